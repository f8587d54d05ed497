// The GGUF format (versions 2 and 3, little-endian): typed metadata, a table of tensors, aligned data.
// https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Every count and length is checked against the bytes that are left.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "common/model/model_file.h"

namespace tandem {

// The numbers are the file's.
enum class GgufType : std::uint32_t {
  kUint8,
  kInt8,
  kUint16,
  kInt16,
  kUint32,
  kInt32,
  kFloat32,
  kBool,
  kString,
  kArray,
  kUint64,
  kInt64,
  kFloat64
};

struct GgufTensor {
  std::string name;
  std::string type_name;                  // GGML's: "Q4_1"
  std::vector<std::uint64_t> dimensions;  // innermost first, as the file has them
  std::uint64_t begin_bytes = 0;          // from the start of the file
  std::uint64_t size_bytes = 0;
};

// Immutable; thread-safe.
class GgufFile {
 public:
  // Reads and checks metadata and tensor table; holds no tensor data. Errors: NOT_FOUND, INVALID_ARGUMENT naming file, key or
  // tensor, value and limit.
  static absl::StatusOr<GgufFile> Open(const std::string& path);

  const ModelFile& file() const { return file_; }
  ModelFile TakeFile() && { return std::move(file_); }
  const std::vector<GgufTensor>& tensors() const { return tensors_; }  // in order of name
  const GgufTensor* Find(const std::string& name) const;               // null when there is none

  bool Has(const std::string& key) const { return values_.contains(key); }
  // Errors, all of them: NOT_FOUND naming the key, INVALID_ARGUMENT when the value has another type or does not fit.
  absl::StatusOr<std::int64_t> GetInteger(const std::string& key) const;  // any integer type
  absl::StatusOr<double> GetNumber(const std::string& key) const;         // any integer or float type
  absl::StatusOr<bool> GetBool(const std::string& key) const;
  absl::StatusOr<std::string> GetString(const std::string& key) const;
  absl::StatusOr<std::vector<std::string>> GetStrings(const std::string& key) const;
  absl::StatusOr<std::vector<std::int64_t>> GetIntegers(const std::string& key) const;  // an array of any integer type

 private:
  struct Value {
    GgufType type = GgufType::kUint8;
    GgufType element_type = GgufType::kUint8;  // of an array
    std::string bytes;                         // a number, a string, or an array of numbers, as in the file
    std::vector<std::string> strings;          // an array of strings
  };
  class Reader;

  explicit GgufFile(ModelFile file) : file_(std::move(file)) {}
  absl::StatusOr<const Value*> FindValue(const std::string& key) const;
  absl::Status WrongType(const std::string& key, const Value& value, const char* wanted) const;

  ModelFile file_;
  std::vector<GgufTensor> tensors_;
  std::map<std::string, Value> values_;
};

}  // namespace tandem
