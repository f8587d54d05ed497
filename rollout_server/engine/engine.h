// The rollout server's loop: schedule -> batch -> model -> sample -> finish. One thread owns everything mutable (scheduler,
// cache, adapters, sampler, model); the public functions send it commands through a bounded queue and are thread-safe. When units
// and shared sequences both have work, steps of the two lanes alternate. With runs_ahead each lane has a step under way while its
// next one is planned, built and put behind it: see Note [Running ahead] in schedule/scheduler.h.
//
// Guarantees: a token once drawn is never drawn again; every token carries the weight version that it was drawn under; commands
// take effect between two steps; while the elastic memory is yielded the model is not called, and requests wait.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/time.h"
#include "common/base/bounded_queue.h"
#include "common/base/clock.h"
#include "common/base/mutex.h"
#include "common/metrics/metrics.h"
#include "common/model/tokenizer.h"
#include "proto/pool.pb.h"
#include "rollout_server/engine/batch_sink.h"
#include "rollout_server/engine/engine_metrics.h"
#include "rollout_server/engine/reply.h"
#include "rollout_server/model/decoder_model.h"
#include "rollout_server/request/rollout_request.h"
#include "rollout_server/sample/completion_text.h"
#include "rollout_server/sample/sampler.h"
#include "rollout_server/schedule/scheduler.h"
#include "rollout_server/weights/adapter_table.h"

namespace tandem {

struct EngineOptions {
  int num_blocks = 0;
  int block_tokens = 16;
  std::uint64_t block_bytes = 0;  // for metrics; 0: not known
  int max_batch_tokens = 2048;
  int max_sequences = 256;
  int max_waiting_sequences = 16384;
  int max_adapters = std::numeric_limits<int>::max();  // of one step, as the model was made for
  int vocab_size = 0;
  std::vector<std::uint32_t> end_token_ids;
  std::string model_digest;       // of the cache's keys
  std::uint64_t lease_epoch = 0;  // at start
  bool is_paused = false;         // at start: the trainer holds the elastic memory
  Device device = Device::kCpu;   // that model and sampler use
  // Steps are handed over before the tokens of the one before are known. For a device that works beside the host; where model and
  // sampler compute when they are called, it only delays the tokens. A step with penalties is never run ahead of: they need the
  // tokens on the host.
  bool runs_ahead = false;
};

struct EngineStatus {
  bool is_paused = false;
  int running_sequences = 0;
  int waiting_sequences = 0;
  int kv_blocks_total = 0;
  int kv_blocks_used = 0;
  int kv_blocks_peak = 0;  // since the elastic memory last came back
  std::size_t queued_commands = 0;
};

class Engine {
 public:
  // `model`, `sampler` and `metrics` outlive the engine; model and sampler are called on the engine's thread alone. Starts the
  // thread. Errors: INVALID_ARGUMENT naming the option.
  static absl::StatusOr<std::unique_ptr<Engine>> Create(EngineOptions options, DecoderModel* model, Sampler* sampler,
                                                        std::shared_ptr<const Tokenizer> tokenizer, Metrics* metrics);
  ~Engine();

  // The batch's fate comes through `sink`, OnEnd last: NOT_FOUND, FAILED_PRECONDITION (version), RESOURCE_EXHAUSTED (waiting
  // queue) before anything else. Errors, without a call of the sink: RESOURCE_EXHAUSTED (command queue), UNAVAILABLE (shutting
  // down).
  absl::Status Submit(BatchRequest batch, std::shared_ptr<BatchSink> sink);
  // Errors: ABORTED (version), FAILED_PRECONDITION (draining while paused), DEADLINE_EXCEEDED (nothing was activated).
  absl::Status Activate(Adapter adapter, bool drain, MonotonicTime deadline);
  absl::Status Retire(const std::string& job, MonotonicTime deadline);
  // Returns when no step runs or will run, on the device neither, and nothing cached will be read again. Idempotent. Errors:
  // DEADLINE_EXCEEDED (nothing changed), INTERNAL (the device failed; see error()).
  absl::Status YieldElastic(v1::StreamMode mode, MonotonicTime deadline);
  // Idempotent.
  absl::Status ReturnElastic(std::uint64_t lease_epoch);
  // The trainer is gone: before any later command units end and its jobs' adapters are retired, those too that wait to be
  // activated. Does not wait for it. Errors: UNAVAILABLE (shutting down), RESOURCE_EXHAUSTED (the queue stays full for 30 s).
  absl::Status PeerLost();
  // Ends every batch with UNAVAILABLE and stops the thread. Idempotent.
  void Stop();

  EngineStatus status() const;
  // Not OK when the engine has given up: the model failed many steps in a row, or the device's context is poisoned.
  absl::Status error() const;

 private:
  struct Batch {
    std::uint64_t id = 0;
    BatchRequest request;
    std::shared_ptr<BatchSink> sink;
    std::set<SequenceId> live;
    std::vector<bool> is_prompt_reported;  // by group
    MonotonicTime arrived;
  };
  struct Generation {  // one sequence's side of sampling
    Batch* batch = nullptr;
    const GroupRequest* group = nullptr;
    Member member;
    std::uint64_t seed = 0;
    std::optional<CompletionText> text;
    MonotonicTime last_token;
    const std::uint32_t* last_token_place = nullptr;  // while it is being drawn
  };
  // Handed to model and sampler; its tokens have not been collected.
  struct StepUnderWay {
    struct Row {
      SequenceId id = 0;
      std::uint64_t weight_version = 0;
    };
    std::uint64_t number = 0;
    StepPlan plan;
    std::vector<Row> rows;  // of the sequences that draw
    bool penalises = false;
    PendingDraw draw;
    MonotonicTime begin;
  };
  struct PendingActivation {
    Adapter adapter;
    std::shared_ptr<Reply> reply;
  };
  struct PendingYield {
    v1::StreamMode mode;
    std::shared_ptr<Reply> reply;
  };

  Engine(EngineOptions options, DecoderModel* model, Sampler* sampler, std::shared_ptr<const Tokenizer> tokenizer,
         Metrics* metrics);
  absl::Status Send(std::function<void()> command);
  absl::Status SendAndWait(const std::shared_ptr<Reply>& reply, MonotonicTime deadline, std::string_view what,
                           std::function<void()> command);

  // All below: engine thread.
  void Loop();
  void RunCommands(absl::Duration wait);
  bool Step();
  bool StepLane(Lane lane);
  void ReportAdmissions(const StepPlan& plan);
  absl::StatusOr<StepUnderWay> StartStep(StepPlan plan);
  void StepStarted(StepUnderWay step);
  void FinishStep(Lane lane);
  void FinishToken(const StepUnderWay::Row& row, const DrawnToken& token);
  void FailStep(const StepPlan& plan, const absl::Status& status);
  std::uint32_t NumDelivered(SequenceId id) const;  // tokens of its completion
  void EndSequence(SequenceId id, v1::FinishReason reason, std::string text, const std::string& error);
  void AddBatch(BatchRequest request, const std::shared_ptr<BatchSink>& sink, MonotonicTime arrived);
  void AddSequences(Batch* batch);
  void EndBatch(std::uint64_t batch_id, v1::FinishReason reason, const absl::Status& status);
  void EndCancelled();
  absl::Status ActivateNow(Adapter adapter);
  absl::Status RetireNow(const std::string& job);
  void DropActivations(const std::string& job);
  void SettlePending();
  absl::Status PauseNow();
  absl::Status Fence(const char* before);
  void GiveUp(const absl::Status& status);
  bool IsDeviceLost();
  std::uint64_t VersionOf(const std::string& job) const;
  std::string RootKeyOf(const Sequence& sequence) const;
  void PublishStatus();

  const EngineOptions options_;
  DecoderModel* const model_;
  Sampler* const sampler_;
  const std::shared_ptr<const Tokenizer> tokenizer_;
  EngineMetrics metrics_;
  BoundedQueue<std::function<void()>> commands_;
  std::atomic<bool> is_stopping_{false};

  BlockAllocator allocator_;
  Scheduler scheduler_;
  AdapterTable adapters_;
  std::map<std::uint64_t, Batch> batches_;
  std::map<SequenceId, Generation> generations_;
  std::deque<PendingActivation> pending_activations_;
  std::deque<PendingYield> pending_yields_;
  bool is_paused_ = false;
  bool is_device_lost_ = false;
  std::uint64_t lease_epoch_ = 0;
  std::uint64_t next_batch_id_ = 1;
  std::uint64_t num_steps_ = 0;
  int num_failed_in_a_row_ = 0;
  Lane last_lane_ = Lane::kShared;
  std::map<Lane, StepUnderWay> under_way_;                  // at most one a lane
  MonotonicTime finished_ = MonotonicTime::InfinitePast();  // the last step

  mutable Mutex mutex_;
  EngineStatus status_ ABSL_GUARDED_BY(mutex_);
  absl::Status error_ ABSL_GUARDED_BY(mutex_);
  Mutex stop_mutex_;
  std::thread thread_ ABSL_GUARDED_BY(stop_mutex_);
};

}  // namespace tandem
