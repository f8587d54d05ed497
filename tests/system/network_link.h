// A second network namespace behind a link whose every packet passes through the test: slow, lossy, or cut without either end
// being told. Needs root, `ip` and /dev/net/tun.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/time.h"
#include "common/base/clock.h"
#include "common/base/mutex.h"
#include "common/base/status.h"
#include "common/base/unique_fd.h"

namespace tandem {

// What a shell command printed, and its wait status.
struct ShellOutput {
  int status = -1;
  std::string text;
};
ShellOutput RunShell(const std::string& command);

struct LinkFaults {
  double loss = 0;              // share of the packets, 0 to 1
  absl::Duration delay;         // of each packet
  double bytes_per_second = 0;  // each way; 0: as fast as it goes
  bool is_cut = false;          // nothing passes
};

class NetworkLink {
 public:
  // Errors: what is missing, in words for a skip.
  static absl::StatusOr<std::unique_ptr<NetworkLink>> Create();
  ~NetworkLink();

  static constexpr char kHere[] = "10.213.77.1", kThere[] = "10.213.77.2";
  // Before a command that runs on the other side.
  std::string prefix() const { return absl::StrCat("ip netns exec ", name_, " "); }
  void Set(const LinkFaults& faults);

 private:
  struct Packet {
    MonotonicTime due;
    std::vector<char> bytes;
  };
  struct Direction {
    int from = -1, to = -1;
    std::deque<Packet> under_way;
    MonotonicTime free;  // when the packet before has left
  };

  NetworkLink(std::string name, UniqueFd here, UniqueFd there);
  void Carry();
  void Receive(Direction* direction);
  void Deliver(Direction* direction);

  const std::string name_;
  const UniqueFd here_, there_;
  Mutex mutex_;
  LinkFaults faults_ ABSL_GUARDED_BY(mutex_);
  bool is_stopping_ ABSL_GUARDED_BY(mutex_) = false;
  // Of the carrying thread.
  std::mt19937 random_{7};
  Direction directions_[2];
  std::thread thread_;
};

}  // namespace tandem
