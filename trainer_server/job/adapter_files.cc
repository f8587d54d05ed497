#include "trainer_server/job/adapter_files.h"

#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <span>

#include "trainer_server/checkpoint/durable_file.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

constexpr const char* kFiles[] = {"adapter_config.json", "adapter_model.safetensors"};
constexpr std::size_t kMaxAdapterBytes = std::size_t{1} << 36;

// A directory of its own, gone with its scope.
class TemporaryDirectory {
 public:
  static absl::StatusOr<TemporaryDirectory> Create() {
    std::error_code error;
    std::string path = (fs::temp_directory_path(error) / "tandem-adapter-XXXXXX").string();
    if (::mkdtemp(path.data()) == nullptr) {
      return absl::InternalError(absl::StrCat("making temporary directory ", path, " failed: ", std::strerror(errno)));
    }
    return TemporaryDirectory(path);
  }
  TemporaryDirectory(TemporaryDirectory&& other) noexcept : path_(std::exchange(other.path_, std::string())) {}
  TemporaryDirectory& operator=(TemporaryDirectory&&) = delete;
  ~TemporaryDirectory() {
    std::error_code ignored;
    if (!path_.empty()) fs::remove_all(path_, ignored);
  }
  std::string path(const std::string& file) const { return path_ + "/" + file; }
  const std::string& path() const { return path_; }

 private:
  explicit TemporaryDirectory(std::string path) : path_(std::move(path)) {}
  std::string path_;
};

}  // namespace

bool HasStartAdapter(const v1::AdapterConfig& adapter) {
  return !adapter.start_config_content().empty() || !adapter.start_job().empty();
}

PeftConfig PeftConfigOf(const v1::AdapterConfig& adapter) {
  PeftConfig peft;
  peft.rank = static_cast<int>(adapter.rank());
  peft.alpha = adapter.alpha();
  peft.use_rslora = adapter.rank_stabilised();
  for (const int kind : adapter.targets()) peft.targets.push_back(static_cast<LinearKind>(kind - 1));
  return peft;
}

absl::StatusOr<PeftAdapter> OpenStartAdapter(const v1::AdapterConfig& adapter, const ModelConfig& model,
                                             const ContentStore& content) {
  TANDEM_ASSIGN_OR_RETURN(const TemporaryDirectory directory, TemporaryDirectory::Create());
  const std::string* const contents[] = {&adapter.start_config_content(), &adapter.start_weights_content()};
  for (std::size_t i = 0; i < std::size(kFiles); ++i) {
    TANDEM_ASSIGN_OR_RETURN(const std::string stored, content.PathOf(*contents[i]));
    std::error_code error;
    fs::create_symlink(fs::absolute(stored), directory.path(kFiles[i]), error);
    if (error) return absl::InternalError(absl::StrCat("linking ", stored, " failed: ", error.message()));
  }
  return PeftAdapter::Open(directory.path(), model);
}

absl::StatusOr<std::vector<std::pair<std::string, std::string>>> ExportFiles(const v1::AdapterConfig& config,
                                                                             const ModelConfig& model,
                                                                             const std::string& adapter) {
  TANDEM_ASSIGN_OR_RETURN(const TemporaryDirectory directory, TemporaryDirectory::Create());
  PeftConfig peft = PeftConfigOf(config);
  peft.base_model = model.name;
  TANDEM_RETURN_IF_ERROR(WritePeftAdapter(directory.path(), model, peft, std::as_bytes(std::span<const char>(adapter))));
  std::vector<std::pair<std::string, std::string>> files;
  for (const char* const name : kFiles) {
    TANDEM_ASSIGN_OR_RETURN(std::string bytes, ReadWholeFile(directory.path(name), kMaxAdapterBytes));
    files.emplace_back(name, std::move(bytes));
  }
  return files;
}

absl::Status ExportMerged(const v1::AdapterConfig& config, const ModelDescription& model, const std::string& model_path,
                          const std::string& adapter, const FileSink& sink) {
  if (model_path.empty()) {
    return absl::FailedPreconditionError("trainer_server was started without --model, whose files a merged export reads");
  }
  const auto source = ModelSource::Open(model_path);
  if (!source.ok()) return absl::FailedPreconditionError(absl::StrCat("--model=", model_path, ": ", source.status().message()));
  if (WeightLayout::Create((*source)->description().config, StorageFormat::kFp32).digest !=
      WeightLayout::Create(model.config, StorageFormat::kFp32).digest) {
    return absl::FailedPreconditionError(absl::StrCat("--model=", model_path, " is ", (*source)->description().config.name,
                                                      ", not the pool's ", model.config.name));
  }
  const PeftConfig peft = PeftConfigOf(config);
  const AdapterLayout layout = AdapterLayout::Create(model.config, peft.rank, peft.targets);
  return StreamMergedModel(**source, model_path, layout, static_cast<float>(peft.scale()),
                           std::as_bytes(std::span<const char>(adapter)), {}, sink);
}

}  // namespace tandem
