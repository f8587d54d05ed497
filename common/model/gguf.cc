#include "common/model/gguf.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <optional>
#include <utility>

#include "common/base/units.h"

namespace tandem {
namespace {

static_assert(std::endian::native == std::endian::little, "model files are little-endian and are read as they are");

constexpr std::uint32_t kMagic = 0x46554747;  // "GGUF"
constexpr std::uint64_t kDefaultAlignment = 32;
constexpr std::uint32_t kMaxDimensions = 4;
constexpr std::uint64_t kMaxKeyBytes = 65535;
constexpr std::uint64_t kMaxNameBytes = 1024;
constexpr std::uint64_t kMinMetadataBytes = 8 + 4 + 1;    // an empty key, the type, the smallest value
constexpr std::uint64_t kMinTensorBytes = 8 + 4 + 4 + 8;  // an empty name, number of dimensions, type, offset
constexpr std::uint64_t kWindowBytes = 1 * kMiB;
constexpr const char* kAlignmentKey = "general.alignment";

constexpr std::array<std::pair<const char*, std::uint64_t>, 13> kTypes = {{{"uint8", 1},
                                                                           {"int8", 1},
                                                                           {"uint16", 2},
                                                                           {"int16", 2},
                                                                           {"uint32", 4},
                                                                           {"int32", 4},
                                                                           {"float32", 4},
                                                                           {"bool", 1},
                                                                           {"string", 8},
                                                                           {"array", 12},
                                                                           {"uint64", 8},
                                                                           {"int64", 8},
                                                                           {"float64", 8}}};
const char* TypeName(GgufType type) { return kTypes[static_cast<std::size_t>(type)].first; }
// Of a string or an array: the least that one takes.
std::uint64_t TypeBytes(GgufType type) { return kTypes[static_cast<std::size_t>(type)].second; }

struct TensorType {
  std::uint32_t id;
  const char* name;
  std::uint64_t block_values;
  std::uint64_t block_bytes;
};
// ggml.h, enum ggml_type; sizes from ggml-common.h.
constexpr std::array<TensorType, 32> kTensorTypes = {
    {{0, "F32", 1, 4},        {1, "F16", 1, 2},         {2, "Q4_0", 32, 18},    {3, "Q4_1", 32, 20},    {6, "Q5_0", 32, 22},
     {7, "Q5_1", 32, 24},     {8, "Q8_0", 32, 34},      {9, "Q8_1", 32, 36},    {10, "Q2_K", 256, 84},  {11, "Q3_K", 256, 110},
     {12, "Q4_K", 256, 144},  {13, "Q5_K", 256, 176},   {14, "Q6_K", 256, 210}, {15, "Q8_K", 256, 292}, {16, "IQ2_XXS", 256, 66},
     {17, "IQ2_XS", 256, 74}, {18, "IQ3_XXS", 256, 98}, {19, "IQ1_S", 256, 50}, {20, "IQ4_NL", 32, 18}, {21, "IQ3_S", 256, 110},
     {22, "IQ2_S", 256, 82},  {23, "IQ4_XS", 256, 136}, {24, "I8", 1, 1},       {25, "I16", 1, 2},      {26, "I32", 1, 4},
     {27, "I64", 1, 8},       {28, "F64", 1, 8},        {29, "IQ1_M", 256, 56}, {30, "BF16", 1, 2},     {34, "TQ1_0", 256, 54},
     {35, "TQ2_0", 256, 66},  {39, "MXFP4", 32, 17}}};

const TensorType* FindTensorType(std::uint32_t id) {
  for (const TensorType& type : kTensorTypes) {
    if (type.id == id) return &type;
  }
  return nullptr;
}

template <typename T>
T FromBytes(const char* bytes) {
  T value;
  std::memcpy(&value, bytes, sizeof(value));
  return value;
}

// nullopt when the type is no integer, or the value is above int64's largest.
std::optional<std::int64_t> ToInteger(GgufType type, const char* bytes) {
  switch (type) {
    case GgufType::kUint8:
      return FromBytes<std::uint8_t>(bytes);
    case GgufType::kInt8:
      return FromBytes<std::int8_t>(bytes);
    case GgufType::kUint16:
      return FromBytes<std::uint16_t>(bytes);
    case GgufType::kInt16:
      return FromBytes<std::int16_t>(bytes);
    case GgufType::kUint32:
      return FromBytes<std::uint32_t>(bytes);
    case GgufType::kInt32:
      return FromBytes<std::int32_t>(bytes);
    case GgufType::kInt64:
      return FromBytes<std::int64_t>(bytes);
    case GgufType::kUint64: {
      const auto value = FromBytes<std::uint64_t>(bytes);
      if (value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) return std::nullopt;
      return static_cast<std::int64_t>(value);
    }
    default:
      return std::nullopt;
  }
}

}  // namespace

// Reads a file from its start, through a window, never past its end.
class GgufFile::Reader {
 public:
  explicit Reader(const ModelFile& file) : file_(file) {}

  std::uint64_t position() const { return position_; }
  std::uint64_t remaining() const { return file_.size_bytes() - position_; }

  absl::Status Read(void* bytes, std::uint64_t size) {
    if (size > remaining()) {
      return absl::InvalidArgumentError(
          absl::StrCat("data past the end of the file: ", size, " bytes at ", position_, " of ", file_.size_bytes()));
    }
    char* out = static_cast<char*>(bytes);
    while (size > 0) {
      if (position_ < window_begin_ || position_ >= window_begin_ + window_.size()) {
        window_.resize(std::min(kWindowBytes, remaining()));
        window_begin_ = position_;
        TANDEM_RETURN_IF_ERROR(file_.ReadAt(position_, std::as_writable_bytes(std::span(window_))));
      }
      const std::uint64_t offset = position_ - window_begin_;
      const std::uint64_t count = std::min<std::uint64_t>(size, window_.size() - offset);
      std::memcpy(out, window_.data() + offset, count);
      out += count;
      position_ += count;
      size -= count;
    }
    return absl::OkStatus();
  }

  template <typename T>
  absl::StatusOr<T> ReadNumber() {
    T value = 0;
    TANDEM_RETURN_IF_ERROR(Read(&value, sizeof(value)));
    return value;
  }

  absl::StatusOr<std::string> ReadString(std::uint64_t max_bytes) {
    TANDEM_ASSIGN_OR_RETURN(const std::uint64_t size, ReadNumber<std::uint64_t>());
    if (size > remaining()) {
      return absl::InvalidArgumentError(
          absl::StrCat("string past the end of the file: ", size, " bytes at ", position_, " of ", file_.size_bytes()));
    }
    if (size > max_bytes)
      return absl::InvalidArgumentError(absl::StrCat("string of ", size, " bytes; at most ", max_bytes, " are taken"));
    std::string text(size, '\0');
    TANDEM_RETURN_IF_ERROR(Read(text.data(), size));
    return text;
  }

  absl::StatusOr<GgufType> ReadType() {
    TANDEM_ASSIGN_OR_RETURN(const std::uint32_t id, ReadNumber<std::uint32_t>());
    if (id >= kTypes.size()) return absl::InvalidArgumentError(absl::StrCat("unknown value type ", id));
    return static_cast<GgufType>(id);
  }

  absl::StatusOr<Value> ReadValue() {
    Value value;
    TANDEM_ASSIGN_OR_RETURN(value.type, ReadType());
    if (value.type == GgufType::kArray) {
      TANDEM_RETURN_IF_ERROR(ReadArray(&value));
    } else if (value.type == GgufType::kString) {
      TANDEM_ASSIGN_OR_RETURN(value.bytes, ReadString(remaining()));
    } else {
      value.bytes.resize(TypeBytes(value.type));
      TANDEM_RETURN_IF_ERROR(Read(value.bytes.data(), value.bytes.size()));
      if (value.type == GgufType::kBool && static_cast<unsigned char>(value.bytes[0]) > 1) {
        return absl::InvalidArgumentError(absl::StrCat("bool is ", static_cast<int>(value.bytes[0]), "; it must be 0 or 1"));
      }
    }
    return value;
  }

 private:
  absl::Status ReadArray(Value* value) {
    TANDEM_ASSIGN_OR_RETURN(value->element_type, ReadType());
    TANDEM_ASSIGN_OR_RETURN(const std::uint64_t count, ReadNumber<std::uint64_t>());
    if (value->element_type == GgufType::kArray) return absl::InvalidArgumentError("an array of arrays is not taken");
    if (count > remaining() / TypeBytes(value->element_type)) {
      return absl::InvalidArgumentError(absl::StrCat("array past the end of the file: ", count, " values of ",
                                                     TypeName(value->element_type), " at ", position_, " of ",
                                                     file_.size_bytes()));
    }
    if (value->element_type != GgufType::kString) {
      value->bytes.resize(count * TypeBytes(value->element_type));
      return Read(value->bytes.data(), value->bytes.size());
    }
    for (std::uint64_t i = 0; i < count; ++i) {
      TANDEM_ASSIGN_OR_RETURN(std::string text, ReadString(remaining()));
      value->strings.push_back(std::move(text));
    }
    return absl::OkStatus();
  }

  const ModelFile& file_;
  std::uint64_t position_ = 0;
  std::vector<char> window_;
  std::uint64_t window_begin_ = 0;
};

namespace {

// Everything but where the data begins: begin_bytes is relative to it.
template <typename Reader>
absl::StatusOr<GgufTensor> ReadTensor(Reader* reader) {
  GgufTensor tensor;
  TANDEM_ASSIGN_OR_RETURN(tensor.name, reader->ReadString(kMaxNameBytes));
  const auto fail = [&](const auto&... message) {
    return absl::InvalidArgumentError(absl::StrCat("tensor '", tensor.name, "': ", message...));
  };
  TANDEM_ASSIGN_OR_RETURN(const std::uint32_t num_dimensions, reader->template ReadNumber<std::uint32_t>());
  if (num_dimensions > kMaxDimensions)
    return fail("too many dimensions: ", num_dimensions, "; at most ", kMaxDimensions, " are taken");
  std::uint64_t num_values = 1;
  for (std::uint32_t i = 0; i < num_dimensions; ++i) {
    TANDEM_ASSIGN_OR_RETURN(const std::uint64_t dimension, reader->template ReadNumber<std::uint64_t>());
    tensor.dimensions.push_back(dimension);
    if (!MultiplyFits(num_values, dimension, &num_values))
      return fail("shape product overflows 64 bits at dimension ", i, " of ", dimension);
  }
  TANDEM_ASSIGN_OR_RETURN(const std::uint32_t type_id, reader->template ReadNumber<std::uint32_t>());
  const TensorType* type = FindTensorType(type_id);
  if (type == nullptr) return fail("unknown tensor type ", type_id);
  tensor.type_name = type->name;
  const std::uint64_t row_values = tensor.dimensions.empty() ? 1 : tensor.dimensions[0];
  if (row_values % type->block_values != 0) {
    return fail("row is not a whole number of blocks: ", row_values, " values, ", type->block_values, " a block of ", type->name);
  }
  if (!MultiplyFits(num_values / type->block_values, type->block_bytes, &tensor.size_bytes)) {
    return fail("shape product overflows 64 bits: ", num_values, " values of ", type->name);
  }
  TANDEM_ASSIGN_OR_RETURN(tensor.begin_bytes, reader->template ReadNumber<std::uint64_t>());
  return tensor;
}

absl::Status CheckPlaces(const std::vector<GgufTensor>& tensors, std::uint64_t data_bytes, std::uint64_t alignment) {
  std::vector<const GgufTensor*> by_place;
  by_place.reserve(tensors.size());
  for (const GgufTensor& tensor : tensors) {
    const auto fail = [&](const auto&... message) {
      return absl::InvalidArgumentError(absl::StrCat("tensor '", tensor.name, "': ", message...));
    };
    if (tensor.begin_bytes > data_bytes || tensor.size_bytes > data_bytes - tensor.begin_bytes) {
      return fail("data past the end of the file: ", tensor.size_bytes, " bytes at ", tensor.begin_bytes, " of ", data_bytes,
                  " data bytes");
    }
    if (tensor.begin_bytes % alignment != 0) {
      return fail("offset is not a multiple of the alignment: ", tensor.begin_bytes, " and ", alignment);
    }
    by_place.push_back(&tensor);
  }
  std::sort(by_place.begin(), by_place.end(), [](const GgufTensor* a, const GgufTensor* b) {
    return std::pair(a->begin_bytes, a->size_bytes) < std::pair(b->begin_bytes, b->size_bytes);
  });
  std::uint64_t end_bytes = 0;
  for (const GgufTensor* tensor : by_place) {
    if (tensor->begin_bytes < end_bytes) {
      return absl::InvalidArgumentError(absl::StrCat("tensor '", tensor->name, "': ranges overlap: begins at ",
                                                     tensor->begin_bytes, ", the one before ends at ", end_bytes));
    }
    end_bytes = tensor->begin_bytes + tensor->size_bytes;
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<GgufFile> GgufFile::Open(const std::string& path) {
  TANDEM_ASSIGN_OR_RETURN(ModelFile model_file, ModelFile::Open(path));
  GgufFile gguf(std::move(model_file));
  Reader reader(gguf.file_);
  const auto read_all = [&]() -> absl::Status {
    const absl::StatusOr<std::uint32_t> magic = reader.ReadNumber<std::uint32_t>();
    if (!magic.ok() || *magic != kMagic) return absl::InvalidArgumentError("not a GGUF file: it does not begin with 'GGUF'");
    TANDEM_ASSIGN_OR_RETURN(const std::uint32_t version, reader.ReadNumber<std::uint32_t>());
    if (version != 2 && version != 3) {
      return absl::InvalidArgumentError(absl::StrCat("unsupported version ", version, "; 2 and 3 (little-endian) are taken"));
    }
    TANDEM_ASSIGN_OR_RETURN(const std::uint64_t num_tensors, reader.ReadNumber<std::uint64_t>());
    TANDEM_ASSIGN_OR_RETURN(const std::uint64_t num_values, reader.ReadNumber<std::uint64_t>());
    if (num_tensors > reader.remaining() / kMinTensorBytes) {
      return absl::InvalidArgumentError(
          absl::StrCat("more tensors than the file can hold: ", num_tensors, " in ", reader.remaining(), " bytes"));
    }
    if (num_values > reader.remaining() / kMinMetadataBytes) {
      return absl::InvalidArgumentError(
          absl::StrCat("more metadata than the file can hold: ", num_values, " values in ", reader.remaining(), " bytes"));
    }

    for (std::uint64_t i = 0; i < num_values; ++i) {
      TANDEM_ASSIGN_OR_RETURN(std::string key, reader.ReadString(kMaxKeyBytes));
      absl::StatusOr<Value> value = reader.ReadValue();
      if (!value.ok()) return Annotate(value.status(), "metadata '" + key + "'");
      if (gguf.values_.contains(key)) return absl::InvalidArgumentError(absl::StrCat("metadata '", key, "' appears twice"));
      gguf.values_.emplace(std::move(key), *std::move(value));
    }
    std::uint64_t alignment = kDefaultAlignment;
    if (gguf.Has(kAlignmentKey)) {
      TANDEM_ASSIGN_OR_RETURN(const std::int64_t value, gguf.GetInteger(kAlignmentKey));
      if (value <= 0 || !std::has_single_bit(static_cast<std::uint64_t>(value)) || value > (std::int64_t{1} << 30)) {
        return absl::InvalidArgumentError(absl::StrCat(kAlignmentKey, ": alignment is not a power of two up to 2^30: ", value));
      }
      alignment = static_cast<std::uint64_t>(value);
    }

    for (std::uint64_t i = 0; i < num_tensors; ++i) {
      TANDEM_ASSIGN_OR_RETURN(GgufTensor tensor, ReadTensor(&reader));
      gguf.tensors_.push_back(std::move(tensor));
    }
    const std::uint64_t data_begin_bytes = RoundUp(reader.position(), alignment);
    const std::uint64_t size_bytes = gguf.file_.size_bytes();
    TANDEM_RETURN_IF_ERROR(
        CheckPlaces(gguf.tensors_, size_bytes > data_begin_bytes ? size_bytes - data_begin_bytes : 0, alignment));
    for (GgufTensor& tensor : gguf.tensors_) tensor.begin_bytes += data_begin_bytes;
    std::sort(gguf.tensors_.begin(), gguf.tensors_.end(),
              [](const GgufTensor& a, const GgufTensor& b) { return a.name < b.name; });
    for (std::size_t i = 1; i < gguf.tensors_.size(); ++i) {
      if (gguf.tensors_[i].name == gguf.tensors_[i - 1].name) {
        return absl::InvalidArgumentError(absl::StrCat("tensor named twice: '", gguf.tensors_[i].name, "'"));
      }
    }
    return absl::OkStatus();
  };
  TANDEM_RETURN_IF_ERROR(Annotate(read_all(), path));
  return gguf;
}

const GgufTensor* GgufFile::Find(const std::string& name) const {
  const auto found = std::lower_bound(tensors_.begin(), tensors_.end(), name,
                                      [](const GgufTensor& tensor, const std::string& wanted) { return tensor.name < wanted; });
  return found != tensors_.end() && found->name == name ? &*found : nullptr;
}

absl::StatusOr<const GgufFile::Value*> GgufFile::FindValue(const std::string& key) const {
  const auto found = values_.find(key);
  if (found == values_.end()) return absl::NotFoundError(absl::StrCat(file_.path(), ": no metadata '", key, "'"));
  return &found->second;
}

absl::Status GgufFile::WrongType(const std::string& key, const Value& value, const char* wanted) const {
  std::string type = TypeName(value.type);
  if (value.type == GgufType::kArray) absl::StrAppend(&type, " of ", TypeName(value.element_type));
  return absl::InvalidArgumentError(absl::StrCat(file_.path(), ": metadata '", key, "' is ", type, "; ", wanted, " is expected"));
}

absl::StatusOr<std::int64_t> GgufFile::GetInteger(const std::string& key) const {
  TANDEM_ASSIGN_OR_RETURN(const Value* value, FindValue(key));
  const std::optional<std::int64_t> number = ToInteger(value->type, value->bytes.data());
  if (!number.has_value()) return WrongType(key, *value, "an integer below 2^63");
  return *number;
}

absl::StatusOr<double> GgufFile::GetNumber(const std::string& key) const {
  TANDEM_ASSIGN_OR_RETURN(const Value* value, FindValue(key));
  if (value->type == GgufType::kFloat32) return FromBytes<float>(value->bytes.data());
  if (value->type == GgufType::kFloat64) return FromBytes<double>(value->bytes.data());
  const std::optional<std::int64_t> number = ToInteger(value->type, value->bytes.data());
  if (!number.has_value()) return WrongType(key, *value, "a number");
  return static_cast<double>(*number);
}

absl::StatusOr<bool> GgufFile::GetBool(const std::string& key) const {
  TANDEM_ASSIGN_OR_RETURN(const Value* value, FindValue(key));
  if (value->type != GgufType::kBool) return WrongType(key, *value, "a bool");
  return value->bytes[0] != 0;
}

absl::StatusOr<std::string> GgufFile::GetString(const std::string& key) const {
  TANDEM_ASSIGN_OR_RETURN(const Value* value, FindValue(key));
  if (value->type != GgufType::kString) return WrongType(key, *value, "a string");
  return value->bytes;
}

absl::StatusOr<std::vector<std::string>> GgufFile::GetStrings(const std::string& key) const {
  TANDEM_ASSIGN_OR_RETURN(const Value* value, FindValue(key));
  if (value->type != GgufType::kArray || value->element_type != GgufType::kString)
    return WrongType(key, *value, "an array of strings");
  return value->strings;
}

absl::StatusOr<std::vector<std::int64_t>> GgufFile::GetIntegers(const std::string& key) const {
  TANDEM_ASSIGN_OR_RETURN(const Value* value, FindValue(key));
  if (value->type != GgufType::kArray || value->element_type == GgufType::kString)
    return WrongType(key, *value, "an array of integers");
  const std::uint64_t element_bytes = TypeBytes(value->element_type);
  std::vector<std::int64_t> numbers;
  numbers.reserve(value->bytes.size() / element_bytes);
  for (std::size_t i = 0; i < value->bytes.size(); i += element_bytes) {
    const std::optional<std::int64_t> number = ToInteger(value->element_type, value->bytes.data() + i);
    if (!number.has_value()) return WrongType(key, *value, "an array of integers");
    numbers.push_back(*number);
  }
  return numbers;
}

}  // namespace tandem
