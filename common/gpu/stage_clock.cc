#include "common/gpu/stage_clock.h"

#include <utility>

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace tandem {
namespace {

class CpuStageClock final : public StageClock {
 public:
  void Enter(const char* stage, void*) override {
    const absl::Time now = absl::Now();
    if (stage_ != nullptr) seconds_[stage_] += absl::ToDoubleSeconds(now - since_);
    stage_ = stage;
    since_ = now;
  }
  absl::StatusOr<std::map<std::string, double>> Take() override { return std::exchange(seconds_, {}); }

 private:
  const char* stage_ = nullptr;
  absl::Time since_;
  std::map<std::string, double> seconds_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<StageClock>> StageClock::Create(Device device) {
  if (device == Device::kCuda) return internal::CreateCudaStageClock();
  return std::make_unique<CpuStageClock>();
}

}  // namespace tandem
