// Each target over its seeds, over what libFuzzer once found (corpus/), and over mutations of both, the same in every run. What
// libFuzzer does by hand for hours (docs/security.md), this repeats in a second a target.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>

#include "common/base/allocation_budget.h"
#include "common/base/clock.h"
#include "common/base/random.h"
#include "tests/fuzz/fuzz_input.h"
#include "tests/fuzz/fuzz_target.h"

namespace tandem::fuzz {
namespace {

constexpr absl::Duration kMutating = absl::Milliseconds(500);  // of one target
constexpr int kMaxMutations = 20000;
constexpr absl::Duration kSlow = absl::Seconds(60);  // beside busy neighbours and under a sanitizer; else seconds at most
constexpr std::size_t kMaxHeapBytes = std::size_t{256} << 20;  // of one input, on the thread that reads it
constexpr long kMaxResidentKib = 3 << 20;
constexpr std::size_t kMaxInputBytes = 64 << 10;

const std::string* current_input = nullptr;

// An input that ends the process is kept where the test ran.
void KeepInput(int signal) {
  const int file = ::open("fuzz-crash", O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  (void)!::write(file, current_input->data(), current_input->size());
  constexpr char kSaid[] = "the input that did it is in the file fuzz-crash\n";
  (void)!::write(STDERR_FILENO, kSaid, sizeof kSaid - 1);
  ::signal(signal, SIG_DFL);
  ::raise(signal);
}

// One of a few changes to a text, drawn from (seed, counter).
class Mutator {
 public:
  Mutator(std::uint64_t seed, const FuzzTarget& target, const std::vector<std::string>& texts)
      : seed_(seed), target_(target), texts_(texts) {}

  std::string Next() {
    std::string text = texts_[Below(texts_.size())];
    for (std::uint64_t changes = 1 + Below(4); changes > 0; --changes) Change(&text);
    text.resize(std::min(text.size(), kMaxInputBytes));
    return text;
  }

 private:
  std::uint64_t Below(std::uint64_t bound) { return RandomBelow(seed_, counter_++, bound); }

  void Change(std::string* text) {
    const std::size_t at = Below(text->size() + 1);
    const std::size_t size = Below(std::min<std::size_t>(text->size() - at, 64) + 1);
    switch (Below(8)) {
      case 0:
        if (at < text->size()) (*text)[at] = static_cast<char>((*text)[at] ^ (1 << Below(8)));
        break;
      case 1:
        if (at < text->size()) (*text)[at] = static_cast<char>(Below(256));
        break;
      case 2:
        text->erase(at, size);
        break;
      case 3:
        text->insert(at, text->substr(at, size));
        break;
      case 4: {
        // A number in binary near an edge.
        static constexpr std::uint64_t kEdges[] = {0,          1,          0x7f,       0xff,       0x7fff, 0xffff,
                                                   0x7fffffff, 0xffffffff, 1ull << 32, 1ull << 63, ~0ull};
        const std::uint64_t edge = kEdges[Below(std::size(kEdges))] + Below(3) - 1;
        const std::size_t width = std::size_t{1} << Below(4);
        text->replace(at, std::min(width, text->size() - at), reinterpret_cast<const char*>(&edge), width);
        break;
      }
      case 5:
        if (!target_.words.empty()) text->insert(at, target_.words[Below(target_.words.size())]);
        break;
      case 6: {
        const std::string& other = texts_[Below(texts_.size())];
        text->replace(at, size, other.substr(Below(other.size() + 1), Below(256)));
        break;
      }
      case 7: {
        // The same a thousand times: depth, or a long list.
        const std::string piece = text->substr(at, std::min<std::size_t>(size, 8));
        for (int i = 0; i < 1000 && text->size() < kMaxInputBytes; ++i) text->insert(at, piece);
        break;
      }
    }
  }

  const std::uint64_t seed_;
  const FuzzTarget& target_;
  const std::vector<std::string>& texts_;
  std::uint64_t counter_ = 0;
};

class FuzzReplayTest : public ::testing::TestWithParam<NamedTarget> {
 protected:
  void SetUp() override {
    QuietLogs();
    for (const int signal : {SIGABRT, SIGSEGV, SIGBUS, SIGFPE}) ::signal(signal, KeepInput);
  }
  void TearDown() override {
    for (const int signal : {SIGABRT, SIGSEGV, SIGBUS, SIGFPE}) ::signal(signal, SIG_DFL);
  }
};

TEST_P(FuzzReplayTest, ComesBackFromWhateverItReads) {
  const FuzzTarget target = GetParam().make();
  std::vector<std::string> texts = target.seeds;
  const std::string found = absl::StrCat(TANDEM_FUZZ_CORPUS, "/", GetParam().name);
  if (std::filesystem::exists(found)) {
    for (const auto& entry : std::filesystem::directory_iterator(found)) texts.push_back(ReadText(entry.path().string()));
    std::sort(texts.begin() + static_cast<std::ptrdiff_t>(target.seeds.size()), texts.end());
  }
  ASSERT_FALSE(texts.empty());
  const auto read = [&target](const std::string& input) {
    current_input = &input;
    const MonotonicTime begin = MonotonicTime::Now();
    const AllocationBudget budget(kMaxHeapBytes, SIZE_MAX);
    target.read(input);
    ASSERT_FALSE(budget.is_exceeded()) << absl::StrCat("input of ", input.size(), " bytes took ", budget.peak_bytes());
    ASSERT_LT(MonotonicTime::Now() - begin, kSlow) << absl::StrCat("input of ", input.size(), " bytes");
  };
  for (const std::string& text : texts) ASSERT_NO_FATAL_FAILURE(read(text));
  ASSERT_NO_FATAL_FAILURE(read(""));
  Mutator mutator(DeriveSeed(1, GetParam().name[0]), target, texts);
  int num_mutations = 0;
  for (const MonotonicTime end = MonotonicTime::Now() + kMutating; num_mutations < kMaxMutations && MonotonicTime::Now() < end;
       ++num_mutations) {
    ASSERT_NO_FATAL_FAILURE(read(mutator.Next()));
  }
  struct rusage usage {};
  ASSERT_EQ(::getrusage(RUSAGE_SELF, &usage), 0);
  EXPECT_LT(usage.ru_maxrss, kMaxResidentKib);
  RecordProperty("mutations", num_mutations);
}

INSTANTIATE_TEST_SUITE_P(All, FuzzReplayTest, ::testing::ValuesIn(AllTargets().begin(), AllTargets().end()),
                         [](const auto& target) { return std::string(target.param.name); });

}  // namespace
}  // namespace tandem::fuzz
