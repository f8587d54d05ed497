#include "common/sharing/descriptor_server.h"
#include "common/base/clock.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "common/sharing/fd_channel.h"

namespace tandem {
namespace {

int NumOpen() {
  int count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) ++count;
  return count;
}

std::vector<UniqueFd> MakeFiles(std::uint32_t count) {
  std::vector<UniqueFd> files;
  for (std::uint32_t i = 0; i < count; ++i) {
    files.emplace_back(::memfd_create("chunk", MFD_CLOEXEC));
    (void)!::pwrite(files.back().get(), &i, sizeof i, 0);
  }
  return files;
}

// A server with `count` files and the thread that polls it.
class DescriptorServerTest : public ::testing::Test {
 protected:
  void Start(std::uint32_t count) {
    char folder[] = "/tmp/tandem_sharing_XXXXXX";
    // A folder whose name alone exceeds a socket address.
    folder_ = std::string(::mkdtemp(folder));
    path_ = folder_ + "/" + std::string(120, 'x');
    ASSERT_EQ(::mkdir(path_.c_str(), 0700), 0);
    path_ += "/rollout_server.sock";
    files_ = MakeFiles(count);
    auto server = DescriptorServer::Create(path_, files_);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = std::move(*server);
    thread_ = std::thread([this] {
      while (!is_stopping_) {
        std::vector<pollfd> entries;
        server_->AppendPoll(&entries);
        ::poll(entries.data(), entries.size(), 10);
        server_->Serve();
      }
    });
  }
  void TearDown() override {
    is_stopping_ = true;
    if (thread_.joinable()) thread_.join();
    server_.reset();
    std::filesystem::remove_all(folder_);
  }
  UniqueFd Connect() { return std::move(ConnectUnix(path_, Soon())).value(); }
  static MonotonicTime Soon() { return MonotonicTime::Now() + absl::Seconds(5); }

  std::string folder_, path_;
  std::vector<UniqueFd> files_;
  std::unique_ptr<DescriptorServer> server_;
  std::atomic<bool> is_stopping_ = false;
  std::thread thread_;
};

// CASES C42
TEST_F(DescriptorServerTest, HandsOver600InOrderCloseOnExec) {
  Start(600);
  const UniqueFd socket = Connect();
  ASSERT_TRUE(SendToken(socket.get(), server_->IssueToken(::getpid())).ok());
  const auto received = ReceiveDescriptors(socket.get(), 600, Soon());
  ASSERT_TRUE(received.ok()) << received.status();
  ASSERT_EQ(received->size(), 600u);
  for (std::uint32_t i = 0; i < 600; ++i) {
    std::uint32_t content = 0;
    ASSERT_EQ(::pread((*received)[i].get(), &content, sizeof content, 0), 4);
    ASSERT_EQ(content, i);
    ASSERT_NE(::fcntl((*received)[i].get(), F_GETFD) & FD_CLOEXEC, 0);
  }
  const auto joiner = server_->TakeAccepted();
  ASSERT_TRUE(joiner.has_value());
  EXPECT_EQ(joiner->pid(), ::getpid());
  EXPECT_FALSE(server_->TakeAccepted().has_value()) << "once";
}

// CASES C42
TEST_F(DescriptorServerTest, SendsAtMost253InAPacket) {
  Start(600);
  const UniqueFd socket = Connect();
  ASSERT_TRUE(SendToken(socket.get(), server_->IssueToken(::getpid())).ok());
  std::vector<std::uint32_t> counts;
  for (std::uint32_t done = 0; done < 600;) {
    pollfd entry{.fd = socket.get(), .events = POLLIN, .revents = 0};
    ASSERT_EQ(::poll(&entry, 1, 5000), 1);
    DescriptorPacket header;
    ASSERT_EQ(::recv(socket.get(), &header, sizeof header, 0), static_cast<ssize_t>(sizeof header));  // drops the descriptors
    counts.push_back(header.count);
    EXPECT_EQ(header.first, done);
    EXPECT_EQ(header.total, 600u);
    done += header.count;
  }
  EXPECT_EQ(counts, (std::vector<std::uint32_t>{253, 253, 94}));
}

// CASES C42
TEST_F(DescriptorServerTest, CutPacketIsAnErrorThatClosesWhatCame) {
  Start(400);
  const std::string token = server_->IssueToken(::getpid());
  const UniqueFd socket = Connect();
  ASSERT_TRUE(SendToken(socket.get(), token).ok());
  const int before = NumOpen();
  rlimit old{};
  ::getrlimit(RLIMIT_NOFILE, &old);
  const rlimit low{.rlim_cur = static_cast<rlim_t>(before + 300),
                   .rlim_max = old.rlim_max};  // the first packet fits, the second not
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &low), 0);
  const auto received = ReceiveDescriptors(socket.get(), 400, Soon());
  ::setrlimit(RLIMIT_NOFILE, &old);
  EXPECT_EQ(received.status().code(), absl::StatusCode::kDataLoss) << received.status();
  EXPECT_NE(std::string(received.status().message()).find("RLIMIT_NOFILE"), std::string::npos);
  EXPECT_NEAR(NumOpen(), before, 1) << "the server may have closed its end";
}

// CASES C42
TEST_F(DescriptorServerTest, SilentClientsBlockNobodyAndAreClosed) {
  Start(3);
  std::vector<UniqueFd> silent;
  for (int i = 0; i < 40; ++i) silent.push_back(Connect());
  const MonotonicTime begin = MonotonicTime::Now();
  const UniqueFd socket = Connect();
  ASSERT_TRUE(SendToken(socket.get(), server_->IssueToken(::getpid())).ok());
  ASSERT_TRUE(ReceiveDescriptors(socket.get(), 3, Soon()).ok());
  EXPECT_LT(MonotonicTime::Now() - begin, absl::Seconds(1));
  for (const UniqueFd& fd : silent) {
    pollfd entry{.fd = fd.get(), .events = POLLIN, .revents = 0};
    ASSERT_EQ(::poll(&entry, 1, 4000), 1) << "a silent client is still served";
    char byte;
    EXPECT_EQ(::recv(fd.get(), &byte, 1, 0), 0);
  }
  EXPECT_LT(MonotonicTime::Now() - begin, absl::Seconds(4));
}

// CASES C42
TEST_F(DescriptorServerTest, WrongLateAndForeignTokensGetNothing) {
  Start(3);
  const auto shown = [&](const std::string& token) {
    const UniqueFd socket = Connect();
    EXPECT_TRUE(SendToken(socket.get(), token).ok());
    return ReceiveDescriptors(socket.get(), 3, Soon()).status();
  };
  EXPECT_EQ(shown(std::string(kTokenBytes, '\0')).code(), absl::StatusCode::kUnavailable) << "none was issued";
  const std::string token = server_->IssueToken(::getpid());
  EXPECT_EQ(shown(token.substr(1)).code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(shown(token + "x").code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(shown(MakeToken()).code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(shown(token).ok()) << "wrong ones spoil nothing";
  EXPECT_EQ(shown(token).code(), absl::StatusCode::kUnavailable) << "one-time";
  const std::string replaced = server_->IssueToken(::getpid());
  const std::string fresh = server_->IssueToken(::getpid());
  EXPECT_EQ(shown(replaced).code(), absl::StatusCode::kUnavailable);

  // The token of this process, shown by another.
  const pid_t child = ::fork();
  if (child == 0) ::_exit(shown(fresh).ok() ? 1 : 0);
  int status = -1;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(shown(fresh).code(), absl::StatusCode::kUnavailable) << "spent by the other's showing";
  EXPECT_FALSE(server_->TakeAccepted().has_value());
}

// Another user of the node: kept out of the folder; and where an operator has opened both folder and socket, by the credentials
// that the kernel tells, though the token is the right one and was issued to this very process.
TEST_F(DescriptorServerTest, ProcessesOfOtherUsersAreRefused) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can make a process of another user";
  Start(3);
  constexpr uid_t kOther = 65534;
  enum Outcome { kGotDescriptors, kCouldNotConnect, kGotNone };
  for (const bool is_opened : {false, true}) {
    if (is_opened) {
      ASSERT_EQ(::chmod(folder_.c_str(), 0755), 0);
      ASSERT_EQ(::chmod(std::filesystem::path(path_).parent_path().c_str(), 0755), 0);
      ASSERT_EQ(::chmod(path_.c_str(), 0666), 0);
    }
    int token_pipe[2];
    ASSERT_EQ(::pipe(token_pipe), 0);
    const pid_t child = ::fork();
    if (child == 0) {
      char token[kTokenBytes] = {};
      const bool is_other =
          ::setgid(kOther) == 0 && ::setuid(kOther) == 0 && ::read(token_pipe[0], token, sizeof token) == sizeof token;
      if (!is_other) ::_exit(100);
      const auto socket = ConnectUnix(path_, Soon());
      if (!socket.ok()) ::_exit(kCouldNotConnect);
      const bool is_sent = SendToken(socket->get(), std::string(token, sizeof token)).ok();
      ::_exit(is_sent && ReceiveDescriptors(socket->get(), 3, Soon()).ok() ? kGotDescriptors : kGotNone);
    }
    const std::string token = server_->IssueToken(child);
    ASSERT_EQ(::write(token_pipe[1], token.data(), token.size()), static_cast<ssize_t>(token.size()));
    int status = -1;
    ::waitpid(child, &status, 0);
    EXPECT_EQ(WEXITSTATUS(status), is_opened ? kGotNone : kCouldNotConnect);
    EXPECT_FALSE(server_->TakeAccepted().has_value());
    ::close(token_pipe[0]);
    ::close(token_pipe[1]);
  }
}

TEST(FdChannel, TrustsNoHeader) {
  const std::vector<UniqueFd> files = MakeFiles(2);
  const auto receive = [&](DescriptorPacket header, std::uint32_t expected) {
    int pair[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
    const UniqueFd sender(pair[0]), receiver(pair[1]);
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    iovec bytes{.iov_base = &header, .iov_len = sizeof header};
    msghdr message{};
    message.msg_iov = &bytes;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* const part = CMSG_FIRSTHDR(&message);
    part->cmsg_level = SOL_SOCKET;
    part->cmsg_type = SCM_RIGHTS;
    part->cmsg_len = CMSG_LEN(sizeof(int));
    const int fd = files[0].get();
    std::memcpy(CMSG_DATA(part), &fd, sizeof fd);
    EXPECT_GT(::sendmsg(sender.get(), &message, 0), 0);
    return ReceiveDescriptors(receiver.get(), expected, MonotonicTime::Now() + absl::Milliseconds(100)).status().code();
  };
  const int before = NumOpen();
  EXPECT_EQ(receive({.first = 0, .count = 1, .total = 1}, 1), absl::StatusCode::kOk);
  EXPECT_EQ(receive({.magic = 1, .first = 0, .count = 1, .total = 1}, 1), absl::StatusCode::kDataLoss);
  EXPECT_EQ(receive({.first = 1, .count = 1, .total = 1}, 1), absl::StatusCode::kDataLoss);
  EXPECT_EQ(receive({.first = 0, .count = 2, .total = 2}, 2), absl::StatusCode::kDataLoss);
  EXPECT_EQ(receive({.first = 0, .count = 1, .total = 2}, 1), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(receive({.first = 0, .count = 1, .total = 2}, 2), absl::StatusCode::kDeadlineExceeded) << "silent after one";
  EXPECT_EQ(NumOpen(), before) << "every error closes what came";
}

}  // namespace
}  // namespace tandem
