#include "trainer_server/plan/memory_plan.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "common/base/check.h"
#include "common/base/units.h"
#include "common/gpu/dtype.h"
#include "common/memory/pool_plan.h"
#include "trainer_server/batch/pack_micro_batches.h"
#include "trainer_server/policy/policy_memory.h"

namespace tandem {
namespace {

constexpr std::uint64_t kMaxContextTokens = 1 << 24;
constexpr std::uint64_t kMaxBlocks = 1 << 24;
constexpr std::uint64_t kPoolGranularityBytes = 2 * kMiB;
constexpr std::uint64_t kStandingAlignmentBytes = 256;
constexpr std::uint64_t kMaxLiveSequences = 1 << 16;
constexpr std::uint32_t kAssumedMaxSequences = 256;
constexpr std::uint32_t kAssumedBlockTokens = 16;

// Rates that times are estimated with: half of what dense bf16 products and copies reach on one H200, and a desktop CPU's.
struct Rates {
  double flops_per_second, bytes_per_second;
};
Rates RatesOf(Device device) {
  return device == Device::kCuda ? Rates{.flops_per_second = 370e12, .bytes_per_second = 2.1e12}
                                 : Rates{.flops_per_second = 50e9, .bytes_per_second = 10e9};
}

// As a flag's value. Regions and pools are whole MiB.
std::string WholeMib(std::uint64_t bytes) { return absl::StrCat(bytes / kMiB, "MiB"); }

double Real(std::uint64_t value) { return static_cast<double>(value); }
std::int64_t Signed(std::uint64_t value) { return static_cast<std::int64_t>(value); }
std::uint64_t Unsigned(int value) { return static_cast<std::uint64_t>(std::max(value, 0)); }
std::uint64_t DivideUp(std::uint64_t value, std::uint64_t divisor) { return (value + divisor - 1) / divisor; }
std::uint64_t Remaining(std::uint64_t total, std::uint64_t used) { return total - std::min(total, used); }

std::uint64_t Sum(const google::protobuf::RepeatedPtrField<v1::OwnedBytes>& owners) {
  std::uint64_t bytes = 0;
  for (const v1::OwnedBytes& owner : owners) bytes += owner.bytes();
  return bytes;
}

// The largest context in [least, kMaxContextTokens] that `fits`; 0: not even the least. Requires: what fits, fits shorter.
std::uint64_t LargestContext(std::uint64_t least, const std::function<bool(std::uint64_t)>& fits) {
  if (!fits(least)) return 0;
  std::uint64_t low = least, high = kMaxContextTokens + 1;
  while (high - low > 1) {
    const std::uint64_t middle = low + (high - low) / 2;
    (fits(middle) ? low : high) = middle;
  }
  return low;
}

// The sizes of one job on one node. A context is the longest training prompt and a completion; all lengths in tokens.
class Arithmetic {
 public:
  Arithmetic(const ModelConfig& model, const JobMemory& job, const NodeMemory& node) : model_(model), job_(job), node_(node) {
    TANDEM_CHECK(node.rollout.block_tokens() > 0 && node.rollout.kv_block_bytes() > 0, "no KV blocks");
  }

  std::uint64_t sequences_per_step() const { return job_.prompts_per_step * job_.group_size; }
  std::uint64_t context() const { return job_.longest_prompt_tokens + job_.max_completion_tokens; }
  std::uint64_t num_layers() const { return Unsigned(model_.num_layers); }

  // Blocks of `live` sequences of full length: a group's members share the blocks of its prompt, and each has its own copy of the
  // last one where the prompt fills it partly. One sequence shares with nobody.
  std::uint64_t KvBlocks(std::uint64_t live, std::uint64_t prompt, std::uint64_t completion) const {
    const std::uint64_t tokens = node_.rollout.block_tokens(), all = DivideUp(prompt + completion, tokens);
    if (live <= 1) return live * all;
    return DivideUp(live, job_.group_size) * DivideUp(prompt, tokens) + live * (all - prompt / tokens);
  }
  std::uint64_t KvBytes(std::uint64_t live) const {
    const std::uint64_t prompt = std::max(job_.longest_prompt_tokens, job_.longest_evaluation_prompt_tokens);
    return KvBlocks(live, prompt, job_.max_completion_tokens) * node_.rollout.kv_block_bytes();
  }
  std::uint64_t num_blocks() const { return std::min(node_.elastic_bytes / node_.rollout.kv_block_bytes(), kMaxBlocks); }
  std::uint64_t LargestLive(std::uint64_t wanted) const {
    std::uint64_t low = 0, high = wanted + 1;
    while (high - low > 1) {
      const std::uint64_t middle = low + (high - low) / 2;
      (KvBytes(middle) <= num_blocks() * node_.rollout.kv_block_bytes() ? low : high) = middle;
    }
    return low;
  }

  // Rows of the largest micro-batch when the longest sequence has `context` tokens.
  std::uint64_t Rows(std::uint64_t context) const {
    const std::uint64_t completion = Remaining(context, job_.longest_prompt_tokens);
    const std::uint64_t whole_step = job_.prompts_per_step * (job_.longest_prompt_tokens + job_.group_size * completion);
    return std::min(static_cast<std::uint64_t>(MicroBatchLimit(Signed(job_.micro_batch_tokens), Signed(context))), whole_step);
  }
  PolicyMemory Policy(std::uint64_t rows) const {
    const std::int64_t head_rows = Signed(std::max<std::uint64_t>(Remaining(rows, job_.shortest_prompt_tokens), 1));
    const std::uint64_t segments = std::min(rows, job_.prompts_per_step * (1 + job_.group_size));
    const PolicyPass pass{.rank = job_.rank,
                          .rows = Signed(rows),
                          .head_rows = head_rows,
                          .num_segments = Signed(segments),
                          .logit_chunk = Signed(job_.logit_chunk),
                          .has_dropout = job_.has_dropout};
    return node_.device == Device::kCpu ? PlanCpuPolicyMemory(model_, pass)
                                        : PlanPolicyMemory(model_, node_.weight_format, node_.attention, pass);
  }
  // What stays of every layer: on the CPU in the elastic region, on a GPU as far as that has room.
  KeptLayers Kept(const PolicyMemory& policy) const {
    if (node_.device == Device::kCpu) return {.num_slots = model_.num_layers, .slot_bytes = policy.layer_input_bytes};
    return ChooseKeptLayers(policy, model_.num_layers, Remaining(node_.elastic_bytes, policy.working_bytes),
                            node_.host_limit_bytes);
  }
  // The least that training takes of an elastic region of any size.
  std::uint64_t LeastTrainingBytes(const PolicyMemory& policy) const {
    std::uint64_t layers = num_layers();
    if (node_.device == Device::kCuda) {
      const std::uint64_t in_host = node_.host_limit_bytes / policy.layer_input_bytes;
      layers =
          std::clamp<std::uint64_t>(Remaining(layers, in_host), std::min<std::uint64_t>(kMinLayerInputSlots, layers), layers);
    }
    return policy.working_bytes + layers * policy.layer_input_bytes;
  }
  bool FitsElastic(const PolicyMemory& policy) const {
    const std::uint64_t layers =
        node_.device == Device::kCpu ? num_layers() : std::min<std::uint64_t>(kMinLayerInputSlots, num_layers());
    return policy.working_bytes + layers * policy.layer_input_bytes <= node_.elastic_bytes;
  }
  bool FitsHost(const PolicyMemory& policy) const { return Kept(policy).host_bytes <= node_.host_limit_bytes; }

  // Of the rollout server's standing region; where it does not say, all that it has.
  std::uint64_t rollout_standing_bytes() const {
    const std::uint64_t used = Sum(node_.rollout.standing());
    return used > 0 ? used : node_.rollout_standing_bytes;
  }
  std::uint64_t adapter_copy_bytes() const { return RoundUp(job_.adapter_bytes, kStandingAlignmentBytes); }
  std::uint64_t trainer_fixed_bytes() const {
    std::uint64_t bytes = 0;
    for (const v1::OwnedBytes& owner : node_.trainer_fixed) bytes += owner.bytes();
    return bytes;
  }
  // Masters, gradients, two moments, two slots, and the reference's.
  std::uint64_t num_adapter_copies() const { return job_.has_reference_adapter ? 7 : 6; }
  std::uint64_t trainer_standing_bytes() const { return trainer_fixed_bytes() + num_adapter_copies() * adapter_copy_bytes(); }

  // The smallest pool with this much elastic memory and no more standing memory than is used.
  std::uint64_t AskedPoolBytes(std::uint64_t elastic_bytes) const {
    PoolSizes sizes{.weights_bytes = node_.weights_bytes,
                    .model_bytes = node_.model_bytes,
                    .rollout_standing_bytes = std::max<std::uint64_t>(rollout_standing_bytes(), 1),
                    .trainer_standing_bytes = std::max<std::uint64_t>(trainer_standing_bytes(), 1),
                    .elastic_on_chunk = node_.device == Device::kCuda};
    std::uint64_t fixed = 0;
    for (const std::uint64_t bytes :
         {sizes.weights_bytes, sizes.model_bytes, sizes.rollout_standing_bytes, sizes.trainer_standing_bytes}) {
      fixed += RoundUp(bytes, kPoolGranularityBytes);
    }
    sizes.pool_bytes = fixed + RoundUp(elastic_bytes, kPoolGranularityBytes);
    // The elastic region may lose part of a chunk to the region before it.
    for (int attempt = 0; attempt < 3; ++attempt) {
      const absl::StatusOr<PoolPlan> plan = PoolPlan::Create(sizes, kPoolGranularityBytes);
      if (!plan.ok()) break;
      const v1::ByteRange& elastic = plan->regions.back().range();
      sizes.pool_bytes = std::uint64_t{plan->num_chunks} * plan->chunk_bytes;
      if (elastic.end_bytes() - elastic.begin_bytes() >= elastic_bytes) break;
      sizes.pool_bytes += plan->chunk_bytes;
    }
    return sizes.pool_bytes;
  }

  // FLOPs of the products with the layers' weights, for one row.
  double linear_flops() const {
    double elements = 0;
    for (int kind = 0; kind < kNumLinearKinds; ++kind) {
      const LinearShape shape = ShapeOf(model_, static_cast<LinearKind>(kind));
      elements += static_cast<double>(shape.inputs) * shape.outputs;
    }
    return 2 * elements * model_.num_layers;
  }
  double down_flops() const { return 2.0 * model_.intermediate_size * model_.hidden_size * model_.num_layers; }
  double head_flops() const { return 2.0 * model_.vocab_size * model_.hidden_size; }
  // Of a causal forward pass of all layers over one sequence's rows [first, end): 4 q a visible key and row.
  double AttentionFlops(double first, double end) const {
    return 2 * (end * end - first * first) * model_.q_size() * model_.num_layers;
  }
  // `keeps_attention`: its forward pass is not computed again.
  double TrainingSeconds(double flops_per_second, bool keeps_attention) const {
    const double prompts = Real(job_.prompts_per_step), group = Real(job_.group_size), prompt = Real(job_.longest_prompt_tokens),
                 completion = Real(job_.max_completion_tokens);
    // A group that is one micro-batch computes its prompt once, else each completion computes it anew.
    const bool is_shared = job_.longest_prompt_tokens + job_.group_size * job_.max_completion_tokens <= Rows(context());
    const double prompt_parts = is_shared ? prompts : prompts * group;
    const double rows = prompt_parts * prompt + prompts * group * completion, head_rows = prompts * group * completion;
    const double attention =
        prompt_parts * AttentionFlops(0, prompt) + prompts * group * AttentionFlops(prompt, prompt + completion);
    const double update = 3 * linear_flops() * rows - down_flops() * rows + 2 * head_flops() * head_rows +
                          (keeps_attention ? 3.5 : 4.5) * attention;
    const double scoring = linear_flops() * rows + head_flops() * head_rows + attention;
    return (Real(job_.updates_per_rollout) * update + Real(job_.scoring_passes) * scoring) / flops_per_second;
  }
  double GenerationSeconds(std::uint64_t live, const Rates& rates) const {
    const double prompt = Real(job_.longest_prompt_tokens), completion = Real(job_.max_completion_tokens);
    const double prefill =
        Real(job_.prompts_per_step) * (linear_flops() * prompt + AttentionFlops(0, prompt)) / rates.flops_per_second;
    const double kv_token_bytes = Real(node_.rollout.kv_block_bytes()) / node_.rollout.block_tokens();
    const double step_bytes = Real(node_.weights_bytes) + Real(live) * (prompt + completion / 2) * kv_token_bytes;
    const double step_flops = Real(live) * (linear_flops() + head_flops());
    const double waves = Real(DivideUp(sequences_per_step(), live));
    return prefill + waves * completion * std::max(step_bytes / rates.bytes_per_second, step_flops / rates.flops_per_second);
  }

 private:
  const ModelConfig& model_;
  const JobMemory& job_;
  const NodeMemory& node_;
};

class OwnerTable {
 public:
  explicit OwnerTable(v1::MemoryPlan* plan) : plan_(plan) {}
  void Add(const std::string& owner, v1::Role role, v1::MemoryPlace place, std::uint64_t generation, std::uint64_t training) {
    if (generation == 0 && training == 0) return;
    v1::PlannedBytes* bytes = plan_->add_owners();
    bytes->set_owner(owner);
    bytes->set_role(role);
    bytes->set_place(place);
    bytes->set_generation_bytes(generation);
    bytes->set_training_bytes(training);
  }
  void Keep(const std::string& owner, v1::Role role, std::uint64_t bytes) {
    Add(owner, role, v1::MEMORY_PLACE_POOL, bytes, bytes);
  }

 private:
  v1::MemoryPlan* const plan_;
};

void FillOwners(const Arithmetic& arithmetic, const JobMemory& job, const NodeMemory& node, const PolicyMemory& policy,
                v1::MemoryPlan* plan) {
  OwnerTable table(plan);
  table.Keep("weights", v1::ROLE_UNSPECIFIED, node.weights_bytes);
  table.Keep("model", v1::ROLE_UNSPECIFIED, node.model_bytes);
  for (const v1::OwnedBytes& owner : node.rollout.standing()) table.Keep(owner.owner(), v1::ROLE_ROLLOUT, owner.bytes());
  table.Keep("rollout_standing_unused", v1::ROLE_ROLLOUT, Remaining(node.rollout_standing_bytes, Sum(node.rollout.standing())));
  const std::uint64_t copy = arithmetic.adapter_copy_bytes();
  table.Keep("adapter_masters", v1::ROLE_TRAINER, copy);
  table.Keep("gradients", v1::ROLE_TRAINER, copy);
  table.Keep("optimizer", v1::ROLE_TRAINER, 2 * copy);
  table.Keep("adapter_slots", v1::ROLE_TRAINER, 2 * copy);
  if (job.has_reference_adapter) table.Keep("reference_adapter", v1::ROLE_TRAINER, copy);
  for (const v1::OwnedBytes& owner : node.trainer_fixed) table.Keep(owner.owner(), v1::ROLE_TRAINER, owner.bytes());
  table.Keep("trainer_standing_unused", v1::ROLE_TRAINER,
             Remaining(node.trainer_standing_bytes, arithmetic.trainer_standing_bytes()));
  const std::uint64_t kv_cache = arithmetic.KvBytes(plan->live_sequences());
  const KeptLayers kept = arithmetic.Kept(policy);
  const std::uint64_t activations = policy.working_bytes - (kept.keeps_attention ? policy.saved_bytes : 0);
  // Where they do not all find room, shorter sequences keep those of more layers: up to all that is left.
  const std::uint64_t layer_inputs =
      kept.host_bytes > 0 ? Remaining(node.elastic_bytes, activations) : plan->layers_in_pool() * kept.slot_bytes;
  table.Add("kv_cache", v1::ROLE_ROLLOUT, v1::MEMORY_PLACE_POOL, kv_cache, 0);
  table.Add("activations", v1::ROLE_TRAINER, v1::MEMORY_PLACE_POOL, 0, activations);
  table.Add("layer_inputs", v1::ROLE_TRAINER, v1::MEMORY_PLACE_POOL, 0, layer_inputs);
  table.Add("elastic_unused", v1::ROLE_UNSPECIFIED, v1::MEMORY_PLACE_POOL, Remaining(node.elastic_bytes, kv_cache),
            Remaining(node.elastic_bytes, activations + layer_inputs));
  table.Add("host_layer_inputs", v1::ROLE_TRAINER, v1::MEMORY_PLACE_HOST, kept.host_bytes, kept.host_bytes);  // pinned for good
  table.Add("outside_pool", v1::ROLE_UNSPECIFIED, v1::MEMORY_PLACE_OUTSIDE, node.outside_bytes, node.outside_bytes);
}

void FillWalls(const Arithmetic& arithmetic, const ModelConfig& model, const JobMemory& job, const NodeMemory& node,
               v1::MemoryPlan* plan) {
  const std::uint64_t prompt = job.longest_prompt_tokens, least = prompt + 1;
  std::vector<std::pair<std::string, std::uint64_t>> walls;
  const auto add = [&](const char* name, const std::function<bool(std::uint64_t)>& fits) {
    walls.emplace_back(name, LargestContext(least, fits));
  };
  const std::uint64_t blocks = arithmetic.num_blocks();
  add("positions", [&](std::uint64_t context) { return context <= Unsigned(model.max_positions); });
  add("kv_cache", [&](std::uint64_t context) { return arithmetic.KvBlocks(1, prompt, context - prompt) <= blocks; });
  add("activations", [&](std::uint64_t context) { return arithmetic.FitsElastic(arithmetic.Policy(arithmetic.Rows(context))); });
  if (job.micro_batch_tokens > 0) {
    add("micro_batch_tokens", [&](std::uint64_t context) { return context <= job.micro_batch_tokens; });
  }
  if (node.device == Device::kCuda) {
    add("host_memory", [&](std::uint64_t context) { return arithmetic.FitsHost(arithmetic.Policy(arithmetic.Rows(context))); });
  }
  std::uint64_t largest = kMaxContextTokens;
  for (const auto& wall : walls) largest = std::min(largest, wall.second);
  plan->set_largest_context_tokens(largest);
  add("live_sequences", [&](std::uint64_t context) {
    return arithmetic.KvBlocks(plan->wanted_live_sequences(), prompt, context - prompt) <= blocks;
  });
  std::ranges::stable_sort(walls, {}, &std::pair<std::string, std::uint64_t>::second);
  for (const auto& [name, tokens] : walls) {
    v1::ContextWall* wall = plan->add_walls();
    wall->set_name(name);
    wall->set_context_tokens(tokens);
  }
}

void FindStandingFaults(const Arithmetic& arithmetic, const JobMemory& job, const NodeMemory& node, PlannedMemory* planned) {
  if (arithmetic.trainer_standing_bytes() <= node.trainer_standing_bytes) return;
  planned->faults.push_back(absl::StrCat(
      "adapter.rank: ", job.rank, "; must be small enough: masters, gradients, two moments and the slots are ",
      arithmetic.num_adapter_copies(), " x ", FormatBytes(arithmetic.adapter_copy_bytes()),
      " of the trainer's standing region of ",
      FormatBytes(Remaining(node.trainer_standing_bytes, arithmetic.trainer_fixed_bytes())),
      " for jobs; --trainer_standing_bytes=", WholeMib(planned->figures.asked_trainer_standing_bytes()), " holds it"));
}

// Why a pass over the largest micro-batch finds no memory; empty: it does.
std::string PassFault(const Arithmetic& arithmetic, const NodeMemory& node, const PolicyMemory& policy,
                      const v1::MemoryPlan& plan) {
  if (!arithmetic.FitsElastic(policy)) {
    return absl::StrCat("forward and backward pass of ", plan.micro_batch_rows(), " rows take ",
                        FormatBytes(arithmetic.LeastTrainingBytes(policy)), " of an elastic region of ",
                        FormatBytes(node.elastic_bytes));
  }
  if (!arithmetic.FitsHost(policy)) {
    return absl::StrCat("inputs of ", plan.layers_in_host(), " layers take ", FormatBytes(arithmetic.Kept(policy).host_bytes),
                        " of host memory, of which ", FormatBytes(node.host_limit_bytes), " can be page-locked");
  }
  return "";
}

std::string CompletionTokens(const JobMemory& job) {
  return absl::StrCat(job.max_completion_tokens - job.further_tokens,
                      job.further_tokens == 0 ? "" : absl::StrCat(" and ", job.further_tokens, " tokens of further turns"));
}

void FindMicroBatchFaults(const JobMemory& job, std::uint64_t context, const std::string& pass_fault, PlannedMemory* planned) {
  const std::string field = absl::StrCat("batch.micro_batch_tokens: ", job.micro_batch_tokens);
  if (context > job.micro_batch_tokens) {
    planned->faults.push_back(absl::StrCat(field, "; must be at least ", context, ", the longest prompt of ",
                                           job.longest_prompt_tokens, " tokens and rollout.sampling.max_tokens ",
                                           CompletionTokens(job), ", or 0"));
  } else if (!pass_fault.empty()) {
    planned->faults.push_back(absl::StrCat(field, "; must be small enough, ", context, " is: ", pass_fault));
  }
}

void FindContextFaults(const Arithmetic& arithmetic, const JobMemory& job, const NodeMemory& node, const std::string& pass_fault,
                       PlannedMemory* planned) {
  const v1::MemoryPlan& plan = planned->figures;
  std::vector<std::string> reasons;
  if (!node.is_rollout_assumed && arithmetic.KvBytes(1) > arithmetic.num_blocks() * node.rollout.kv_block_bytes()) {
    reasons.push_back(absl::StrCat("the KV cache of one sequence takes ", FormatBytes(arithmetic.KvBytes(1)),
                                   " of an elastic region of ", FormatBytes(node.elastic_bytes)));
  }
  if (!pass_fault.empty()) reasons.push_back(pass_fault);
  for (const std::string& reason : reasons) {
    planned->faults.push_back(
        absl::StrCat("rollout.sampling.max_tokens: ", CompletionTokens(job), ", with prompts of up to ",
                     std::max(job.longest_prompt_tokens, job.longest_evaluation_prompt_tokens), " tokens; ",
                     plan.largest_context_tokens() == 0
                         ? "no context fits on this node"
                         : absl::StrCat("the largest context that fits is ", plan.largest_context_tokens(), " tokens"),
                     ": ", reason, "; the job fits with --pool_bytes=", WholeMib(plan.least_pool_bytes()),
                     " --rollout_standing_bytes=", WholeMib(plan.asked_rollout_standing_bytes()),
                     " --trainer_standing_bytes=", WholeMib(plan.asked_trainer_standing_bytes())));
  }
}

void FindFaults(const Arithmetic& arithmetic, const JobMemory& job, const NodeMemory& node, const PolicyMemory& policy,
                PlannedMemory* planned) {
  FindStandingFaults(arithmetic, job, node, planned);
  const std::uint64_t context = arithmetic.context();
  std::string pass_fault = PassFault(arithmetic, node, policy, planned->figures);
  if (job.micro_batch_tokens > 0) {
    // Where whole sequences fit, micro-batches are what is too large.
    const PolicyMemory of_context = arithmetic.Policy(std::min(arithmetic.Rows(context), context));
    const bool fits_alone = arithmetic.FitsElastic(of_context) && arithmetic.FitsHost(of_context);
    FindMicroBatchFaults(job, context, fits_alone ? pass_fault : "", planned);
    if (fits_alone) pass_fault.clear();
  }
  FindContextFaults(arithmetic, job, node, pass_fault, planned);
}

void AddWarnings(const NodeMemory& node, PlannedMemory* planned) {
  const v1::MemoryPlan& plan = planned->figures;
  if (node.is_rollout_assumed) {
    planned->warnings.push_back(
        "memory: rollout_server was not heard yet; its figures are assumed, those of its flags' defaults");
  }
  if (plan.live_sequences() > 0 && plan.live_sequences() < plan.wanted_live_sequences()) {
    planned->warnings.push_back(absl::StrCat("memory: the KV cache holds ", plan.live_sequences(),
                                             " sequences of full length at a time, ", plan.wanted_live_sequences(),
                                             " are wanted: the others wait or are computed again; a pool of ",
                                             FormatBytes(plan.asked_pool_bytes()), " holds them all"));
  }
}

}  // namespace

v1::RolloutMemory AssumedRolloutMemory(const ModelConfig& model, Device device) {
  v1::RolloutMemory memory;
  memory.set_block_tokens(kAssumedBlockTokens);
  memory.set_kv_block_bytes(2 * ElementBytes(device == Device::kCuda ? DType::kBf16 : DType::kFp32) * Unsigned(model.num_layers) *
                            Unsigned(model.kv_size()) * kAssumedBlockTokens);
  memory.set_max_sequences(kAssumedMaxSequences);
  return memory;
}

std::uint64_t RowsOfWholeGroup(const JobMemory& job) {
  constexpr std::uint64_t kWorthwhileShare = 8;
  const std::uint64_t prompt = job.longest_prompt_tokens, completion = std::max<std::uint64_t>(job.max_completion_tokens, 1);
  const auto limit = static_cast<std::uint64_t>(MicroBatchLimit(0, Signed(prompt + completion)));
  const std::uint64_t rows = prompt + job.group_size * completion;
  const std::uint64_t parts = DivideUp(job.group_size, (limit - prompt) / completion);
  return (parts - 1) * prompt * kWorthwhileShare >= rows ? rows : 0;
}

PlannedMemory PlanMemory(const ModelConfig& model, const JobMemory& job, const NodeMemory& node) {
  const Arithmetic arithmetic(model, job, node);
  PlannedMemory planned;
  v1::MemoryPlan& plan = planned.figures;
  plan.set_pool_bytes(node.pool_bytes());
  plan.set_host_limit_bytes(node.host_limit_bytes);
  plan.set_context_tokens(arithmetic.context());
  const std::uint64_t most_live = job.live_sequences > 0 ? job.live_sequences : std::max(node.rollout.max_sequences(), 1u);
  const std::uint64_t wanted = std::min({arithmetic.sequences_per_step(), most_live, kMaxLiveSequences});
  plan.set_wanted_live_sequences(static_cast<std::uint32_t>(wanted));
  plan.set_live_sequences(static_cast<std::uint32_t>(arithmetic.LargestLive(wanted)));
  JobMemory one_group = job;
  one_group.group_size = kMaxContextTokens;  // all members share one prompt
  plan.set_largest_group(
      static_cast<std::uint32_t>(Arithmetic(model, one_group, node).LargestLive(std::min(most_live, kMaxLiveSequences))));

  const std::uint64_t rows = arithmetic.Rows(arithmetic.context());
  const PolicyMemory policy = arithmetic.Policy(rows);
  plan.set_micro_batch_rows(rows);
  const KeptLayers kept = arithmetic.Kept(policy);
  plan.set_layers_in_pool(static_cast<std::uint32_t>(kept.num_slots));
  plan.set_layers_in_host(static_cast<std::uint32_t>(model.num_layers - kept.num_slots));

  const std::uint64_t training = arithmetic.LeastTrainingBytes(policy);
  plan.set_asked_pool_bytes(arithmetic.AskedPoolBytes(std::max(arithmetic.KvBytes(wanted), training)));
  plan.set_least_pool_bytes(arithmetic.AskedPoolBytes(std::max(arithmetic.KvBytes(1), training)));
  plan.set_asked_rollout_standing_bytes(RoundUp(arithmetic.rollout_standing_bytes(), kPoolGranularityBytes));
  plan.set_asked_trainer_standing_bytes(RoundUp(arithmetic.trainer_standing_bytes(), kPoolGranularityBytes));

  const Rates rates = RatesOf(node.device);
  plan.set_flops_per_second(rates.flops_per_second);
  plan.set_bytes_per_second(rates.bytes_per_second);
  plan.set_training_seconds(arithmetic.TrainingSeconds(rates.flops_per_second, kept.keeps_attention));
  plan.set_generation_seconds(arithmetic.GenerationSeconds(std::max(plan.live_sequences(), 1u), rates));

  FillOwners(arithmetic, job, node, policy, &plan);
  FillWalls(arithmetic, model, job, node, &plan);
  FindFaults(arithmetic, job, node, policy, &planned);
  AddWarnings(node, &planned);
  return planned;
}

std::uint64_t PlannedOf(const v1::MemoryPlan& plan, const std::string& owner) {
  std::uint64_t bytes = 0;
  for (const v1::PlannedBytes& planned : plan.owners()) {
    if (planned.owner() == owner) bytes += std::max(planned.generation_bytes(), planned.training_bytes());
  }
  return bytes;
}

}  // namespace tandem
