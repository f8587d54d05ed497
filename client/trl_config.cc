#include "client/trl_config.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_join.h"
#include "common/base/printable.h"
#include "common/model/utf8.h"
#include "google/protobuf/text_format.h"
#include "nlohmann/json.hpp"
#include "yaml-cpp/yaml.h"

namespace tandem {
namespace {

using Json = nlohmann::json;
using Lines = std::vector<std::string>;

constexpr std::size_t kMaxTextBytes = 1 << 20;
constexpr std::size_t kMaxNodes = 10000;  // aliases may repeat a small file without end
constexpr int kMaxDepth = 64;

// yaml-cpp makes \N and \_ single bytes, which are no UTF-8.
std::string TextOf(const YAML::Node& node) { return ReplaceIllFormed(node.Scalar()); }

// Plain scalars as YAML's core schema types them, "1e-6" included; quoted ones are text.
Json ScalarToJson(const YAML::Node& node) {
  const std::string text = TextOf(node);
  if (node.Tag() == "!") return text;
  const std::string lower = absl::AsciiStrToLower(text);
  if (lower == "true" || lower == "false") return lower == "true";
  if (lower == "null" || lower == "none" || text == "~" || text.empty()) return nullptr;
  std::int64_t integer = 0;
  if (absl::SimpleAtoi(text, &integer)) return integer;
  double number = 0;
  if (absl::SimpleAtod(text, &number)) return number;
  return text;
}

// `depth`: of the node, whose alias may stand within itself.
absl::StatusOr<Json> ToJson(const YAML::Node& node, int depth, std::size_t* num_nodes) {
  if (depth > kMaxDepth) return absl::InvalidArgumentError(absl::StrCat("the configuration nests deeper than ", kMaxDepth));
  if (++*num_nodes > kMaxNodes) {
    return absl::InvalidArgumentError(absl::StrCat("the configuration has more than ", kMaxNodes, " values"));
  }
  if (node.IsScalar()) return ScalarToJson(node);
  if (node.IsSequence()) {
    Json array = Json::array();
    for (const YAML::Node& item : node) {
      TANDEM_ASSIGN_OR_RETURN(Json value, ToJson(item, depth + 1, num_nodes));
      array.push_back(std::move(value));
    }
    return array;
  }
  if (node.IsMap()) {
    Json object = Json::object();
    for (const auto& item : node) {
      TANDEM_ASSIGN_OR_RETURN(object[TextOf(item.first)], ToJson(item.second, depth + 1, num_nodes));
    }
    return object;
  }
  return Json(nullptr);
}

absl::StatusOr<Json> Parse(const std::string& text) {
  if (text.size() > kMaxTextBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("the configuration has ", text.size(), " bytes; the limit is ", kMaxTextBytes));
  }
  if (!IsWellFormed(text)) {
    return absl::InvalidArgumentError(absl::StrCat("the configuration is not UTF-8, from byte ", WellFormedPrefix(text), " on"));
  }
  try {
    std::size_t num_nodes = 0;
    TANDEM_ASSIGN_OR_RETURN(Json options, ToJson(YAML::Load(text), /*depth=*/0, &num_nodes));
    if (!options.is_object()) return absl::InvalidArgumentError("the configuration is not a mapping of options to values");
    return options;
  } catch (const YAML::Exception& error) {
    return absl::InvalidArgumentError(absl::StrCat("the configuration is neither JSON nor YAML: ", error.what()));
  }
}

// Why an option has no place in a job.
constexpr char kNodeKeepsFiles[] = "the node keeps a job's files under its --data_dir; tandem export takes the adapter away";
constexpr char kPrecision[] = "precision is the node's: bf16 with fp32 sums on a GPU, fp32 on the CPU";
constexpr char kOneNode[] = "one node trains a job";
constexpr char kMemory[] = "memory is planned from the job's lengths; see tandem plan";
constexpr char kEngine[] = "the rollout server's own engine generates; its flags size it";
constexpr char kRecords[] = "every step is recorded; see tandem watch, plot, history and completions";
constexpr char kHub[] = "nothing is sent to a hub";
constexpr char kModel[] = "the model is the node's: --model of the daemons";
constexpr char kAdaptive[] = "the entropy coefficient stays as it is";
constexpr char kEvaluation[] = "evaluation is set by evaluation { }";
const std::map<std::string, const char*>& Reasons() {
  static const auto* const reasons = new std::map<std::string, const char*>{
      {"output_dir", kNodeKeepsFiles},
      {"overwrite_output_dir", kNodeKeepsFiles},
      {"save_only_model", "checkpoints hold all that a resume needs"},
      {"save_safetensors", "an adapter is exported as safetensors"},
      {"resume_from_checkpoint", "a job resumes by itself; adapter.start_path starts another one from an adapter"},
      {"bf16", kPrecision},
      {"fp16", kPrecision},
      {"tf32", kPrecision},
      {"bf16_full_eval", kPrecision},
      {"fp16_full_eval", kPrecision},
      {"dtype", kPrecision},
      {"torch_dtype", kPrecision},
      {"load_in_4bit", "--weights=nf4 of the daemons holds the base model in 4 bits"},
      {"load_in_8bit", "--weights=fp8 of the daemons holds the base model in 8 bits"},
      {"bnb_4bit_quant_type", "--weights=nf4 of the daemons"},
      {"use_bnb_nested_quant", "--weights=nf4 of the daemons"},
      {"activation_checkpointing", "layers are computed again in the backward pass where memory asks for it"},
      {"activation_checkpointing_kwargs", "layers are computed again in the backward pass where memory asks for it"},
      {"gradient_checkpointing", "layers are computed again in the backward pass where memory asks for it"},
      {"gradient_checkpointing_kwargs", "layers are computed again in the backward pass where memory asks for it"},
      {"auto_find_batch_size", kMemory},
      {"torch_empty_cache_steps", kMemory},
      {"activation_offloading", kMemory},
      {"use_liger_kernel", "the head is always computed in tiles"},
      {"torch_compile", "kernels are compiled ahead"},
      {"attn_implementation", "the attention is the node's"},
      {"deepspeed", kOneNode},
      {"fsdp", kOneNode},
      {"fsdp_config", kOneNode},
      {"ddp_find_unused_parameters", kOneNode},
      {"ddp_timeout", kOneNode},
      {"ds3_gather_for_generation", kOneNode},
      {"parallelism_config", kOneNode},
      {"accelerator_config", kOneNode},
      {"num_processes", kOneNode},
      {"local_rank", kOneNode},
      {"pad_to_multiple_of", "sequences are packed without padding"},
      {"group_by_length", "sequences are packed without padding"},
      {"per_device_eval_batch_size", "an evaluation's completions are generated as memory allows"},
      {"eval_accumulation_steps", "an evaluation's completions are generated as memory allows"},
      {"eval_on_start", "a job with an evaluation always begins with one"},
      {"do_eval", kEvaluation},
      {"eval_delay", kEvaluation},
      {"do_train", "a job trains"},
      {"do_predict", "tandem generate asks the model"},
      {"greater_is_better", "the metric of evaluation { } is always the larger the better"},
      {"dataloader_num_workers", "rows are read where they lie"},
      {"dataloader_pin_memory", "rows are read where they lie"},
      {"dataloader_drop_last", "an epoch's last rows are drawn with the next epoch's first"},
      {"dataloader_persistent_workers", "rows are read where they lie"},
      {"remove_unused_columns", "reward functions get every column"},
      {"dataset_name", "data.path names a file: JSON lines, a JSON array, CSV; the Python package converts others"},
      {"dataset_config", "data.path names a file"},
      {"dataset_train_split", "data.path names a file"},
      {"dataset_test_split", "evaluation.path names a file, or data.held_out_share keeps rows back"},
      {"dataset_streaming", "files larger than memory are read as they are"},
      {"reward_funcs", "functions are yours to add: tandem submit --rewards=FILE.py:FUNCTION, or rewards { } (docs/rewards.md)"},
      {"reward_model_name_or_path", "a reward model is served as a RewardService: rewards { remote { } }"},
      {"model_name_or_path", kModel},
      {"model_revision", kModel},
      {"model_init_kwargs", kModel},
      {"trust_remote_code", "no code comes with a model"},
      {"router_aux_loss_coef", "there is no mixture of experts among the model families"},
      {"lora_modules_to_save", "an adapter has low-rank matrices only"},
      {"lora_task_type", "adapters are for causal language models"},
      {"use_dora", "an adapter has low-rank matrices only"},
      {"cache_implementation", kEngine},
      {"use_transformers_paged", kEngine},
      {"use_transformers_continuous_batching", kEngine},
      {"transformers_continuous_batching_config", kEngine},
      {"max_tool_calling_iterations", "rollouts call no tools"},
      {"log_completions", kRecords},
      {"log_unique_prompts", kRecords},
      {"log_multimodal", "prompts are text"},
      {"num_completions_to_print", kRecords},
      {"log_completions_hub_repo", kHub},
      {"log_level", kRecords},
      {"report_to", kRecords},
      {"project", kRecords},
      {"trackio_space_id", kRecords},
      {"disable_tqdm", kRecords},
      {"include_num_input_tokens_seen", kRecords},
      {"push_to_hub", kHub},
      {"entropy_coef_min", kAdaptive},
      {"entropy_coef_max", kAdaptive},
      {"entropy_coef_delta", kAdaptive},
      {"entropy_target", kAdaptive},
      {"normalize_advantages", "of RLOOConfig: recipe: \"rloo\" has no whitening"},
      {"reward_clip_range", "of RLOOConfig: rewards are not clipped"},
      {"data_seed", "the job's seed shuffles too"},
      {"full_determinism", "a job's trajectory is a function of its file and data"},
  };
  return *reasons;
}

std::string ReasonFor(const std::string& option) {
  if (const auto found = Reasons().find(option); found != Reasons().end()) return found->second;
  if (absl::StartsWith(option, "vllm_")) return kEngine;
  if (absl::StartsWith(option, "hub_")) return kHub;
  if (absl::StartsWith(option, "logging_")) return kRecords;
  return "not an option that this command knows";
}

// One configuration on its way to a job.
class Import {
 public:
  Import(Json options, const std::string& name) : options_(std::move(options)) { imported_.job.set_name(name); }

  absl::StatusOr<ImportedJob> Run() {
    v1::JobSpec& job = imported_.job;
    ReadBatch(&job);
    ReadSampling(job.mutable_rollout());
    ReadLoss(job.mutable_loss());
    ReadKl(job.mutable_loss());
    ReadMasks(job.mutable_loss());
    ReadRolloutCorrection(job.mutable_loss());
    ReadAdvantage(job.mutable_advantage());
    ReadOptimizer(job.mutable_optimizer());
    ReadAdapter(job.mutable_adapter());
    ReadData(&job);
    ReadEvaluation(&job);
    ReadCheckpoints(&job);
    for (const auto& [option, value] : options_.items()) {
      if (!value.is_null() && !seen_.contains(option)) Leave(option, ReasonFor(option));
    }
    if (!faults_.empty()) return absl::InvalidArgumentError(absl::StrJoin(faults_, "\n"));
    std::ranges::stable_sort(imported_.not_kept, {}, &NotKept::option);
    return std::move(imported_);
  }

 private:
  // The value when it is given and not null.
  const Json* Find(const std::string& option) {
    seen_.insert(option);
    const auto found = options_.find(option);
    return found == options_.end() || found->is_null() ? nullptr : &*found;
  }
  void Fault(const std::string& option, const std::string& limit) {
    faults_.push_back(absl::StrCat(option, ": ", options_[option].dump(), "; must be ", limit));
  }
  void Leave(const std::string& option, const std::string& reason) {
    const auto found = options_.find(option);
    imported_.not_kept.push_back({option, found == options_.end() ? "TRL's default" : found->dump(), reason});
  }
  std::optional<double> Number(const std::string& option) {
    const Json* const value = Find(option);
    if (value == nullptr) return std::nullopt;
    double number = 0;
    if (value->is_number()) return value->get<double>();
    if (value->is_string() && absl::SimpleAtod(value->get<std::string>(), &number)) return number;
    Fault(option, "a number");
    return std::nullopt;
  }
  std::optional<std::uint32_t> Count(const std::string& option) {
    const Json* const value = Find(option);
    if (value == nullptr) return std::nullopt;
    if (value->is_number_integer() && value->get<std::int64_t>() >= 0 && value->get<std::int64_t>() <= UINT32_MAX) {
      return value->get<std::uint32_t>();
    }
    Fault(option, "a whole number >= 0");
    return std::nullopt;
  }
  std::optional<bool> Flag(const std::string& option) {
    const Json* const value = Find(option);
    if (value == nullptr) return std::nullopt;
    if (value->is_boolean()) return value->get<bool>();
    Fault(option, "true or false");
    return std::nullopt;
  }
  std::optional<std::string> Word(const std::string& option) {
    const Json* const value = Find(option);
    if (value == nullptr) return std::nullopt;
    if (value->is_string()) return value->get<std::string>();
    Fault(option, "a word");
    return std::nullopt;
  }
  // `words` in the order of an enum's values from 1.
  template <typename Enum>
  std::optional<Enum> Choice(const std::string& option, const Lines& words) {
    const std::optional<std::string> word = Word(option);
    if (!word.has_value()) return std::nullopt;
    const auto found = std::ranges::find(words, *word);
    if (found != words.end()) return static_cast<Enum>(found - words.begin() + 1);
    Fault(option, absl::StrCat("one of ", absl::StrJoin(words, ", ")));
    return std::nullopt;
  }

  // TRL counts micro-batches, a job counts prompts. One process is assumed.
  void ReadBatch(v1::JobSpec* job) {
    const std::uint64_t each = Count("per_device_train_batch_size").value_or(8), group = Count("num_generations").value_or(8);
    const std::uint64_t accumulated = std::max(Count("gradient_accumulation_steps").value_or(1), 1u);
    const auto generation_batch = Count("generation_batch_size"), given_parts = Count("steps_per_generation");
    const std::uint32_t passes = Count("num_iterations").value_or(1);
    std::uint64_t parts = given_parts.value_or(static_cast<std::uint32_t>(accumulated));
    if (each == 0 || group < 2 || passes == 0 || parts == 0) {
      faults_.push_back(absl::StrCat("per_device_train_batch_size ", each, ", num_generations ", group, ", num_iterations ",
                                     passes, ", steps_per_generation ", parts,
                                     "; must be at least 1, num_generations at least 2"));
      return;
    }
    if (generation_batch.has_value() && given_parts.has_value()) {
      Fault("generation_batch_size", "left out where steps_per_generation is given, as TRL has it");
      return;
    }
    if (generation_batch.has_value()) {
      if (*generation_batch == 0 || *generation_batch % each != 0) {
        Fault("generation_batch_size", absl::StrCat("a multiple of per_device_train_batch_size, ", each));
        return;
      }
      parts = *generation_batch / each;
    }
    // Fewer micro-batches a generation than a step accumulates: several generations of one policy make one batch.
    const std::uint64_t micro_batches = std::max(parts, accumulated);
    if (micro_batches % parts != 0 || micro_batches % accumulated != 0) {
      faults_.push_back(absl::StrCat("steps_per_generation: ", parts,
                                     "; must divide gradient_accumulation_steps or be its multiple, ", accumulated));
      return;
    }
    if (each * micro_batches % group != 0) {
      faults_.push_back(absl::StrCat("num_generations: ", group, "; must divide the batch of ", each * micro_batches,
                                     " completions: per_device_train_batch_size x steps_per_generation"));
      return;
    }
    updates_ = micro_batches / accumulated * passes;
    job->mutable_rollout()->set_group_size(static_cast<std::uint32_t>(group));
    job->mutable_rollout()->set_prompts_per_step(static_cast<std::uint32_t>(each * micro_batches / group));
    job->mutable_loss()->set_updates_per_rollout(passes);
    const std::uint64_t mini_batches = micro_batches / accumulated;
    if (job->rollout().prompts_per_step() % mini_batches == 0) {
      job->mutable_loss()->set_mini_batches_per_rollout(static_cast<std::uint32_t>(mini_batches));
    } else {
      Leave("steps_per_generation",
            absl::StrCat("its ", mini_batches,
                         " optimizer steps a generation split groups; a mini-batch holds whole groups, so that ",
                         job->rollout().prompts_per_step(), " prompts make one"));
      updates_ = passes;
    }
    if (options_.contains("per_device_train_batch_size")) {
      Leave("per_device_train_batch_size",
            absl::StrCat("as for one process: rollout.prompts_per_step is ", job->rollout().prompts_per_step(),
                         ", times your number of processes; micro-batches are filled by tokens (batch.micro_batch_tokens)"));
    }
    ReadSteps(job);
  }

  // A job's step is a rollout batch; TRL's an optimizer step.
  void ReadSteps(v1::JobSpec* job) {
    const Json* const given = Find("max_steps");
    if (given != nullptr && !given->is_number_integer()) {
      Fault("max_steps", "a whole number");
    } else if (given != nullptr && given->get<std::int64_t>() > 0) {
      const auto steps = given->get<std::uint64_t>();
      job->set_num_steps(static_cast<std::uint32_t>((steps + updates_ - 1) / updates_));
      if (updates_ > 1) {
        Leave("max_steps",
              absl::StrCat("counts optimizer steps; a step of the job makes ", updates_, ": num_steps is ", job->num_steps()));
      }
    } else {
      Leave("num_train_epochs", "num_steps is the number of rows x epochs / rollout.prompts_per_step: write it");
    }
    Find("num_train_epochs");
    job->set_seed(Count("seed").value_or(42));
  }

  void ReadSampling(v1::RolloutConfig* rollout) {
    v1::SamplingParams* const sampling = rollout->mutable_sampling();
    sampling->set_temperature(Number("temperature").value_or(1));
    sampling->set_max_tokens(Count("max_completion_length").value_or(512));
    if (const auto top_p = Number("top_p"); top_p.value_or(1) != 1) sampling->set_top_p(*top_p);
    if (const auto top_k = Count("top_k")) sampling->set_top_k(*top_k);
    if (const auto min_p = Number("min_p")) sampling->set_min_p(*min_p);
    if (const auto penalty = Number("repetition_penalty"); penalty.value_or(1) != 1) sampling->set_repetition_penalty(*penalty);
    const Json* const more = Find("generation_kwargs");
    if (more == nullptr) return;
    if (!more->is_object()) return Fault("generation_kwargs", "a mapping");
    for (const auto& [name, value] : more->items()) {
      if (name == "presence_penalty" && value.is_number()) {
        sampling->set_presence_penalty(value.get<double>());
      } else if ((name == "stop" || name == "stop_strings") && (value.is_string() || value.is_array())) {
        for (const Json& stop : value.is_string() ? Json::array({value}) : value) {
          if (stop.is_string()) sampling->add_stop_strings(stop.get<std::string>());
        }
      } else if (name == "stop_token_ids" && value.is_array()) {
        for (const Json& id : value) {
          if (id.is_number_integer()) sampling->add_stop_token_ids(id.get<std::uint32_t>());
        }
      } else {
        imported_.not_kept.push_back({"generation_kwargs." + name, value.dump(), "the sampler has no such setting"});
      }
    }
  }

  void ReadLoss(v1::LossConfig* loss) {
    static const Lines kTypes = {"grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"};
    static constexpr v1::LossPreset kPresets[] = {v1::LOSS_PRESET_GRPO,  v1::LOSS_PRESET_BNPO,  v1::LOSS_PRESET_DR_GRPO,
                                                  v1::LOSS_PRESET_DAPO,  v1::LOSS_PRESET_CISPO, v1::LOSS_PRESET_SAPO,
                                                  v1::LOSS_PRESET_LUSPO, v1::LOSS_PRESET_VESPO};
    const v1::LossPreset preset = kPresets[Choice<int>("loss_type", kTypes).value_or(4) - 1];
    loss->set_preset(preset);
    const int level = Choice<int>("importance_sampling_level", {"token", "sequence"}).value_or(1);
    loss->set_ratio_level(level == 2 ? v1::RATIO_LEVEL_SEQUENCE : v1::RATIO_LEVEL_TOKEN);
    const double low = Number("epsilon").value_or(0.2), high = Number("epsilon_high").value_or(low);
    const auto delta = Number("delta");
    if (preset == v1::LOSS_PRESET_CISPO) {
      loss->set_cispo_max_ratio(high);
    } else if (preset != v1::LOSS_PRESET_SAPO && preset != v1::LOSS_PRESET_VESPO) {
      loss->set_epsilon_low(low);
      loss->set_epsilon_high(high);
      if (delta.has_value()) loss->set_delta(*delta);
    }
    const auto positive = Number("sapo_temperature_pos"), negative = Number("sapo_temperature_neg");
    if (preset == v1::LOSS_PRESET_SAPO) {
      loss->set_sapo_temperature_positive(positive.value_or(1));
      loss->set_sapo_temperature_negative(negative.value_or(1.05));
    }
    const auto k_positive = Number("vespo_k_pos"), lambda_positive = Number("vespo_lambda_pos"),
               k_negative = Number("vespo_k_neg"), lambda_negative = Number("vespo_lambda_neg");
    if (preset == v1::LOSS_PRESET_VESPO) {
      loss->set_vespo_k_positive(k_positive.value_or(2));
      loss->set_vespo_lambda_positive(lambda_positive.value_or(3));
      loss->set_vespo_k_negative(k_negative.value_or(3));
      loss->set_vespo_lambda_negative(lambda_negative.value_or(2));
    }
    if (preset == v1::LOSS_PRESET_BNPO) {
      Leave("loss_type",
            "the mean over a micro-batch's tokens depends on how a step is split; micro-batches are filled by tokens here");
    }
  }

  void ReadKl(v1::LossConfig* loss) {
    const double beta = Number("beta").value_or(0);
    const bool is_corrected = Flag("use_bias_correction_kl").value_or(true);
    const bool syncs = Flag("sync_ref_model").value_or(false);
    const double alpha = Number("ref_model_mixup_alpha").value_or(0.6);
    const std::uint64_t interval = Count("ref_model_sync_steps").value_or(512);
    if (beta == 0) return;
    loss->set_beta(beta);
    loss->set_kl_estimator(v1::KL_ESTIMATOR_K3);
    loss->set_kl_bias_correction(is_corrected);
    Leave("beta", "kept, with log-ratios cut at 20 and each token's KL at 10 (loss.kl_log_ratio_clamp, kl_output_clamp)");
    if (!syncs) return;
    loss->mutable_reference_sync()->set_alpha(alpha);
    loss->mutable_reference_sync()->set_interval_steps(
        static_cast<std::uint32_t>(std::max<std::uint64_t>(interval / updates_, 1)));
    Leave("sync_ref_model",
          absl::StrCat("kept for the adapter's factors, each mixed by itself, behind every ",
                       loss->reference_sync().interval_steps(), ". step; TRL mixes whole weights and refuses adapters"));
  }

  void ReadMasks(v1::LossConfig* loss) {
    if (Flag("mask_truncated_completions").value_or(false)) loss->set_mask_truncated(true);
    if (const auto quantile = Number("top_entropy_quantile"); quantile.value_or(1) != 1)
      loss->set_top_entropy_quantile(*quantile);
    if (const auto coefficient = Number("entropy_coef"); coefficient.value_or(0) != 0)
      loss->set_entropy_coefficient(*coefficient);
    if (Flag("use_adaptive_entropy").value_or(false)) Leave("use_adaptive_entropy", kAdaptive);
    if (const auto threshold = Number("off_policy_mask_threshold")) loss->set_off_policy_threshold(*threshold);
  }

  // Without vLLM TRL draws from the very model that it trains, and corrects nothing.
  void ReadRolloutCorrection(v1::LossConfig* loss) {
    v1::RolloutCorrection* const correction = loss->mutable_rollout_correction();
    const bool is_on = Flag("use_vllm").value_or(false) && Flag("vllm_importance_sampling_correction").value_or(true);
    Flag("vllm_importance_sampling_correction");
    static constexpr v1::RolloutCorrectionMode kModes[] = {
        v1::ROLLOUT_CORRECTION_MODE_TOKEN_TRUNCATE, v1::ROLLOUT_CORRECTION_MODE_TOKEN_MASK,
        v1::ROLLOUT_CORRECTION_MODE_SEQUENCE_TRUNCATE, v1::ROLLOUT_CORRECTION_MODE_SEQUENCE_MASK};
    const int mode =
        Choice<int>("vllm_importance_sampling_mode", {"token_truncate", "token_mask", "sequence_truncate", "sequence_mask"})
            .value_or(4);
    const char* const max_option =
        options_.contains("vllm_importance_sampling_cap") ? "vllm_importance_sampling_cap" : "vllm_importance_sampling_clip_max";
    const bool has_no_max = options_.contains(max_option) && options_[max_option].is_null();
    const auto most = Number(max_option), least = Number("vllm_importance_sampling_clip_min");
    if (!is_on) {
      correction->set_mode(v1::ROLLOUT_CORRECTION_MODE_NONE);
      return;
    }
    if (has_no_max && !least.has_value()) {
      correction->set_mode(v1::ROLLOUT_CORRECTION_MODE_NONE);
      Leave("vllm_importance_sampling_mode", "weights without any bound are not among the corrections");
      return;
    }
    if (loss->preset() == v1::LOSS_PRESET_VESPO && mode > 2) {
      correction->set_mode(v1::ROLLOUT_CORRECTION_MODE_TOKEN_TRUNCATE);
      Leave("vllm_importance_sampling_mode", "vespo folds the weight of each token into phi: TOKEN_TRUNCATE");
    } else {
      correction->set_mode(kModes[mode - 1]);
    }
    if (!has_no_max) correction->set_max(most.value_or(3));
    if (least.has_value()) correction->set_min(*least);
  }

  void ReadAdvantage(v1::AdvantageConfig* advantage) {
    advantage->set_estimator(v1::ADVANTAGE_ESTIMATOR_GROUP);
    const bool normalizes =
        Choice<int>("multi_objective_aggregation", {"sum_then_normalize", "normalize_then_sum"}).value_or(1) == 2;
    advantage->set_aggregation(normalizes ? v1::REWARD_AGGREGATION_NORMALIZE_THEN_SUM
                                          : v1::REWARD_AGGREGATION_SUM_THEN_NORMALIZE);
    int scale = v1::ADVANTAGE_SCALE_GROUP;
    if (const Json* const given = Find("scale_rewards"); given != nullptr && given->is_boolean()) {
      scale = given->get<bool>() ? v1::ADVANTAGE_SCALE_GROUP : v1::ADVANTAGE_SCALE_NONE;
    } else if (given != nullptr) {
      scale = Choice<int>("scale_rewards", {"group", "batch", "none"}).value_or(scale);
    }
    if (!normalizes) advantage->set_scale(static_cast<v1::AdvantageScale>(scale));
    if (const Json* const weights = Find("reward_weights")) {
      Leave("reward_weights",
            absl::StrCat("weights go with their functions: rewards { weight: ... }, in this order: ", weights->dump()));
    }
  }

  void ReadOptimizer(v1::OptimizerConfig* optimizer) {
    optimizer->set_learning_rate(Number("learning_rate").value_or(1e-6));
    optimizer->set_beta1(Number("adam_beta1").value_or(0.9));
    optimizer->set_beta2(Number("adam_beta2").value_or(0.999));
    optimizer->set_epsilon(Number("adam_epsilon").value_or(1e-8));
    optimizer->set_weight_decay(Number("weight_decay").value_or(0));
    optimizer->set_max_grad_norm(Number("max_grad_norm").value_or(1));
    if (const auto optim = Word("optim"); optim.has_value() && !absl::StartsWith(*optim, "adamw_torch")) {
      Leave("optim", "the optimizer is AdamW with fp32 moments");
    }
    const std::string schedule = Word("lr_scheduler_type").value_or("linear");
    const Json* const more = Find("lr_scheduler_kwargs");
    double final_ratio = 0;
    if (schedule == "linear") {
      optimizer->set_schedule(v1::LEARNING_RATE_SCHEDULE_LINEAR);
    } else if (schedule == "cosine" || schedule == "cosine_with_min_lr") {
      optimizer->set_schedule(v1::LEARNING_RATE_SCHEDULE_COSINE);
      if (more != nullptr && more->is_object()) {
        if (more->contains("min_lr_rate") && (*more)["min_lr_rate"].is_number())
          final_ratio = (*more)["min_lr_rate"].get<double>();
        if (more->contains("min_lr") && (*more)["min_lr"].is_number()) {
          final_ratio = (*more)["min_lr"].get<double>() / optimizer->learning_rate();
        }
      }
    } else {
      optimizer->set_schedule(v1::LEARNING_RATE_SCHEDULE_CONSTANT);
      if (schedule != "constant" && schedule != "constant_with_warmup") {
        Leave("lr_scheduler_type", "schedules are constant, linear and cosine: CONSTANT");
      }
    }
    if (final_ratio != 0) optimizer->set_final_learning_rate_ratio(final_ratio);
    ReadWarmup(optimizer);
  }
  void ReadWarmup(v1::OptimizerConfig* optimizer) {
    // Since transformers 5 a warm-up below 1 is a share.
    const double given = Number("warmup_steps").value_or(0),
                 share = given > 0 && given < 1 ? given : Number("warmup_ratio").value_or(0);
    Number("warmup_ratio");
    const double steps = given >= 1 ? given / static_cast<double>(updates_) : share * imported_.job.num_steps();
    if (steps > 0) optimizer->set_warmup_steps(static_cast<std::uint32_t>(std::ceil(steps)));
    if (share > 0 && imported_.job.num_steps() == 0) Leave("warmup_ratio", "a share of num_steps, which is not known here");
  }

  void ReadAdapter(v1::AdapterConfig* adapter) {
    static const std::map<std::string, v1::LinearKind> kKinds = {
        {"q_proj", v1::LINEAR_KIND_Q_PROJ},      {"k_proj", v1::LINEAR_KIND_K_PROJ},       {"v_proj", v1::LINEAR_KIND_V_PROJ},
        {"o_proj", v1::LINEAR_KIND_O_PROJ},      {"gate_proj", v1::LINEAR_KIND_GATE_PROJ}, {"up_proj", v1::LINEAR_KIND_UP_PROJ},
        {"down_proj", v1::LINEAR_KIND_DOWN_PROJ}};
    const bool uses_peft = Flag("use_peft").value_or(false);
    adapter->set_rank(Count("lora_r").value_or(16));
    adapter->set_alpha(Number("lora_alpha").value_or(32));
    double dropout = Number("lora_dropout").value_or(uses_peft ? 0.05 : 0);
    if (Flag("disable_dropout").value_or(false)) dropout = 0;
    adapter->set_dropout(dropout);
    if (Flag("use_rslora").value_or(false)) adapter->set_rank_stabilised(true);
    const Json* const targets = Find("lora_target_modules");
    if (targets != nullptr && *targets != "all-linear") {
      for (const Json& target : targets->is_array() ? *targets : Json::array({*targets})) {
        const auto found = target.is_string() ? kKinds.find(target.get<std::string>()) : kKinds.end();
        if (found != kKinds.end()) {
          adapter->add_targets(found->second);
        } else {
          imported_.not_kept.push_back({"lora_target_modules", target.dump(), "adapters are on the seven linears of a layer"});
        }
      }
    }
    if (!uses_peft)
      Leave("use_peft", "a job trains an adapter, never all weights: rank 16, alpha 32, and a higher learning rate");
  }

  void ReadData(v1::JobSpec* job) {
    if (!Flag("shuffle_dataset").value_or(true)) job->mutable_data()->set_no_shuffle(true);
    if (const Json* const arguments = Find("chat_template_kwargs"))
      job->mutable_data()->set_template_arguments(arguments->dump());
    if (const auto most = Count("max_prompt_length")) {
      job->mutable_data()->set_max_prompt_tokens(*most);
      Leave("max_prompt_length", "rows with longer prompts are left out, not cut");
    }
    // True here always.
    Flag("cast_lm_head_to_fp32");
    if (const auto name = Word("run_name")) Leave("run_name", "the job's name is the configuration file's; edit it");
  }

  void ReadEvaluation(v1::JobSpec* job) {
    const std::string strategy = Word("eval_strategy").value_or("no");
    const auto interval = Number("eval_steps");
    const auto samples = Count("num_generations_eval");
    const bool wants_best = Flag("load_best_model_at_end").value_or(false);
    const auto metric = Word("metric_for_best_model");
    if (strategy == "no") return;
    v1::EvaluationConfig* const evaluation = job->mutable_evaluation();
    evaluation->set_samples_per_prompt(samples.value_or(job->rollout().group_size()));
    const double steps = interval.value_or(Number("logging_steps").value_or(10));
    const double whole = steps < 1 ? std::ceil(steps * job->num_steps()) : std::ceil(steps / static_cast<double>(updates_));
    if (strategy == "steps") {
      evaluation->set_interval_steps(static_cast<std::uint32_t>(std::max(whole, 1.0)));
    } else {
      Leave("eval_strategy", "evaluations are by steps: evaluation.interval_steps");
    }
    if (wants_best) Leave("load_best_model_at_end", "the best evaluation's checkpoint is kept: tandem export --best");
    if (metric.has_value()) {
      const std::string bare = absl::StartsWith(*metric, "eval_") ? metric->substr(5) : *metric;
      if (bare == "reward" || absl::StartsWith(bare, "rewards/")) {
        evaluation->set_metric(bare);
      } else {
        Leave("metric_for_best_model", "metrics are reward, rewards/FUNCTION/mean and pass_at_K");
      }
    }
  }

  void ReadCheckpoints(v1::JobSpec* job) {
    const std::string strategy = Word("save_strategy").value_or("steps");
    const double steps = Number("save_steps").value_or(500);
    if (strategy == "steps" && steps >= 1) {
      job->mutable_checkpoint()->set_interval_steps(static_cast<std::uint32_t>(std::ceil(steps / static_cast<double>(updates_))));
    } else {
      Leave("save_strategy", "checkpoints are by steps: checkpoint.interval_steps, 10 where it is not set");
    }
    if (const auto keep = Count("save_total_limit"); keep.value_or(0) > 0) job->mutable_checkpoint()->set_keep(*keep);
  }

  Json options_;
  std::set<std::string> seen_;
  Lines faults_;
  std::uint64_t updates_ = 1;  // optimizer steps of one step of the job
  ImportedJob imported_;
};

}  // namespace

absl::StatusOr<ImportedJob> ImportTrlConfig(const std::string& text, const std::string& name) {
  TANDEM_ASSIGN_OR_RETURN(Json options, Parse(text));
  return Import(std::move(options), name).Run();
}

absl::StatusOr<std::string> ToJobFile(const ImportedJob& imported) {
  std::string job;
  if (!google::protobuf::TextFormat::PrintToString(imported.job, &job)) return absl::InternalError("the job cannot be printed");
  std::string text = absl::StrCat("# Yours to write: ", imported.job.has_data() ? "path in data { }" : "data { path: ... }",
                                  ", rewards { ... }");
  if (imported.job.num_steps() == 0) text += ", num_steps";
  if (imported.job.has_evaluation()) text += ", path in evaluation { } or held_out_share in data { }";
  text += "\n";
  for (const NotKept& option : imported.not_kept) {
    const std::string line = absl::StrCat(option.option, ": ", option.value, ": ", option.reason);
    absl::StrAppend(&text, "# ", Printable(line, LineEnds::kEscape), "\n");
  }
  return text + job;
}

}  // namespace tandem
