// libFuzzer's entry (preset cpu-fuzz): tandem_fuzz --target=NAME [libFuzzer's flags] CORPUS...
// A corpus folder that is empty is filled with the target's seeds first; its words go to the file CORPUS.dict.
#include <cstdio>
#include <cstdlib>
#include <filesystem>

#include "tests/fuzz/fuzz_input.h"
#include "tests/fuzz/fuzz_target.h"

namespace tandem::fuzz {
namespace {

FuzzTarget* target = nullptr;

// As libFuzzer's dictionaries have it.
std::string Quoted(const std::string& word) {
  std::string quoted = "\"";
  for (const char c : word) {
    char code[8];
    std::snprintf(code, sizeof code, "\\x%02x", static_cast<unsigned char>(c));
    quoted += code;
  }
  return quoted + "\"\n";
}

int Choose(int argc, char** argv) {
  QuietLogs();
  const std::string flag = "--target=", chosen = argc > 1 ? argv[1] : "";
  for (const NamedTarget& named : AllTargets()) {
    if (chosen == flag + named.name) target = new FuzzTarget(named.make());
  }
  if (target == nullptr) {
    std::fprintf(stderr, "the first argument must be --target=NAME, one of:");
    for (const NamedTarget& named : AllTargets()) std::fprintf(stderr, " %s", named.name);
    std::fprintf(stderr, "\n");
    std::exit(1);
  }
  for (int i = 2; i < argc; ++i) {
    if (argv[i][0] == '-' || !std::filesystem::is_directory(argv[i])) continue;
    if (std::filesystem::is_empty(argv[i])) {
      for (std::size_t k = 0; k < target->seeds.size(); ++k) WriteText(absl::StrCat(argv[i], "/seed-", k), target->seeds[k]);
    }
    std::string words;
    for (const std::string& word : target->words) words += Quoted(word);
    WriteText(absl::StrCat(argv[i], ".dict"), words);
    break;
  }
  return 0;
}

}  // namespace
}  // namespace tandem::fuzz

extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) { return tandem::fuzz::Choose(*argc, *argv); }

extern "C" int LLVMFuzzerTestOneInput(const unsigned char* data, std::size_t size) {
  tandem::fuzz::target->read(std::string(reinterpret_cast<const char*>(data), size));
  return 0;
}
