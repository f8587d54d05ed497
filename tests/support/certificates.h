// Certificates made by the command openssl, for tests over TLS.
#pragma once

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/base/check.h"

namespace tandem::testing {

inline void RunOpenssl(const std::string& directory, const std::string& script) {
  const std::string command = absl::StrCat("cd '", directory, "' && { ", script, "; } >openssl.log 2>&1");
  TANDEM_CHECK(std::system(command.c_str()) == 0, "openssl failed: ", directory, "/openssl.log");
}

// NAME.pem and NAME.key: an authority.
inline void MakeAuthority(const std::string& directory, const std::string& name) {
  RunOpenssl(directory,
             absl::StrCat("openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=", name,
                          " -keyout ", name, ".key -out ", name, ".pem && chmod 600 ", name, ".key"));
}

// NAME.pem and NAME.key, signed by `authority`; `days` below 0: expired. The addresses are those of this machine and of `more`
// ("IP:10.0.0.1").
inline void MakeCertificate(const std::string& directory, const std::string& authority, const std::string& name, int days = 2,
                            const std::string& more = "") {
  RunOpenssl(
      directory,
      absl::StrCat("openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=", name, " -keyout ", name,
                   ".new -out ", name, ".csr && echo 'subjectAltName=IP:127.0.0.1,DNS:localhost", more.empty() ? "" : ",", more,
                   "' > ", name, ".ext && openssl x509 -req -in ", name, ".csr -CA ", authority, ".pem -CAkey ", authority,
                   ".key -CAcreateserial -days ", days, " -extfile ", name, ".ext -out ", name, ".crt && chmod 600 ", name,
                   ".new && mv ", name, ".new ", name, ".key && mv ", name, ".crt ", name, ".pem"));
}

inline std::string ReadText(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

inline void WritePrivate(const std::string& path, const std::string& text) {
  std::ofstream(path + ".new", std::ios::binary) << text;
  TANDEM_CHECK(std::system(absl::StrCat("chmod 600 '", path, ".new' && mv '", path, ".new' '", path, "'").c_str()) == 0, path);
}

}  // namespace tandem::testing
