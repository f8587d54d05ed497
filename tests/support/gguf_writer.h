// Writes small GGUF files (version 3), good or bad: it checks nothing.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "common/model/gguf.h"

namespace tandem::testing {

class GgufWriter {
 public:
  void AddUint32(const std::string& key, std::uint32_t value) { AddValue(key, GgufType::kUint32, Raw(value)); }
  void AddFloat32(const std::string& key, float value) { AddValue(key, GgufType::kFloat32, Raw(value)); }
  void AddBool(const std::string& key, bool value) { AddValue(key, GgufType::kBool, Raw(static_cast<std::uint8_t>(value))); }
  void AddString(const std::string& key, const std::string& text) { AddValue(key, GgufType::kString, Text(text)); }
  void AddStrings(const std::string& key, const std::vector<std::string>& texts) {
    std::string bytes = Raw(static_cast<std::uint32_t>(GgufType::kString)) + Raw(std::uint64_t{texts.size()});
    for (const std::string& text : texts) bytes += Text(text);
    AddValue(key, GgufType::kArray, bytes);
  }
  void AddInt32s(const std::string& key, const std::vector<std::int32_t>& values) {
    std::string bytes = Raw(static_cast<std::uint32_t>(GgufType::kInt32)) + Raw(std::uint64_t{values.size()});
    for (const std::int32_t value : values) bytes += Raw(value);
    AddValue(key, GgufType::kArray, bytes);
  }
  // `dimensions`: innermost first. `type_id`: GGML's.
  void AddTensor(const std::string& name, const std::vector<std::uint64_t>& dimensions, std::uint32_t type_id,
                 const std::string& bytes) {
    table_ += Text(name) + Raw(static_cast<std::uint32_t>(dimensions.size()));
    for (const std::uint64_t dimension : dimensions) table_ += Raw(dimension);
    table_ += Raw(type_id) + Raw(std::uint64_t{data_.size()});
    data_ += bytes;
    data_.resize((data_.size() + 31) / 32 * 32, '\0');
    ++num_tensors_;
  }
  std::string Finish() const {
    std::string bytes = "GGUF" + Raw(std::uint32_t{3}) + Raw(num_tensors_) + Raw(num_values_) + values_ + table_;
    bytes.resize((bytes.size() + 31) / 32 * 32, '\0');
    return bytes + data_;
  }

 private:
  template <typename T>
  static std::string Raw(T value) {
    return std::string(reinterpret_cast<const char*>(&value), sizeof(value));
  }
  static std::string Text(const std::string& text) { return Raw(std::uint64_t{text.size()}) + text; }
  void AddValue(const std::string& key, GgufType type, const std::string& bytes) {
    values_ += Text(key) + Raw(static_cast<std::uint32_t>(type)) + bytes;
    ++num_values_;
  }

  std::string values_, table_, data_;
  std::uint64_t num_values_ = 0;
  std::uint64_t num_tensors_ = 0;
};

}  // namespace tandem::testing
