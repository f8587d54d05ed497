#include "client/connection.h"

#include <pwd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "common/base/clock.h"
#include "common/model/bounded_json.h"
#include "common/rpc/channel.h"
#include "nlohmann/json.hpp"

namespace tandem {
namespace {

constexpr std::uintmax_t kMaxFileBytes = 1 << 20;
constexpr std::size_t kUserEntryBytes = 16 << 10;

enum class Secrecy { kPublic, kPrivate };

// `what` names the setting in errors.
absl::StatusOr<std::string> ReadSmallFile(const std::string& path, const std::string& what, Secrecy secrecy) {
  struct stat found {};
  if (::stat(path.c_str(), &found) != 0)
    return absl::NotFoundError(absl::StrCat(what, ": cannot read ", path, ": ", std::strerror(errno)));
  if (!S_ISREG(found.st_mode) || static_cast<std::uintmax_t>(found.st_size) > kMaxFileBytes)
    return absl::InvalidArgumentError(
        absl::StrCat(what, ": ", path, " is not a regular file of at most ", kMaxFileBytes, " bytes"));
  if (secrecy == Secrecy::kPrivate && (found.st_mode & 077) != 0)
    return absl::PermissionDeniedError(
        absl::StrCat(what, ": others may read ", path, ": chmod 600 it, and take a new one if they have"));
  std::ifstream file(path, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  if (!file) return absl::PermissionDeniedError(absl::StrCat(what, ": cannot read ", path));
  return text;
}

// Empty: the system has no name for the user.
std::string LoginName() {
  passwd found{};
  passwd* entry = nullptr;
  std::string buffer(kUserEntryBytes, '\0');
  return ::getpwuid_r(::geteuid(), &found, buffer.data(), buffer.size(), &entry) == 0 && entry != nullptr ? entry->pw_name : "";
}

// The settings by the names that file, flags and environment share.
struct Settings {
  std::string trainer, rollout, ca, cert, key, token_file;
};
struct SettingField {
  const char* name;
  std::string Settings::*value;
  bool is_path;  // else an address
};
constexpr std::array<SettingField, 6> kFields = {{{"trainer", &Settings::trainer, false},
                                                  {"rollout", &Settings::rollout, false},
                                                  {"ca", &Settings::ca, true},
                                                  {"cert", &Settings::cert, true},
                                                  {"key", &Settings::key, true},
                                                  {"token_file", &Settings::token_file, true}}};

// HOST:PORT, of IPv6 with HOST in brackets, or unix:PATH. `setting` names it in errors.
absl::Status CheckAddress(const std::string& address, const std::string& setting) {
  constexpr char kUnix[] = "unix:";
  bool is_address = absl::StartsWith(address, kUnix) && address != kUnix;
  if (const std::size_t colon = address.rfind(':'); !absl::StartsWith(address, kUnix) && colon != address.npos) {
    const std::string host = address.substr(0, colon), digits = address.substr(colon + 1);
    const bool is_bracketed = host.size() > 2 && host.front() == '[' && host.back() == ']';
    const std::string name = is_bracketed ? host.substr(1, host.size() - 2) : host;
    const bool is_host =
        !name.empty() && name.find_first_of("[]/ \t\r\n") == name.npos && (name.find(':') != name.npos) == is_bracketed;
    int port = 0;
    is_address = is_host && digits.size() <= 5 && digits.find_first_not_of("0123456789") == digits.npos &&
                 absl::SimpleAtoi(digits, &port) && port >= 1 && port <= 65535;
  }
  if (is_address) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(setting, ": '", address, "'; must be HOST:PORT with a port of 1 to 65535, or unix:PATH"));
}

// Of the context `name`; empty: the file's own choice, which may be none.
absl::StatusOr<Settings> ReadContext(const std::string& path, std::string name) {
  TANDEM_ASSIGN_OR_RETURN(const std::string text, ReadSmallFile(path, "configuration file", Secrecy::kPublic));
  const auto fault = [&](const auto&... parts) { return absl::InvalidArgumentError(absl::StrCat(path, ": ", parts...)); };
  TANDEM_ASSIGN_OR_RETURN(const nlohmann::json file, ParseBoundedJson(text, path, "the file"));
  if (!file.is_object()) return fault("not a JSON object");
  for (const auto& [key, value] : file.items()) {
    if (key == "context" ? !value.is_string() : key != "contexts" || !value.is_object())
      return fault("'", key, "' is not \"context\" with a name or \"contexts\" with an object");
  }
  if (name.empty()) name = file.value("context", "");
  if (name.empty()) return Settings();
  const nlohmann::json contexts = file.value("contexts", nlohmann::json::object());
  if (!contexts.contains(name)) {
    std::string known;
    for (const auto& [key, value] : contexts.items()) absl::StrAppend(&known, known.empty() ? "" : ", ", key);
    return absl::NotFoundError(absl::StrCat(path, ": no context '", name, "'; there are: ", known.empty() ? "none" : known));
  }
  if (!contexts[name].is_object()) return fault("context '", name, "' is not an object");
  Settings settings;
  for (const auto& [key, value] : contexts[name].items()) {
    const auto field = std::ranges::find(kFields, key, [](const SettingField& f) { return std::string(f.name); });
    if (field == kFields.end() || !value.is_string() || value.get<std::string>().empty())
      return fault("context '", name, "': '", key, "' is none of trainer, rollout, ca, cert, key, token_file with a text");
    const std::string word = value.get<std::string>();
    if (!field->is_path) TANDEM_RETURN_IF_ERROR(CheckAddress(word, absl::StrCat(path, ": context '", name, "': ", key)));
    settings.*field->value = field->is_path ? (std::filesystem::path(path).parent_path() / word).string() : word;
  }
  return settings;
}

absl::StatusOr<ChannelSecurity> ReadSecurity(const Settings& settings, std::string token) {
  ChannelSecurity security;
  if (settings.cert.empty() != settings.key.empty())
    return absl::InvalidArgumentError("cert and key are given together or not at all");
  if (token.empty() && !settings.token_file.empty()) {
    TANDEM_ASSIGN_OR_RETURN(token, ReadSmallFile(settings.token_file, "token_file", Secrecy::kPrivate));
    token = std::string(absl::StripAsciiWhitespace(token));
  }
  if (settings.ca.empty()) {
    if (token.empty() && settings.cert.empty()) return security;
    return absl::InvalidArgumentError("a token or a client certificate is shown over TLS only: give ca, the server's CA");
  }
  if (!std::all_of(token.begin(), token.end(), [](char c) { return absl::ascii_isgraph(static_cast<unsigned char>(c)); }))
    return absl::InvalidArgumentError("the token has characters other than visible ASCII, or is more than one word");
  TANDEM_ASSIGN_OR_RETURN(security.ca, ReadSmallFile(settings.ca, "ca", Secrecy::kPublic));
  if (security.ca.find("-----BEGIN CERTIFICATE-----") == std::string::npos)
    return absl::InvalidArgumentError(absl::StrCat("ca: ", settings.ca, " has no PEM certificate"));
  if (!settings.cert.empty()) {
    TANDEM_ASSIGN_OR_RETURN(security.certificate, ReadSmallFile(settings.cert, "cert", Secrecy::kPublic));
    TANDEM_ASSIGN_OR_RETURN(security.key, ReadSmallFile(settings.key, "key", Secrecy::kPrivate));
  }
  security.token = std::move(token);
  return security;
}

}  // namespace

std::string UserNameOf(const std::string& login, uid_t uid) { return IsUserName(login) ? login : absl::StrCat("uid-", uid); }

std::unique_ptr<v1::JobService::Stub> Connection::Trainer() const {
  return v1::JobService::NewStub(MakeChannel(trainer_address, security));
}
std::unique_ptr<v1::RolloutService::Stub> Connection::Rollout() const {
  return v1::RolloutService::NewStub(MakeChannel(rollout_address, security));
}

std::unique_ptr<grpc::ClientContext> Connection::Context(absl::Duration least) const {
  auto context = std::make_unique<grpc::ClientContext>();
  context->set_deadline(GrpcDeadline(MonotonicTime::Now() + std::max(timeout, least)));
  // Over TLS the server knows who calls.
  const bool is_over_tls = !security.ca.empty() && !absl::StartsWith(trainer_address, "unix:");
  if (!is_over_tls) context->AddMetadata(kUserHeader, UserNameOf(LoginName(), ::geteuid()));
  return context;
}

absl::StatusOr<Connection> ResolveConnection(const ConnectionFlags& flags,
                                             const std::function<std::string(const std::string&)>& environment) {
  std::string context = flags.context.empty() ? environment("TANDEM_CONTEXT") : flags.context;
  Settings settings;
  if (context != "none") {
    std::string path = environment("TANDEM_CONFIG");
    const bool is_named = !path.empty() || !context.empty();
    if (path.empty()) {
      const std::string home = environment("XDG_CONFIG_HOME");
      path = (home.empty() ? environment("HOME") + "/.config" : home) + "/tandem/config.json";
    }
    std::error_code error;
    if (is_named || std::filesystem::exists(path, error)) { TANDEM_ASSIGN_OR_RETURN(settings, ReadContext(path, context)); }
  }
  const Settings given{flags.trainer, flags.rollout, flags.ca, flags.cert, flags.key, flags.token_file};
  for (const SettingField& field : kFields) {
    std::string value = given.*field.value, setting = absl::StrCat("--", field.name);
    if (value.empty()) {
      setting = absl::StrCat("TANDEM_", absl::AsciiStrToUpper(field.name));
      value = environment(setting);
    }
    if (value.empty()) continue;
    if (!field.is_path) TANDEM_RETURN_IF_ERROR(CheckAddress(value, setting));
    settings.*field.value = value;
  }
  Connection connection;
  connection.trainer_address = settings.trainer.empty() ? "127.0.0.1:7070" : settings.trainer;
  connection.rollout_address = settings.rollout.empty() ? "127.0.0.1:7071" : settings.rollout;
  // A token file named on the command line is meant more than the environment's token.
  const std::string token = flags.token_file.empty() ? environment("TANDEM_TOKEN") : "";
  TANDEM_ASSIGN_OR_RETURN(connection.security, ReadSecurity(settings, token));
  return connection;
}

absl::Status CallStatus(const grpc::Status& status, const std::string& server, const std::string& address) {
  const absl::Status ours = FromGrpc(status);
  const std::string words(ours.message()), at = absl::StrCat(server, " at ", address);
  // Words of gRPC's own, which a server without the method says: ours, of C++, another in Python, one that speaks HTTP alone.
  if (absl::IsUnimplemented(ours) &&
      (words.empty() || absl::StartsWith(words, "Method not found") || absl::StrContains(words, "http2 header with status"))) {
    const char* const other = server == "trainer_server" ? "rollout_server" : "trainer_server";
    return absl::UnimplementedError(
        absl::StrCat(at, ": what answers there is none (is it the ", other, ", or another version?)"));
  }
  if (!absl::IsUnavailable(ours)) return ours;
  if (absl::StartsWith(words, "DNS resolution failed"))
    return absl::UnavailableError(absl::StrCat(at, ": no address is known for its host"));
  if (!absl::StrContains(words, "failed to connect")) return Annotate(ours, at);
  // gRPC's own words are of attempts and addresses. "Peer name node-1 is not in peer certificate":
  constexpr char kPeerName[] = "Peer name ";
  if (const std::size_t end = words.find(" is not in peer certificate"); end != words.npos) {
    const std::size_t begin = words.rfind(kPeerName, end) + sizeof(kPeerName) - 1;
    return absl::UnavailableError(absl::StrCat(at, ": the server's certificate does not name ", words.substr(begin, end - begin),
                                               ": reach it at an address that it names, or give it one of this name"));
  }
  if (absl::StrContains(words, "Failed parsing HTTP/2"))
    return absl::UnavailableError(
        absl::StrCat(at, ": what answers there does not speak gRPC (is it the port of --metrics or --http_address?)"));
  // One that someone answered and hung up on is about TLS.
  if (absl::StrContains(words, "andshak") || absl::StrContains(words, "Socket closed"))
    return Annotate(ours, absl::StrCat(at,
                                       ": no agreement on TLS: either only one side speaks it (this one does with `ca`), or ca, "
                                       "cert or key do not fit"));
  return absl::UnavailableError(
      absl::StrCat(at, " does not answer: it is not running there, or still starting; tandem status --wait=60s waits for it"));
}

}  // namespace tandem
