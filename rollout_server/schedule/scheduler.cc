#include "rollout_server/schedule/scheduler.h"

#include <algorithm>
#include <utility>

#include "common/base/check.h"
#include "rollout_server/cache/cache_key.h"

namespace tandem {

Scheduler::Scheduler(SchedulerOptions options, BlockAllocator* allocator, RootKeyOf root_key_of)
    : options_(options), allocator_(allocator), root_key_of_(std::move(root_key_of)) {
  TANDEM_CHECK(options_.block_tokens > 0 && options_.max_sequences > 0 && options_.max_batch_tokens >= options_.max_sequences &&
                   options_.max_adapters > 0,
               "block_tokens=", options_.block_tokens, " max_sequences=", options_.max_sequences,
               " max_batch_tokens=", options_.max_batch_tokens, " max_adapters=", options_.max_adapters);
}

SequenceId Scheduler::AddGroup(const GroupSpec& spec) {
  TANDEM_CHECK(spec.prompt != nullptr && !spec.prompt->empty() && spec.group_size > 0, "empty group");
  const SequenceId first_id = next_sequence_id_;
  const std::uint64_t group_id = next_group_id_++;
  Group& group = groups_[group_id];
  group.spec = spec;
  group.num_live = group.num_waiting = spec.group_size;
  if (spec.lane == Lane::kShared && !spec.job.empty()) num_live_[spec.job] += spec.group_size;
  for (std::uint32_t member = 0; member < spec.group_size; ++member) {
    Sequence sequence;
    sequence.id = next_sequence_id_++;
    sequence.group_id = group_id;
    sequence.member_index = member;
    sequence.prompt = spec.prompt;
    sequence.max_tokens = spec.max_tokens;
    lane_of(spec.lane).waiting.insert(lane_of(spec.lane).waiting.end(), sequence.id);
    sequences_.emplace_hint(sequences_.end(), sequence.id, std::move(sequence));
  }
  return first_id;
}

StepPlan Scheduler::Schedule(Lane lane) {
  StepPlan plan;
  plan.lane = lane;
  std::uint32_t budget = options_.max_batch_tokens;
  for (std::size_t tries = num_live_.size();; --tries) {
    turns_ = TakeTurns(lane);
    const bool has_room = ScheduleRunning(&plan, &budget);
    if (has_room) AdmitWaiting(&plan, &budget);
    // Where those whose turn it is cannot run, for want of blocks, others can.
    if (!plan.sequences.empty() || !turns_.has_value() || tries == 0) return plan;
  }
}

// See Note [Adapters of a step].
std::optional<std::set<std::string>> Scheduler::TakeTurns(Lane lane) {
  const auto limit = static_cast<std::size_t>(options_.max_adapters);
  if (lane == Lane::kUnit || num_live_.size() <= limit) return std::nullopt;
  std::set<std::string> jobs;  // with a sequence that could run now
  for (const SequenceId id : shared_.running) {
    const Sequence& sequence = sequences_.at(id);
    const std::string& job = groups_.at(sequence.group_id).spec.job;
    if (!job.empty() && !sequence.is_complete()) jobs.insert(job);
  }
  for (const SequenceId id : shared_.waiting) {
    if (jobs.size() == num_live_.size()) break;  // all that there are
    const Sequence& sequence = sequences_.at(id);
    const Group& group = groups_.at(sequence.group_id);
    if (!group.spec.job.empty() && !jobs.contains(group.spec.job) && MayStart(sequence, group)) jobs.insert(group.spec.job);
  }
  if (jobs.size() <= limit) return std::nullopt;
  std::vector<std::pair<std::uint64_t, std::string>> by_turn;  // the longest ago first
  for (const std::string& job : jobs) {
    const auto turn = last_turns_.find(job);
    by_turn.emplace_back(turn == last_turns_.end() ? 0 : turn->second, job);
  }
  std::sort(by_turn.begin(), by_turn.end());
  std::erase_if(last_turns_, [&](const auto& entry) { return !jobs.contains(entry.first); });
  std::set<std::string> taken;
  ++num_turns_;
  for (std::size_t i = 0; i < limit; ++i) {
    last_turns_[by_turn[i].second] = num_turns_;
    taken.insert(by_turn[i].second);
  }
  return taken;
}

bool Scheduler::HasTurn(const Sequence& sequence) const {
  if (!turns_.has_value()) return true;
  const std::string& job = groups_.at(sequence.group_id).spec.job;
  return job.empty() || turns_->contains(job);
}

// False when a sequence of this lane was short of blocks.
bool Scheduler::ScheduleRunning(StepPlan* plan, std::uint32_t* budget) {
  std::vector<SequenceId>& running = lane_of(plan->lane).running;
  bool has_room = true;
  for (std::size_t index = 0; index < running.size() && *budget > 0; ++index) {
    Sequence& sequence = sequences_.at(running[index]);
    if (sequence.is_complete() || !HasTurn(sequence)) continue;
    const std::uint32_t end = sequence.num_computed + std::min(*budget, sequence.num_tokens() - sequence.num_computed);
    bool can_run = EnsureWritable(&sequence, end, plan->lane, plan);
    while (!can_run) {
      if (!ReleaseNewestKept(plan->lane)) {
        if (running.size() == 1) {
          // Alone in its lane, it waits with its blocks. For a unit, and without one, a sequence that fits the pool never gets
          // here.
          TANDEM_CHECK(plan->lane == Lane::kShared && allocator_->num_used(Lane::kUnit) > 0, "a lone sequence outgrew the pool");
          return false;
        }
        Sequence& newest = sequences_.at(running.back());
        has_room = false;
        plan->preempted.push_back(newest.id);
        Preempt(&newest);
        if (&newest == &sequence) return false;
      }
      can_run = EnsureWritable(&sequence, end, plan->lane, plan);
    }
    Plan(sequence, plan, budget);
  }
  return has_room;
}

void Scheduler::AdmitWaiting(StepPlan* plan, std::uint32_t* budget) {
  LaneState& lane = lane_of(plan->lane);
  std::uint64_t active_unit = 0;
  if (plan->lane == Lane::kUnit) {
    // The oldest unit that has a sequence left.
    SequenceId oldest = lane.waiting.empty() ? 0 : *lane.waiting.begin();
    if (!lane.running.empty()) oldest = lane.waiting.empty() ? lane.running.front() : std::min(oldest, lane.running.front());
    if (sequences_.contains(oldest)) active_unit = groups_.at(sequences_.at(oldest).group_id).spec.unit_id;
  }
  for (auto next = lane.waiting.begin(); next != lane.waiting.end() && *budget > 0;) {
    if (lane.running.size() >= static_cast<std::size_t>(options_.max_sequences)) return;
    Sequence& sequence = sequences_.at(*next);
    Group& group = groups_.at(sequence.group_id);
    if (plan->lane == Lane::kUnit && group.spec.unit_id != active_unit) return;
    ++next;  // admission erases the place
    if (!MayStart(sequence, group) || !HasTurn(sequence)) continue;
    bool is_admitted = TryAdmit(&sequence, &group, plan);
    while (!is_admitted && lane.running.empty() && ReleaseNewestKept(plan->lane)) is_admitted = TryAdmit(&sequence, &group, plan);
    if (!is_admitted) return;  // nobody overtakes for want of blocks
    Plan(sequence, plan, budget);
  }
}

bool Scheduler::MayStart(const Sequence& sequence, const Group& group) const {
  if (!sequence.has_started && (is_all_held_ || held_jobs_.contains(group.spec.job))) return false;
  if (sequence.is_complete()) return false;  // preempted while its last token was being drawn
  return !group.prefiller.has_value();       // another member computes the prompt right now
}

bool Scheduler::TryAdmit(Sequence* sequence, Group* group, StepPlan* plan) {
  const Lane lane = group->spec.lane;
  LaneState& state = lane_of(lane);
  sequence->is_single_version = true;
  sequence->last_key = lane == Lane::kShared ? root_key_of_(*sequence) : std::string();
  sequence->num_published_blocks = 0;
  const Admission admission = ShareCached(sequence, *group);
  // Room for all that is known of it, for a copy of the block it writes first, and for one block more for everybody who runs:
  // else it would be preempted again before it got anywhere.
  const std::uint32_t shared_blocks = static_cast<std::uint32_t>(sequence->block_table.size());
  const bool copies_block = shared_blocks * options_.block_tokens > sequence->num_computed &&
                            allocator_->ref_count(sequence->block_table[sequence->num_computed / options_.block_tokens]) > 1;
  const std::uint32_t needed_blocks = NumBlocks(sequence->num_tokens()) - shared_blocks + (copies_block ? 1 : 0);
  if (static_cast<int>(needed_blocks + state.running.size()) > NumFree(lane)) {
    ReleaseBlocks(sequence);
    return false;
  }
  if (sequence->num_computed < sequence->num_prompt_tokens() && group->kept_blocks.empty()) group->prefiller = sequence->id;
  if (--group->num_waiting == 0) ReleaseKept(sequence->group_id, group);  // first: the last to write then needs no copy
  TANDEM_CHECK(EnsureWritable(sequence, sequence->num_tokens(), lane, plan), "admitted sequence ", sequence->id,
               " found no block");
  plan->admissions.push_back(admission);
  sequence->is_running = sequence->has_started = true;
  state.waiting.erase(sequence->id);
  state.running.insert(std::upper_bound(state.running.begin(), state.running.end(), sequence->id), sequence->id);
  return true;
}

// Gives the sequence what is computed already: the group's prompt, else the longest chain of published blocks. At least its last
// token is left to compute, for its logits.
Admission Scheduler::ShareCached(Sequence* sequence, const Group& group) {
  Admission admission{.id = sequence->id};
  if (!group.kept_blocks.empty()) {
    sequence->block_table = group.kept_blocks;
    for (std::int32_t block : sequence->block_table) allocator_->Retain(block);
    sequence->num_computed = std::min(sequence->num_prompt_tokens(), sequence->num_tokens() - 1);
    return admission;
  }
  if (group.spec.lane == Lane::kUnit) return admission;
  admission.queried_tokens = sequence->num_tokens();
  std::vector<std::uint32_t> tokens(options_.block_tokens);
  while (sequence->num_computed + options_.block_tokens < sequence->num_tokens()) {
    for (int i = 0; i < options_.block_tokens; ++i) tokens[i] = sequence->TokenAt(sequence->num_computed + i);
    const std::string key = ChainKey(sequence->last_key, tokens);
    const std::optional<std::int32_t> block = allocator_->Find(key, group.spec.lane);
    if (!block.has_value()) break;
    sequence->block_table.push_back(*block);
    sequence->num_computed += options_.block_tokens;
    sequence->num_published_blocks += 1;
    sequence->last_key = key;
  }
  admission.hit_tokens = sequence->num_computed;
  return admission;
}

void Scheduler::Plan(const Sequence& sequence, StepPlan* plan, std::uint32_t* budget) const {
  const std::uint32_t left = sequence.num_tokens() - sequence.num_computed;
  const std::uint32_t num_tokens = std::min(*budget, left);
  plan->sequences.push_back(
      {.id = sequence.id, .begin = sequence.num_computed, .num_tokens = num_tokens, .draws = num_tokens == left});
  plan->num_tokens += num_tokens;
  *budget -= num_tokens;
}

int Scheduler::NumFree(Lane lane) const {
  return lane == Lane::kUnit ? allocator_->num_blocks() - allocator_->num_used(Lane::kUnit) : allocator_->num_free();
}

std::optional<std::int32_t> Scheduler::TakeBlock(Lane lane, StepPlan* plan) {
  std::optional<std::int32_t> block = allocator_->Allocate(lane);
  while (!block.has_value() && lane == Lane::kUnit) {  // see Note [Lanes]
    if (!ReleaseNewestKept(Lane::kShared)) {
      if (shared_.running.empty()) return std::nullopt;
      Sequence& newest = sequences_.at(shared_.running.back());
      plan->preempted.push_back(newest.id);
      Preempt(&newest);
    }
    block = allocator_->Allocate(lane);
  }
  return block;
}

// Blocks for tokens [num_computed, end), each named by this table alone. False when there are none; what was taken stays.
bool Scheduler::EnsureWritable(Sequence* sequence, std::uint32_t end, Lane lane, StepPlan* plan) {
  for (std::uint32_t index = sequence->num_computed / options_.block_tokens; index < NumBlocks(end); ++index) {
    const bool is_new = index >= sequence->block_table.size();
    if (!is_new && allocator_->ref_count(sequence->block_table[index]) == 1) continue;
    const std::optional<std::int32_t> block = TakeBlock(lane, plan);
    if (!block.has_value()) return false;
    if (is_new) {
      sequence->block_table.push_back(*block);
    } else {
      plan->copies.push_back({.from = sequence->block_table[index], .to = *block});
      allocator_->Release(sequence->block_table[index]);
      sequence->block_table[index] = *block;
    }
  }
  return true;
}

void Scheduler::Computed(const StepPlan& plan) {
  for (const PlannedSequence& planned : plan.sequences) {
    const auto found = sequences_.find(planned.id);
    if (found == sequences_.end()) continue;
    Sequence& sequence = found->second;
    Group& group = groups_.at(sequence.group_id);
    sequence.num_computed += planned.num_tokens;
    if (plan.lane == Lane::kShared && sequence.is_single_version) PublishBlocks(&sequence);
    if (group.prefiller != sequence.id || sequence.num_computed < sequence.num_prompt_tokens()) continue;
    group.prefiller.reset();
    if (group.num_waiting == 0 || !sequence.is_single_version) continue;
    group.kept_blocks.assign(sequence.block_table.begin(),
                             sequence.block_table.begin() + NumBlocks(sequence.num_prompt_tokens()));
    for (std::int32_t block : group.kept_blocks) allocator_->Retain(block);
    lane_of(plan.lane).keeping.insert(sequence.group_id);
  }
}

void Scheduler::PublishBlocks(Sequence* sequence) {
  const std::uint32_t block_tokens = options_.block_tokens;
  std::vector<std::uint32_t> tokens(block_tokens);
  while ((sequence->num_published_blocks + 1) * block_tokens <= sequence->num_computed) {
    const std::uint32_t begin = sequence->num_published_blocks * block_tokens;
    for (std::uint32_t i = 0; i < block_tokens; ++i) tokens[i] = sequence->TokenAt(begin + i);
    sequence->last_key = ChainKey(sequence->last_key, tokens);
    allocator_->Publish(sequence->block_table[sequence->num_published_blocks], sequence->last_key);
    sequence->num_published_blocks += 1;
  }
}

void Scheduler::Append(SequenceId id, std::uint32_t token) { sequences_.at(id).completion.push_back(token); }
void Scheduler::Resolve(SequenceId id, std::uint32_t token) { sequences_.at(id).completion.back() = token; }

void Scheduler::End(SequenceId id) {
  Sequence& sequence = sequences_.at(id);
  const std::uint64_t group_id = sequence.group_id;
  Group& group = groups_.at(group_id);
  LaneState& lane = lane_of(group.spec.lane);
  if (sequence.is_running) {
    ReleaseBlocks(&sequence);
    lane.running.erase(std::lower_bound(lane.running.begin(), lane.running.end(), id));
  } else {
    lane.waiting.erase(id);
    --group.num_waiting;
  }
  if (group.prefiller == id) group.prefiller.reset();
  if (group.num_waiting == 0) ReleaseKept(group_id, &group);
  const auto num_live = group.spec.lane == Lane::kShared ? num_live_.find(group.spec.job) : num_live_.end();
  if (num_live != num_live_.end() && --num_live->second == 0) {
    last_turns_.erase(num_live->first);
    num_live_.erase(num_live);
  }
  sequences_.erase(id);
  if (--group.num_live == 0) groups_.erase(group_id);
}

void Scheduler::Preempt(Sequence* sequence) {
  Group& group = groups_.at(sequence->group_id);
  LaneState& lane = lane_of(group.spec.lane);
  ReleaseBlocks(sequence);
  sequence->is_running = false;
  lane.running.erase(std::lower_bound(lane.running.begin(), lane.running.end(), sequence->id));
  lane.waiting.insert(sequence->id);
  ++group.num_waiting;
  if (group.prefiller == sequence->id) group.prefiller.reset();
}

void Scheduler::ReleaseBlocks(Sequence* sequence) {
  // From the end, so that of a published chain the beginning, which more requests share, is evicted last.
  for (auto block = sequence->block_table.rbegin(); block != sequence->block_table.rend(); ++block) allocator_->Release(*block);
  sequence->block_table.clear();
  sequence->num_computed = 0;
}

bool Scheduler::ReleaseNewestKept(Lane lane) {
  const std::set<std::uint64_t>& keeping = lane_of(lane).keeping;
  if (keeping.empty()) return false;
  const std::uint64_t group_id = *keeping.rbegin();
  ReleaseKept(group_id, &groups_.at(group_id));
  return true;
}

void Scheduler::ReleaseKept(std::uint64_t group_id, Group* group) {
  for (std::int32_t block : group->kept_blocks) allocator_->Release(block);
  group->kept_blocks.clear();
  lane_of(group->spec.lane).keeping.erase(group_id);
}

void Scheduler::PreemptAll() {
  for (Lane lane : {Lane::kUnit, Lane::kShared}) {
    while (ReleaseNewestKept(lane)) {}
    while (!lane_of(lane).running.empty()) Preempt(&sequences_.at(lane_of(lane).running.back()));
  }
  TANDEM_CHECK(allocator_->num_free() == allocator_->num_blocks(),
               "blocks held by nobody: ", allocator_->num_blocks() - allocator_->num_free());
  allocator_->ForgetAll();
}

void Scheduler::HoldJob(const std::string& job, bool is_held) {
  if (is_held) {
    held_jobs_.insert(job);
  } else {
    held_jobs_.erase(job);
  }
}

void Scheduler::WeightsChanged(const std::string& job) {
  for (auto& [id, sequence] : sequences_) {
    if (sequence.is_running && groups_.at(sequence.group_id).spec.job == job) sequence.is_single_version = false;
  }
  for (auto& [group_id, group] : groups_) {
    if (group.spec.job == job) ReleaseKept(group_id, &group);
  }
}

int Scheduler::num_started(const std::string* job) const {
  return static_cast<int>(std::count_if(sequences_.begin(), sequences_.end(), [&](const auto& entry) {
    return entry.second.has_started && (job == nullptr || groups_.at(entry.second.group_id).spec.job == *job);
  }));
}

int Scheduler::num_running() const { return static_cast<int>(unit_.running.size() + shared_.running.size()); }
int Scheduler::num_waiting() const { return static_cast<int>(unit_.waiting.size() + shared_.waiting.size()); }

}  // namespace tandem
