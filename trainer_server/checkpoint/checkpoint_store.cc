#include "trainer_server/checkpoint/checkpoint_store.h"

#include <algorithm>
#include <filesystem>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"
#include "common/base/check.h"
#include "common/base/hash.h"
#include "common/base/log.h"
#include "common/base/units.h"
#include "common/model/bounded_json.h"
#include "nlohmann/json.hpp"
#include "trainer_server/checkpoint/durable_file.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

constexpr int kFormat = 2;
constexpr char kManifest[] = "manifest.json";
constexpr char kAdapter[] = "adapter.bin";
constexpr char kState[] = "state.json";
constexpr char kJob[] = "job.textproto";
constexpr char kEvaluation[] = "evaluation";
constexpr char kEvaluatedStep[] = "evaluated_step";
constexpr char kBestStep[] = "best_step";
constexpr char kBestValue[] = "best_value";
constexpr char kRisenValue[] = "risen_value";
constexpr char kWithoutRise[] = "evaluations_without_rise";
constexpr char kCheckpoints[] = "checkpoints";  // of a job's folder
constexpr char kStepPrefix[] = "step-";
constexpr char kPartialPrefix[] = "partial-";
constexpr char kDamagedPrefix[] = "damaged-";    // before the name of one that an older one was taken for
constexpr char kReplacedPrefix[] = "replaced-";  // before the name of a checkpoint whose step is written again
constexpr std::size_t kMaxTextBytes = 1 << 20;
constexpr std::size_t kMaxArrayBytes = std::size_t{1} << 36;
constexpr std::uint64_t kSpareBytes = 64 << 20;  // of the file system, left to histories, the job store and logs

struct StateField {
  const char* name;
  std::uint64_t CheckpointState::*value;
};
constexpr StateField kStateFields[] = {{"step", &CheckpointState::step},
                                       {"weight_version", &CheckpointState::weight_version},
                                       {"optimizer_steps", &CheckpointState::optimizer_steps},
                                       {"prompt_cursor", &CheckpointState::prompt_cursor},
                                       {"seed", &CheckpointState::seed},
                                       {"num_tokens", &CheckpointState::num_tokens},
                                       {"history_bytes", &CheckpointState::history_bytes},
                                       {"groups_in_flight", &CheckpointState::groups_in_flight}};

struct ArrayFile {
  const char* name;
  std::span<std::byte> CheckpointArrays::*bytes;
  bool is_optional = false;  // absent where the job has no such array
};
constexpr ArrayFile kArrayFiles[] = {{kAdapter, &CheckpointArrays::adapter},
                                     {"first_moments.bin", &CheckpointArrays::first_moments},
                                     {"second_moments.bin", &CheckpointArrays::second_moments},
                                     {"reference.bin", &CheckpointArrays::reference, /*is_optional=*/true}};

std::string StateToJson(const CheckpointState& state) {
  nlohmann::json json;
  for (const StateField& field : kStateFields) json[field.name] = state.*field.value;
  const EvaluationProgress& progress = state.evaluation;
  nlohmann::json& evaluation = json[kEvaluation] = nlohmann::json::object();
  if (progress.evaluated_step.has_value()) evaluation[kEvaluatedStep] = *progress.evaluated_step;
  if (progress.best_step.has_value()) {
    evaluation[kBestStep] = *progress.best_step;
    evaluation[kBestValue] = progress.best_value;
    evaluation[kRisenValue] = progress.risen_value;
  }
  evaluation[kWithoutRise] = progress.evaluations_without_rise;
  return json.dump(1);
}

absl::StatusOr<EvaluationProgress> ProgressFromJson(const nlohmann::json& json, const std::string& path) {
  EvaluationProgress progress;
  const auto damaged = [&] { return absl::DataLossError(absl::StrCat(path, ": '", kEvaluation, "' is absent or not whole")); };
  const auto found = json.find(kEvaluation);
  if (found == json.end() || !found->is_object()) return damaged();
  const auto is_count = [&](const char* name) { return found->contains(name) && (*found)[name].is_number_unsigned(); };
  const auto is_number = [&](const char* name) { return found->contains(name) && (*found)[name].is_number(); };
  if (!is_count(kWithoutRise)) return damaged();
  progress.evaluations_without_rise = (*found)[kWithoutRise].get<std::uint64_t>();
  if (is_count(kEvaluatedStep)) progress.evaluated_step = (*found)[kEvaluatedStep].get<std::uint64_t>();
  if (is_count(kBestStep)) {
    if (!is_number(kBestValue) || !is_number(kRisenValue)) return damaged();
    progress.best_step = (*found)[kBestStep].get<std::uint64_t>();
    progress.best_value = (*found)[kBestValue].get<double>();
    progress.risen_value = (*found)[kRisenValue].get<double>();
  }
  return progress;
}

absl::StatusOr<CheckpointState> StateFromJson(const std::string& text, const std::string& path) {
  const nlohmann::json json = ParseBoundedJson(text, path, "the file").value_or(nlohmann::json());
  CheckpointState state;
  for (const StateField& field : kStateFields) {
    if (!json.is_object() || !json.contains(field.name) || !json[field.name].is_number_unsigned()) {
      return absl::DataLossError(absl::StrCat(path, ": '", field.name, "' is absent or not a number"));
    }
    state.*field.value = json[field.name].get<std::uint64_t>();
  }
  TANDEM_ASSIGN_OR_RETURN(state.evaluation, ProgressFromJson(json, path));
  return state;
}

nlohmann::json Describe(std::span<const std::byte> bytes) {
  Sha256 hash;
  hash.Update(bytes.data(), bytes.size());
  return {{"size_bytes", bytes.size()}, {"sha256", hash.Finish()}};
}

std::span<const std::byte> BytesOf(const std::string& text) { return std::as_bytes(std::span<const char>(text)); }

// Of ReadWholeFile: the file is absent, longer than it can be, or ended early. Other faults may pass.
bool IsDamage(const absl::Status& status) {
  return absl::IsNotFound(status) || absl::IsResourceExhausted(status) || absl::IsDataLoss(status);
}

// A file of the checkpoint, equal to what the manifest says of it.
absl::StatusOr<std::string> ReadChecked(const std::string& directory, const nlohmann::json& manifest, const std::string& name,
                                        std::size_t limit_bytes) {
  const std::string path = directory + "/" + name;
  const auto damaged = [&](const std::string& what) { return absl::DataLossError(absl::StrCat("checkpoint ", path, " ", what)); };
  const auto entry = manifest["files"].find(name);
  if (entry == manifest["files"].end()) return damaged("is not in the manifest");
  absl::StatusOr<std::string> text = ReadWholeFile(path, limit_bytes);
  if (absl::IsNotFound(text.status())) return damaged("is absent");
  if (IsDamage(text.status())) return damaged(std::string(text.status().message()));
  TANDEM_RETURN_IF_ERROR(text.status());
  const nlohmann::json found = Describe(BytesOf(*text));
  if (*entry != found) return damaged(absl::StrCat("is ", found.dump(), "; the manifest says ", entry->dump()));
  return text;
}

std::uint64_t SizeOf(const CheckpointArrays& arrays) {
  std::uint64_t size_bytes = 0;
  for (const ArrayFile& file : kArrayFiles) size_bytes += (arrays.*file.bytes).size();
  return size_bytes;
}

// Of the files in it; what goes meanwhile counts as nothing.
std::uint64_t SizeOfTree(const fs::path& directory) {
  std::uint64_t size_bytes = 0;
  std::error_code error;
  for (fs::recursive_directory_iterator file(directory, error), end; !error && file != end; file.increment(error)) {
    std::error_code ignored;
    if (!file->is_regular_file(ignored)) continue;
    const std::uintmax_t file_bytes = file->file_size(ignored);
    if (!ignored) size_bytes += file_bytes;
  }
  return size_bytes;
}

absl::StatusOr<nlohmann::json> ReadManifest(const std::string& directory) {
  const std::string path = directory + "/" + kManifest;
  const absl::StatusOr<std::string> text = ReadWholeFile(path, kMaxTextBytes);
  if (IsDamage(text.status())) return absl::DataLossError(absl::StrCat("checkpoint ", path, ": ", text.status().message()));
  TANDEM_RETURN_IF_ERROR(text.status());
  nlohmann::json manifest = ParseBoundedJson(*text, path, "the file").value_or(nlohmann::json());
  if (!manifest.is_object() || !manifest.contains("files") || !manifest["files"].is_object() || !manifest.contains("format")) {
    return absl::DataLossError(absl::StrCat("checkpoint ", path, " is not a manifest"));
  }
  if (manifest["format"] != kFormat) {
    return absl::FailedPreconditionError(
        absl::StrCat("checkpoint ", path, " has format ", manifest["format"].dump(), "; this trainer reads ", kFormat));
  }
  return manifest;
}

}  // namespace

absl::StatusOr<CheckpointStore> CheckpointStore::Open(const std::string& directory, CheckpointQuota quota) {
  TANDEM_RETURN_IF_ERROR(MakeDirectories(directory));
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(directory, error)) {
    const std::string name = entry.path().filename().string();
    const bool is_replaced = name.starts_with(kReplacedPrefix);
    if (!is_replaced && !name.starts_with(kPartialPrefix)) continue;
    std::error_code ignored;
    const fs::path final_path = is_replaced ? fs::path(directory) / name.substr(sizeof(kReplacedPrefix) - 1) : fs::path();
    if (is_replaced && !fs::exists(final_path, ignored)) {
      TANDEM_LOG(kInfo, "checkpoint", "taking back what a crash left path=", entry.path().string());
      fs::rename(entry.path(), final_path, ignored);
      continue;
    }
    TANDEM_LOG(kInfo, "checkpoint", "removing what a crash left path=", entry.path().string());
    fs::remove_all(entry.path(), ignored);
  }
  if (error) return absl::InternalError(absl::StrCat("listing ", directory, " failed: ", error.message()));
  return CheckpointStore(directory, std::move(quota));
}

std::string CheckpointStore::DirectoryOf(std::uint64_t step) const {
  return absl::StrFormat("%s/%s%06d", directory_, kStepPrefix, step);
}

std::vector<std::uint64_t> CheckpointStore::Steps() const {
  std::vector<std::uint64_t> steps;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(directory_, error)) {
    const std::string name = entry.path().filename().string();
    std::uint64_t step = 0;
    if (name.rfind(kStepPrefix, 0) == 0 && absl::SimpleAtoi(name.substr(sizeof(kStepPrefix) - 1), &step)) steps.push_back(step);
  }
  std::ranges::sort(steps);
  return steps;
}

void CheckpointStore::Discard(std::uint64_t step) const {
  const std::string path = DirectoryOf(step);
  const std::string doomed = absl::StrCat(directory_, "/", kPartialPrefix, "old-", fs::path(path).filename().string());
  std::error_code ignored;
  fs::remove_all(doomed, ignored);
  fs::rename(path, doomed, ignored);
  fs::remove_all(doomed, ignored);
}

absl::StatusOr<CheckpointStore::Room> CheckpointStore::FindRoom() const {
  std::error_code error;
  const std::uint64_t available_bytes = fs::space(directory_, error).available;
  if (error) return absl::InternalError(absl::StrCat("asking for the free space of ", directory_, " failed: ", error.message()));
  Room room{available_bytes - std::min(available_bytes, kSpareBytes),
            absl::StrCat(FormatBytes(kSpareBytes), " must stay free; the file system has ", FormatBytes(available_bytes),
                         ": make room, then resume")};
  if (quota_.limit_bytes == 0) return room;
  std::uint64_t used_bytes = 0;
  for (const auto& job : fs::directory_iterator(quota_.jobs_directory, error))
    used_bytes += SizeOfTree(job.path() / kCheckpoints);
  if (error) return absl::InternalError(absl::StrCat("listing ", quota_.jobs_directory, " failed: ", error.message()));
  const std::uint64_t left_bytes = quota_.limit_bytes - std::min(quota_.limit_bytes, used_bytes);
  if (left_bytes < room.size_bytes)
    room = {left_bytes, absl::StrCat("those of all jobs have ", FormatBytes(used_bytes), " of the ",
                                     FormatBytes(quota_.limit_bytes), " of --checkpoint_bytes: remove folders of ended jobs in ",
                                     quota_.jobs_directory, " or raise it, then resume")};
  return room;
}

void CheckpointStore::DiscardDamaged() const {
  std::error_code error;
  std::vector<fs::path> found;
  for (fs::directory_iterator entry(directory_, error), end; !error && entry != end; entry.increment(error)) {
    if (entry->path().filename().string().starts_with(kDamagedPrefix)) found.push_back(entry->path());
  }
  for (const fs::path& path : found) {
    TANDEM_LOG(kWarning, "checkpoint", "removed path=", path.string());
    fs::remove_all(path, error);
  }
}

absl::Status CheckpointStore::MakeRoom(std::uint64_t size_bytes, std::optional<std::uint64_t> best_step) const {
  std::vector<std::uint64_t> steps = Steps();
  if (!steps.empty()) steps.pop_back();
  std::erase(steps, best_step);
  TANDEM_ASSIGN_OR_RETURN(Room room, FindRoom());
  if (room.size_bytes < size_bytes) {
    DiscardDamaged();
    TANDEM_ASSIGN_OR_RETURN(room, FindRoom());
  }
  for (std::size_t i = 0; room.size_bytes < size_bytes && i < steps.size(); ++i) {
    TANDEM_LOG(kWarning, "checkpoint", "removed for want of room path=", DirectoryOf(steps[i]),
               " available=", FormatBytes(room.size_bytes), " wanted=", FormatBytes(size_bytes));
    Discard(steps[i]);
    TANDEM_ASSIGN_OR_RETURN(room, FindRoom());
  }
  if (room.size_bytes >= size_bytes) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat("checkpoint in ", directory_, " takes ", FormatBytes(size_bytes), " and ", room.limit));
}

absl::Status CheckpointStore::Write(const CheckpointState& state, const std::string& job_text, const CheckpointArrays& arrays,
                                    std::size_t keep) {
  TANDEM_CHECK(keep >= 1, "at least one checkpoint is kept");
  const std::string partial = absl::StrFormat("%s/%s%06d", directory_, kPartialPrefix, state.step);
  std::error_code error;
  fs::remove_all(partial, error);
  TANDEM_RETURN_IF_ERROR(MakeRoom(SizeOf(arrays), state.evaluation.best_step));
  TANDEM_RETURN_IF_ERROR(MakeDirectories(partial));
  nlohmann::json manifest = {{"format", kFormat}, {"step", state.step}, {"files", nlohmann::json::object()}};
  const auto write = [&](const char* name, std::span<const std::byte> bytes) {
    manifest["files"][name] = Describe(bytes);
    return WriteFileDurably(partial + "/" + name, bytes);
  };
  std::vector<std::byte> on_host;
  for (const ArrayFile& file : kArrayFiles) {
    const std::span<const std::byte> array = arrays.*file.bytes;
    if (array.empty() && file.is_optional) continue;
    on_host.resize(array.size());
    TANDEM_RETURN_IF_ERROR(CopyToHost(arrays.device, on_host.data(), array.data(), array.size()));
    TANDEM_RETURN_IF_ERROR(write(file.name, on_host));
  }
  const std::string state_text = StateToJson(state);
  TANDEM_RETURN_IF_ERROR(write(kState, BytesOf(state_text)));
  TANDEM_RETURN_IF_ERROR(write(kJob, BytesOf(job_text)));
  TANDEM_RETURN_IF_ERROR(WriteFileDurably(partial + "/" + kManifest, manifest.dump(1)));
  TANDEM_RETURN_IF_ERROR(SyncDirectory(partial));

  // A directory cannot be renamed over a full one: the same step written again first moves the old one away, to where Open takes
  // it back from when the new one did not follow.
  const std::string final_name = DirectoryOf(state.step);
  const std::string replaced = absl::StrCat(directory_, "/", kReplacedPrefix, fs::path(final_name).filename().string());
  if (fs::exists(final_name, error)) {
    const absl::StatusOr<nlohmann::json> present = ReadManifest(final_name);
    if (present.ok() && *present == manifest) {  // the job has not moved since
      fs::remove_all(partial, error);
      return absl::OkStatus();
    }
    fs::remove_all(replaced, error);
    fs::rename(final_name, replaced, error);
  }
  fs::rename(partial, final_name, error);
  if (error) return absl::InternalError(absl::StrCat("renaming ", partial, " to ", final_name, " failed: ", error.message()));
  TANDEM_RETURN_IF_ERROR(SyncDirectory(directory_));
  fs::remove_all(replaced, error);
  const std::vector<std::uint64_t> steps = Steps();
  for (std::size_t i = 0; i + keep < steps.size(); ++i) {
    if (steps[i] != state.evaluation.best_step) Discard(steps[i]);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::optional<CheckpointState>> CheckpointStore::LoadNewest(const std::string& job_text,
                                                                           const CheckpointArrays& arrays) const {
  std::vector<std::uint64_t> damaged;
  absl::Status damage;
  const std::vector<std::uint64_t> steps = Steps();
  for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
    absl::StatusOr<CheckpointState> state = Load(*step, job_text, arrays);
    if (state.ok()) {
      if (!damaged.empty()) DiscardDamaged();
      for (const std::uint64_t newer : damaged) TANDEM_RETURN_IF_ERROR(SetAside(newer));
      return std::optional(*std::move(state));
    }
    if (!absl::IsDataLoss(state.status())) return state.status();
    TANDEM_LOG(kError, "checkpoint", "damaged step=", *step, " because=", std::string(state.status().message()));
    damaged.push_back(*step);
    if (damage.ok()) damage = state.status();
  }
  if (!damage.ok()) return damage;
  return std::nullopt;
}

// What is trained again may be equal to the manifest of a damaged one, which must not be taken for written.
absl::Status CheckpointStore::SetAside(std::uint64_t step) const {
  const std::string path = DirectoryOf(step);
  const std::string aside = absl::StrCat(directory_, "/", kDamagedPrefix, fs::path(path).filename().string());
  std::error_code error;
  fs::rename(path, aside, error);
  if (error) return absl::InternalError(absl::StrCat("renaming ", path, " to ", aside, " failed: ", error.message()));
  TANDEM_LOG(kWarning, "checkpoint", "set aside path=", aside);
  return absl::OkStatus();
}

absl::StatusOr<CheckpointState> CheckpointStore::Load(std::uint64_t step, const std::string& job_text,
                                                      const CheckpointArrays& arrays) const {
  const std::string directory = DirectoryOf(step);
  TANDEM_ASSIGN_OR_RETURN(const nlohmann::json manifest, ReadManifest(directory));
  TANDEM_ASSIGN_OR_RETURN(const std::string stored_job, ReadChecked(directory, manifest, kJob, kMaxTextBytes));
  if (stored_job != job_text) {
    return absl::FailedPreconditionError(absl::StrCat("checkpoint ", directory, " belongs to another job file"));
  }
  TANDEM_ASSIGN_OR_RETURN(const std::string state_text, ReadChecked(directory, manifest, kState, kMaxTextBytes));
  TANDEM_ASSIGN_OR_RETURN(const CheckpointState state, StateFromJson(state_text, directory + "/" + kState));
  if (state.step != step) { return absl::DataLossError(absl::StrCat("checkpoint ", directory, " holds step ", state.step)); }
  for (const ArrayFile& file : kArrayFiles) {
    const std::span<std::byte> target = arrays.*file.bytes;
    if (target.empty() && file.is_optional) continue;
    TANDEM_ASSIGN_OR_RETURN(const std::string bytes, ReadChecked(directory, manifest, file.name, kMaxArrayBytes));
    if (bytes.size() != target.size()) {
      return absl::FailedPreconditionError(absl::StrCat("checkpoint ", directory, "/", file.name, " has ", bytes.size(),
                                                        " bytes; the job's adapter has ", target.size()));
    }
    TANDEM_RETURN_IF_ERROR(CopyFromHost(arrays.device, target.data(), bytes.data(), bytes.size()));
  }
  return state;
}

absl::StatusOr<std::string> CheckpointStore::ReadAdapter(std::uint64_t step) const {
  const std::string directory = DirectoryOf(step);
  TANDEM_ASSIGN_OR_RETURN(const nlohmann::json manifest, ReadManifest(directory));
  return ReadChecked(directory, manifest, kAdapter, kMaxArrayBytes);
}

absl::StatusOr<std::string> CheckpointStore::ReadNewestAdapter() const {
  const std::vector<std::uint64_t> steps = Steps();
  if (steps.empty()) return absl::NotFoundError(absl::StrCat("no checkpoint in ", directory_));
  return ReadAdapter(steps.back());
}

absl::StatusOr<std::string> CheckpointStore::ReadBestAdapter() const {
  const std::vector<std::uint64_t> steps = Steps();
  if (steps.empty()) return absl::NotFoundError(absl::StrCat("no checkpoint in ", directory_));
  const std::string newest = DirectoryOf(steps.back());
  TANDEM_ASSIGN_OR_RETURN(const nlohmann::json manifest, ReadManifest(newest));
  TANDEM_ASSIGN_OR_RETURN(const std::string text, ReadChecked(newest, manifest, kState, kMaxTextBytes));
  TANDEM_ASSIGN_OR_RETURN(const CheckpointState state, StateFromJson(text, newest + "/" + kState));
  if (!state.evaluation.best_step.has_value()) {
    return absl::NotFoundError(absl::StrCat("no evaluation before the checkpoint ", newest));
  }
  return ReadAdapter(*state.evaluation.best_step);
}

}  // namespace tandem
