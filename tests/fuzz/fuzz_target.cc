#include "tests/fuzz/fuzz_target.h"

#include <array>

#include "common/base/log.h"
#include "google/protobuf/stubs/logging.h"

namespace tandem::fuzz {

std::span<const NamedTarget> AllTargets() {
  static constexpr auto kTargets = std::to_array<NamedTarget>({
      {"chat_messages", ChatMessagesTarget},
      {"chat_template", ChatTemplateTarget},
      {"checkpoint", CheckpointTarget},
      {"client_config", ClientConfigTarget},
      {"data_set", DataSetTarget},
      {"descriptor_packets", DescriptorPacketsTarget},
      {"generate_request", GenerateRequestTarget},
      {"gguf", GgufTarget},
      {"history", HistoryTarget},
      {"http_request", HttpRequestTarget},
      {"hugging_face_model", HuggingFaceModelTarget},
      {"job_file", JobFileTarget},
      {"job_service", JobServiceTarget},
      {"job_store", JobStoreTarget},
      {"job_text", JobTextTarget},
      {"json_schema", JsonSchemaTarget},
      {"kv_scale_table", KvScaleTableTarget},
      {"math_value", MathValueTarget},
      {"model_description", ModelDescriptionTarget},
      {"page_request", PageRequestTarget},
      {"pattern", PatternTarget},
      {"peft_adapter", PeftAdapterTarget},
      {"pool_manifest", PoolManifestTarget},
      {"pool_service", PoolServiceTarget},
      {"reward_function", RewardFunctionTarget},
      {"rollout_service", RolloutServiceTarget},
      {"safetensors", SafetensorsTarget},
      {"socket_token", SocketTokenTarget},
      {"tokenizer_json", TokenizerJsonTarget},
      {"tokens_file", TokensFileTarget},
      {"trl_config", TrlConfigTarget},
      {"worker_answer", WorkerAnswerTarget},
  });
  return kTargets;
}

void QuietLogs() {
  StartLog("fuzz", static_cast<LogLevel>(static_cast<int>(LogLevel::kError) + 1));
  google::protobuf::SetLogHandler(nullptr);
}

}  // namespace tandem::fuzz
