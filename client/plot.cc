#include "client/plot.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "common/base/unique_fd.h"

namespace tandem {
namespace {

struct NamedPanel {
  const char* metric;
  const char* title;
};
constexpr NamedPanel kUsualPanels[] = {{"reward", "reward of each step"},
                                       {"kl", "KL to the reference (nats a token)"},
                                       {"entropy", "entropy (nats a token)"},
                                       {"completions/mean_length", "completion length (tokens)"},
                                       {"clip_ratio/region_mean", "share of clipped ratios"},
                                       {"grad_norm", "gradient norm before clipping"}};
constexpr std::size_t kMeanSteps = 5;
constexpr int kMissingCommand = 127;  // the shell's

std::vector<std::pair<double, double>> MovingMean(const std::vector<std::pair<double, double>>& points) {
  std::vector<std::pair<double, double>> means;
  double sum = 0;
  for (std::size_t i = 0; i < points.size(); ++i) {
    sum += points[i].second - (i >= kMeanSteps ? points[i - kMeanSteps].second : 0);
    means.emplace_back(points[i].first, sum / static_cast<double>(std::min(i + 1, kMeanSteps)));
  }
  return means;
}

Panel MakePanel(const JobHistory& history, const std::string& metric, const std::string& title) {
  Panel panel{.title = title, .curves = {}};
  const auto points = SeriesOf(history, metric);
  panel.curves.push_back({"step", "points", points});
  panel.curves.push_back({"mean of five", "lines lw 2", MovingMean(points)});
  if (metric != "reward") return panel;
  Curve held_out{"held-out", "linespoints lw 2", {}};
  for (const v1::WatchResponse& event : history.events) {
    if (event.has_evaluation()) held_out.points.emplace_back(event.evaluation().step(), event.evaluation().reward());
  }
  if (!held_out.points.empty()) panel.curves.push_back(std::move(held_out));
  return panel;
}

// Least and largest value of all curves.
std::pair<double, double> Range(const Panel& panel) {
  std::pair<double, double> range(std::numeric_limits<double>::infinity(), -std::numeric_limits<double>::infinity());
  for (const Curve& curve : panel.curves) {
    for (const auto& [step, value] : curve.points) range = {std::min(range.first, value), std::max(range.second, value)};
  }
  return range;
}

// gnuplot draws to its standard output where it cannot write to the file that it was told.
absl::Status CheckWritable(const std::string& png) {
  struct stat found {};
  const bool is_there = ::lstat(png.c_str(), &found) == 0;
  const UniqueFd file(::open(png.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0666));
  if (!file.is_open()) return absl::InvalidArgumentError(absl::StrCat("--png: cannot write ", png, ": ", std::strerror(errno)));
  if (!is_there) ::unlink(png.c_str());
  return absl::OkStatus();
}

// Within gnuplot's single quotes.
std::string Quoted(const std::string& text) { return absl::StrCat("'", absl::StrReplaceAll(text, {{"'", "''"}}), "'"); }

}  // namespace

absl::StatusOr<std::vector<Panel>> MakePanels(const JobHistory& history, const std::vector<std::string>& metrics) {
  const v1::StepMetrics* last = nullptr;
  for (const v1::WatchResponse& event : history.events) last = event.has_step() ? &event.step() : last;
  if (last == nullptr) {
    return absl::FailedPreconditionError(absl::StrCat("job ", history.status.job(), " has no finished step to draw"));
  }
  std::vector<Panel> panels;
  if (metrics.empty()) {
    for (const NamedPanel& usual : kUsualPanels) {
      if (!SeriesOf(history, usual.metric).empty()) panels.push_back(MakePanel(history, usual.metric, usual.title));
    }
    return panels;
  }
  for (const std::string& metric : metrics) {
    if (SeriesOf(history, metric).empty()) {
      std::vector<std::string> names;
      for (const v1::NamedValue& value : last->values()) names.push_back(value.name());
      return absl::InvalidArgumentError(
          absl::StrCat("--metrics: the job recorded no '", metric, "'; it has: ", absl::StrJoin(names, ", ")));
    }
    const auto* const usual = std::ranges::find(kUsualPanels, metric, [](const NamedPanel& panel) { return panel.metric; });
    panels.push_back(MakePanel(history, metric, usual == std::end(kUsualPanels) ? metric : usual->title));
  }
  return panels;
}

std::string PlotScript(const std::vector<Panel>& panels, const std::string& png, std::size_t width) {
  constexpr int kTextRows = 16;
  std::string script;
  if (png.empty()) {
    absl::StrAppend(&script, "set terminal dumb size ", std::clamp<std::size_t>(width - 2, 60, 110), ",", kTextRows, "\n");
  } else {
    const std::size_t columns = panels.size() > 1 ? 2 : 1, rows = (panels.size() + columns - 1) / columns;
    absl::StrAppend(&script, "set terminal pngcairo noenhanced size ", columns == 1 ? 900 : 1400, ",",
                    columns == 1 ? 500 : 380 * rows, "\nset output ", Quoted(png), "\nset multiplot layout ", rows, ",", columns,
                    "\n");
  }
  absl::StrAppend(&script, "set xlabel 'step'\nset grid\nset key below\n");
  for (const Panel& panel : panels) {
    std::string plots;
    for (std::size_t i = 0; i < panel.curves.size(); ++i) {
      absl::StrAppend(&script, "$curve", i, " << EOD\n");
      for (const auto& [step, value] : panel.curves[i].points) absl::StrAppendFormat(&script, "%.0f %.9g\n", step, value);
      absl::StrAppend(&script, "EOD\n");
      absl::StrAppend(&plots, i == 0 ? "" : ", ", "$curve", i, " using 1:2 with ", panel.curves[i].style, " title ",
                      Quoted(panel.curves[i].title));
    }
    const auto [low, high] = Range(panel);
    if (low == high) {
      absl::StrAppendFormat(&script, "set yrange [%.9g:%.9g]\n", low - 0.5, high + 0.5);
    } else {
      absl::StrAppend(&script, "set yrange [*:*]\n");
    }
    absl::StrAppend(&script, "set title ", Quoted(panel.title), "\nplot ", plots, "\n");
  }
  return script;
}

absl::Status DrawPanels(const std::vector<Panel>& panels, const std::string& png, std::size_t width) {
  if (!png.empty()) TANDEM_RETURN_IF_ERROR(CheckWritable(png));
  const std::string script = PlotScript(panels, png, width);
  std::fflush(stdout);
  std::FILE* const gnuplot = ::popen("gnuplot", "we");
  if (gnuplot == nullptr) return absl::InternalError("gnuplot cannot be started");
  // A gnuplot that ends before it has read all tells why by its status.
  const auto on_broken_pipe = std::signal(SIGPIPE, SIG_IGN);
  const bool is_sent = std::fwrite(script.data(), 1, script.size(), gnuplot) == script.size();
  const int ended = ::pclose(gnuplot);
  std::signal(SIGPIPE, on_broken_pipe);
  if (WIFEXITED(ended) && WEXITSTATUS(ended) == kMissingCommand) {
    return absl::FailedPreconditionError(
        "gnuplot is not installed; Debian's package is gnuplot-nox. `tandem history` has the figures");
  }
  if (!is_sent || ended != 0) return absl::InternalError(absl::StrCat("gnuplot failed with status ", ended));
  return absl::OkStatus();
}

}  // namespace tandem
