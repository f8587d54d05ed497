// Published recipes by name: what a paper or trainer states of loss, advantage, optimizer, sampling and batch, as a job file that
// the job's own fields are laid over. Pure functions; thread-safe.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "proto/job.pb.h"

namespace tandem {

// Names in alphabetical order.
std::vector<std::string> RecipeNames();

// Fills what `spec` does not set from the recipe that it names; what it sets wins, and a RolloutCorrection, DynamicSampling or
// ReferenceSync of its own replaces the recipe's whole. Adds to `notes` what the recipe states and a job cannot take from it, to
// `faults` a name that is none. Returns the paths of the fields that the recipe gave, as "optimizer.learning_rate".
std::set<std::string> ApplyRecipe(v1::JobSpec* spec, std::vector<std::string>* notes, std::vector<std::string>* faults);

// Settings that are allowed together and known to mislead, one sentence each: field, value, what happens. `given`: the job as it
// was written, before recipe and defaults; `resolved`: as it runs.
std::vector<std::string> MisleadingSettings(const v1::JobSpec& given, const v1::JobSpec& resolved);

}  // namespace tandem
