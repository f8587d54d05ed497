// What the trainer reads: job files, data sets, and its own files after a crash or a careless hand.
#include <cstring>
#include <filesystem>
#include <memory>

#include "common/base/check.h"
#include "common/base/hash.h"
#include "nlohmann/json.hpp"
#include "tests/fuzz/fuzz_input.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/trainer_server/support/fake_model.h"
#include "trainer_server/checkpoint/checkpoint_store.h"
#include "trainer_server/job/content_store.h"
#include "trainer_server/job/history.h"
#include "trainer_server/job/job_plan.h"
#include "trainer_server/job/job_store.h"
#include "trainer_server/prompt/prompt_source.h"

namespace tandem::fuzz {
namespace {

constexpr std::size_t kArrayBytes = 16;

// A data set in a content store, and jobs that name it.
struct StoredData {
  testing::TemporaryDirectory directory;
  std::unique_ptr<ContentStore> store = ContentStore::Open(directory.path(), 1 << 20).value();
  std::string sha256;

  explicit StoredData(const std::string& bytes) : sha256(Sha256Hex(bytes)) {
    auto upload = store->BeginUpload(sha256, bytes.size()).value();
    TANDEM_CHECK(upload->Append(bytes).ok() && upload->Commit().ok(), sha256);
  }
};

constexpr char kRows[] = "{\"prompt\": \"1 + 1\", \"answer\": 2}\n{\"prompt\": \"2 + 3\", \"answer\": 5}\n";

std::string JobOf(const std::string& sha256, const std::string& more) {
  return absl::StrCat(
      R"(name: "a" num_steps: 4 rollout { prompts_per_step: 2 group_size: 4 sampling { temperature: 1 max_tokens: 8 } }
    adapter { rank: 2 alpha: 4 } optimizer { learning_rate: 0.1 } data { content: ")",
      sha256, "\" } ", more);
}

}  // namespace

FuzzTarget JobTextTarget() {
  const auto data = std::make_shared<StoredData>(kRows);
  const JobSurroundings surroundings{SmallModel(), std::make_shared<ByteEncoder>(), data->store.get(),
                                     [] { return SmallNode(); }};
  const auto read = [data, surroundings](const std::string& input) {
    auto plan = PlanJob(input, surroundings, JobOrigin::kSubmitted);
    if (!plan.ok()) return;
    const absl::Status measured = MeasureMemory(surroundings, SmallNode(), &*plan);
    if (measured.ok()) KeepGroupsWhole(surroundings, SmallNode(), &*plan);
    const auto text = JobText(*plan);
    if (!text.ok()) return;
    // What is stored with the job must be what its next life reads.
    const auto stored = PlanJob(*text, surroundings, JobOrigin::kStored);
    TANDEM_CHECK(stored.ok(), stored.status().ToString(), "\n", *text);
  };
  FuzzTarget target{.read = read, .seeds = {}, .words = {}};
  const std::string ended = "rewards { weight: 1 ended_by_itself {} } ";
  for (const std::string& more :
       {ended, ended + "recipe: 'dapo'", ended + "recipe: 'gspo' evaluation { }",
        std::string(
            "rewards { weight: 1 numeric_answer { answer_field: 'answer' } } loss { preset: LOSS_PRESET_GRPO beta: 0.1 }"),
        ended + "evaluation { interval_steps: 2 num_prompts: 1 sampling { max_tokens: 4 } } data { held_out_share: 0.5 }",
        ended + "loss { preset: LOSS_PRESET_CISPO updates_per_rollout: 2 mini_batches_per_rollout: 2 } batch { "
                "micro_batch_tokens: 64 }",
        ended + "advantage { scale: ADVANTAGE_SCALE_GROUP } rollout { dynamic_sampling { max_rounds: 3 } }",
        std::string("rewards { weight: 1 json_schema { schema: '{\"type\": \"object\"}' } } rewards { name: 'r' weight: .2 "
                    "regular_expression { pattern: 'a+b' } }")}) {
    target.seeds.push_back(JobOf(data->sha256, more));
  }
  const auto* const spec = v1::JobSpec::descriptor();
  for (int i = 0; i < spec->field_count(); ++i) {
    target.words.push_back(spec->field(i)->name());
    const auto* const inner = spec->field(i)->message_type();
    for (int k = 0; inner != nullptr && k < inner->field_count(); ++k) {
      target.words.push_back(inner->field(k)->name());
      const auto* const values = inner->field(k)->enum_type();
      for (int v = 0; values != nullptr && v < values->value_count(); ++v) target.words.push_back(values->value(v)->name());
    }
  }
  for (const char* word : {"nan", "inf", "-1", "4294967295", "18446744073709551615", "1e-300", "{ }", "\"\\377\"", "true"}) {
    target.words.push_back(word);
  }
  return target;
}

FuzzTarget DataSetTarget() {
  const auto encoder = std::make_shared<ByteEncoder>();
  const auto read = [encoder](const std::string& input) {
    const InputFile file(input);
    const auto data = DataSet::Open(file.path());
    if (!data.ok()) return;
    v1::DataConfig config;
    config.set_prompt_field("prompt");
    config.set_apply_chat_template(true);
    for (std::size_t i = 0; i < std::min<std::size_t>((*data)->num_rows(), 64); ++i) {
      const auto row = (*data)->ReadRow(i);
      if (!row.ok()) continue;
      row->dump();  // rewards and messages quote rows: it is text, all of it
      EncodePrompt(*encoder, config, *row, (*data)->line_of(i)).IgnoreError();
    }
    config.set_held_out_share(0.5);
    config.set_max_prompt_tokens(100);
    SelectRows(*encoder, config, **data).IgnoreError();
  };
  return {.read = read,
          .seeds = {kRows, "[{\"prompt\": \"a\"},\n {\"prompt\": [{\"role\": \"user\", \"content\": \"b\"}]}]",
                    "prompt,answer\r\n\"a, \"\"b\"\"\nc\",1\r\nd,2\r\n", "\xef\xbb\xbf{\"prompt\": \"\\ud83d\\ude00\"}\n\n"},
          .words = {"\"prompt\"", "\"\"", "\r\n", "PAR1", "\x1f\x8b", "\xef\xbb\xbf", "[[[[", "{\"a\":{\"a\":", "\\ud800",
                    "\\u0000"}};
}

FuzzTarget CheckpointTarget() {
  const auto directory = std::make_shared<testing::TemporaryDirectory>();
  const auto arrays = std::make_shared<std::vector<std::byte>>(4 * kArrayBytes);
  const auto view = [arrays] {
    const std::span<std::byte> all(*arrays);
    return CheckpointArrays{.adapter = all.subspan(0, kArrayBytes),
                            .first_moments = all.subspan(kArrayBytes, kArrayBytes),
                            .second_moments = all.subspan(2 * kArrayBytes, kArrayBytes),
                            .reference = all.subspan(3 * kArrayBytes, kArrayBytes)};
  };
  auto store = CheckpointStore::Open(directory->path());
  CheckpointState state;
  state.step = 7;
  state.evaluation = {.evaluated_step = 6, .best_step = 7, .best_value = 0.5, .risen_value = 0.5};
  TANDEM_CHECK(store.ok() && store->Write(state, "job", view(), 1).ok(), "checkpoint");
  const std::string step = directory->path() + "/step-000007/";
  const auto read = [directory, view, step](const std::string& input) {
    // "manifest" is the file's own text; an empty one is made to fit the other parts, so that these are looked at.
    const std::vector<std::string> parts = SplitParts(input, 3);
    nlohmann::json manifest = {{"format", 2}, {"step", 7}, {"files", nlohmann::json::object()}};
    WriteText(step + "state.json", parts[1]);
    WriteText(step + "adapter.bin", parts[2]);
    for (const auto& entry : std::filesystem::directory_iterator(step)) {
      const std::string name = entry.path().filename().string(), text = ReadText(entry.path().string());
      if (name != "manifest.json") manifest["files"][name] = {{"size_bytes", text.size()}, {"sha256", Sha256Hex(text)}};
    }
    WriteText(step + "manifest.json", parts[0].empty() ? manifest.dump() : parts[0]);
    const CheckpointStore checkpoints = CheckpointStore::OpenForReading(directory->path());
    checkpoints.LoadNewest("job", view()).IgnoreError();
    checkpoints.ReadBestAdapter().IgnoreError();
  };
  const std::string manifest = ReadText(step + "manifest.json"), written = ReadText(step + "state.json");
  return {.read = read,
          .seeds = {JoinParts({"", written, ReadText(step + "adapter.bin")}),
                    JoinParts({manifest, written, ReadText(step + "adapter.bin")})},
          .words = {"\"format\"", "\"files\"", "\"size_bytes\"", "\"sha256\"", "\"best_step\"", "\"evaluation\"",
                    "18446744073709551615", "-1", "null", "[[[[", "{\"a\":{\"a\":"}};
}

FuzzTarget HistoryTarget() {
  const auto directory = std::make_shared<testing::TemporaryDirectory>();
  std::filesystem::create_directory(directory->File("completions"));
  const auto read = [directory](const std::string& input) {
    const std::vector<std::string> parts = SplitParts(input, 2);
    WriteText(directory->File("history.jsonl"), parts[0]);
    WriteText(directory->File("completions/step-000001.jsonl"), parts[1]);
    HistoryReader reader(directory->path());
    while (const auto event = reader.Next()) {
      DataCountsOf(event->values);
      TANDEM_CHECK(FromJsonLine(ToJsonLine(*event)).has_value(), ToJsonLine(*event));
    }
    for (const std::uint64_t step : StepsWithCompletions(directory->path())) {
      ReadCompletions(directory->path(), step, [](const v1::CompletionRecord&) { return true; }).IgnoreError();
    }
  };
  return {
      .read = read,
      .seeds = {JoinParts({"{\"kind\":\"data\",\"step\":0,\"rows\":10,\"trained\":8,\"times\":{}}\n"
                           "{\"kind\":\"step\",\"step\":1,\"reward\":0.5,\"times\":{\"step_time\":2.5}}\n"
                           "{\"kind\":\"evaluation\",\"step\":1,\"reward\":0.25,\"times\":{}}\n",
                           "{\"step\":1,\"prompt\":\"a\",\"completion\":\"b\",\"rewards\":[{\"name\":\"r\",\"value\":1}]}\n"})},
      .words = {"\"kind\"", "\"step\"", "\"data\"", "\"evaluation\"", "\"times\"", "\"rows\"", "-1e308", "1e308", "-1", "\n"}};
}

FuzzTarget JobStoreTarget() {
  const auto directory = std::make_shared<testing::TemporaryDirectory>();
  const std::string path = directory->File("jobs.sqlite");
  const auto remove = [path] {
    for (const char* suffix : {"", "-wal", "-shm", "-journal"}) std::filesystem::remove(path + suffix);
  };
  std::vector<std::string> seeds;
  {
    auto store = JobStore::Open(path);
    TANDEM_CHECK(store.ok(), store.status().ToString());
    seeds.push_back(ReadText(path));  // empty but for the schema
    v1::JobSpec spec;
    spec.set_name("a");
    spec.set_num_steps(3);
    for (int i = 0; i < 3; ++i) TANDEM_CHECK((*store)->Add(spec, "name: 'a'", "ada").ok(), "add");
  }
  seeds.push_back(ReadText(path));  // closing it took the log into the file
  const auto read = [directory, path, remove](const std::string& input) {
    remove();
    WriteText(path, input);
    const auto store = JobStore::Open(path);
    if (!store.ok()) return;
    const auto jobs = (*store)->List(100, std::nullopt, {});
    (*store)->Next().IgnoreError();
    (*store)->resident().IgnoreError();
    if (!jobs.ok()) return;
    for (const StoredJob& job : *jobs) {
      (*store)->Pause(job.status.job()).IgnoreError();
      (*store)->Resume(job.status.job()).IgnoreError();
      (*store)->Cancel(job.status.job()).IgnoreError();
    }
  };
  return {.read = read, .seeds = std::move(seeds), .words = {"SQLite format 3", "jobs", "CREATE TABLE", "user_version"}};
}

}  // namespace tandem::fuzz
