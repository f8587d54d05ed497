// A reader of bytes that nobody vouches for, as both drivers run it: libFuzzer (preset cpu-fuzz) and the replay among the tests.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

namespace tandem::fuzz {

struct FuzzTarget {
  // Comes back within a second whatever the input; what it finds wrong beyond a crash ends the process (TANDEM_CHECK).
  std::function<void(const std::string& input)> read;
  std::vector<std::string> seeds;  // small and, but for a few, valid
  std::vector<std::string> words;  // what a mutation may put in
};

struct NamedTarget {
  const char* name;      // a folder of its own under corpus/, once it has found something
  FuzzTarget (*make)();  // once a process: services start their servers
};
// Every target, in order of names.
std::span<const NamedTarget> AllTargets();
// No lines about refused inputs.
void QuietLogs();

FuzzTarget SafetensorsTarget();
FuzzTarget GgufTarget();
FuzzTarget HuggingFaceModelTarget();
FuzzTarget TokenizerJsonTarget();
FuzzTarget ModelDescriptionTarget();
FuzzTarget ChatTemplateTarget();
FuzzTarget ChatMessagesTarget();
FuzzTarget PeftAdapterTarget();
FuzzTarget KvScaleTableTarget();

FuzzTarget JobTextTarget();
FuzzTarget DataSetTarget();
FuzzTarget CheckpointTarget();
FuzzTarget HistoryTarget();
FuzzTarget JobStoreTarget();

FuzzTarget PatternTarget();
FuzzTarget JsonSchemaTarget();
FuzzTarget MathValueTarget();
FuzzTarget RewardFunctionTarget();
FuzzTarget WorkerAnswerTarget();

FuzzTarget ClientConfigTarget();
FuzzTarget JobFileTarget();
FuzzTarget TrlConfigTarget();

FuzzTarget TokensFileTarget();
FuzzTarget DescriptorPacketsTarget();
FuzzTarget SocketTokenTarget();
FuzzTarget PoolManifestTarget();
FuzzTarget PoolServiceTarget();

FuzzTarget GenerateRequestTarget();
FuzzTarget RolloutServiceTarget();
FuzzTarget JobServiceTarget();
FuzzTarget HttpRequestTarget();
FuzzTarget PageRequestTarget();

}  // namespace tandem::fuzz
