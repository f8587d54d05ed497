#include "tests/system/network_link.h"

#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

namespace tandem {
namespace {

constexpr std::size_t kMaxUnderWay = 4096;  // packets of one direction; further ones are lost, as in a router

absl::StatusOr<UniqueFd> OpenTun(const std::string& name) {
  UniqueFd fd(::open("/dev/net/tun", O_RDWR | O_CLOEXEC | O_NONBLOCK));
  if (!fd.is_open()) return absl::UnavailableError(absl::StrCat("/dev/net/tun: ", std::strerror(errno)));
  ifreq request{};
  request.ifr_flags = IFF_TUN | IFF_NO_PI;
  std::strncpy(request.ifr_name, name.c_str(), IFNAMSIZ - 1);
  if (::ioctl(fd.get(), TUNSETIFF, &request) != 0)
    return absl::UnavailableError(absl::StrCat("making the device ", name, ": ", std::strerror(errno)));
  return fd;
}

}  // namespace

ShellOutput RunShell(const std::string& command) {
  FILE* const pipe = ::popen(("{ " + command + "; } 2>&1").c_str(), "r");
  ShellOutput output;
  std::array<char, 4096> piece;
  for (std::size_t size = 0; (size = std::fread(piece.data(), 1, piece.size(), pipe)) > 0;)
    output.text.append(piece.data(), size);
  output.status = ::pclose(pipe);
  return output;
}

absl::StatusOr<std::unique_ptr<NetworkLink>> NetworkLink::Create() {
  const std::string name = absl::StrCat("tandem", ::getpid()), near = absl::StrCat("tdh", ::getpid()),
                    far = absl::StrCat("tdt", ::getpid());
  TANDEM_ASSIGN_OR_RETURN(UniqueFd here, OpenTun(near));
  TANDEM_ASSIGN_OR_RETURN(UniqueFd there, OpenTun(far));
  const std::string inside = absl::StrCat("ip netns exec ", name, " ");
  const ShellOutput made =
      RunShell(absl::StrCat("ip netns add ", name, " && ip link set ", far, " netns ", name, " && ip address add ", kHere,
                            "/30 dev ", near, " && ip link set ", near, " up && ", inside, "ip address add ", kThere, "/30 dev ",
                            far, " && ", inside, "ip link set ", far, " up"));
  std::unique_ptr<NetworkLink> link(new NetworkLink(name, std::move(here), std::move(there)));
  if (made.status != 0) return absl::UnavailableError(made.text);
  return link;
}

NetworkLink::NetworkLink(std::string name, UniqueFd here, UniqueFd there)
    : name_(std::move(name)), here_(std::move(here)), there_(std::move(there)) {
  directions_[0] = {.from = here_.get(), .to = there_.get(), .under_way = {}, .free = {}};
  directions_[1] = {.from = there_.get(), .to = here_.get(), .under_way = {}, .free = {}};
  thread_ = std::thread([this] { Carry(); });
}

NetworkLink::~NetworkLink() {
  {
    MutexLock lock(&mutex_);
    is_stopping_ = true;
  }
  thread_.join();
  RunShell("ip netns del " + name_);  // the devices go with their descriptors
}

void NetworkLink::Set(const LinkFaults& faults) {
  MutexLock lock(&mutex_);
  faults_ = faults;
}

void NetworkLink::Carry() {
  while (true) {
    {
      MutexLock lock(&mutex_);
      if (is_stopping_) return;
    }
    absl::Duration wait = absl::Milliseconds(50);
    std::array<pollfd, 2> entries;
    for (std::size_t i = 0; i < 2; ++i) {
      entries[i] = {.fd = directions_[i].from, .events = POLLIN, .revents = 0};
      if (!directions_[i].under_way.empty())
        wait = std::clamp(directions_[i].under_way.front().due - MonotonicTime::Now(), absl::ZeroDuration(), wait);
    }
    const timespec timeout = absl::ToTimespec(wait);
    ::ppoll(entries.data(), entries.size(), &timeout, nullptr);
    for (Direction& direction : directions_) {
      Receive(&direction);
      Deliver(&direction);
    }
  }
}

void NetworkLink::Receive(Direction* direction) {
  LinkFaults faults;
  {
    MutexLock lock(&mutex_);
    faults = faults_;
  }
  if (faults.is_cut) direction->under_way.clear();
  std::array<char, 2048> bytes;
  for (ssize_t size = 0; (size = ::read(direction->from, bytes.data(), bytes.size())) > 0;) {
    const bool is_lost = std::uniform_real_distribution<>(0, 1)(random_) < faults.loss;
    if (faults.is_cut || is_lost || direction->under_way.size() >= kMaxUnderWay) continue;
    const MonotonicTime now = MonotonicTime::Now();
    if (faults.bytes_per_second > 0)
      direction->free = std::max(direction->free, now) + absl::Seconds(static_cast<double>(size) / faults.bytes_per_second);
    direction->under_way.push_back(
        {.due = std::max(direction->free, now) + faults.delay, .bytes = {bytes.data(), bytes.data() + size}});
  }
}

void NetworkLink::Deliver(Direction* direction) {
  const MonotonicTime now = MonotonicTime::Now();
  while (!direction->under_way.empty() && direction->under_way.front().due <= now) {
    const std::vector<char>& bytes = direction->under_way.front().bytes;
    [[maybe_unused]] const ssize_t written = ::write(direction->to, bytes.data(), bytes.size());  // a full device loses it
    direction->under_way.pop_front();
  }
}

}  // namespace tandem
