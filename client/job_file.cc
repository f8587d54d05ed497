#include "client/job_file.h"

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <set>
#include <sstream>
#include <utility>

#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "common/base/clock.h"
#include "common/base/hash.h"
#include "common/base/units.h"
#include "common/rpc/channel.h"
#include "google/protobuf/io/tokenizer.h"
#include "google/protobuf/text_format.h"

namespace tandem {
namespace {

constexpr std::size_t kPieceBytes = 256 * kKiB;               // the server waits 20 s for one
constexpr absl::Duration kUploadPatience = absl::Minutes(2);  // without a byte more
constexpr absl::Duration kUploadRetryInterval = absl::Seconds(1);
constexpr std::uintmax_t kJobFileLimit = 256 * kKiB;

// By path from `message` on, the values of every enumeration that a field called `name` holds.
void FindEnumerations(const google::protobuf::Descriptor* message, const std::string& name, const std::string& prefix,
                      std::set<const google::protobuf::Descriptor*>* seen, std::map<std::string, std::string>* values) {
  if (!seen->insert(message).second) return;
  for (int i = 0; i < message->field_count(); ++i) {
    const google::protobuf::FieldDescriptor* const field = message->field(i);
    const std::string path = prefix + field->name();
    if (field->message_type() != nullptr) FindEnumerations(field->message_type(), name, path + ".", seen, values);
    if (field->enum_type() == nullptr || field->name() != name) continue;
    std::vector<std::string> names;
    for (int k = 0; k < field->enum_type()->value_count(); ++k) {
      if (field->enum_type()->value(k)->number() != 0) names.push_back(field->enum_type()->value(k)->name());
    }
    (*values)[path] = absl::StrJoin(names, ", ");
  }
}

// The parser's message, with the values that the field may have where it is about an enumeration.
std::string WithAllowedValues(const std::string& message) {
  constexpr char kUnknown[] = "Unknown enumeration value of ", kField[] = " for field \"";
  const std::size_t field = message.rfind(kField);
  if (message.rfind(kUnknown, 0) != 0 || field == message.npos) return message;
  const std::size_t begin = field + sizeof(kField) - 1;
  std::map<std::string, std::string> values;
  std::set<const google::protobuf::Descriptor*> seen;
  FindEnumerations(v1::JobSpec::descriptor(), message.substr(begin, message.find('"', begin) - begin), "", &seen, &values);
  if (values.empty()) return message;
  // The parser does not say of which message the field is.
  const std::string allowed =
      values.size() == 1 ? values.begin()->second : absl::StrJoin(values, "; ", absl::PairFormatter(": "));
  return absl::StrCat(absl::StripSuffix(message, "."), "; must be ", allowed);
}

class FaultCollector final : public google::protobuf::io::ErrorCollector {
 public:
  explicit FaultCollector(std::string source) : source_(std::move(source)) {}
  void AddError(int line, int column, const std::string& message) override {
    absl::StrAppend(&faults_, faults_.empty() ? "" : "\n", source_, ":", line + 1, ":", column + 1, ": ",
                    WithAllowedValues(message));
  }
  void AddWarning(int line, int column, const std::string& message) override { AddError(line, column, message); }
  const std::string& faults() const { return faults_; }

 private:
  std::string source_, faults_;
};

absl::Status MergeText(const std::string& text, const std::string& source, v1::JobSpec* spec) {
  FaultCollector collector(source);
  google::protobuf::TextFormat::Parser parser;
  parser.RecordErrorsTo(&collector);
  if (parser.MergeFromString(text, spec)) return absl::OkStatus();
  return absl::InvalidArgumentError(collector.faults());
}

// `field` names it in errors.
absl::StatusOr<std::string> HashFile(const std::string& field, const std::string& path) {
  std::error_code error;
  (void)std::filesystem::file_size(path, error);  // a folder has none
  std::ifstream file;
  if (!error) file.open(path, std::ios::binary);
  if (!error && !file) error = std::error_code(errno, std::generic_category());
  if (error) return absl::NotFoundError(absl::StrCat(field, ": cannot read ", path, ": ", error.message()));
  Sha256 hash;
  std::string piece(kPieceBytes, '\0');
  while (file.read(piece.data(), static_cast<std::streamsize>(piece.size())) || file.gcount() > 0) {
    hash.Update(piece.data(), static_cast<std::size_t>(file.gcount()));
  }
  if (file.bad()) return absl::DataLossError(absl::StrCat(field, ": reading ", path, " failed"));
  return hash.Finish();
}

// Sends `path` from `offset_bytes` on.
absl::Status SendPieces(v1::JobService::Stub* trainer, const Connection& connection, const std::string& path,
                        const std::string& sha256, std::uint64_t offset_bytes) {
  std::error_code error;
  const std::uintmax_t size = std::filesystem::file_size(path, error);
  if (error) return absl::NotFoundError(absl::StrCat("cannot read ", path, ": ", error.message()));
  grpc::ClientContext upload_context;
  // A minute, and a second more for each MiB.
  upload_context.set_deadline(
      GrpcDeadline(MonotonicTime::Now() + absl::Minutes(1) + absl::Seconds(static_cast<double>(size / kMiB))));
  v1::UploadResponse response;
  auto writer = trainer->Upload(&upload_context, &response);
  v1::UploadRequest request;
  request.mutable_header()->set_sha256(sha256);
  request.mutable_header()->set_size_bytes(size);
  request.mutable_header()->set_name(std::filesystem::path(path).filename().string());
  request.mutable_header()->set_offset_bytes(offset_bytes);
  bool is_open = writer->Write(request);
  std::ifstream file(path, std::ios::binary);
  file.seekg(static_cast<std::streamoff>(offset_bytes));
  std::string piece(kPieceBytes, '\0');
  while (is_open && (file.read(piece.data(), static_cast<std::streamsize>(piece.size())) || file.gcount() > 0)) {
    request.mutable_piece()->assign(piece.data(), static_cast<std::size_t>(file.gcount()));
    is_open = writer->Write(request);
  }
  writer->WritesDone();
  return CallStatus(writer->Finish(), "trainer_server", connection.trainer_address);
}

bool IsAway(const absl::Status& status) { return absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status); }

// Goes on where it stopped when the connection breaks, until kUploadPatience has brought nothing.
absl::Status SendFile(v1::JobService::Stub* trainer, const Connection& connection, const std::string& path,
                      const std::string& sha256) {
  v1::HasContentRequest question;
  question.set_sha256(sha256);
  std::uint64_t furthest_bytes = 0;
  MonotonicTime progress = MonotonicTime::Now();
  absl::Status status;
  while (status.ok() || MonotonicTime::Now() - progress < kUploadPatience) {
    if (!status.ok()) absl::SleepFor(kUploadRetryInterval);
    v1::HasContentResponse answer;
    auto context = connection.Context();
    // gRPC sees to a connection that is being made only while a call waits for it.
    context->set_wait_for_ready(!status.ok());
    const absl::Status asked =
        CallStatus(trainer->HasContent(context.get(), question, &answer), "trainer_server", connection.trainer_address);
    if (!asked.ok()) {
      if (status.ok() || !IsAway(asked)) return asked;  // no upload has begun
      continue;
    }
    if (answer.present()) return absl::OkStatus();
    if (answer.partial_bytes() > furthest_bytes) {
      furthest_bytes = answer.partial_bytes();
      progress = MonotonicTime::Now();
    }
    status = SendPieces(trainer, connection, path, sha256, answer.partial_bytes());
    if (status.ok()) return status;
    // What was there may have been other bytes: the store has dropped it then.
    const bool may_pass =
        IsAway(status) || absl::IsAborted(status) || (absl::IsInvalidArgument(status) && answer.partial_bytes() > 0);
    if (!may_pass) break;
  }
  return Annotate(status, absl::StrCat("uploading ", path));
}

// Calls `visit(field, path)` for each file that the job names and stores the content address it gives in place of the path.
absl::Status ReplaceFiles(
    v1::JobSpec* spec,
    const std::function<absl::StatusOr<std::string>(const std::string& field, const std::string& path)>& visit) {
  if (!spec->data().path().empty()) {
    TANDEM_ASSIGN_OR_RETURN(*spec->mutable_data()->mutable_content(), visit("data.path", spec->data().path()));
    spec->mutable_data()->clear_path();
  }
  if (!spec->evaluation().path().empty()) {
    TANDEM_ASSIGN_OR_RETURN(*spec->mutable_evaluation()->mutable_content(), visit("evaluation.path", spec->evaluation().path()));
    spec->mutable_evaluation()->clear_path();
  }
  if (!spec->adapter().start_path().empty()) {
    v1::AdapterConfig* adapter = spec->mutable_adapter();
    const std::string field = "adapter.start_path";
    const std::filesystem::path directory(adapter->start_path());
    TANDEM_ASSIGN_OR_RETURN(*adapter->mutable_start_config_content(), visit(field, (directory / "adapter_config.json").string()));
    TANDEM_ASSIGN_OR_RETURN(*adapter->mutable_start_weights_content(),
                            visit(field, (directory / "adapter_model.safetensors").string()));
    adapter->clear_start_path();
  }
  for (int i = 0; i < spec->rewards_size(); ++i) {
    if (spec->rewards(i).python_function().path().empty()) continue;
    v1::PythonFunction* python = spec->mutable_rewards(i)->mutable_python_function();
    TANDEM_ASSIGN_OR_RETURN(*python->mutable_content(),
                            visit(absl::StrCat("rewards[", i, "].python_function.path"), python->path()));
    if (python->file_name().empty()) python->set_file_name(std::filesystem::path(python->path()).filename().string());
    python->clear_path();
  }
  return absl::OkStatus();
}

void ResolvePath(const std::filesystem::path& base, std::string* path) {
  if (!path->empty()) *path = (base / *path).lexically_normal().string();
}

}  // namespace

absl::StatusOr<v1::JobSpec> ReadJobFile(const std::string& path, const std::vector<std::string>& overrides) {
  std::error_code error;
  const std::uintmax_t size = std::filesystem::file_size(path, error);
  if (error) return absl::NotFoundError(absl::StrCat("cannot read job file ", path, ": ", error.message()));
  if (size > kJobFileLimit) {
    return absl::InvalidArgumentError(absl::StrCat("job file ", path, " has ", size, " bytes; the limit is ", kJobFileLimit));
  }
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  if (!file) return absl::NotFoundError(absl::StrCat("cannot read job file ", path));
  v1::JobSpec spec;
  TANDEM_RETURN_IF_ERROR(MergeText(text.str(), path, &spec));
  const std::filesystem::path base = std::filesystem::absolute(path).parent_path();
  ResolvePath(base, spec.mutable_data()->mutable_path());
  if (spec.has_evaluation()) ResolvePath(base, spec.mutable_evaluation()->mutable_path());
  if (spec.has_adapter()) ResolvePath(base, spec.mutable_adapter()->mutable_start_path());
  for (v1::RewardConfig& reward : *spec.mutable_rewards()) {
    if (reward.has_python_function()) ResolvePath(base, reward.mutable_python_function()->mutable_path());
  }
  for (const std::string& text_override : overrides) {
    TANDEM_RETURN_IF_ERROR(MergeText(text_override, absl::StrCat("--set '", text_override, "'"), &spec));
  }
  return spec;
}

absl::Status AddPythonRewards(const std::string& rewards, v1::JobSpec* spec) {
  std::string file;
  for (const absl::string_view part : absl::StrSplit(rewards, ',')) {
    const std::string word(part);
    const std::size_t colon = word.rfind(':');
    if (colon != std::string::npos) file = word.substr(0, colon);
    const std::string function = word.substr(colon == std::string::npos ? 0 : colon + 1);
    if (file.empty() || function.empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat("--rewards: '", word, "'; must be FILE:FUNCTION, or after one a further FUNCTION of its file"));
    }
    v1::RewardConfig* reward = spec->add_rewards();
    reward->set_weight(1);
    reward->mutable_python_function()->set_path(std::filesystem::absolute(file).lexically_normal().string());
    reward->mutable_python_function()->set_function(function);
  }
  return absl::OkStatus();
}

absl::Status UploadFiles(const Connection& connection, v1::JobSpec* spec) {
  auto trainer = connection.Trainer();
  return ReplaceFiles(spec, [&](const std::string& field, const std::string& path) -> absl::StatusOr<std::string> {
    TANDEM_ASSIGN_OR_RETURN(const std::string sha256, HashFile(field, path));
    TANDEM_RETURN_IF_ERROR(SendFile(trainer.get(), connection, path, sha256));
    return sha256;
  });
}

}  // namespace tandem
