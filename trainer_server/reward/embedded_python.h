// The text of client/python/tandem/reward_worker.py and reward_function.py, as the build found it: a node needs no Python
// package.
#pragma once

#include <string_view>

namespace tandem {

extern const std::string_view kRewardWorkerProgram;
extern const std::string_view kRewardFunctionProgram;

}  // namespace tandem
