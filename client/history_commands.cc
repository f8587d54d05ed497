// Commands that look at what a job has done.
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <set>

#include "absl/strings/str_join.h"
#include "client/commands.h"
#include "client/job_history.h"
#include "client/plot.h"
#include "client/printing.h"
#include "client/progress.h"
#include "common/rpc/job_state.h"
#include "google/protobuf/text_format.h"

namespace tandem {
namespace {

constexpr std::size_t kLeastColumn = 36, kMostColumns = 6, kColumnGap = 2;
constexpr std::size_t kComparedSteps = 10;

std::size_t TerminalWidth() {
  struct winsize size {};
  if (::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) return size.ws_col;
  return 120;
}

// What it earned; by function; how it ended.
std::vector<std::string> RewardParts(const v1::CompletionRecord& record) {
  std::vector<std::string> functions;
  for (const v1::NamedValue& value : record.rewards()) {
    functions.push_back(absl::StrFormat("%s %.2f", value.name(), value.value()));
  }
  return {absl::StrFormat("[%d] reward %.3f  advantage %+.3f", record.member_index(), record.reward(), record.advantage()),
          absl::StrJoin(functions, " "),
          absl::StrCat(record.completion_tokens(), " tokens, ",
                       EnumWord(v1::FinishReason_Name(record.finish_reason()), "FINISH_REASON_"))};
}

std::string GroupTitle(const v1::CompletionRecord& record) {
  return absl::StrCat("\n--- step ", record.step(), ", prompt ", record.group_index(), " ---\n", record.prompt());
}

// A prompt's completions, so many beside each other as the terminal has room for.
void PrintSideBySide(const std::vector<v1::CompletionRecord>& group) {
  Print(GroupTitle(group[0]) + "\n");
  const std::size_t num_columns = std::clamp<std::size_t>(TerminalWidth() / (kLeastColumn + kColumnGap), 1, kMostColumns);
  for (std::size_t first = 0; first < group.size(); first += num_columns) {
    std::vector<std::string> cells;
    for (std::size_t i = first; i < std::min(first + num_columns, group.size()); ++i) {
      cells.push_back(absl::StrJoin(RewardParts(group[i]), "\n") + "\n\n" + group[i].completion());
    }
    const std::size_t width = (TerminalWidth() - kColumnGap * (num_columns - 1)) / num_columns;
    Print(FormatColumns(cells, width, kColumnGap) + "\n");
  }
}

// Every field that is set, by its path: "rewards[0].weight" -> "0.8".
void Flatten(const google::protobuf::Message& message, const std::string& prefix, std::map<std::string, std::string>* fields) {
  const auto* const reflection = message.GetReflection();
  std::vector<const google::protobuf::FieldDescriptor*> set;
  reflection->ListFields(message, &set);
  for (const auto* const field : set) {
    const int count = field->is_repeated() ? reflection->FieldSize(message, field) : 1;
    for (int i = 0; i < count; ++i) {
      const std::string path = absl::StrCat(prefix, field->name(), field->is_repeated() ? absl::StrCat("[", i, "]") : "");
      if (field->cpp_type() == google::protobuf::FieldDescriptor::CPPTYPE_MESSAGE) {
        const auto& inner =
            field->is_repeated() ? reflection->GetRepeatedMessage(message, field, i) : reflection->GetMessage(message, field);
        (*fields)[path] = "{}";
        Flatten(inner, path + ".", fields);
      } else {
        google::protobuf::TextFormat::PrintFieldValueToString(message, field, field->is_repeated() ? i : -1, &(*fields)[path]);
      }
    }
  }
}

struct ComparedJob {
  std::map<std::string, std::string> settings;
  JobHistory history;
  std::vector<std::string> names;           // of its metrics, in the history's order
  std::map<std::string, std::string> text;  // by metric
};

std::string Number(double value) { return absl::StrFormat("%.4g", value); }

// Means over the last steps, and the held-out reward before and after.
absl::StatusOr<ComparedJob> Describe(const Connection& connection, const std::string& job) {
  ComparedJob compared;
  auto trainer = connection.Trainer();
  auto context = connection.Context();
  v1::GetJobRequest request;
  request.set_job(job);
  v1::JobDescription description;
  TANDEM_RETURN_IF_ERROR(
      CallStatus(trainer->Describe(context.get(), request, &description), "trainer_server", connection.trainer_address));
  v1::JobSpec spec;
  if (!google::protobuf::TextFormat::ParseFromString(description.job_text(), &spec)) {
    return absl::InternalError(absl::StrCat("job ", job, ": its file cannot be read"));
  }
  Flatten(spec, "", &compared.settings);
  TANDEM_ASSIGN_OR_RETURN(compared.history, FetchHistory(connection, job));

  const auto put = [&](const std::string& name, const std::string& text) {
    if (compared.text.emplace(name, text).second) compared.names.push_back(name);
  };
  put("state", StateWord(description.status().state()));
  put("steps", absl::StrCat(description.status().step(), "/", description.status().num_steps()));
  std::vector<const v1::EvaluationMetrics*> evaluations;
  const v1::StepMetrics* last = nullptr;
  for (const v1::WatchResponse& event : compared.history.events) {
    if (event.has_evaluation()) evaluations.push_back(&event.evaluation());
    if (event.has_step()) last = &event.step();
  }
  if (!evaluations.empty()) {
    put("held-out reward, first", Number(evaluations.front()->reward()));
    put("held-out reward, last", Number(evaluations.back()->reward()));
  }
  if (last == nullptr) return compared;
  for (const v1::NamedValue& value : last->values()) {
    const auto series = SeriesOf(compared.history, value.name());
    const std::size_t count = std::min(series.size(), kComparedSteps);
    double sum = 0;
    for (std::size_t i = series.size() - count; i < series.size(); ++i) sum += series[i].second;
    put(value.name(), Number(sum / static_cast<double>(count)));
  }
  return compared;
}

}  // namespace

absl::Status Completions(const Connection& connection, const Words& words, v1::CompletionsRequest filters) {
  TANDEM_ASSIGN_OR_RETURN(*filters.mutable_job(), OneWord(words, "completions", "JOB [--step=N]"));
  auto trainer = connection.Trainer();
  auto context = connection.Context();
  auto reader = trainer->Completions(context.get(), filters);
  v1::CompletionRecord record;
  std::vector<v1::CompletionRecord> group;
  std::pair<std::int64_t, std::int64_t> shown(-1, -1);  // step and prompt
  bool is_empty = true;
  while (reader->Read(&record)) {
    is_empty = false;
    const std::pair<std::int64_t, std::int64_t> place(record.step(), record.group_index());
    if (connection.json) {
      Print(ToJson(record));
    } else if (filters.has_group_index()) {
      if (!group.empty() && place != shown) {
        PrintSideBySide(group);
        group.clear();
      }
      group.push_back(record);
    } else {
      if (place != shown) Print(GroupTitle(record));
      Print(absl::StrCat(absl::StrJoin(RewardParts(record), "  "), "\n    ", record.completion()));
    }
    shown = place;
  }
  TANDEM_RETURN_IF_ERROR(CallStatus(reader->Finish(), "trainer_server", connection.trainer_address));
  if (!group.empty()) PrintSideBySide(group);
  if (is_empty && !connection.json) Print("no completion passes the filters");
  return absl::OkStatus();
}

absl::Status Compare(const Connection& connection, const Words& words) {
  if (words.size() != 2) return absl::InvalidArgumentError("usage: tandem compare JOB JOB");
  ComparedJob jobs[2];
  for (int i = 0; i < 2; ++i) { TANDEM_ASSIGN_OR_RETURN(jobs[i], Describe(connection, words[static_cast<std::size_t>(i)])); }
  const auto or_dash = [](const std::map<std::string, std::string>& values, const std::string& name) {
    const auto found = values.find(name);
    return found == values.end() ? std::string("-") : found->second;
  };
  std::vector<std::vector<std::string>> settings = {{"setting", words[0], words[1]}};
  std::map<std::string, std::string> both = jobs[0].settings;
  both.insert(jobs[1].settings.begin(), jobs[1].settings.end());
  for (const auto& [name, value] : both) {
    const std::string a = or_dash(jobs[0].settings, name), b = or_dash(jobs[1].settings, name);
    if (a != b) settings.push_back({name, a, b});
  }
  std::vector<std::vector<std::string>> results = {
      {absl::StrCat("result, mean of the last ", kComparedSteps, " steps"), words[0], words[1]}};
  std::vector<std::string> names = jobs[0].names;
  for (const std::string& name : jobs[1].names) {
    if (jobs[0].text.count(name) == 0) names.push_back(name);
  }
  for (const std::string& name : names) results.push_back({name, or_dash(jobs[0].text, name), or_dash(jobs[1].text, name)});
  if (connection.json) {
    for (const auto* rows : {&settings, &results}) {
      for (std::size_t i = 1; i < rows->size(); ++i)
        Print(FormatComparison((*rows)[i], rows == &settings ? "setting" : "result"));
    }
    return absl::OkStatus();
  }
  Print(settings.size() == 1 ? "the two jobs have the same settings" : FormatTable(settings));
  Print("\n" + FormatTable(results));
  return absl::OkStatus();
}

absl::Status History(const Connection& connection, const Words& words, const std::string& tensorboard) {
  TANDEM_ASSIGN_OR_RETURN(const std::string job, OneWord(words, "history", "JOB [--tensorboard=DIRECTORY]"));
  TANDEM_ASSIGN_OR_RETURN(const JobHistory history, FetchHistory(connection, job));
  if (tensorboard.empty()) {
    for (const v1::WatchResponse& event : history.events) Print(ToFlatJson(event));
    return absl::OkStatus();
  }
  TANDEM_ASSIGN_OR_RETURN(EventFileWriter writer, EventFileWriter::Create(tensorboard, history.status));
  for (const v1::WatchResponse& event : history.events) TANDEM_RETURN_IF_ERROR(writer.Append(event));
  Print(connection.json ? absl::StrCat("{\"file\":\"", writer.path(), "\"}") : absl::StrCat("wrote ", writer.path()));
  return absl::OkStatus();
}

absl::Status Plot(const Connection& connection, const Words& words, const PlotOptions& options) {
  TANDEM_ASSIGN_OR_RETURN(const std::string job, OneWord(words, "plot", "JOB [--png=FILE] [--metrics=NAME,...]"));
  TANDEM_ASSIGN_OR_RETURN(const JobHistory history, FetchHistory(connection, job));
  TANDEM_ASSIGN_OR_RETURN(const std::vector<Panel> panels, MakePanels(history, options.metrics));
  TANDEM_RETURN_IF_ERROR(DrawPanels(panels, options.png, TerminalWidth()));
  if (!options.png.empty()) Print(absl::StrCat("wrote ", options.png));
  return absl::OkStatus();
}

}  // namespace tandem
