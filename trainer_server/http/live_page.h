// The page of --http_address: one static document, and what it asks for: answers of JobService and RolloutService as protobuf
// prints them in JSON. It can only look. Thread-safe.
//
//   /                        the document
//   /api/status              TrainerStatus
//   /api/rollout             RolloutStatus
//   /api/jobs                ListJobsResponse
//   /api/jobs/JOB            JobStatus
//   /api/jobs/JOB/history    WatchResponse, one a line: what has happened so far
//   /api/jobs/JOB/completions    CompletionRecord, one a line; texts are cut at kMaxTextBytes
// A query names whole-number fields of the request: /api/jobs/a-1f3a/history?from_step=12&stride_steps=4. A fault is a line of
// text.
//
// Over TLS the roles of the gRPC calls are demanded, by the header "authorization: Bearer TOKEN". Without TLS only requests that
// name this machine by a loopback address are answered, so that no other site's page reads this one through a name of its own
// (DNS rebinding).
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <string_view>

#include "common/base/clock.h"
#include "common/base/mutex.h"
#include "common/rpc/access.h"
#include "proto/job.grpc.pb.h"
#include "proto/rollout.grpc.pb.h"
#include "trainer_server/http/http_server.h"

namespace tandem {

class LivePage {
 public:
  static constexpr std::size_t kMaxTextBytes = 16 << 10;   // of a prompt, of a completion
  static constexpr std::size_t kMaxAnswerBytes = 4 << 20;  // then it ends: the caller goes on from there
  static constexpr std::uint32_t kMaxCompletions = 64;
  // What an address for the page takes. Errors: INVALID_ARGUMENT naming --http_address.
  static absl::Status CheckAddress(const std::string& address, const AccessOptions& access);
  // The addresses are those of JobService and RolloutService.
  LivePage(std::shared_ptr<Access> access, const std::string& trainer_address, const std::string& rollout_address);

  // Blocks for as long as the daemons take to answer, at most kCallTimeout.
  HttpResponse Answer(const HttpRequest& request);
  static constexpr absl::Duration kCallTimeout = absl::Seconds(5);

 private:
  // `path`: behind "/api/".
  HttpResponse AnswerCall(std::string_view path, std::string_view query, const HttpRequest& request);
  HttpResponse History(const std::string& job, std::string_view query);
  HttpResponse Completions(const std::string& job, std::string_view query);
  absl::Status Admit(std::string_view rpc, const HttpRequest& request);

  const std::shared_ptr<Access> access_;
  const std::unique_ptr<v1::JobService::Stub> trainer_;
  const std::unique_ptr<v1::RolloutService::Stub> rollout_;
  const HttpResponse document_;
  Mutex mutex_;
  std::map<std::string, MonotonicTime> seen_ ABSL_GUARDED_BY(mutex_);  // callers over TLS, and when they last called
};

}  // namespace tandem
