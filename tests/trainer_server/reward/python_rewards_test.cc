// Python reward functions through real workers, and programs under test: what they do well, and what hostile ones do not do.
#include <netinet/in.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <cmath>
#include <cstdlib>
#include <fstream>
#include <thread>

#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "common/base/clock.h"
#include "common/base/hash.h"
#include "common/base/unique_fd.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/temporary_directory.h"
#include "tests/trainer_server/reward/reward_testing.h"
#include "trainer_server/reward/group_scorer.h"
#include "trainer_server/reward/python_worker.h"

namespace tandem {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

// TANDEM_TEST_PYTHON: another, as of an environment that has math-verify.
std::string Python() {
  const char* const given = std::getenv("TANDEM_TEST_PYTHON");
  return given == nullptr ? "/usr/bin/python3" : given;
}

class PythonRewardsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const auto sandbox = sandbox_.Get(); !sandbox.ok()) GTEST_SKIP() << sandbox.status().message();
    surroundings_.sandbox = &sandbox_;
    surroundings_.path_of_content = [this](const std::string& sha256) -> absl::StatusOr<std::string> {
      return directory_.path() + "/" + sha256;
    };
    surroundings_.worker_pools = std::make_shared<PythonWorkerPools>();
  }

  // A file in the store.
  std::string Store(const std::string& text) {
    std::ofstream(directory_.path() + "/" + Sha256Hex(text), std::ios::binary) << text;
    return Sha256Hex(text);
  }
  std::unique_ptr<RewardFunction> MakeHere(const std::string& text) {
    auto function = MakeRewardFunction(Config("weight: 1 " + text), "rewards[0].", surroundings_);
    EXPECT_TRUE(function.ok()) << text << ": " << function.status();
    return function.ok() ? *std::move(function) : nullptr;
  }
  std::unique_ptr<RewardFunction> MakePython(const std::string& program, const std::string& function,
                                             const std::string& more = "", const std::string& around = "") {
    return MakeHere(absl::StrCat(around, " python_function { content: '", Store(program), "' file_name: 'mine.py' function: '",
                                 function, "' ", more, " }"));
  }
  static absl::StatusOr<RewardColumn> ScoreTexts(const RewardFunction& function, const std::vector<std::string>& texts,
                                                 const Json& row = {{"prompt", "say"}}, const RewardCall& call = {}) {
    std::vector<RewardInput> inputs;
    for (const std::string& text : texts) {
      inputs.push_back({.row = &row, .completion = text, .completion_tokens = 3, .token_ids = {5, 6, 7}});
    }
    return function.Score(inputs, call);
  }
  std::string ErrorOf(const RewardFunction& function, const std::vector<std::string>& texts = {"a", "b"}) {
    const auto rewards = ScoreTexts(function, texts);
    EXPECT_FALSE(rewards.ok());
    return std::string(rewards.status().message());
  }

  testing::TemporaryDirectory directory_;
  SandboxSource sandbox_{Python()};
  RewardSurroundings surroundings_;
};

TEST_F(PythonRewardsTest, TenFunctionsWrittenForTrlRunUnchanged) {
  std::ifstream file(TANDEM_GOLDEN_DIR "/rewards/trl_style.py");
  const std::string program(std::istreambuf_iterator<char>(file), {});
  const Json row = {{"prompt", {{{"role", "system"}, {"content", "Reason."}}, {{"role", "user"}, {"content", "1/2 + 1/2 = ?"}}}},
                    {"answer", "1"},
                    {"solution", "1"},
                    {"task", "math"}};
  const std::vector<std::string> texts = {"<reasoning>\nbecause = 1\n</reasoning>\n<answer>\n1\n</answer>", "it is is is 1/2.",
                                          ""};
  const std::pair<const char*, RewardColumn> cases[] = {
      {"correctness", {2.0, 0.0, 0.0}},  {"integer", {0.5, 0.0, 0.0}},     {"strict_format", {0.5, 0.0, 0.0}},
      {"xml_count", {0.5, 0.0, 0.0}},    {"length", {3.0, 3.0, 3.0}},      {"judged", {1.0, 0.0, 0.0}},
      {"only_maths", {1.0, -1.0, -1.0}}, {"exact_value", {1.0, 0.0, 0.0}}, {"repetition_penalty", {0.0, -0.25, 0.0}},
      {"curriculum", {0.0, 0.5, 0.0}},
  };
  std::vector<std::unique_ptr<RewardFunction>> functions;  // of one file: one pool
  for (const auto& [name, expected] : cases) functions.push_back(MakePython(program, name));
  for (std::size_t i = 0; i < functions.size(); ++i) {
    ASSERT_TRUE(functions[i]->Check().ok()) << functions[i]->Check();
    EXPECT_EQ(functions[i]->name(), cases[i].first);
    const auto rewards = ScoreTexts(*functions[i], texts, row, {.step = 5, .num_steps = 10});
    ASSERT_TRUE(rewards.ok()) << rewards.status();
    EXPECT_EQ(*rewards, cases[i].second) << cases[i].first;
  }
  Json other = row;
  other["task"] = "code";
  EXPECT_EQ(*ScoreTexts(*functions[6], texts, other), RewardColumn(3));
}

TEST_F(PythonRewardsTest, TextPromptsAreTextUnlessMessagesAreAskedFor) {
  const std::string program =
      "def shape(prompts, completions, **columns):\n"
      "    assert 'prompt' not in columns and columns['hint'] == ['h'] * 2, columns\n"
      "    chat = isinstance(prompts[0], list)\n"
      "    if chat: assert prompts[0][-1] == {'role': 'user', 'content': 'say'} and completions[0][0]['role'] == 'assistant'\n"
      "    return [float(chat)] * len(prompts)\n"
      "def bare(completions):\n"
      "    return [len(text) for text in completions]\n";
  const Json row = {{"prompt", "say"}, {"hint", "h"}};
  EXPECT_THAT(*ScoreTexts(*MakePython(program, "shape"), {"a", "b"}, row), ElementsAre(0.0, 0.0));
  surroundings_.worker_pools = std::make_shared<PythonWorkerPools>();
  EXPECT_THAT(*ScoreTexts(*MakePython(program, "shape", "as_messages: true"), {"a", "b"}, row), ElementsAre(1.0, 1.0));
  surroundings_.worker_pools = std::make_shared<PythonWorkerPools>();
  const std::string long_text(3'000'000, 'x');
  EXPECT_THAT(
      *ScoreTexts(*MakePython(program, "bare"), {"\xc3\xa4\xc3\xb6", "", long_text}, {{"prompt", "say"}, {"long", long_text}}),
      ElementsAre(2.0, 0.0, 3'000'000.0));
}

TEST_F(PythonRewardsTest, FaultsOfAFileAreToldWhenTheJobIsSubmitted) {
  const auto said = [&](const std::string& program, const std::string& function) {
    surroundings_.worker_pools = std::make_shared<PythonWorkerPools>();
    const absl::Status checked = MakePython(program, function)->Check();
    EXPECT_EQ(checked.code(), absl::StatusCode::kInvalidArgument) << checked;
    return std::string(checked.message());
  };
  EXPECT_THAT(said("def right(**k): return []\ndef _hidden(): pass\n", "rigth"),
              HasSubstr("mine.py has no 'rigth'; its functions are right"));
  EXPECT_THAT(said("x = 3", "x"), HasSubstr("'x' is a int, not a function"));
  EXPECT_THAT(said("import absent_package", "f"),
              HasSubstr("ModuleNotFoundError: No module named 'absent_package'\n  mine.py:1"));
  EXPECT_THAT(said("def f(:", "f"), HasSubstr("SyntaxError"));
  EXPECT_THAT(said("import os; os._exit(3)", "f"), HasSubstr("its worker ended with code 3"));
  EXPECT_THAT(said("raise SystemExit(4)", "f"), HasSubstr("mine.py cannot be imported: SystemExit: 4"));
  EXPECT_THAT(
      Faults("weight: 1 python_function { path: 'x.py' content: 'none' file_name: '../x' function: '1f' memory_limit_mib: 1 "
             "max_attempts: 1000 time_limit_seconds: -1 }"),
      ::testing::AllOf(HasSubstr("python_function.path: 'x.py'"), HasSubstr("file_name: '../x'"), HasSubstr("function: '1f'"),
                       HasSubstr("memory_limit_mib: 1, must be 64"), HasSubstr("max_attempts: 1000"),
                       HasSubstr("time_limit_seconds: -1, must be 0.001 to 3600"), HasSubstr("python_function.content: ")));
  EXPECT_THAT(Faults("weight: 1 on_failure: REWARD_FAILURE_POLICY_COUNT_AS_NONE ended_by_itself {}"),
              HasSubstr("rewards[2].on_failure: has no meaning here"));
}

struct Wrong {
  const char* body;
  const char* said;
};

// Also CASES C26: one value too few or too many, a scalar, text.
TEST_F(PythonRewardsTest, EachFaultNamesFunctionAndCompletion) {
  const Wrong cases[] = {
      {"return [1.0]", "reward function 'right': mine.py:f: returned 1 values for 2 completions"},
      {"return [1.0] * 3", "returned 3 values for 2 completions"},
      {"return 1.0", "returned a float, must be a list of 2 numbers or None"},
      {"return 'ab'", "returned a str, must be a list of 2 numbers or None"},
      {"return None", "returned a NoneType"},
      {"return [1, float('nan')]", "reward function 'right': completion 1: returned nan, must be finite or None"},
      {"return [float('inf'), 1]", "completion 0: returned inf, must be finite or None"},
      {"return ['1', 1]", "completion 0: returned '1', must be a number or None"},
      {"return [1j, 1]", "completion 0: returned 1j, must be a number or None"},
      {"return [1, 10 ** 400]", "completion 1: returned 1000"},
      {"helper()",
       "mine.py:f: raised ZeroDivisionError: division by zero\n  mine.py:4 in f: helper()\n  mine.py:2 in helper: 1 / 0"},
      {"raise SystemExit('gone')", "raised SystemExit: gone"},
      {"return (1 / len(text[1:]) for text in completions)", "mine.py:f: raised ZeroDivisionError: division by zero"},
      {"return [1, 10 ** 5000]", "completion 1: returned a int"},
  };
  for (const Wrong& wrong : cases) {
    surroundings_.worker_pools = std::make_shared<PythonWorkerPools>();
    const std::string program = absl::StrCat("def helper():\n    1 / 0\ndef f(completions, **kwargs):\n    ", wrong.body, "\n");
    EXPECT_THAT(ErrorOf(*MakePython(program, "f", "", "name: 'right'")), HasSubstr(wrong.said));
    // The same counted as None, where it concerns.
    surroundings_.worker_pools = std::make_shared<PythonWorkerPools>();
    std::vector<std::string> failures;
    const auto rewards =
        ScoreTexts(*MakePython(program, "f", "", "name: 'right' on_failure: REWARD_FAILURE_POLICY_COUNT_AS_NONE"), {"a", "b"},
                   {{"prompt", "say"}}, {.on_failure = [&](const RewardFailure& failure) { failures.push_back(failure.text); }});
    ASSERT_TRUE(rewards.ok()) << rewards.status();
    ASSERT_EQ(failures.size(), 1u) << wrong.body;
    EXPECT_THAT(failures[0], HasSubstr(wrong.said));
    const std::size_t at = failures[0].find("completion ");
    for (std::size_t i = 0; i < 2; ++i) {
      const bool concerns_one = at != std::string::npos && failures[0].find(": completion ") != std::string::npos;
      EXPECT_EQ(rewards->at(i).has_value(), concerns_one && failures[0][at + 11] != static_cast<char>('0' + i))
          << wrong.body << i;
    }
  }
}

TEST_F(PythonRewardsTest, WorkersThatAreLostAreNamedAndReplaced) {
  const Wrong cases[] = {
      {"while True: pass", "mine.py:f: took longer than its limit of 500ms"},
      {"import time; time.sleep(1000)", "took longer than its limit of 500ms"},
      {"import os; os._exit(7)", "its worker ended with code 7"},
      {"import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "its worker was ended by signal 11"},
      {"while True: print('x' * 100000)", "wrote without end"},
      {"import os\n    for fd in range(3, 60):\n        try: os.write(fd, b'nonsense')\n        except OSError: pass\n    "
       "os._exit(0)",
       "its worker"},
      {"import os\n    for fd in reversed(range(3, 60)):\n        try:\n            while True: os.write(fd, b'\\0' * 100000)\n  "
       "      except OSError: pass",
       "its worker answered what is no"},
      {"import sys; sys.stderr.write('last words\\n'); import os; os._exit(9)", "its worker ended with code 9: last words"},
      {"x = bytearray(1 << 30)", "raised MemoryError"},
  };
  for (const Wrong& wrong : cases) {
    surroundings_.worker_pools = std::make_shared<PythonWorkerPools>();
    const std::string program =
        absl::StrCat("def f(completions, **kwargs):\n    ", wrong.body, "\n    return [1.0] * len(completions)\n",
                     "def g(completions, **kwargs): return [0.5] * len(completions)\n");
    const auto broken = MakePython(program, "f", "time_limit_seconds: 0.5 max_attempts: 1 memory_limit_mib: 256");
    const auto good = MakePython(program, "g", "memory_limit_mib: 256");
    EXPECT_THAT(ErrorOf(*broken), HasSubstr(wrong.said)) << wrong.body;
    EXPECT_THAT(*ScoreTexts(*good, {"a"}), ElementsAre(0.5)) << wrong.body;
  }
}

TEST_F(PythonRewardsTest, MessagesAreTextWhateverAWorkerWrote) {
  google::protobuf::RepeatedPtrField<v1::RewardConfig> configs;
  const std::string program = "import os\ndef f(**kwargs):\n    os.write(2, b'last \\xff\\xfe words')\n    os._exit(9)\n";
  *configs.Add() =
      Config(absl::StrCat("weight: 1 python_function { content: '", Store(program), "' function: 'f' max_attempts: 1 }"));
  const auto rewards = RewardSet::Create(configs, surroundings_);
  ASSERT_TRUE(rewards.ok()) << rewards.status();
  const Json row = {{"prompt", "say"}};
  const RewardInput input{.row = &row, .completion = "a"};
  EXPECT_THAT(std::string(rewards->Score({&input, 1}).status().message()),
              HasSubstr("code 9: last \xef\xbf\xbd\xef\xbf\xbd words"));
}

TEST_F(PythonRewardsTest, ALostCallIsTriedAgainOnAFreshWorker) {
  // Dies at its first call in a process that has the odd clock value; the values do not depend on it.
  const std::string program =
      "import os, random\n"
      "def f(completions, **kwargs):\n"
      "    if random.SystemRandom().random() < 0.5: os._exit(1)\n"
      "    return [len(text) for text in completions]\n";
  const auto function = MakePython(program, "f", "max_attempts: 40");
  for (int i = 0; i < 10; ++i) EXPECT_THAT(*ScoreTexts(*function, {"a", "bc"}), ElementsAre(1.0, 2.0));
}

TEST_F(PythonRewardsTest, AWorkerThatDiedWhileIdleCostsNoAttempt) {
  const auto function = MakePython("def f(completions, **kwargs): return [1.0] * len(completions)\n", "f", "max_attempts: 1");
  ASSERT_TRUE(ScoreTexts(*function, {"a"}).ok());
  std::ifstream children(absl::StrCat("/proc/self/task/", ::getpid(), "/children"));
  pid_t worker = -1;
  ASSERT_TRUE(children >> worker);
  ASSERT_EQ(::kill(worker, SIGKILL), 0);
  siginfo_t ended{};
  ASSERT_EQ(::waitid(P_PID, static_cast<id_t>(worker), &ended, WEXITED | WNOWAIT), 0);
  EXPECT_THAT(*ScoreTexts(*function, {"a"}), ElementsAre(1.0));
}

TEST_F(PythonRewardsTest, MathVerifyJudgesWhereItIsInstalled) {
  std::ifstream file(TANDEM_GOLDEN_DIR "/../../client/examples/math_verify_rewards.py");
  const auto function = MakePython(std::string(std::istreambuf_iterator<char>(file), {}), "equivalent");
  const absl::Status checked = function->Check();
  if (absl::StrContains(checked.message(), "No module named 'math_verify'")) GTEST_SKIP() << checked.message();
  const Json row = {{"prompt", "say"}, {"solution", "$\\frac{1}{2}$"}};
  EXPECT_THAT(*ScoreTexts(*function, {"It is $0.5$", "so $\\boxed{\\frac{2}{4}}$", "3"}, row), ElementsAre(1.0, 1.0, 0.0));
}

TEST_F(PythonRewardsTest, AnInterruptedCallEndsAtOnce) {
  const auto function = MakePython("import time\ndef f(**kwargs): time.sleep(1000)\n", "f", "time_limit_seconds: 3600");
  const MonotonicTime begin = MonotonicTime::Now();
  const auto rewards = ScoreTexts(*function, {"a"}, {{"prompt", "say"}},
                                  {.is_interrupted = [&] { return MonotonicTime::Now() - begin > absl::Milliseconds(300); }});
  EXPECT_TRUE(absl::IsCancelled(rewards.status())) << rewards.status();
  EXPECT_LT(MonotonicTime::Now() - begin, absl::Seconds(20));
}

TEST_F(PythonRewardsTest, AFunctionSeesNothingOfTheNode) {
  std::ofstream(directory_.path() + "/secret") << "secret";
  const std::string program =
      absl::StrCat(R"(
import os, socket
def f(completions, **kwargs):
    seen = []
    for path in ()",
                   "'", directory_.path(), "/secret', '/etc/passwd', '/etc/shadow', '/root', '/home', '/var', '/sys", R"('):
        if os.path.exists(path): seen.append(path)
    if len([p for p in os.listdir('/proc') if p.isdigit()]) > 4: seen.append('processes')
    if os.getuid() == 0: seen.append('root')
    for path in ('/usr/x', '/x', '/dev/x', '/dev/shm/x', '/rewards/x', '/rewards/mine.py', '/tandem/reward_worker.py'):
        try: open(path, 'w'); seen.append('wrote ' + path)
        except OSError: pass
    if [name for index, name in socket.if_nameindex() if name != 'lo']: seen.append('interfaces')
    if set(os.environ) - {'PATH', 'HOME', 'USER', 'LC_ALL', 'OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'PYTHONDONTWRITEBYTECODE',
                          'PYTHONHASHSEED', 'CUDA_VISIBLE_DEVICES', 'PWD', 'LC_CTYPE'}: seen.append(str(os.environ))
    with open('/tmp/scratch', 'w') as file: file.write('x')
    if seen: raise RuntimeError(', '.join(seen))
    return [1.0]
)");
  const auto rewards = ScoreTexts(*MakePython(program, "f"), {"a"});
  ASSERT_TRUE(rewards.ok()) << rewards.status();
}

TEST_F(PythonRewardsTest, GroupsAreScoredByManyWorkersAtATime) {
  google::protobuf::RepeatedPtrField<v1::RewardConfig> configs;
  const std::string program =
      "import time\n"
      "def size(completions, **kwargs): return [len(text) for text in completions]\n"
      "def begun(completions, **kwargs):\n    begun = time.time()\n    time.sleep(0.3)\n    return [begun] * len(completions)\n";
  for (const char* function : {"size", "begun"}) {
    *configs.Add() =
        Config(absl::StrCat("weight: 1 python_function { content: '", Store(program), "' function: '", function, "' }"));
  }
  const auto rewards = RewardSet::Create(configs, surroundings_);
  ASSERT_TRUE(rewards.ok()) << rewards.status();
  GroupScorer scorer(&*rewards, 4, [] { return false; });
  std::vector<Json> rows(8, {{"prompt", "say"}});
  for (int round = 0; round < 2; ++round) {
    scorer.Begin(1, 2, rows.size());
    for (std::size_t g = 0; g < rows.size(); ++g) {
      scorer.Add(g, {{.row = &rows[g], .completion = "thrown away", .completion_tokens = 1}}, "");
      scorer.Add(g, {{.row = &rows[g], .completion = std::string(g, 'x'), .completion_tokens = 1}}, "");
    }
    const auto tables = scorer.Finish();
    ASSERT_TRUE(tables.ok()) << tables.status();
    double least_gap = 1e9;
    for (std::size_t g = 0; g < rows.size(); ++g) {
      EXPECT_EQ((*tables)[g][0][0], static_cast<double>(g));
      for (std::size_t h = 0; h < g; ++h) least_gap = std::min(least_gap, std::abs(*(*tables)[g][0][1] - *(*tables)[h][0][1]));
    }
    EXPECT_LT(least_gap, 0.3) << "no two calls overlap";
  }
  scorer.Begin(1, 2, 2);
  scorer.Add(0, {{.row = rows.data(), .completion = "", .completion_tokens = 1}}, "");
  EXPECT_TRUE(absl::IsInternal(scorer.Finish().status()));
}

// ---- Programs under test -----------------------------------------------------------------------------------------------------

std::string Fenced(const std::string& program) { return absl::StrCat("Here it is:\n```python\n", program, "\n```\nDone."); }

class CodeTestsTest : public PythonRewardsTest {
 protected:
  double ScoreProgram(const std::string& completion, const Json& tests, const std::string& more = "") {
    const auto function = MakeHere(absl::StrCat("code_tests { tests_field: 'tests' ", more, " }"));
    const auto rewards = ScoreTexts(*function, {completion}, {{"tests", tests}});
    EXPECT_TRUE(rewards.ok() && rewards->at(0).has_value()) << rewards.status();
    return rewards.ok() ? rewards->at(0).value_or(-99) : -99;
  }
  static Json Adds() { return {{{"input", "1 2\n"}, {"output", "3"}}, {{"input", "-1 1"}, {"output", "0\n"}}}; }
};

TEST_F(CodeTestsTest, ShareOfTestsThatPass) {
  const std::string adds = "a, b = map(int, input().split())\nprint(a + b, '')";
  EXPECT_EQ(ScoreProgram(Fenced(adds), Adds()), 1);
  EXPECT_EQ(ScoreProgram(Fenced("print(3)"), Adds()), 0.5);
  EXPECT_EQ(ScoreProgram(Fenced("print(3)"), Adds(), "all: true"), 0);
  EXPECT_EQ(ScoreProgram(adds, Adds()), 0) << "no block";
  EXPECT_EQ(ScoreProgram("```\n" + adds, Adds()), 0) << "a block that is not closed";
  EXPECT_EQ(ScoreProgram(Fenced("print(9)") + "\nNo:\n```py\n" + adds + "\n```\n```bash\nls\n```", Adds()), 1);
  EXPECT_EQ(ScoreProgram(Fenced(adds + "\nraise SystemExit(1)"), Adds()), 0) << "its exit code counts";
  const Json asserts = {"assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'\nassert add(0, 0) == 0"};
  EXPECT_EQ(
      ScoreProgram(Fenced("def add(a, b):\n    print('noise')\n    return a + b\nif __name__ == '__main__': 1 / 0"), asserts), 1);
  EXPECT_EQ(ScoreProgram(Fenced("def add(a, b): return int(a) + int(b)"), asserts), 0.5);
  EXPECT_EQ(ScoreProgram(Fenced("import sys; sys.exit(0)"), asserts), 0) << "an early end passes nothing";
  EXPECT_EQ(ScoreProgram(Fenced("import os; os._exit(0)"), asserts), 0);
}

TEST_F(CodeTestsTest, RowsThatCannotBeReadNameFunctionFieldAndTest) {
  const auto function = MakeHere("name: 'passes' code_tests { tests_field: 'tests' }");
  const auto said = [&](const Json& tests) {
    return std::string(ScoreTexts(*function, {"a"}, {{"tests", tests}}).status().message());
  };
  EXPECT_THAT(said(3), HasSubstr("reward function 'passes': row field 'tests' must be an array of 1 to 64 tests, is number"));
  EXPECT_THAT(said(Json::array()), HasSubstr("is one of 0"));
  EXPECT_THAT(said({"assert 1", {{"input", "x"}}}), HasSubstr("test 1 is {\"input\":\"x\"}, must be"));
  EXPECT_EQ(*ScoreTexts(*function, {"a"}, {{"tests", nullptr}}), RewardColumn(1));
  EXPECT_THAT(
      Faults("weight: 1 code_tests { language: 'rust' memory_limit_mib: 1 time_limit_seconds: 601 }"),
      HasSubstr("code_tests.language: 'rust', must be python\nrewards[2].code_tests.tests_field: empty, must name a field of the "
                "data set's rows\nrewards[2].code_tests.memory_limit_mib: 1, must be 64 to 65536\n"
                "rewards[2].code_tests.time_limit_seconds: 601, must be 0.001 to 600"));
}

// Each of these ends within its limits, prints nothing, leaves no process, and the next program runs as ever. What it prints
// ends it as a program that passes its test.
class HostileProgramTest : public CodeTestsTest, public ::testing::WithParamInterface<std::pair<const char*, const char*>> {
 protected:
  void SetUp() override {
    CodeTestsTest::SetUp();
    ASSERT_EQ(::prctl(PR_SET_CHILD_SUBREAPER, 1), 0);
  }
};

TEST_P(HostileProgramTest, HarmsNothing) {
  const MonotonicTime begin = MonotonicTime::Now();
  const std::string print = "import os\ndef print(text):\n    os.write(1, b'harmed')\n    os._exit(0)\n";
  EXPECT_EQ(
      ScoreProgram(Fenced(print + GetParam().second), {{{"output", "harmed"}}}, "time_limit_seconds: 1 memory_limit_mib: 128"),
      0);
  EXPECT_LT(MonotonicTime::Now() - begin, absl::Seconds(10));
  // Who is left of it? Orphans become children of this process, until the last of them is waited for.
  const MonotonicTime limit = MonotonicTime::Now() + absl::Seconds(5);
  while (::waitpid(-1, nullptr, WNOHANG) >= 0) {
    ASSERT_LT(MonotonicTime::Now(), limit) << "processes are left";
    absl::SleepFor(absl::Milliseconds(5));
  }
  EXPECT_EQ(ScoreProgram(Fenced("print('well')"), {{{"output", "well"}}}), 1);
}

INSTANTIATE_TEST_SUITE_P(
    Each, HostileProgramTest,
    ::testing::Values(
        std::pair("ForkBomb", "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"),
        std::pair("ThreadBomb",
                  "import threading, time\nwhile True:\n    try: threading.Thread(target=time.sleep, args=(99,)).start()\n"
                  "    except RuntimeError: pass"),
        std::pair("DiskFill",
                  "import os\nfor folder in ('/tmp', '/dev/shm', '/dev', '/', '/usr', '/var/tmp'):\n    for i in range(9):\n     "
                  "   try:\n"
                  "            with open(folder + '/f%d' % i, 'wb') as f:\n                if folder != '/tmp': print('harmed')\n"
                  "                for j in range(4096): f.write(b'x' * 65536)\n        except OSError: pass\n"
                  "if sum(os.path.getsize('/tmp/' + f) for f in os.listdir('/tmp')) > 1 << 26: print('harmed')"),
        std::pair("ManyFiles", "import itertools\nfor i in itertools.count():\n    open('/tmp/%d' % i, 'w').close()"),
        std::pair("Memory", "x = []\nwhile True: x.append(bytearray(1 << 20))"),
        std::pair("MemoryOfManyProcesses",
                  "import os, time\nfor i in range(20): os.fork() or (bytearray(60 << 20), time.sleep(99))\n"
                  "x = bytearray(60 << 20)\ntime.sleep(99)"),
        std::pair("MemoryOfChildrenOfAThread",
                  "import threading, time\ndef work():\n    for i in range(4):\n"
                  "        if os.fork() == 0:\n            x = bytearray(60 << 20)\n            time.sleep(99)\n"
                  "    time.sleep(0.5)\n    print('harmed')\nthreading.Thread(target=work).start()"),
        std::pair("ScratchBehindAnEndedProcess",
                  "import time\nif os.fork() == 0: os._exit(0)\nx = b'x' * (75 << 20)\n"
                  "with open('/tmp/f', 'wb') as file:\n    for i in range(62): file.write(b'x' * (1 << 20))\n"
                  "time.sleep(0.3)\nprint('harmed')"),
        std::pair("SharedMemory",
                  "import ctypes, mmap\nlibc = ctypes.CDLL(None)\nif libc.shmget(0, 1 << 30, 0o1600) >= 0: print('harmed')\n"
                  "if libc.memfd_create(b'x', 0) >= 0: print('harmed')\n"
                  "for file in (lambda: -1, lambda: open('/dev/zero', 'r+b').fileno()):\n"
                  "    try: mmap.mmap(file(), 1 << 20); print('harmed')\n    except OSError: pass"),
        std::pair("SocketsOfNoNetworkNamespace",
                  "import socket\nfor family in (socket.AF_VSOCK, socket.AF_ALG):\n"
                  "    try: socket.socket(family, socket.SOCK_STREAM if family == socket.AF_VSOCK else socket.SOCK_SEQPACKET)\n"
                  "    except OSError: continue\n    print('harmed')"),
        std::pair("Interfaces",
                  "import socket\nif [n for i, n in socket.if_nameindex() if n != 'lo']: print('harmed')\n"
                  "socket.socket(socket.AF_PACKET, socket.SOCK_RAW); print('harmed')"),
        std::pair("EndlessOutput", "import sys\nwhile True: sys.stdout.write('harmed' * 10000)"),
        std::pair("EndlessErrors", "import sys\nwhile True: sys.stderr.write('harmed' * 10000)"),
        std::pair("Signals",
                  "import os, signal\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n    except (OSError, "
                  "ValueError): pass\n"
                  "for pid in [-1, 1, os.getppid()] + list(range(2, 70000)):\n    try: os.kill(pid, signal.SIGKILL)\n"
                  "    except OSError: pass\nwhile True: pass"),
        std::pair("LeavesChildren",
                  "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(1000)"),
        std::pair("ClosesItsOutput", "import os, time\nos.close(1); os.close(2); time.sleep(1000)"),
        std::pair("NodeFiles",
                  "import os\nfor p in ('/etc/shadow', '/etc/passwd', '/root', '/home', '/var', '/proc/1/mem', '/proc/1/cwd'):\n"
                  "    try:\n        if os.path.isdir(p): os.listdir(p)\n        else: open(p).read()\n        print('harmed')\n"
                  "    except OSError: pass"),
        std::pair("Privileges",
                  "import ctypes, os\nlibc = ctypes.CDLL(None)\nif libc.unshare(0x10000000) == 0: print('harmed')\n"
                  "if libc.mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0: print('harmed')\n"
                  "if libc.ptrace(16, 1, 0, 0) == 0: print('harmed')\n"
                  "for f in (os.setuid, os.setgid):\n    try: f(0); print('harmed')\n    except OSError: pass"),
        std::pair("DeepRecursion", "import sys\nsys.setrecursionlimit(10 ** 9)\ndef f(): f()\nf()")),
    [](const auto& program) { return program.param.first; });

TEST_F(CodeTestsTest, AServerOfTheNodeCannotBeReached) {
  const UniqueFd server(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  ASSERT_TRUE(::bind(server.get(), generic, size) == 0 && ::listen(server.get(), 1) == 0 &&
              ::getsockname(server.get(), generic, &size) == 0);
  const std::string program = absl::StrCat("import socket\ntry: socket.create_connection(('127.0.0.1', ", ntohs(address.sin_port),
                                           "), 2); print('reached')\n", "except OSError as error: print(type(error).__name__)");
  EXPECT_EQ(ScoreProgram(Fenced(program), {{{"output", "ConnectionRefusedError"}}}), 1);
}

// What a node lacks is told so that a person can act.
TEST(SandboxTest, WhatIsMissingIsNamed) {
  EXPECT_THAT(std::string(Sandbox::Create("/absent/python").status().message()),
              HasSubstr("--reward_python: '/absent/python' is no program that can be run"));
  EXPECT_THAT(std::string(Sandbox::Create("/bin/false").status().message()),
              HasSubstr("--reward_python: /bin/false cannot be used"));
}

}  // namespace
}  // namespace tandem
