// A job's curves, drawn by gnuplot into the terminal or a PNG file.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "client/job_history.h"
#include "common/base/status.h"

namespace tandem {

struct Curve {
  std::string title;
  const char* style = "lines";                    // gnuplot's words
  std::vector<std::pair<double, double>> points;  // step, value
};
struct Panel {
  std::string title;
  std::vector<Curve> curves;
};

// One panel a metric: its steps with a mean over five, and for the reward the held-out ones. `metrics` empty: reward, KL,
// entropy, completion length, clip ratio, gradient norm, those that the job recorded. Errors: FAILED_PRECONDITION (no step yet),
// INVALID_ARGUMENT naming a metric that the job has not, and those that it has.
absl::StatusOr<std::vector<Panel>> MakePanels(const JobHistory& history, const std::vector<std::string>& metrics);

// gnuplot's script that draws `panels`, data included. `png` empty: text of `width` characters.
std::string PlotScript(const std::vector<Panel>& panels, const std::string& png, std::size_t width);

// Errors: INVALID_ARGUMENT (`png` cannot be written), FAILED_PRECONDITION (gnuplot is missing), INTERNAL (it fails).
absl::Status DrawPanels(const std::vector<Panel>& panels, const std::string& png, std::size_t width);

}  // namespace tandem
