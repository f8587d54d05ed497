// An input as what a reader takes: several texts, a file, a directory, messages.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/check.h"
#include "common/base/unique_fd.h"
#include "tests/support/temporary_directory.h"

namespace tandem::fuzz {

inline constexpr char kPartEnd = '\x1e';  // ASCII's record separator

// Exactly `count` parts: the last is what is left, those that are missing are empty.
inline std::vector<std::string> SplitParts(const std::string& input, std::size_t count) {
  std::vector<std::string> parts;
  std::size_t begin = 0;
  while (parts.size() + 1 < count) {
    const std::size_t end = input.find(kPartEnd, begin);
    parts.push_back(input.substr(begin, end == std::string::npos ? end : end - begin));
    begin = end == std::string::npos ? input.size() : end + 1;
  }
  parts.push_back(input.substr(begin));
  return parts;
}

inline std::string JoinParts(const std::vector<std::string>& parts) {
  std::string input;
  for (std::size_t i = 0; i < parts.size(); ++i) input += parts[i] + (i + 1 < parts.size() ? std::string(1, kPartEnd) : "");
  return input;
}

// Messages of a stream, each behind its size in two bytes, low one first.
inline std::vector<std::string> SplitMessages(const std::string& input) {
  std::vector<std::string> messages;
  for (std::size_t at = 0; at + 2 <= input.size() && messages.size() < 32;) {
    const std::size_t size = static_cast<unsigned char>(input[at]) | std::size_t{static_cast<unsigned char>(input[at + 1])} << 8;
    messages.push_back(input.substr(at + 2, size));
    at += 2 + size;
  }
  return messages;
}

inline std::string JoinMessages(const std::vector<std::string>& messages) {
  std::string input;
  for (const std::string& message : messages) {
    TANDEM_CHECK(message.size() < 65536, message.size());
    input += {static_cast<char>(message.size() & 0xff), static_cast<char>(message.size() >> 8)};
    input += message;
  }
  return input;
}

// A file in memory that has a path.
class InputFile {
 public:
  explicit InputFile(const std::string& bytes) : file_(::memfd_create("fuzz_input", MFD_CLOEXEC)) {
    TANDEM_CHECK(::write(file_.get(), bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()), "memfd");
  }
  std::string path() const { return absl::StrCat("/proc/self/fd/", file_.get()); }

 private:
  UniqueFd file_;
};

inline void WriteText(const std::string& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << text;
  TANDEM_CHECK(file.good(), path);
}

inline std::string ReadText(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// The texts of files under tests/golden, by their paths there.
inline std::vector<std::string> GoldenTexts(const std::vector<std::string>& names) {
  std::vector<std::string> texts;
  for (const std::string& name : names) {
    texts.push_back(ReadText(absl::StrCat(TANDEM_GOLDEN_DIR "/", name)));
    TANDEM_CHECK(!texts.back().empty(), name);
  }
  return texts;
}

}  // namespace tandem::fuzz
