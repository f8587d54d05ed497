// The safetensors format: 8 bytes header length, a JSON header, then every tensor's bytes without gap or overlap.
// https://github.com/huggingface/safetensors. Stricter than the library in one thing: a name may appear once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "common/model/model_file.h"

namespace tandem {

struct SafetensorsTensor {
  std::string name;
  std::string dtype;                 // as the file writes it: "F32", "BF16"
  std::vector<std::uint64_t> shape;  // outermost first
  std::uint64_t begin_bytes = 0;     // from the start of the file
  std::uint64_t size_bytes = 0;
};

// Immutable; thread-safe.
class SafetensorsFile {
 public:
  // Reads and checks the header; holds no tensor data. Errors: NOT_FOUND, INVALID_ARGUMENT naming file, tensor, value and limit.
  static absl::StatusOr<SafetensorsFile> Open(const std::string& path);

  const ModelFile& file() const { return file_; }
  ModelFile TakeFile() && { return std::move(file_); }
  const std::vector<SafetensorsTensor>& tensors() const { return tensors_; }  // in order of name
  const SafetensorsTensor* Find(const std::string& name) const;               // null when there is none
  const std::map<std::string, std::string>& metadata() const { return metadata_; }

 private:
  SafetensorsFile(ModelFile file, std::vector<SafetensorsTensor> tensors, std::map<std::string, std::string> metadata)
      : file_(std::move(file)), tensors_(std::move(tensors)), metadata_(std::move(metadata)) {}

  ModelFile file_;
  std::vector<SafetensorsTensor> tensors_;
  std::map<std::string, std::string> metadata_;
};

struct SafetensorsEntry {
  std::string name;
  std::string dtype;
  std::vector<std::uint64_t> shape;
};
// A file's bytes up to its data, in which the tensors then lie one behind the other. Errors: INVALID_ARGUMENT (unknown dtype,
// name twice, a size beyond 64 bits).
absl::StatusOr<std::string> SafetensorsHeader(const std::vector<SafetensorsEntry>& tensors,
                                              const std::map<std::string, std::string>& metadata);

// A tensor to write. `pieces` are its bytes in order, from wherever they lie: nothing is gathered in memory.
struct SafetensorsOutput {
  std::string name;
  std::string dtype;
  std::vector<std::uint64_t> shape;
  std::vector<std::span<const std::byte>> pieces;
};
// Atomically. Errors: INVALID_ARGUMENT (unknown dtype, bytes differ from shape x dtype, name twice), else the system's.
absl::Status WriteSafetensors(const std::string& path, const std::vector<SafetensorsOutput>& tensors,
                              const std::map<std::string, std::string>& metadata);

}  // namespace tandem
