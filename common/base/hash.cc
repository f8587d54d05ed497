#include "common/base/hash.h"

#include <openssl/evp.h>

#include "common/base/check.h"

namespace tandem {

struct Sha256::State {
  EVP_MD_CTX* context = EVP_MD_CTX_new();
  ~State() { EVP_MD_CTX_free(context); }
};

Sha256::Sha256() : state_(std::make_unique<State>()) {
  TANDEM_CHECK(EVP_DigestInit_ex(state_->context, EVP_sha256(), nullptr) == 1, "OpenSSL has no SHA-256");
}
Sha256::~Sha256() = default;

void Sha256::Update(const void* bytes, std::size_t size) {
  TANDEM_CHECK(EVP_DigestUpdate(state_->context, bytes, size) == 1, "EVP_DigestUpdate failed");
}

std::string Sha256::Finish() {
  unsigned char digest[32];
  TANDEM_CHECK(EVP_DigestFinal_ex(state_->context, digest, nullptr) == 1, "EVP_DigestFinal_ex failed");
  std::string hex;
  for (unsigned char byte : digest) {
    hex.push_back("0123456789abcdef"[byte >> 4]);
    hex.push_back("0123456789abcdef"[byte & 15]);
  }
  return hex;
}

std::string Sha256Hex(std::string_view bytes) {
  Sha256 hash;
  hash.Update(bytes);
  return hash.Finish();
}

}  // namespace tandem
