#include "common/model/safetensors.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <set>
#include <string_view>
#include <utility>

#include <nlohmann/json.hpp>

#include "common/base/units.h"
#include "common/model/bounded_json.h"

namespace tandem {
namespace {

static_assert(std::endian::native == std::endian::little, "model files are little-endian and are read as they are");

constexpr std::uint64_t kLengthBytes = 8;
constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;  // the library's limit
constexpr const char* kMetadataKey = "__metadata__";

// Bytes of one element; 0 for an unknown dtype.
std::uint64_t DtypeBytes(std::string_view dtype) {
  static constexpr std::array<std::pair<std::string_view, std::uint64_t>, 15> kDtypes = {{{"F64", 8},
                                                                                          {"F32", 4},
                                                                                          {"F16", 2},
                                                                                          {"BF16", 2},
                                                                                          {"I64", 8},
                                                                                          {"I32", 4},
                                                                                          {"I16", 2},
                                                                                          {"I8", 1},
                                                                                          {"U64", 8},
                                                                                          {"U32", 4},
                                                                                          {"U16", 2},
                                                                                          {"U8", 1},
                                                                                          {"BOOL", 1},
                                                                                          {"F8_E4M3", 1},
                                                                                          {"F8_E5M2", 1}}};
  for (const auto& [name, bytes] : kDtypes) {
    if (name == dtype) return bytes;
  }
  return 0;
}

// Offsets come out relative to the data's start.
absl::StatusOr<SafetensorsTensor> ParseTensor(const std::string& name, const nlohmann::json& entry, std::uint64_t data_bytes) {
  const auto fail = [&](const auto&... message) {
    return absl::InvalidArgumentError(absl::StrCat("tensor '", name, "': ", message...));
  };
  if (!entry.is_object()) return fail("entry is not an object");
  const auto dtype = entry.find("dtype");
  const auto shape = entry.find("shape");
  const auto offsets = entry.find("data_offsets");
  if (dtype == entry.end() || !dtype->is_string()) return fail("dtype is missing or is not a string");
  if (shape == entry.end() || !shape->is_array()) return fail("shape is missing or is not an array");
  if (offsets == entry.end() || !offsets->is_array()) return fail("data_offsets is missing or is not an array");
  if (entry.size() != 3) return fail("has ", entry.size(), " fields; dtype, shape and data_offsets are expected");
  if (offsets->size() != 2) return fail("two offsets expected, ", offsets->size(), " found");
  for (const nlohmann::json& offset : *offsets) {
    if (!offset.is_number_unsigned()) return fail("offset is not an unsigned integer: ", offset.dump());
  }

  SafetensorsTensor tensor;
  tensor.name = name;
  tensor.dtype = dtype->get<std::string>();
  tensor.begin_bytes = (*offsets)[0].get<std::uint64_t>();
  const std::uint64_t end_bytes = (*offsets)[1].get<std::uint64_t>();
  if (tensor.begin_bytes > end_bytes) return fail("begin after end: ", tensor.begin_bytes, " > ", end_bytes);
  if (end_bytes > data_bytes) {
    return fail("data past the end of the file: ends at ", end_bytes, " of ", data_bytes, " data bytes");
  }
  tensor.size_bytes = end_bytes - tensor.begin_bytes;

  std::uint64_t expected_bytes = DtypeBytes(tensor.dtype);
  if (expected_bytes == 0) return fail("unknown dtype '", tensor.dtype, "'");
  for (const nlohmann::json& dimension : *shape) {
    if (!dimension.is_number_unsigned()) return fail("dimension is not an unsigned integer: ", dimension.dump());
    tensor.shape.push_back(dimension.get<std::uint64_t>());
    if (!MultiplyFits(expected_bytes, tensor.shape.back(), &expected_bytes)) {
      return fail("shape product overflows 64 bits: ", shape->dump());
    }
  }
  if (expected_bytes != tensor.size_bytes) {
    return fail("bytes differ from shape x dtype: ", tensor.size_bytes, " in the file, ", expected_bytes, " for ", shape->dump(),
                " ", tensor.dtype);
  }
  return tensor;
}

// The tensors cover [0, data_bytes) once.
absl::Status CheckCover(const std::vector<SafetensorsTensor>& tensors, std::uint64_t data_bytes) {
  std::vector<const SafetensorsTensor*> by_place;
  by_place.reserve(tensors.size());
  for (const SafetensorsTensor& tensor : tensors) by_place.push_back(&tensor);
  std::sort(by_place.begin(), by_place.end(), [](const SafetensorsTensor* a, const SafetensorsTensor* b) {
    return std::pair(a->begin_bytes, a->size_bytes) < std::pair(b->begin_bytes, b->size_bytes);
  });
  std::uint64_t end_bytes = 0;
  for (const SafetensorsTensor* tensor : by_place) {
    if (tensor->begin_bytes < end_bytes) {
      return absl::InvalidArgumentError(absl::StrCat("tensor '", tensor->name, "': ranges overlap: begins at ",
                                                     tensor->begin_bytes, ", the one before ends at ", end_bytes));
    }
    if (tensor->begin_bytes > end_bytes) {
      return absl::InvalidArgumentError(
          absl::StrCat("tensor '", tensor->name, "': bytes belong to no tensor: ", end_bytes, " to ", tensor->begin_bytes));
    }
    end_bytes = tensor->begin_bytes + tensor->size_bytes;
  }
  if (end_bytes != data_bytes) {
    return absl::InvalidArgumentError(absl::StrCat("bytes belong to no tensor: ", end_bytes, " to ", data_bytes));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<SafetensorsFile> SafetensorsFile::Open(const std::string& path) {
  TANDEM_ASSIGN_OR_RETURN(ModelFile file, ModelFile::Open(path));
  const auto fail = [&](const auto&... message) { return absl::InvalidArgumentError(absl::StrCat(path, ": ", message...)); };
  if (file.size_bytes() < kLengthBytes) return fail("no header length: the file has ", file.size_bytes(), " bytes of 8");
  std::uint64_t header_bytes = 0;
  TANDEM_RETURN_IF_ERROR(file.ReadAt(0, std::as_writable_bytes(std::span(&header_bytes, 1))));
  if (header_bytes > file.size_bytes() - kLengthBytes) {
    return fail("header longer than the file: ", header_bytes, " of ", file.size_bytes() - kLengthBytes, " bytes");
  }
  if (header_bytes > kMaxHeaderBytes) return fail("header of ", header_bytes, " bytes; at most ", kMaxHeaderBytes, " are taken");
  std::string text(header_bytes, '\0');
  TANDEM_RETURN_IF_ERROR(file.ReadAt(kLengthBytes, std::as_writable_bytes(std::span(text))));
  absl::StatusOr<nlohmann::json> header = ParseBoundedJson(text, path, "header");
  if (!header.ok()) return header.status();
  if (!header->is_object()) return fail("header is not an object");

  const std::uint64_t data_begin_bytes = kLengthBytes + header_bytes;
  const std::uint64_t data_bytes = file.size_bytes() - data_begin_bytes;
  std::vector<SafetensorsTensor> tensors;
  std::map<std::string, std::string> metadata;
  for (const auto& [name, entry] : header->items()) {
    if (name == kMetadataKey) {
      if (!entry.is_object()) return fail("__metadata__ is not an object");
      for (const auto& [key, value] : entry.items()) {
        if (!value.is_string()) return fail("__metadata__ '", key, "' is not a string");
        metadata[key] = value.get<std::string>();
      }
      continue;
    }
    absl::StatusOr<SafetensorsTensor> tensor = ParseTensor(name, entry, data_bytes);
    if (!tensor.ok()) return Annotate(tensor.status(), path);
    tensors.push_back(*std::move(tensor));
  }
  TANDEM_RETURN_IF_ERROR(Annotate(CheckCover(tensors, data_bytes), path));
  for (SafetensorsTensor& tensor : tensors) tensor.begin_bytes += data_begin_bytes;
  std::sort(tensors.begin(), tensors.end(),
            [](const SafetensorsTensor& a, const SafetensorsTensor& b) { return a.name < b.name; });
  return SafetensorsFile(std::move(file), std::move(tensors), std::move(metadata));
}

const SafetensorsTensor* SafetensorsFile::Find(const std::string& name) const {
  const auto found =
      std::lower_bound(tensors_.begin(), tensors_.end(), name,
                       [](const SafetensorsTensor& tensor, const std::string& wanted) { return tensor.name < wanted; });
  return found != tensors_.end() && found->name == name ? &*found : nullptr;
}

absl::StatusOr<std::string> SafetensorsHeader(const std::vector<SafetensorsEntry>& tensors,
                                              const std::map<std::string, std::string>& metadata) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header[kMetadataKey] = metadata;
  std::set<std::string> names;
  std::uint64_t end_bytes = 0;
  for (const SafetensorsEntry& tensor : tensors) {
    const auto fail = [&](const auto&... message) {
      return absl::InvalidArgumentError(absl::StrCat("tensor '", tensor.name, "': ", message...));
    };
    if (!names.insert(tensor.name).second || tensor.name == kMetadataKey) return fail("the name is taken");
    std::uint64_t size_bytes = DtypeBytes(tensor.dtype);
    if (size_bytes == 0) return fail("unknown dtype '", tensor.dtype, "'");
    for (const std::uint64_t dimension : tensor.shape) {
      if (!MultiplyFits(size_bytes, dimension, &size_bytes)) return fail("shape product overflows 64 bits");
    }
    header[tensor.name] = {
        {"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {end_bytes, end_bytes + size_bytes}}};
    end_bytes += size_bytes;
  }
  std::string text = header.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
  text.resize(RoundUp(text.size(), 8), ' ');  // data begins aligned
  const std::uint64_t header_bytes = text.size();
  std::string length(sizeof header_bytes, '\0');
  std::memcpy(length.data(), &header_bytes, sizeof header_bytes);
  return length + text;
}

absl::Status WriteSafetensors(const std::string& path, const std::vector<SafetensorsOutput>& tensors,
                              const std::map<std::string, std::string>& metadata) {
  std::vector<SafetensorsEntry> entries;
  for (const SafetensorsOutput& tensor : tensors) entries.push_back({tensor.name, tensor.dtype, tensor.shape});
  absl::StatusOr<std::string> header = SafetensorsHeader(entries, metadata);
  if (!header.ok()) return Annotate(header.status(), absl::StrCat("writing ", path));
  for (const SafetensorsOutput& tensor : tensors) {
    std::uint64_t expected_bytes = DtypeBytes(tensor.dtype), size_bytes = 0;
    for (const std::uint64_t dimension : tensor.shape) expected_bytes *= dimension;
    for (const auto& piece : tensor.pieces) size_bytes += piece.size();
    if (size_bytes == expected_bytes) continue;
    return absl::InvalidArgumentError(absl::StrCat("writing ", path, ": tensor '", tensor.name,
                                                   "': bytes differ from shape x dtype: ", size_bytes, " given, ", expected_bytes,
                                                   " expected"));
  }
  TANDEM_ASSIGN_OR_RETURN(AtomicFileWriter writer, AtomicFileWriter::Create(path));
  TANDEM_RETURN_IF_ERROR(writer.Write(std::as_bytes(std::span(*header))));
  for (const SafetensorsOutput& tensor : tensors) {
    for (const auto& piece : tensor.pieces) TANDEM_RETURN_IF_ERROR(writer.Write(piece));
  }
  return writer.Commit();
}

}  // namespace tandem
