// A rollout server in this process: draws tokens by seed from the adapter bytes in the shared memory, and fails when told to.
#pragma once

#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "common/base/clock.h"
#include "common/base/mutex.h"
#include "common/rpc/channel.h"
#include "grpcpp/grpcpp.h"
#include "kernels/checksum/checksum.h"
#include "proto/rollout.grpc.pb.h"
#include "tests/trainer_server/support/fake_model.h"

namespace tandem {

class FakeRollout final : public v1::RolloutService::Service {
 public:
  // What goes wrong with the next calls.
  struct Faults {
    int dying_units = 0;                                 // Generate: breaks off in the middle and forgets every adapter
    int forgotten_units = 0;                             // Generate: answers NOT_FOUND
    int busy_units = 0;                                  // Generate: answers RESOURCE_EXHAUSTED
    int stalled_activations = 0;                         // ActivateAdapter: answers only after the caller has gone
    std::function<void(v1::GenerateResponse*)> corrupt;  // every answer of a unit
    // Called in "activate", "generate"; true: the call is answered only after the caller has gone. May be empty.
    std::function<bool(const char* moment)> at = {};
  };

  explicit FakeRollout(const FakePool* pool) : pool_(pool) {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
  }
  ~FakeRollout() override { server_->Shutdown(GrpcDeadline(MonotonicTime::Now() + absl::Seconds(1))); }
  std::string address() const { return absl::StrCat("127.0.0.1:", port_); }
  void Set(Faults faults) {
    MutexLock lock(&mutex_);
    faults_ = std::move(faults);
  }
  std::uint64_t version(const std::string& job) {
    MutexLock lock(&mutex_);
    return active_.contains(job) ? active_[job].weight_version() : 0;
  }
  std::string checksum(const std::string& job) {
    MutexLock lock(&mutex_);
    return active_.contains(job) ? SlotChecksum(active_[job]) : "";
  }
  int num_units() {
    MutexLock lock(&mutex_);
    return num_units_;
  }
  std::vector<v1::GenerateRequest> last_unit() {
    MutexLock lock(&mutex_);
    return last_unit_;
  }

  grpc::Status GetStatus(grpc::ServerContext*, const v1::RolloutStatusRequest*, v1::RolloutStatus*) override {
    return grpc::Status::OK;
  }

  grpc::Status ActivateAdapter(grpc::ServerContext* context, const v1::ActivateAdapterRequest* request,
                               v1::ActivateAdapterResponse* response) override {
    bool is_stalled = false;
    std::function<bool(const char*)> at;
    {
      MutexLock lock(&mutex_);
      is_stalled = faults_.stalled_activations-- > 0;
      at = faults_.at;
    }
    if (at && at("activate")) is_stalled = true;
    while (is_stalled && !context->IsCancelled()) absl::SleepFor(absl::Milliseconds(5));
    if (context->IsCancelled()) return grpc::Status::CANCELLED;
    MutexLock lock(&mutex_);
    if (active_.contains(request->job()) && active_[request->job()].weight_version() >= request->weight_version()) {
      return {grpc::StatusCode::ABORTED, "version not above the active one"};
    }
    if (SlotChecksum(*request) != request->slot().checksum()) return {grpc::StatusCode::DATA_LOSS, "checksum"};
    active_[request->job()] = *request;
    response->set_weight_version(request->weight_version());
    return grpc::Status::OK;
  }

  grpc::Status RetireAdapter(grpc::ServerContext*, const v1::RetireAdapterRequest* request, v1::RetireAdapterResponse*) override {
    MutexLock lock(&mutex_);
    active_.erase(request->job());
    return grpc::Status::OK;
  }

  grpc::Status Generate(grpc::ServerContext* context,
                        grpc::ServerReaderWriter<v1::GenerateResponse, v1::GenerateRequest>* stream) override {
    std::vector<v1::GenerateRequest> unit;
    v1::GenerateRequest request;
    while (stream->Read(&request)) unit.push_back(request);
    if (unit.empty() || !unit.back().has_run()) return {grpc::StatusCode::INVALID_ARGUMENT, "no run"};
    v1::ActivateAdapterRequest adapter;
    bool is_dying = false;
    std::function<void(v1::GenerateResponse*)> corrupt;
    std::function<bool(const char*)> at;
    {
      MutexLock lock(&mutex_);
      ++num_units_;
      last_unit_ = unit;
      if (faults_.busy_units-- > 0) return {grpc::StatusCode::RESOURCE_EXHAUSTED, "the queue is full"};
      if (faults_.forgotten_units-- > 0) return {grpc::StatusCode::NOT_FOUND, "no adapter"};
      const v1::BatchHeader& header = unit[0].header();
      if (!active_.contains(header.job())) return {grpc::StatusCode::NOT_FOUND, "no adapter of " + header.job()};
      adapter = active_[header.job()];
      if (adapter.weight_version() != header.weight_version()) return {grpc::StatusCode::FAILED_PRECONDITION, "version"};
      is_dying = faults_.dying_units-- > 0;
      if (is_dying) active_.clear();
      corrupt = faults_.corrupt;
      at = faults_.at;
    }
    for (bool is_stalled = at && at("generate"); is_stalled && !context->IsCancelled();) absl::SleepFor(absl::Milliseconds(5));
    int num_answered = 0;
    for (const v1::GenerateRequest& part : unit) {
      if (!part.has_group()) continue;
      for (std::uint32_t member = 0; member < part.group().group_size(); ++member) {
        if (is_dying && num_answered++ > 1) return {grpc::StatusCode::UNAVAILABLE, "the server dies"};
        Answer(adapter, part.group(), member, corrupt, stream);
      }
    }
    return grpc::Status::OK;
  }

 private:
  std::string SlotChecksum(const v1::ActivateAdapterRequest& request) const {
    const auto& range = request.slot().range();
    return *MemoryChecksum(Device::kCpu, pool_->address_of(range.begin_bytes()), range.end_bytes() - range.begin_bytes());
  }

  void Answer(const v1::ActivateAdapterRequest& adapter, const v1::GroupHeader& group, std::uint32_t member,
              const std::function<void(v1::GenerateResponse*)>& corrupt,
              grpc::ServerReaderWriter<v1::GenerateResponse, v1::GenerateRequest>* stream) const {
    const auto& range = adapter.slot().range();
    const std::size_t count = (range.end_bytes() - range.begin_bytes()) / sizeof(float);
    const auto* weights = static_cast<const float*>(static_cast<const void*>(pool_->address_of(range.begin_bytes())));
    const std::uint64_t seed = DeriveSeed(group.sampling().seed(), member);
    v1::GenerateResponse response;
    const auto send = [&] {
      response.set_group_index(group.group_index());
      response.set_member_index(member);
      if (corrupt) corrupt(&response);
      stream->Write(response);
      response.Clear();
    };
    std::uint32_t drawn = 0;
    bool has_ended = false;
    while (drawn < group.sampling().max_tokens() && !has_ended) {
      has_ended = RandomUniform(seed, drawn) < Sigmoid(static_cast<double>(weights[kEndToken % count]) - 2);
      const std::uint32_t id = has_ended ? kEndToken : static_cast<std::uint32_t>('0' + RandomBelow(seed, 1000 + drawn, 10));
      v1::TokenPiece* piece = response.mutable_tokens();
      piece->add_ids(id);
      const double logprob = std::log(Sigmoid(static_cast<double>(weights[id % count])));
      piece->add_rollout_logprobs(static_cast<float>(logprob));
      piece->add_raw_logprobs(static_cast<float>(logprob));
      v1::VersionSpan* span = piece->add_version_spans();
      span->set_weight_version(adapter.weight_version());
      span->set_begin(drawn);
      span->set_end(++drawn);
      send();
    }
    response.mutable_finished()->set_reason(has_ended ? v1::FINISH_REASON_STOP : v1::FINISH_REASON_LENGTH);
    response.mutable_finished()->set_completion_tokens(drawn);
    send();
  }

  const FakePool* const pool_;
  int port_ = 0;
  Mutex mutex_;
  Faults faults_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, v1::ActivateAdapterRequest> active_ ABSL_GUARDED_BY(mutex_);
  std::vector<v1::GenerateRequest> last_unit_ ABSL_GUARDED_BY(mutex_);
  int num_units_ ABSL_GUARDED_BY(mutex_) = 0;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace tandem
