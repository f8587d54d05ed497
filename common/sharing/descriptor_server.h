// The offerer's end of the Unix socket: whoever shows the token that its Attach was given, from the process that asked, gets the
// pool's descriptors. Connections are served side by side and none may be silent for long, so nobody blocks the true joiner.
//
// IssueToken and TakeAccepted are thread-safe; the rest is confined to the thread that polls.
#pragma once

#include <poll.h>
#include <sys/types.h>

#include <list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "common/base/clock.h"
#include "common/base/mutex.h"
#include "common/base/status.h"
#include "common/base/unique_fd.h"
#include "common/sharing/process_watch.h"

namespace tandem {

class DescriptorServer {
 public:
  static constexpr absl::Duration kSilence = absl::Seconds(2);  // without a token, or without taking a packet
  static constexpr absl::Duration kTokenLife = absl::Seconds(10);
  static constexpr std::size_t kMaxConnections = 16;
  static constexpr absl::Duration kAcceptPause = absl::Milliseconds(100);  // while no descriptor is free

  // `descriptors` must outlive the server. Errors: UNAVAILABLE (socket).
  static absl::StatusOr<std::unique_ptr<DescriptorServer>> Create(const std::string& path, std::span<const UniqueFd> descriptors);
  ~DescriptorServer();

  // A token for one connection of process `pid`. There is one joiner at a time: an earlier token and an earlier acceptance lapse.
  std::string IssueToken(pid_t pid);
  // The process whose token was accepted, once.
  std::optional<ProcessWatch> TakeAccepted();

  // What to poll for; and until when at most.
  void AppendPoll(std::vector<pollfd>* entries) const;
  MonotonicTime next_deadline() const;
  // Does what can be done without blocking: accepts, reads tokens, sends packets, drops who is late.
  void Serve();

 private:
  struct Connection {
    UniqueFd fd;
    MonotonicTime deadline;
    bool is_accepted = false;
    std::uint32_t sent = 0;  // descriptors
  };

  DescriptorServer(std::string path, std::span<const UniqueFd> descriptors, UniqueFd listener)
      : path_(std::move(path)), descriptors_(descriptors), listener_(std::move(listener)) {}
  void Accept();
  // False: the connection is done.
  bool Advance(Connection* connection);
  absl::Status ReadToken(Connection* connection);

  const std::string path_;
  const std::span<const UniqueFd> descriptors_;
  const UniqueFd listener_;
  MonotonicTime accept_time_;          // not before: this process has no descriptor free
  std::list<Connection> connections_;  // oldest first

  Mutex mutex_;
  std::string token_ ABSL_GUARDED_BY(mutex_);  // empty: none is good
  pid_t token_pid_ ABSL_GUARDED_BY(mutex_) = 0;
  MonotonicTime token_end_ ABSL_GUARDED_BY(mutex_);
  std::optional<ProcessWatch> accepted_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace tandem
