// What decides who may call, and bytes at the daemons' HTTP listeners.
#include <memory>

#include "common/base/check.h"
#include "common/metrics/metrics.h"
#include "common/rpc/access.h"
#include "tests/fuzz/fuzz_input.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/http_exchange.h"

namespace tandem::fuzz {
namespace {

constexpr Metric kGauge = {.name = "tandem_fuzz", .help = "For this target", .labels = {"job"}};

}  // namespace

FuzzTarget TokensFileTarget() {
  const auto read = [](const std::string& input) {
    const auto tokens = ParseTokens(input);
    if (!tokens.ok()) return;
    for (const AccessToken& token : *tokens) TANDEM_CHECK(token.hash.size() == 64 && token.role != AccessRole::kPair, token.name);
  };
  return {
      .read = read,
      .seeds = {"# who\n" + std::string(64, 'a') + " submit ada\n\n" + std::string(64, '0') + " administer bob@x\n"},
      .words = {" view ", " submit ", " administer ", " pair ", "\n", "\r\n", "#", std::string(64, 'f'), std::string(1, '\0')}};
}

FuzzTarget HttpRequestTarget() {
  const auto metrics = std::shared_ptr<Metrics>(Metrics::Create("127.0.0.1:0").value());
  metrics->SetGauge(kGauge, {"a"}, 1);
  const auto read = [metrics](const std::string& input) {
    TANDEM_CHECK(Exchange(metrics->port(), input, absl::Seconds(20)), "no end of an answer");
  };
  return {.read = read, .seeds = HttpSeeds("/metrics"), .words = HttpWords()};
}

}  // namespace tandem::fuzz
