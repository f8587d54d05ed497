#include "common/metrics/metrics.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/unique_fd.h"

namespace tandem {
namespace {

bool Contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

std::string Scrape(int port) {
  const UniqueFd fd(::socket(AF_INET, SOCK_STREAM, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) return "";
  const std::string ask = "GET /metrics HTTP/1.0\r\n\r\n";
  (void)!::write(fd.get(), ask.data(), ask.size());
  std::string text;
  char buffer[4096];
  for (ssize_t size; (size = ::read(fd.get(), buffer, sizeof buffer)) > 0;) text.append(buffer, static_cast<std::size_t>(size));
  return text;
}

constexpr double kBuckets[] = {0.1, 1};
constexpr Metric kBytes = {.name = "tandem_memory_bytes", .help = "Memory by owner", .labels = {"owner"}};
constexpr Metric kTokensTotal = {.name = "tandem_tokens_total", .type = Metric::Type::kCounter, .help = "Tokens"};
constexpr Metric kReward = {.name = "tandem_reward", .help = "Reward", .labels = {"function", "job"}};
constexpr Metric kSteps = {.name = "tandem_steps_total", .type = Metric::Type::kCounter, .help = "Steps", .labels = {"job"}};
constexpr Metric kStepSeconds = {
    .name = "tandem_step_seconds", .type = Metric::Type::kHistogram, .help = "Step", .labels = {"job"}, .buckets = kBuckets};

// One exposer for all: its destructor takes two seconds.
TEST(Metrics, ServesWhatWasSetAndRefusesATakenAddress) {
  const auto metrics = Metrics::Create("127.0.0.1:0");
  ASSERT_TRUE(metrics.ok()) << metrics.status();
  (*metrics)->SetGauge(kBytes, {"weights"}, 42);
  (*metrics)->SetGauge(kBytes, {"weights"}, 43);
  ASSERT_GT((*metrics)->port(), 0);
  const std::string page = Scrape((*metrics)->port());
  EXPECT_TRUE(Contains(page, "200 OK")) << page;
  EXPECT_TRUE(Contains(page, "# HELP tandem_memory_bytes Memory by owner\n# TYPE tandem_memory_bytes gauge")) << page;
  EXPECT_TRUE(Contains(page, "tandem_memory_bytes{owner=\"weights\"} 43\n")) << page;

  const std::string taken = absl::StrCat("127.0.0.1:", (*metrics)->port());
  const auto refused = Metrics::Create(taken);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(Contains(std::string(refused.status().message()), taken)) << refused.status();
}

TEST(Metrics, CountersAddAndHistogramsCount) {
  const auto metrics = Metrics::Create("");
  ASSERT_TRUE(metrics.ok());
  (*metrics)->AddCounter(kTokensTotal, {}, 2);
  (*metrics)->AddCounter(kTokensTotal, {}, 3);
  (*metrics)->Observe(kStepSeconds, {"a"}, 0.5);
  (*metrics)->Observe(kStepSeconds, {"a"}, 3);
  const std::string text = (*metrics)->Text();
  EXPECT_TRUE(Contains(text, "tandem_tokens_total 5\n")) << text;
  EXPECT_TRUE(Contains(text, "tandem_step_seconds_bucket{job=\"a\",le=\"0.1\"} 0\n")) << text;
  EXPECT_TRUE(Contains(text, "tandem_step_seconds_bucket{job=\"a\",le=\"1\"} 1\n")) << text;
  EXPECT_TRUE(Contains(text, "tandem_step_seconds_count{job=\"a\"} 2\n")) << text;
}

TEST(Metrics, SeriesOfAnEndedJobGoAndOthersStay) {
  const auto metrics = Metrics::Create("");
  ASSERT_TRUE(metrics.ok());
  for (const char* job : {"a", "b"}) {
    (*metrics)->SetGauge(kReward, {"length", job}, 1);
    (*metrics)->AddCounter(kSteps, {job}, 1);
    (*metrics)->Observe(kStepSeconds, {job}, 1);
  }
  (*metrics)->SetGauge(kBytes, {"a"}, 1);
  (*metrics)->RemoveLabel("job", "a");
  std::string text = (*metrics)->Text();
  EXPECT_FALSE(Contains(text, "job=\"a\"")) << text;
  EXPECT_TRUE(Contains(text, "tandem_steps_total{job=\"b\"} 1\n")) << text;
  EXPECT_TRUE(Contains(text, "owner=\"a\"")) << text;
  (*metrics)->AddCounter(kSteps, {"a"}, 1);
  text = (*metrics)->Text();
  EXPECT_TRUE(Contains(text, "tandem_steps_total{job=\"a\"} 1\n")) << "it begins anew: " << text;
}

TEST(Metrics, ReplacedGaugesKeepNoSeriesOfBefore) {
  const auto metrics = Metrics::Create("");
  ASSERT_TRUE(metrics.ok());
  (*metrics)->ReplaceGauges(kBytes, {{{"masters"}, 1}, {{"free"}, 2}});
  (*metrics)->ReplaceGauges(kBytes, {{{"free"}, 3}});
  const std::string text = (*metrics)->Text();
  EXPECT_FALSE(Contains(text, "masters")) << text;
  EXPECT_TRUE(Contains(text, "tandem_memory_bytes{owner=\"free\"} 3\n")) << text;
  (*metrics)->ReplaceGauges(kBytes, {});
  EXPECT_EQ((*metrics)->Text(), "");
}

TEST(Metrics, AFamilyIsBoundedAndWhatIsRefusedIsCounted) {
  const auto metrics = Metrics::Create("");
  ASSERT_TRUE(metrics.ok());
  for (std::size_t i = 0; i < kMaxSeries + 2; ++i) (*metrics)->SetGauge(kBytes, {absl::StrCat("o", i)}, 1);
  (*metrics)->SetGauge(kBytes, {"o0"}, 7);
  std::string text = (*metrics)->Text();
  EXPECT_TRUE(Contains(text, "owner=\"o0\"} 7\n")) << "those that are there go on";
  EXPECT_TRUE(Contains(text, "owner=\"o1023\"}"));
  EXPECT_FALSE(Contains(text, "owner=\"o1024\"}"));
  EXPECT_TRUE(Contains(text, "tandem_metrics_series_refused_total 2\n"));
}

// Whoever connects and says nothing, or says it byte by byte, holds one of few threads: not for long.
TEST(Metrics, SilentConnectionsDoNotKeepTheScraperOut) {
  const auto metrics = Metrics::Create("127.0.0.1:0");
  ASSERT_TRUE(metrics.ok()) << metrics.status();
  (*metrics)->SetGauge(kBytes, {"x"}, 1);
  const auto connect = [&] {
    UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<std::uint16_t>((*metrics)->port()));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
    return fd;
  };
  std::vector<UniqueFd> silent;
  for (int i = 0; i < 6; ++i) {
    silent.push_back(connect());
    const std::string_view said = i % 2 == 0 ? "GET /met" : "";
    EXPECT_EQ(::send(silent.back().get(), said.data(), said.size(), MSG_NOSIGNAL), static_cast<ssize_t>(said.size()));
  }
  const auto begin = std::chrono::steady_clock::now();
  const UniqueFd scraper = connect();
  constexpr std::string_view kScrape = "GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n";
  ASSERT_EQ(::send(scraper.get(), kScrape.data(), kScrape.size(), MSG_NOSIGNAL), static_cast<ssize_t>(kScrape.size()));
  pollfd entry{.fd = scraper.get(), .events = POLLIN, .revents = 0};
  ASSERT_EQ(::poll(&entry, 1, 30'000), 1) << "no answer";
  char text[16] = {};
  ASSERT_GT(::recv(scraper.get(), text, sizeof text - 1, 0), 0);
  EXPECT_EQ(std::string(text).substr(0, 12), "HTTP/1.1 200");
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10)) << "Prometheus waits for ten seconds";
}

TEST(MetricsDeathTest, AFamilyHasOneDeclarationTypeAndNumberOfLabels) {
  const auto metrics = Metrics::Create("");
  EXPECT_DEATH((*metrics)->AddCounter(kBytes, {"x"}, 1), "two types");
  EXPECT_DEATH((*metrics)->SetGauge(kBytes, {}, 1), "has 1 labels, was given 0");
  constexpr static Metric kAgain = {.name = "tandem_memory_bytes", .help = "Another", .labels = {"owner"}};
  (*metrics)->SetGauge(kBytes, {"x"}, 1);
  EXPECT_DEATH((*metrics)->SetGauge(kAgain, {"x"}, 1), "declared twice");
}

}  // namespace
}  // namespace tandem
