#include "client/printing.h"

#include <algorithm>
#include <cstdio>

#include "absl/strings/ascii.h"
#include "common/base/printable.h"
#include "common/base/units.h"
#include "google/protobuf/util/json_util.h"
#include "nlohmann/json.hpp"

namespace tandem {

std::string ToJson(const google::protobuf::Message& message) {
  google::protobuf::util::JsonPrintOptions options;
  options.always_print_primitive_fields = true;
  options.preserve_proto_field_names = true;
  std::string json;
  const auto status = google::protobuf::util::MessageToJsonString(message, &json, options);
  return status.ok() ? json : std::string("{}");
}

void Print(const std::string& line) { PrintPiece(line + "\n"); }

void PrintPiece(std::string_view text) {
  const std::string printable = Printable(text, LineEnds::kKeep);
  std::fwrite(printable.data(), 1, printable.size(), stdout);
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

std::string FormatMemoryPlan(const v1::MemoryPlan& plan) {
  const auto bytes_or_dash = [](std::uint64_t bytes) { return bytes == 0 ? std::string("-") : FormatBytes(bytes); };
  const auto flag = [](std::uint64_t bytes) { return absl::StrCat(bytes / kMiB, "MiB"); };
  std::vector<std::vector<std::string>> rows = {{"owner", "generation", "training", "where"}};
  std::uint64_t generation = 0, training = 0;
  for (const v1::PlannedBytes& owned : plan.owners()) {
    rows.push_back({owned.owner(), bytes_or_dash(owned.generation_bytes()), bytes_or_dash(owned.training_bytes()),
                    EnumWord(v1::MemoryPlace_Name(owned.place()), "MEMORY_PLACE_")});
    if (owned.place() != v1::MEMORY_PLACE_POOL) continue;
    generation += owned.generation_bytes();
    training += owned.training_bytes();
  }
  rows.push_back({"pool", FormatBytes(generation), FormatBytes(training), absl::StrCat("of ", FormatBytes(plan.pool_bytes()))});

  std::string text = FormatTable(rows);
  absl::StrAppend(&text, "\ncontext: ", plan.context_tokens(), " tokens of the job");
  if (plan.largest_context_tokens() == 0) {
    absl::StrAppend(&text, "; no context fits this node");
  } else {
    absl::StrAppend(&text, ", at most ", plan.largest_context_tokens(), " on this node");
  }
  std::string walls;
  for (const v1::ContextWall& wall : plan.walls()) {
    absl::StrAppend(&walls, walls.empty() ? "" : ", ", wall.name(), " ", wall.context_tokens());
  }
  absl::StrAppend(&text, " (ends of contexts, nearest first: ", walls, ")");
  absl::StrAppend(&text, "\nlive sequences of that length: ", plan.live_sequences(), " of ", plan.wanted_live_sequences(),
                  " wanted; largest group all alive: ", plan.largest_group());
  absl::StrAppend(&text, "\nmicro-batch: at most ", plan.micro_batch_rows(), " rows; layer inputs of ", plan.layers_in_pool(),
                  " layers in the pool, of ", plan.layers_in_host(), " in host memory");
  absl::StrAppend(&text, "\nthe job asks for --pool_bytes=", flag(plan.asked_pool_bytes()),
                  " --rollout_standing_bytes=", flag(plan.asked_rollout_standing_bytes()),
                  " --trainer_standing_bytes=", flag(plan.asked_trainer_standing_bytes()),
                  "; with one live sequence at a time --pool_bytes=", flag(plan.least_pool_bytes()));
  absl::StrAppendFormat(
      &text, "\nestimate of a step at full length, at %.3g TFLOP/s and %.3g GB/s: generation %.3g s, training %.3g s",
      plan.flops_per_second() / 1e12, plan.bytes_per_second() / 1e9, plan.generation_seconds(), plan.training_seconds());
  return text;
}

std::string FormatDataCounts(const v1::DataCounts& counts) {
  std::string text = absl::StrCat("data: ", counts.rows(), " rows: ", counts.trained(), " trained");
  if (counts.held_out() > 0) absl::StrAppend(&text, ", ", counts.held_out(), " held out");
  if (counts.too_short() > 0) absl::StrAppend(&text, ", ", counts.too_short(), " left out as too short");
  if (counts.too_long() > 0) absl::StrAppend(&text, ", ", counts.too_long(), " left out as too long");
  if (counts.evaluated() > 0) absl::StrAppend(&text, "; ", counts.evaluated(), " scored in evaluations");
  return text;
}

namespace {

struct Line {
  std::string text;
  std::size_t length = 0;  // in code points
};

// Goes on in a new line, with the word that did not fit, where the line has more than that word.
void BreakLine(bool is_between_words, std::vector<Line>* lines) {
  Line& full = lines->back();
  Line next;
  const std::size_t space = full.text.rfind(' ');
  if (!is_between_words && space != std::string::npos && space > 0) {
    next.text = full.text.substr(space + 1);
    next.length = static_cast<std::size_t>(
        std::count_if(next.text.begin(), next.text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; }));
    full.text.resize(space);
    full.length -= next.length + 1;
  }
  lines->push_back(std::move(next));
}

}  // namespace

std::string FormatColumns(const std::vector<std::string>& texts, std::size_t width, std::size_t gap) {
  std::vector<std::vector<Line>> columns;
  std::size_t num_lines = 0;
  for (const std::string& text : texts) {
    std::vector<Line> lines(1);
    for (std::size_t i = 0; i < text.size();) {
      std::size_t end = i + 1;
      while (end < text.size() && (static_cast<unsigned char>(text[end]) & 0xc0) == 0x80) ++end;
      const bool is_full = lines.back().length == width;
      if (text[i] == '\n') {
        lines.emplace_back();
      } else {
        if (is_full) BreakLine(text[i] == ' ', &lines);
        if (!is_full || text[i] != ' ') {
          // A control character would move the terminal's cursor.
          lines.back().text += static_cast<unsigned char>(text[i]) < ' ' ? std::string(" ") : text.substr(i, end - i);
          ++lines.back().length;
        }
      }
      i = end;
    }
    num_lines = std::max(num_lines, lines.size());
    columns.push_back(std::move(lines));
  }
  std::string table;
  for (std::size_t row = 0; row < num_lines; ++row) {
    std::string line;
    std::size_t missing = 0;  // spaces up to the next column
    for (const std::vector<Line>& column : columns) {
      const Line cell = row < column.size() ? column[row] : Line();
      line.append(cell.text.empty() ? 0 : missing, ' ');
      if (!cell.text.empty()) missing = 0;
      line += cell.text;
      missing += width - cell.length + gap;
    }
    table += (row == 0 ? "" : "\n") + line;
  }
  return table;
}

std::string FormatComparison(const std::vector<std::string>& row, const std::string& kind) {
  return nlohmann::ordered_json({{kind, row[0]}, {"a", row[1]}, {"b", row[2]}}).dump();
}

std::string EnumWord(const std::string& name, const std::string& prefix) {
  return absl::AsciiStrToLower(name.rfind(prefix, 0) == 0 ? name.substr(prefix.size()) : name);
}

}  // namespace tandem
