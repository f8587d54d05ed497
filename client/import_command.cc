#include <cctype>
#include <filesystem>
#include <fstream>

#include "client/commands.h"
#include "client/printing.h"
#include "client/trl_config.h"
#include "nlohmann/json.hpp"

namespace tandem {
namespace {

// A job's name from a file's: [a-z0-9_-]{1,64}.
std::string JobNameOf(const std::string& path) {
  std::string name = std::filesystem::path(path).stem().string().substr(0, 64);
  for (char& c : name) {
    const auto letter = static_cast<unsigned char>(c);
    c = std::isalnum(letter) != 0 ? static_cast<char>(std::tolower(letter)) : c == '_' ? '_' : '-';
  }
  return name.empty() ? "imported" : name;
}

}  // namespace

absl::Status ImportTrl(const Connection& connection, const Words& words) {
  if (words.size() != 1) {
    return absl::InvalidArgumentError(absl::StrCat("usage: tandem import-trl CONFIG (got ", words.size(), " words)"));
  }
  std::ifstream file(words[0], std::ios::binary);
  if (!file) return absl::NotFoundError(absl::StrCat("cannot read ", words[0]));
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  const absl::StatusOr<ImportedJob> imported = ImportTrlConfig(text, JobNameOf(words[0]));
  if (!imported.ok()) return Annotate(imported.status(), words[0]);
  TANDEM_ASSIGN_OR_RETURN(const std::string job_file, ToJobFile(*imported));
  if (!connection.json) {
    Print(job_file);
    return absl::OkStatus();
  }
  nlohmann::ordered_json json = {{"job_text", job_file}, {"not_kept", nlohmann::ordered_json::array()}};
  for (const NotKept& option : imported->not_kept) {
    json["not_kept"].push_back({{"option", option.option}, {"value", option.value}, {"reason", option.reason}});
  }
  Print(json.dump());
  return absl::OkStatus();
}

}  // namespace tandem
