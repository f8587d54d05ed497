#include "common/metrics/metrics.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <string>

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

// One exposer for all: its destructor takes two seconds.
TEST(Metrics, ServesWhatWasSetAndRefusesATakenAddress) {
  const auto metrics = Metrics::Create("127.0.0.1:0");
  ASSERT_TRUE(metrics.ok()) << metrics.status();
  (*metrics)->SetGauge("tandem_memory_bytes", "Memory by owner", {{"owner", "weights"}}, 42);
  (*metrics)->SetGauge("tandem_memory_bytes", "Memory by owner", {{"owner", "weights"}}, 43);
  ASSERT_GT((*metrics)->port(), 0);
  const std::string page = Scrape((*metrics)->port());
  EXPECT_TRUE(Contains(page, "200 OK")) << page;
  EXPECT_TRUE(Contains(page, "# TYPE tandem_memory_bytes gauge")) << page;
  EXPECT_TRUE(Contains(page, "tandem_memory_bytes{owner=\"weights\"} 43\n")) << page;

  const std::string taken = absl::StrCat("127.0.0.1:", (*metrics)->port());
  const auto refused = Metrics::Create(taken);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(Contains(std::string(refused.status().message()), taken)) << refused.status();
}

TEST(Metrics, CountersAddAndHistogramsKeepTheFirstBuckets) {
  const auto metrics = Metrics::Create("");
  ASSERT_TRUE(metrics.ok());
  (*metrics)->AddCounter("tandem_tokens_total", "Tokens", {}, 2);
  (*metrics)->AddCounter("tandem_tokens_total", "Tokens", {}, 3);
  (*metrics)->Observe("tandem_step_seconds", "Step", {{"lane", "unit"}}, {0.1, 1}, 0.5);
  (*metrics)->Observe("tandem_step_seconds", "Step", {{"lane", "unit"}}, {7}, 3);
  const std::string text = (*metrics)->Text();
  EXPECT_TRUE(Contains(text, "tandem_tokens_total 5\n")) << text;
  EXPECT_TRUE(Contains(text, "tandem_step_seconds_bucket{lane=\"unit\",le=\"0.1\"} 0\n")) << text;
  EXPECT_TRUE(Contains(text, "tandem_step_seconds_bucket{lane=\"unit\",le=\"1\"} 1\n")) << text;
  EXPECT_TRUE(Contains(text, "tandem_step_seconds_count{lane=\"unit\"} 2\n")) << text;
  EXPECT_FALSE(Contains(text, "le=\"7\"")) << text;
}

TEST(Metrics, SeriesOfAnEndedJobGoAndOthersStay) {
  const auto metrics = Metrics::Create("");
  ASSERT_TRUE(metrics.ok());
  for (const char* job : {"a", "b"}) {
    (*metrics)->SetGauge("tandem_reward", "Reward", {{"job", job}, {"function", "length"}}, 1);
    (*metrics)->AddCounter("tandem_steps_total", "Steps", {{"job", job}}, 1);
    (*metrics)->Observe("tandem_step_seconds", "Step", {{"job", job}}, {1}, 1);
  }
  (*metrics)->SetGauge("tandem_memory_bytes", "Memory", {{"owner", "a"}}, 1);
  (*metrics)->RemoveLabel("job", "a");
  std::string text = (*metrics)->Text();
  EXPECT_FALSE(Contains(text, "job=\"a\"")) << text;
  EXPECT_TRUE(Contains(text, "tandem_steps_total{job=\"b\"} 1\n")) << text;
  EXPECT_TRUE(Contains(text, "owner=\"a\"")) << text;
  (*metrics)->AddCounter("tandem_steps_total", "Steps", {{"job", "a"}}, 1);
  text = (*metrics)->Text();
  EXPECT_TRUE(Contains(text, "tandem_steps_total{job=\"a\"} 1\n")) << "it begins anew: " << text;
}

TEST(MetricsDeathTest, OneNameHasOneType) {
  const auto metrics = Metrics::Create("");
  (*metrics)->SetGauge("tandem_x", "X", {}, 1);
  EXPECT_DEATH((*metrics)->AddCounter("tandem_x", "X", {}, 1), "two types");
}

}  // namespace
}  // namespace tandem
