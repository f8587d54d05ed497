// Loaded into a process (LD_PRELOAD), a time of day that a test moves: the kernel's and the nanoseconds that stand in the file
// named by TANDEM_TEST_CLOCK. Who sleeps until a time of day, as gRPC's timers do in Abseil's futexes, is woken as the kernel
// would wake him had its clock been set; a timer that tells of that becomes readable when the file is written.
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/inotify.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstdint>
#include <cstdlib>
#include <ctime>

namespace {

using Syscall = long (*)(long, ...);
constexpr std::int64_t kSecond = 1'000'000'000, kSlice = 20'000'000;

Syscall Real() {
  static const auto real = reinterpret_cast<Syscall>(::dlsym(RTLD_NEXT, "syscall"));
  return real;
}

std::int64_t MovedBy() {
  static const std::atomic<std::int64_t>* const moved = []() -> const std::atomic<std::int64_t>* {
    const char* const path = std::getenv("TANDEM_TEST_CLOCK");
    const int fd = path == nullptr ? -1 : ::open(path, O_RDONLY | O_CLOEXEC);
    void* const page = fd < 0 ? MAP_FAILED : ::mmap(nullptr, sizeof(std::int64_t), PROT_READ, MAP_SHARED, fd, 0);
    if (fd >= 0) ::close(fd);
    return page == MAP_FAILED ? nullptr : static_cast<const std::atomic<std::int64_t>*>(page);
  }();
  return moved == nullptr ? 0 : moved->load();
}

std::int64_t Nanoseconds(const timespec& time) { return time.tv_sec * kSecond + time.tv_nsec; }
timespec Timespec(std::int64_t nanoseconds) { return {.tv_sec = nanoseconds / kSecond, .tv_nsec = nanoseconds % kSecond}; }

}  // namespace

extern "C" {

int clock_gettime(clockid_t clock, timespec* time) noexcept {
  const long result = Real()(SYS_clock_gettime, clock, time);
  if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
    *time = Timespec(Nanoseconds(*time) + MovedBy());
  return static_cast<int>(result);
}

int gettimeofday(timeval* time, void*) noexcept {
  timespec now{};
  const int result = clock_gettime(CLOCK_REALTIME, &now);
  *time = {.tv_sec = now.tv_sec, .tv_usec = now.tv_nsec / 1000};
  return result;
}

time_t time(time_t* out) noexcept {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  if (out != nullptr) *out = now.tv_sec;
  return now.tv_sec;
}

// In the place of a timer, a watch on the file.
int timerfd_create(int clock, int flags) noexcept {
  const char* const path = std::getenv("TANDEM_TEST_CLOCK");
  if (clock != CLOCK_REALTIME || path == nullptr) return static_cast<int>(Real()(SYS_timerfd_create, clock, flags));
  const int fd = ::inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
  ::inotify_add_watch(fd, path, IN_MODIFY);
  return fd;
}
int timerfd_settime(int fd, int flags, const itimerspec* wanted, itimerspec* before) noexcept {
  const long result = Real()(SYS_timerfd_settime, fd, flags, wanted, before);
  if (result == 0 || errno != EINVAL || (flags & TFD_TIMER_CANCEL_ON_SET) == 0) return static_cast<int>(result);
  char events[4096];
  while (::read(fd, events, sizeof events) > 0) {}
  return 0;
}

// Futex waits until a time of day end each slice as if by a signal; their callers look at the clock again and wait on.
long syscall(long number, ...) noexcept {
  va_list list;
  va_start(list, number);
  long arguments[6];
  for (long& argument : arguments) argument = va_arg(list, long);
  va_end(list);
  const bool waits_for_time_of_day = number == SYS_futex && (arguments[1] & FUTEX_CLOCK_REALTIME) != 0 &&
                                     (arguments[1] & FUTEX_CMD_MASK) == FUTEX_WAIT_BITSET && arguments[3] != 0;
  if (!waits_for_time_of_day)
    return Real()(number, arguments[0], arguments[1], arguments[2], arguments[3], arguments[4], arguments[5]);
  timespec now{}, end{};
  clock_gettime(CLOCK_REALTIME, &now);
  const std::int64_t left = Nanoseconds(*reinterpret_cast<const timespec*>(arguments[3])) - Nanoseconds(now);
  clock_gettime(CLOCK_MONOTONIC, &end);
  end = Timespec(Nanoseconds(end) + std::clamp<std::int64_t>(left, 0, kSlice));
  const long result =
      Real()(SYS_futex, arguments[0], arguments[1] & ~FUTEX_CLOCK_REALTIME, arguments[2], &end, arguments[4], arguments[5]);
  if (result != 0 && errno == ETIMEDOUT && left > kSlice) errno = EINTR;
  return result;
}

}  // extern "C"
