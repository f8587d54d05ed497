// What the command `tandem` reads on the user's machine.
#include <map>
#include <memory>

#include "client/connection.h"
#include "client/job_file.h"
#include "client/trl_config.h"
#include "common/base/check.h"
#include "google/protobuf/text_format.h"
#include "tests/fuzz/fuzz_input.h"
#include "tests/fuzz/fuzz_target.h"

namespace tandem::fuzz {

FuzzTarget ClientConfigTarget() {
  const auto read = [](const std::string& input) {
    const InputFile file(input);
    for (const char* context : {"", "a"}) {
      const std::map<std::string, std::string> environment = {{"TANDEM_CONFIG", file.path()}, {"TANDEM_CONTEXT", context}};
      ResolveConnection({}, [&](const std::string& name) {
        const auto found = environment.find(name);
        return found == environment.end() ? std::string() : found->second;
      }).IgnoreError();
    }
  };
  return {
      .read = read,
      .seeds =
          {R"({"context": "a", "contexts": {"a": {"trainer": "h:1", "rollout": "h:2"}, "b": {"ca": "ca.pem", "token_file": "t"}}})"},
      .words = {"\"context\"", "\"contexts\"", "\"trainer\"", "\"ca\"", "\"cert\"", "\"key\"", "\"token_file\"", "\"a\"",
                "/dev/null", "\"..\"", "null", "[[[[", "{\"a\":{\"a\":"}};
}

FuzzTarget JobFileTarget() {
  const auto read = [](const std::string& input) {
    const std::vector<std::string> parts = SplitParts(input, 3);
    const InputFile file(parts[2]);
    auto spec = ReadJobFile(file.path(), {parts[0]});
    if (spec.ok()) AddPythonRewards(parts[1], &*spec).IgnoreError();
  };
  return {.read = read,
          .seeds = {JoinParts({"seed: 1", "a.py:correct,well_formed,b.py:f", "name: 'a' num_steps: 3 data { path: 'x.jsonl' }"}),
                    JoinParts({"", "", "rewards { weight: 1 python_function { path: 'r.py' function: 'f' } }"})},
          .words = {"name:", "rewards {", "python_function {", "path:", "../", ".py:", ",", "{", "}", "<", ">", "#", "\\377"}};
}

FuzzTarget TrlConfigTarget() {
  const auto read = [](const std::string& input) {
    const auto imported = ImportTrlConfig(input, "case");
    if (!imported.ok()) return;
    const auto text = ToJobFile(*imported);
    TANDEM_CHECK(text.ok(), text.status().ToString());
    v1::JobSpec spec;
    TANDEM_CHECK(google::protobuf::TextFormat::ParseFromString(*text, &spec), *text);
  };
  return {
      .read = read,
      .seeds =
          {R"({"learning_rate": 1e-6, "num_generations": 8, "loss_type": "dapo", "epsilon_high": 0.28, "beta": 0.0,
                    "reward_weights": [1.0, 0.5], "generation_kwargs": {"min_p": 0.1}, "chat_template_kwargs": {"a": [1]}})",
           "model_name_or_path: Qwen/Qwen3-8B\nuse_peft: true\nlora_r: 16\nlora_target_modules: [q_proj, v_proj]\nmax_steps: 10\n"
           "learning_rate: 1.0e-5\nscale_rewards: group\n",
           "a: &x [1, 2]\nb: *x\nc: {<<: *x}\n"},
      .words = {"learning_rate",
                "num_generations",
                "max_completion_length",
                "per_device_train_batch_size",
                "reward_weights",
                "loss_type",
                "steps_per_generation",
                "num_iterations",
                "generation_kwargs",
                "lora_alpha",
                "&a",
                "*a",
                "<<:",
                "!!binary",
                "? ",
                "- ",
                ": ",
                "[",
                "{",
                "|",
                ">-",
                "---",
                "%YAML",
                ".nan",
                ".inf",
                "1e308",
                "~",
                "\"\\x00\""}};
}

}  // namespace tandem::fuzz
