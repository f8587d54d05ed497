// Decides what the next step computes. Plain data in, plain data out: it sees token counts and block numbers, never a model, a
// clock or a random number, so the same calls give the same plans. Confined to the engine thread.
//
// Continuous batching with chunked prefill: a step takes every running sequence's next tokens, oldest sequence first, then admits
// waiting ones in order of arrival, up to max_batch_tokens. When blocks run out the newest running sequence is preempted: its
// blocks are freed at once, its tokens are kept, and it is computed again from its first token when there is room. The oldest is
// never preempted for another sequence of its lane.
//
// Note [Adapters of a step]
// When sequences of more than max_adapters jobs could run, a step takes those whose turn was longest ago; sequences of the others
// keep their blocks and wait. A unit is of one job, so this concerns the shared lane alone.
//
// Note [Running ahead]
// On a device that works beside the host, the next step of a lane is planned and handed over before the tokens of the one before
// are known. Append counts a token as soon as it is being drawn, Resolve says later what it is: a plan needs no more than its
// being there. What only the token can tell, that the sequence is over, comes one step late: the sequence is ended between the
// two steps and what the second draws for it is thrown away. That it has its max_tokens is known in time, and it is not planned
// again.
//
// Note [Lanes]
// A training step's rollouts are a unit, and the same unit must give the same bits whatever else the server does. Sequences of
// units therefore run in steps of their own, one unit at a time in order of arrival, with a prefix cache that they neither read
// nor write. Blocks that sequences of the shared lane hold count as free for a unit and are taken by preempting them. So a unit's
// plans depend on the unit, the options and the number of blocks alone.
//
// Note [Groups]
// One member of a group computes the prompt; the others wait for it, then begin with references to the prompt's blocks at the
// last prompt token. A block that more than one table names is copied before it is written (StepPlan::copies). While members
// wait, the group itself keeps a reference to the prompt's blocks; under pressure these go before any sequence is preempted.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "rollout_server/cache/block_allocator.h"

namespace tandem {

using SequenceId = std::uint64_t;                  // by arrival: a smaller one is older
inline constexpr std::uint32_t kUnknownToken = 0;  // stands in the place of a token that is being drawn

struct SchedulerOptions {
  int block_tokens = 16;
  int max_batch_tokens = 2048;                         // of one step; >= max_sequences, so that every running sequence can decode
  int max_sequences = 256;                             // running at a time, in each lane
  int max_adapters = std::numeric_limits<int>::max();  // of one step: each job has one, the empty job none
};

struct GroupSpec {
  Lane lane = Lane::kShared;
  std::uint64_t unit_id = 0;  // of Lane::kUnit; units come in increasing order
  std::string job = {};
  std::shared_ptr<const std::vector<std::uint32_t>> prompt = {};  // never empty
  std::uint32_t group_size = 0;
  std::uint32_t max_tokens = std::numeric_limits<std::uint32_t>::max();  // of a member's completion
};

struct Sequence {
  SequenceId id = 0;
  std::uint64_t group_id = 0;
  std::uint32_t member_index = 0;
  std::shared_ptr<const std::vector<std::uint32_t>> prompt;
  std::vector<std::uint32_t> completion;
  std::uint32_t max_tokens = 0;           // of the completion
  std::uint32_t num_computed = 0;         // tokens whose K and V lie in the cache
  std::vector<std::int32_t> block_table;  // block_table[i] holds tokens [i * block_tokens, (i + 1) * block_tokens)
  bool is_running = false;
  bool has_started = false;       // was admitted once
  bool is_single_version = true;  // all its cached tokens were computed under one weight version
  std::string last_key;           // prefix cache: key of the last published block
  std::uint32_t num_published_blocks = 0;

  std::uint32_t num_prompt_tokens() const { return static_cast<std::uint32_t>(prompt->size()); }
  std::uint32_t num_tokens() const { return num_prompt_tokens() + static_cast<std::uint32_t>(completion.size()); }
  bool is_complete() const { return completion.size() >= max_tokens; }
  std::uint32_t TokenAt(std::uint32_t position) const {
    return position < prompt->size() ? (*prompt)[position] : completion[position - prompt->size()];
  }
};

struct BlockCopy {
  std::int32_t from = 0;
  std::int32_t to = 0;
};

// Tokens [begin, begin + num_tokens) of a sequence are computed; if that reaches its last token, the next one is drawn.
struct PlannedSequence {
  SequenceId id = 0;
  std::uint32_t begin = 0;
  std::uint32_t num_tokens = 0;
  bool draws = false;
};

struct Admission {
  SequenceId id = 0;
  std::uint32_t queried_tokens = 0;  // looked up in the prefix cache; 0 where it was not asked
  std::uint32_t hit_tokens = 0;      // of those
};

struct StepPlan {
  Lane lane = Lane::kShared;
  std::vector<BlockCopy> copies;  // before the step, in this order
  std::vector<PlannedSequence> sequences;
  std::vector<Admission> admissions;
  std::vector<SequenceId> preempted;
  std::uint32_t num_tokens = 0;
};

class Scheduler {
 public:
  // The key of the prefix cache's namespace for a sequence about to be admitted (cache/cache_key.h).
  using RootKeyOf = std::function<std::string(const Sequence&)>;

  // `allocator` outlives the scheduler and is used by it alone.
  Scheduler(SchedulerOptions options, BlockAllocator* allocator, RootKeyOf root_key_of);

  // Members get consecutive ids, the first of which is returned. Requires: prompt and max_tokens of a member fit the pool.
  SequenceId AddGroup(const GroupSpec& spec);
  // The next step of `lane`; empty when nothing of it can run now.
  StepPlan Schedule(Lane lane);
  // The plan's tokens are in the cache, or will be before any step that is planned from now on. Sequences that have ended since
  // the plan was made are passed over. Requires: every token of the plan is known, see Resolve.
  void Computed(const StepPlan& plan);
  // A token drawn for `id`, or kUnknownToken while it is being drawn; it is computed by the next step.
  void Append(SequenceId id, std::uint32_t token);
  // What the last token of `id` is that was appended as kUnknownToken.
  void Resolve(SequenceId id, std::uint32_t token);
  // Forgets a sequence, wherever it is, and frees its blocks.
  void End(SequenceId id);

  // Frees every block; running sequences go back to waiting and resume by recomputation. Nothing cached is found again.
  void PreemptAll();
  // While held, sequences that have not started are not admitted: of one job, or of all.
  void HoldJob(const std::string& job, bool is_held);
  void HoldAll(bool is_held) { is_all_held_ = is_held; }
  // The job's weights changed: what its running sequences have cached is of two versions from now on, and is shared no further.
  void WeightsChanged(const std::string& job);

  bool HasSequences(Lane lane) const { return !lane_of(lane).running.empty() || !lane_of(lane).waiting.empty(); }
  // Of `job` (nullptr: of any), that have started and not ended.
  int num_started(const std::string* job) const;
  int num_running() const;
  int num_waiting() const;
  const Sequence& sequence(SequenceId id) const { return sequences_.at(id); }

 private:
  struct Group {
    GroupSpec spec;
    std::uint32_t num_live = 0;
    std::uint32_t num_waiting = 0;
    std::optional<SequenceId> prefiller;    // the member that computes the prompt
    std::vector<std::int32_t> kept_blocks;  // the computed prompt, while members wait
  };
  struct LaneState {
    std::vector<SequenceId> running;  // sorted: oldest first
    std::set<SequenceId> waiting;
    std::set<std::uint64_t> keeping;  // groups with kept_blocks
  };

  LaneState& lane_of(Lane lane) { return lane == Lane::kUnit ? unit_ : shared_; }
  const LaneState& lane_of(Lane lane) const { return lane == Lane::kUnit ? unit_ : shared_; }
  std::uint32_t NumBlocks(std::uint32_t num_tokens) const {
    return (num_tokens + options_.block_tokens - 1) / options_.block_tokens;
  }
  int NumFree(Lane lane) const;
  // The jobs whose sequences the lane's next step takes; nullopt: of all.
  std::optional<std::set<std::string>> TakeTurns(Lane lane);
  bool HasTurn(const Sequence& sequence) const;
  bool ScheduleRunning(StepPlan* plan, std::uint32_t* budget);
  void AdmitWaiting(StepPlan* plan, std::uint32_t* budget);
  bool MayStart(const Sequence& sequence, const Group& group) const;
  bool TryAdmit(Sequence* sequence, Group* group, StepPlan* plan);
  Admission ShareCached(Sequence* sequence, const Group& group);
  void Plan(const Sequence& sequence, StepPlan* plan, std::uint32_t* budget) const;
  std::optional<std::int32_t> TakeBlock(Lane lane, StepPlan* plan);
  bool EnsureWritable(Sequence* sequence, std::uint32_t end, Lane lane, StepPlan* plan);
  void Preempt(Sequence* sequence);
  void ReleaseBlocks(Sequence* sequence);
  bool ReleaseNewestKept(Lane lane);
  void ReleaseKept(std::uint64_t group_id, Group* group);
  void PublishBlocks(Sequence* sequence);

  const SchedulerOptions options_;
  BlockAllocator* const allocator_;
  const RootKeyOf root_key_of_;
  std::map<SequenceId, Sequence> sequences_;
  std::map<std::uint64_t, Group> groups_;
  LaneState unit_, shared_;
  std::set<std::string> held_jobs_;
  bool is_all_held_ = false;
  // Of the shared lane's jobs that have an adapter, see Note [Adapters of a step].
  std::map<std::string, std::size_t> num_live_;      // sequences
  std::map<std::string, std::uint64_t> last_turns_;  // counted by num_turns_; a job without one never had any
  std::uint64_t num_turns_ = 0;
  std::optional<std::set<std::string>> turns_;  // of the step that is being planned
  SequenceId next_sequence_id_ = 0;
  std::uint64_t next_group_id_ = 0;
};

}  // namespace tandem
