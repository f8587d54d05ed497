// SHA-256 (OpenSSL), for content addresses, layout hashes and checksums.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

namespace tandem {

// Thread-compatible. Update any number of times, then Finish once.
class Sha256 {
 public:
  Sha256();
  ~Sha256();
  void Update(const void* bytes, std::size_t size);
  void Update(std::string_view bytes) { Update(bytes.data(), bytes.size()); }
  // 64 lower-case hexadecimal digits.
  std::string Finish();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

std::string Sha256Hex(std::string_view bytes);

}  // namespace tandem
