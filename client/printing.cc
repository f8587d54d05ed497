#include "client/printing.h"

#include <algorithm>
#include <cstdio>

#include "absl/strings/ascii.h"
#include "common/base/units.h"
#include "google/protobuf/util/json_util.h"

namespace tandem {

std::string ToJson(const google::protobuf::Message& message) {
  google::protobuf::util::JsonPrintOptions options;
  options.always_print_primitive_fields = true;
  options.preserve_proto_field_names = true;
  std::string json;
  const auto status = google::protobuf::util::MessageToJsonString(message, &json, options);
  return status.ok() ? json : std::string("{}");
}

void Print(const std::string& line) {
  std::fwrite(line.data(), 1, line.size(), stdout);
  std::fputc('\n', stdout);
  std::fflush(stdout);
}

std::string FormatTable(const std::vector<std::vector<std::string>>& rows) {
  std::vector<std::size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string table;
  for (const auto& row : rows) {
    std::string line;
    for (std::size_t i = 0; i < row.size(); ++i) {
      line += row[i];
      if (i + 1 < row.size()) line.append(widths[i] - row[i].size() + 2, ' ');
    }
    table += (table.empty() ? "" : "\n") + line;
  }
  return table;
}

std::string FormatLedger(const google::protobuf::RepeatedPtrField<v1::OwnedBytes>& ledger) {
  std::vector<v1::OwnedBytes> owners(ledger.begin(), ledger.end());
  std::stable_sort(owners.begin(), owners.end(), [](const auto& a, const auto& b) { return a.bytes() > b.bytes(); });
  std::vector<std::vector<std::string>> rows = {{"owner", "memory", "where"}};
  std::uint64_t total = 0;
  for (const v1::OwnedBytes& owner : owners) {
    rows.push_back({owner.owner(), FormatBytes(owner.bytes()), owner.in_pool() ? "pool" : "process"});
    if (owner.in_pool()) total += owner.bytes();
  }
  rows.push_back({"pool", FormatBytes(total), ""});
  return FormatTable(rows);
}

std::string EnumWord(const std::string& name, const std::string& prefix) {
  return absl::AsciiStrToLower(name.rfind(prefix, 0) == 0 ? name.substr(prefix.size()) : name);
}

}  // namespace tandem
