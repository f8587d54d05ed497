// A library for LD_PRELOAD: at SIGUSR1 the process that it is loaded into launches a kernel that writes where nothing is, as a
// faulty kernel of its own would, in the context that it shares with all of the process.
#include <cuda_runtime.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <thread>

namespace {

std::atomic<bool> is_wanted{false};

__global__ void StrayWrite(int* place) { *place = 1; }

// Waits beside the process's own threads; a signal handler may not launch anything.
[[maybe_unused]] const bool is_waiting = [] {
  struct sigaction action {};
  action.sa_handler = [](int) { is_wanted = true; };
  action.sa_flags = SA_RESTART;
  ::sigaction(SIGUSR1, &action, nullptr);
  std::thread([] {
    while (!is_wanted) ::usleep(1000);
    cudaStream_t stream = nullptr;
    cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    StrayWrite<<<1, 1, 0, stream>>>(reinterpret_cast<int*>(64));
    cudaStreamSynchronize(stream);
  }).detach();
  return true;
}();

}  // namespace
