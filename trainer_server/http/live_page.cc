#include "trainer_server/http/live_page.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "common/base/hash.h"
#include "common/base/log.h"
#include "common/base/printable.h"
#include "common/rpc/channel.h"
#include "google/protobuf/util/json_util.h"
#include "trainer_server/http/live_page_document.h"

namespace tandem {
namespace {

constexpr std::size_t kMaxTargetBytes = 2048;
constexpr std::uint32_t kUsualCompletions = 8;
constexpr std::size_t kMaxCallers = 4096;
constexpr absl::Duration kSilence = absl::Minutes(10);  // after which a caller is told of again
constexpr std::string_view kApi = "/api/";
constexpr char kJson[] = "application/json";
constexpr char kJsonLines[] = "application/x-ndjson";

HttpResponse Fault(unsigned status, const std::string& message) {
  return {.status = status, .body = absl::StrCat(message, "\n")};
}

HttpResponse Fault(const absl::Status& status) {
  const std::string message(status.message());
  switch (status.code()) {
    case absl::StatusCode::kInvalidArgument:
      return Fault(400, message);
    case absl::StatusCode::kUnauthenticated: {
      HttpResponse response = Fault(401, message);
      response.headers.emplace_back("WWW-Authenticate", "Bearer");
      return response;
    }
    case absl::StatusCode::kPermissionDenied:
      return Fault(403, message);
    case absl::StatusCode::kNotFound:
      return Fault(404, message);
    case absl::StatusCode::kResourceExhausted:
      return Fault(429, message);
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kDeadlineExceeded:
      return Fault(503, message);
    default:
      return Fault(500, message);
  }
}

std::string ToJson(const google::protobuf::Message& message) {
  google::protobuf::util::JsonPrintOptions options;
  options.always_print_primitive_fields = true;
  options.preserve_proto_field_names = true;
  std::string json;
  return google::protobuf::util::MessageToJsonString(message, &json, options).ok() ? json : "{}";
}

// Sets the fields of `request` that the query names: whole numbers, and page tokens, which are some too.
absl::Status FillFromQuery(std::string_view query, google::protobuf::Message* request) {
  while (!query.empty()) {
    const std::string_view item = query.substr(0, query.find('&'));
    query.remove_prefix(std::min(query.size(), item.size() + 1));
    const std::string name(item.substr(0, item.find('=')));
    const std::string_view value = item.size() > name.size() ? item.substr(name.size() + 1) : std::string_view();
    const auto* const field = request->GetDescriptor()->FindFieldByName(name);
    std::uint32_t number = 0;
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
    if (error != std::errc() || end != value.data() + value.size())
      return absl::InvalidArgumentError(absl::StrCat(absl::CEscape(name), ": must be a whole number below 2^32"));
    using Field = google::protobuf::FieldDescriptor;
    if (field != nullptr && field->cpp_type() == Field::CPPTYPE_UINT32 && !field->is_repeated()) {
      request->GetReflection()->SetUInt32(request, field, number);
    } else if (name == "page_token" && field != nullptr) {
      request->GetReflection()->SetString(request, field, std::string(value));
    } else {
      return absl::InvalidArgumentError(absl::StrCat("'", absl::CEscape(name), "' is no parameter here"));
    }
  }
  return absl::OkStatus();
}

std::unique_ptr<grpc::ClientContext> CallContext() {
  auto context = std::make_unique<grpc::ClientContext>();
  context->set_deadline(GrpcDeadline(MonotonicTime::Now() + LivePage::kCallTimeout));
  return context;
}

template <typename Response>
HttpResponse AnswerOf(const grpc::Status& status, const Response& response) {
  if (!status.ok()) return Fault(FromGrpc(status));
  return {.type = kJson, .body = ToJson(response)};
}

// A line for each message until the stream or the room ends.
template <typename Message>
HttpResponse LinesOf(grpc::ClientContext* context, grpc::ClientReader<Message>* reader, void (*shorten)(Message*)) {
  HttpResponse response{.type = kJsonLines, .body = {}};
  Message message;
  bool is_whole = true;
  while (is_whole && reader->Read(&message)) {
    if (shorten != nullptr) shorten(&message);
    absl::StrAppend(&response.body, ToJson(message), "\n");
    is_whole = response.body.size() < LivePage::kMaxAnswerBytes;
  }
  if (!is_whole) context->TryCancel();
  const grpc::Status status = reader->Finish();
  return is_whole && !status.ok() ? Fault(FromGrpc(status)) : response;
}

// "'sha256-...'" of what stands between the tags, as a content security policy names it.
std::string HashOf(std::string_view document, std::string_view tag) {
  const std::string begin = absl::StrCat("<", absl::string_view(tag.data(), tag.size()), ">");
  const std::string end = absl::StrCat("</", absl::string_view(tag.data(), tag.size()), ">");
  const std::size_t first = document.find(begin) + begin.size();
  const std::string hash = absl::HexStringToBytes(Sha256Hex(document.substr(first, document.find(end) - first)));
  return absl::StrCat("'sha256-", absl::Base64Escape(hash), "'");
}

HttpResponse MakeDocument() {
  HttpResponse response{.type = "text/html; charset=utf-8", .body = std::string(kLivePageDocument)};
  response.headers.emplace_back(
      "Content-Security-Policy",
      absl::StrCat("default-src 'none'; script-src ", HashOf(kLivePageDocument, "script"), "; style-src ",
                   HashOf(kLivePageDocument, "style"),
                   "; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
                   "require-trusted-types-for 'script'; trusted-types 'none'"));
  return response;
}

// "127.0.0.1:7072", "localhost", "[::1]:80": whatever the port, which a tunnel may change.
bool IsLoopbackHost(std::string_view host) {
  const bool has_brackets = host.starts_with('[');
  const std::string name(has_brackets ? host.substr(0, host.find(']') + 1) : host.substr(0, host.find(':')));
  if (name == "localhost") return true;
  const absl::StatusOr<HttpAddress> address = ParseHttpAddress(absl::StrCat(name, ":0"));
  return address.ok() && address->is_loopback;
}

}  // namespace

absl::Status LivePage::CheckAddress(const std::string& address, const AccessOptions& access) {
  const absl::StatusOr<HttpAddress> parsed = ParseHttpAddress(address);
  if (!parsed.ok()) return absl::InvalidArgumentError(absl::StrCat("--http_address: ", parsed.status().message(), ", or 'off'"));
  if (parsed->is_loopback || !access.tls_cert.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "--http_address=", address,
      " can be reached from other machines: give --tls_cert, --tls_key, and --tokens_file or --tls_client_ca; or serve "
      "the page at 127.0.0.1"));
}

LivePage::LivePage(std::shared_ptr<Access> access, const std::string& trainer_address, const std::string& rollout_address)
    : access_(std::move(access)),
      trainer_(v1::JobService::NewStub(MakeChannel(trainer_address))),
      rollout_(v1::RolloutService::NewStub(MakeChannel(rollout_address))),
      document_(MakeDocument()) {}

HttpResponse LivePage::Answer(const HttpRequest& request) {
  const std::string_view target = request.target;
  const std::string_view path = target.substr(0, target.find('?'));
  const std::string_view query = target.size() > path.size() ? target.substr(path.size() + 1) : std::string_view();
  HttpResponse response;
  if (target.size() > kMaxTargetBytes) {
    response = Fault(414, absl::StrCat("the address is longer than ", kMaxTargetBytes, " bytes"));
  } else if (!request.is_over_tls && !IsLoopbackHost(request.host)) {
    response = Fault(421, absl::StrCat("'", absl::CEscape(request.host),
                                       "' is no name of this machine's loopback device: use 127.0.0.1 or localhost"));
  } else if (path == "/") {
    response = document_;
  } else if (path.starts_with(kApi)) {
    response = AnswerCall(path.substr(kApi.size()), query, request);
  } else {
    response = Fault(404, "there is nothing here");
  }
  constexpr std::array<std::pair<const char*, const char*>, 5> kOfEach = {{{"Cache-Control", "no-store"},
                                                                           {"X-Content-Type-Options", "nosniff"},
                                                                           {"Referrer-Policy", "no-referrer"},
                                                                           {"Cross-Origin-Opener-Policy", "same-origin"},
                                                                           {"Cross-Origin-Resource-Policy", "same-origin"}}};
  for (const auto& [name, value] : kOfEach) response.headers.emplace_back(name, value);
  return response;
}

absl::Status LivePage::Admit(std::string_view rpc, const HttpRequest& request) {
  if (!request.is_over_tls) return absl::OkStatus();  // from within the node, as with gRPC
  TANDEM_RETURN_IF_ERROR(access_->Admit(rpc, request.authorization, request.certificate_name));
  const absl::StatusOr<Caller> caller = access_->Identify(request.authorization, request.certificate_name);
  if (!caller.ok()) return caller.status();
  const MonotonicTime now = MonotonicTime::Now();
  {
    MutexLock lock(&mutex_);
    if (seen_.size() >= kMaxCallers) std::erase_if(seen_, [now](const auto& seen) { return now - seen.second >= kSilence; });
    const auto [found, is_new] = seen_.try_emplace(caller->name, now);
    if (!is_new && now - std::exchange(found->second, now) < kSilence) return absl::OkStatus();
  }
  // A page asks every few seconds: one line tells that somebody began to look.
  WriteLog(
      LogLevel::kInfo, "audit",
      absl::StrCat("name=", caller->name, " role=", AccessRoleName(caller->role), " certificate='",
                   absl::CEscape(request.certificate_name), "' peer=", absl::CEscape(request.peer), " rpc=LivePage result=OK"));
  return absl::OkStatus();
}

HttpResponse LivePage::AnswerCall(std::string_view path, std::string_view query, const HttpRequest& request) {
  constexpr std::string_view kJobs = "jobs/";
  std::string job, what(path);
  if (path.starts_with(kJobs)) {
    const std::string_view rest = path.substr(kJobs.size());
    job = rest.substr(0, rest.find('/'));
    what = rest.substr(job.size());
  }
  const auto admitted = [&](std::string_view rpc) { return Admit(rpc, request); };
  const auto context = CallContext();
  if (what == "status") {
    if (const absl::Status status = admitted("/tandem.v1.JobService/GetStatus"); !status.ok()) return Fault(status);
    v1::TrainerStatus response;
    return AnswerOf(trainer_->GetStatus(context.get(), v1::TrainerStatusRequest(), &response), response);
  }
  if (what == "rollout") {
    if (const absl::Status status = admitted("/tandem.v1.RolloutService/GetStatus"); !status.ok()) return Fault(status);
    v1::RolloutStatus response;
    return AnswerOf(rollout_->GetStatus(context.get(), v1::RolloutStatusRequest(), &response), response);
  }
  if (what == "jobs") {
    if (const absl::Status status = admitted("/tandem.v1.JobService/ListJobs"); !status.ok()) return Fault(status);
    v1::ListJobsRequest list;
    if (const absl::Status status = FillFromQuery(query, &list); !status.ok()) return Fault(status);
    v1::ListJobsResponse response;
    return AnswerOf(trainer_->ListJobs(context.get(), list, &response), response);
  }
  if (what.empty() && !job.empty()) {
    if (const absl::Status status = admitted("/tandem.v1.JobService/GetJob"); !status.ok()) return Fault(status);
    v1::GetJobRequest get;
    if (const absl::Status status = FillFromQuery(query, &get); !status.ok()) return Fault(status);
    get.set_job(job);
    v1::JobStatus response;
    return AnswerOf(trainer_->GetJob(context.get(), get, &response), response);
  }
  if (what == "/history") {
    if (const absl::Status status = admitted("/tandem.v1.JobService/Watch"); !status.ok()) return Fault(status);
    return History(job, query);
  }
  if (what == "/completions") {
    if (const absl::Status status = admitted("/tandem.v1.JobService/Completions"); !status.ok()) return Fault(status);
    return Completions(job, query);
  }
  return Fault(404, "there is nothing here");
}

HttpResponse LivePage::History(const std::string& job, std::string_view query) {
  v1::WatchRequest request;
  if (const absl::Status status = FillFromQuery(query, &request); !status.ok()) return Fault(status);
  request.set_job(job);
  request.set_until_now(true);
  const auto context = CallContext();
  return LinesOf<v1::WatchResponse>(context.get(), trainer_->Watch(context.get(), request).get(), nullptr);
}

HttpResponse LivePage::Completions(const std::string& job, std::string_view query) {
  v1::CompletionsRequest request;
  if (const absl::Status status = FillFromQuery(query, &request); !status.ok()) return Fault(status);
  request.set_job(job);
  if (request.limit() == 0) request.set_limit(kUsualCompletions);
  request.set_limit(std::min(request.limit(), kMaxCompletions));
  const auto context = CallContext();
  return LinesOf<v1::CompletionRecord>(
      context.get(), trainer_->Completions(context.get(), request).get(), +[](v1::CompletionRecord* record) {
        record->set_prompt(Shorten(std::move(*record->mutable_prompt()), kMaxTextBytes));
        record->set_completion(Shorten(std::move(*record->mutable_completion()), kMaxTextBytes));
      });
}

}  // namespace tandem
