// Pools between real processes: who makes, who joins, who dies when.
#include "common/sharing/pool_member.h"
#include "common/base/clock.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <sstream>
#include <string>

#include "absl/time/clock.h"
#include "common/base/random.h"
#include "common/rpc/channel.h"
#include "common/sharing/fd_channel.h"
#include "common/sharing/manifest.h"
#include "tests/common/sharing/pool_process.h"
#include "tests/support/tiny_model.h"

namespace tandem {
namespace {

using testing::FreePort;
using testing::PoolProcess;
using testing::PoolProcessOptions;

bool Contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

class PoolMemberTest : public ::testing::Test {
 protected:
  void SetUp() override {
    char folder[] = "/tmp/tandem_pool_XXXXXX";
    folder_ = ::mkdtemp(folder);
    ASSERT_TRUE(WriteTinyModel(folder_ + "/model", {}).ok());
    for (std::string& address : addresses_) address = absl::StrCat("127.0.0.1:", FreePort());
  }
  void TearDown() override {
    rollout_.reset();
    trainer_.reset();
    std::filesystem::remove_all(folder_);
  }

  PoolProcessOptions OptionsOf(v1::Role role, std::vector<std::string> more = {}) const {
    const std::size_t own = role == v1::ROLE_ROLLOUT ? 0 : 1;
    PoolProcessOptions options{.role = role,
                               .run_dir = folder_ + "/run",
                               .listen = addresses_[own],
                               .peer = addresses_[1 - own],
                               .model = folder_ + "/model",
                               .chunk_bytes = "64KiB",
                               .more = {"pool_bytes=4MiB", "standing_bytes=64KiB"}};
    options.more.insert(options.more.end(), more.begin(), more.end());
    return options;
  }
  std::unique_ptr<PoolProcess> Launch(v1::Role role, std::vector<std::string> more = {}) const {
    return std::make_unique<PoolProcess>(OptionsOf(role, std::move(more)));
  }
  // Both, the rollout server first.
  void StartPair(std::vector<std::string> more = {}) {
    rollout_ = Launch(v1::ROLE_ROLLOUT, more);
    ASSERT_EQ(rollout_->ReadLine(), "ready made");
    trainer_ = Launch(v1::ROLE_TRAINER, more);
    ASSERT_EQ(trainer_->ReadLine(), "ready joined");
  }
  // Asks until the answer is `wanted`; returns the last answer.
  static std::string AskUntil(PoolProcess* process, const std::string& command, const std::string& wanted,
                              absl::Duration timeout = absl::Seconds(10)) {
    const MonotonicTime deadline = MonotonicTime::Now() + timeout;
    std::string answer;
    do {
      answer = process->Ask(command);
      if (answer == wanted) break;
      absl::SleepFor(absl::Milliseconds(10));
    } while (MonotonicTime::Now() < deadline);
    return answer;
  }
  void DeleteModel() const { std::filesystem::remove_all(folder_ + "/model"); }

  std::string folder_;
  std::string addresses_[2];  // rollout server, trainer
  std::unique_ptr<PoolProcess> rollout_, trainer_;
};

constexpr const char* kTrainerStanding = "4";
constexpr const char* kElastic = "5";

TEST_F(PoolMemberTest, EitherStartsFirstAndBothSeeOneMemory) {
  for (const v1::Role first : {v1::ROLE_ROLLOUT, v1::ROLE_TRAINER}) {
    const v1::Role second = first == v1::ROLE_ROLLOUT ? v1::ROLE_TRAINER : v1::ROLE_ROLLOUT;
    const auto maker = Launch(first);
    ASSERT_EQ(maker->ReadLine(), "ready made");
    const auto joiner = Launch(second);
    ASSERT_EQ(joiner->ReadLine(), "ready joined");
    EXPECT_EQ(maker->Ask("pool"), joiner->Ask("pool"));
    EXPECT_EQ(AskUntil(maker.get(), "attached", "yes"), "yes");
    EXPECT_EQ(joiner->Ask("attached"), "yes");
    EXPECT_EQ(AskUntil(maker.get(), "events", "attached"), "attached");
    EXPECT_EQ(AskUntil(joiner.get(), "events", "attached"), "attached");
    ASSERT_EQ(maker->Ask("put 4 77"), "ok");
    EXPECT_EQ(joiner->Ask("get 4"), "77");
    EXPECT_EQ(maker->Ask("read_weights"), joiner->Ask("read_weights"));
    EXPECT_EQ(maker->Ask("ledger"), joiner->Ask("ledger"));
    // The rollout server holds the range, whoever made the pool.
    PoolProcess* const rollout = first == v1::ROLE_ROLLOUT ? maker.get() : joiner.get();
    EXPECT_TRUE(Contains(rollout->Ask("lease"), "rollout_server")) << rollout->Ask("lease");
    EXPECT_EQ(maker->Ask("lease").substr(0, 16), joiner->Ask("lease").substr(0, 16));
  }
}

TEST_F(PoolMemberTest, StartedTogetherExactlyOneMakes) {
  for (int round = 0; round < 8; ++round) {
    rollout_ = Launch(v1::ROLE_ROLLOUT);
    trainer_ = Launch(v1::ROLE_TRAINER);
    const std::string a = rollout_->ReadLine(), b = trainer_->ReadLine();
    EXPECT_TRUE((a == "ready made" && b == "ready joined") || (a == "ready joined" && b == "ready made")) << a << ", " << b;
    EXPECT_EQ(rollout_->Ask("pool"), trainer_->Ask("pool"));
    rollout_->Kill();
    trainer_->Kill();
  }
}

// CASES C42
TEST_F(PoolMemberTest, SixHundredChunksCrossUnderALowDescriptorLimit) {
  PoolProcessOptions options = OptionsOf(v1::ROLE_ROLLOUT);
  options.chunk_bytes = "4KiB";
  options.more = {"pool_bytes=2400KiB", "standing_bytes=64KiB", "nofile=256"};
  rollout_ = std::make_unique<PoolProcess>(options);
  ASSERT_EQ(rollout_->ReadLine(), "ready made");
  options = OptionsOf(v1::ROLE_TRAINER, {"nofile=256"});
  trainer_ = std::make_unique<PoolProcess>(options);
  ASSERT_EQ(trainer_->ReadLine(), "ready joined");
  EXPECT_EQ(rollout_->Ask("limit"), "856");
  EXPECT_EQ(trainer_->Ask("limit"), "856");
  EXPECT_EQ(rollout_->Ask("read_weights"), trainer_->Ask("read_weights"));
}

// CASES C13, C41: the maker dies idle; who lives hands on the memory, with what stands in it, to one that has no model to read.
TEST_F(PoolMemberTest, StandingBytesSurviveSwitchesAndTheDeathOfEitherDaemon) {
  StartPair();
  const std::string pool = rollout_->Ask("pool"), bits = absl::StrCat(0x3d17f62bu);
  ASSERT_EQ(trainer_->Ask(absl::StrCat("put ", kTrainerStanding, " ", bits)), "ok");
  for (int i = 0; i < 2; ++i) {
    ASSERT_TRUE(Contains(trainer_->Ask("acquire"), "trainer_server"));
    ASSERT_EQ(trainer_->Ask("release"), "ok");
    EXPECT_EQ(rollout_->Ask("get 4"), bits);
  }
  DeleteModel();
  for (int round = 0; round < 3; ++round) {
    const MonotonicTime begin = MonotonicTime::Now();
    auto& dead = round % 2 == 0 ? rollout_ : trainer_;
    auto& alive = round % 2 == 0 ? trainer_ : rollout_;
    dead->Kill();
    EXPECT_EQ(AskUntil(alive.get(), "attached", "no"), "no");
    dead = Launch(round % 2 == 0 ? v1::ROLE_ROLLOUT : v1::ROLE_TRAINER);
    ASSERT_EQ(dead->ReadLine(), "ready joined");
    EXPECT_LT(MonotonicTime::Now() - begin, absl::Seconds(5));
    EXPECT_EQ(dead->Ask("pool"), pool);
    EXPECT_EQ(dead->Ask("get 4"), bits);
    EXPECT_EQ(dead->Ask("read_weights"), alive->Ask("read_weights"));
    ASSERT_TRUE(Contains(trainer_->Ask("acquire"), "trainer_server")) << "the pair works again";
    ASSERT_EQ(trainer_->Ask("release"), "ok");
  }
}

// CASES C41: at a random moment of loading, offering or handing over.
TEST_F(PoolMemberTest, MakerKilledAtAnyMomentLeavesTheJoinerWithAPool) {
  const std::uint64_t seed = static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  for (std::uint64_t round = 0; round < 12; ++round) {
    rollout_ = Launch(v1::ROLE_ROLLOUT);
    absl::SleepFor(absl::Milliseconds(static_cast<std::int64_t>(RandomBelow(seed, 2 * round, 60))));
    trainer_ = Launch(v1::ROLE_TRAINER);
    absl::SleepFor(absl::Milliseconds(static_cast<std::int64_t>(RandomBelow(seed, 2 * round + 1, 150))));
    rollout_->Kill();
    rollout_ = Launch(v1::ROLE_ROLLOUT);
    const std::string a = rollout_->ReadLine(), b = trainer_->ReadLine();
    ASSERT_TRUE(Contains(a, "ready") && Contains(b, "ready")) << "round " << round << ": " << a << ", " << b;
    EXPECT_EQ(rollout_->Ask("pool"), trainer_->Ask("pool")) << "round " << round;
    EXPECT_EQ(AskUntil(trainer_.get(), "attached", "yes"), "yes");
    EXPECT_TRUE(Contains(trainer_->Ask("acquire"), "trainer_server")) << "round " << round;
    EXPECT_EQ(trainer_->Ask("release"), "ok");
    rollout_->Kill();
    trainer_->Kill();
  }
}

// CASES C41
TEST_F(PoolMemberTest, JoinerWaitsForAMakerThatDoesNotServeYetAndReplacesItWhenItDies) {
  rollout_ = Launch(v1::ROLE_ROLLOUT, {"hold=1"});
  ASSERT_EQ(rollout_->ReadLine(), "holding");
  trainer_ = Launch(v1::ROLE_TRAINER);
  EXPECT_EQ(trainer_->ReadLine(absl::Milliseconds(500)), "") << "it must not make a second pool";
  rollout_->Send("serve");
  ASSERT_EQ(rollout_->ReadLine(), "ready made");
  ASSERT_EQ(trainer_->ReadLine(), "ready joined");
  rollout_->Kill();
  trainer_->Kill();

  rollout_ = Launch(v1::ROLE_ROLLOUT, {"hold=1"});
  ASSERT_EQ(rollout_->ReadLine(), "holding");
  trainer_ = Launch(v1::ROLE_TRAINER);
  EXPECT_EQ(trainer_->ReadLine(absl::Milliseconds(300)), "");
  rollout_->Kill();
  EXPECT_EQ(trainer_->ReadLine(), "ready made");
}

TEST_F(PoolMemberTest, JoinerGivesUpAfterStartTimeout) {
  rollout_ = Launch(v1::ROLE_ROLLOUT);
  ASSERT_EQ(rollout_->ReadLine(), "ready made");
  rollout_->Signal(SIGSTOP);
  trainer_ = Launch(v1::ROLE_TRAINER, {"start_timeout=1s"});
  const std::string answer = trainer_->ReadLine();
  EXPECT_TRUE(Contains(answer, "failed DEADLINE_EXCEEDED")) << answer;
  rollout_->Signal(SIGCONT);
}

// One joiner that goes through the handshake by hand.
class HandJoiner {
 public:
  explicit HandJoiner(const std::string& address) : stub_(v1::PoolService::NewStub(MakeChannel(address))) {}

  v1::AttachRequest Request() const {
    v1::AttachRequest request;
    request.set_protocol_version(kProtocolVersion);
    request.set_role(v1::ROLE_TRAINER);
    request.set_device_uuid("cpu");
    request.set_pid(::getpid());
    return request;
  }
  absl::Status Attach(const v1::AttachRequest& request) {
    grpc::ClientContext context;
    context.set_deadline(GrpcDeadline(MonotonicTime::Now() + absl::Seconds(5)));
    return FromGrpc(stub_->Attach(&context, request, &manifest));
  }
  absl::Status Ready(const std::string& pool_id, const std::string& checksum) {
    v1::ReadyRequest request;
    request.set_pool_id(pool_id);
    request.set_role(v1::ROLE_TRAINER);
    request.set_sample_checksum(checksum);
    v1::ReadyResponse response;
    grpc::ClientContext context;
    context.set_deadline(GrpcDeadline(MonotonicTime::Now() + absl::Seconds(5)));
    return FromGrpc(stub_->Ready(&context, request, &response));
  }
  absl::Status Connect() {
    auto connected = ConnectUnix(manifest.socket_path(), MonotonicTime::Now() + absl::Seconds(2));
    if (!connected.ok()) return connected.status();
    socket = std::move(*connected);
    return absl::OkStatus();
  }
  absl::Status Receive() {
    return ReceiveDescriptors(socket.get(), manifest.num_chunks(), MonotonicTime::Now() + absl::Seconds(5)).status();
  }

  v1::PoolManifest manifest;
  UniqueFd socket;

 private:
  const std::unique_ptr<v1::PoolService::Stub> stub_;
};

enum class State { kAttached, kConnected, kTokenShown, kReceived };

// Takes `joiner` to `state`.
void GoTo(State state, HandJoiner* joiner) {
  ASSERT_TRUE(joiner->Attach(joiner->Request()).ok());
  if (state == State::kAttached) return;
  ASSERT_TRUE(joiner->Connect().ok());
  if (state == State::kConnected) return;
  ASSERT_TRUE(SendToken(joiner->socket.get(), joiner->manifest.token()).ok());
  if (state == State::kTokenShown) return;
  ASSERT_TRUE(joiner->Receive().ok());
}

// CASES C41
TEST_F(PoolMemberTest, MakerKilledInEachHandshakeStateGivesAnErrorAtOnce) {
  for (const State state : {State::kAttached, State::kConnected, State::kTokenShown, State::kReceived}) {
    PoolProcessOptions options = OptionsOf(v1::ROLE_ROLLOUT);
    options.chunk_bytes = "4KiB";
    rollout_ = std::make_unique<PoolProcess>(options);
    ASSERT_EQ(rollout_->ReadLine(), "ready made");
    HandJoiner joiner(addresses_[0]);
    GoTo(state, &joiner);
    rollout_->Kill();
    const MonotonicTime begin = MonotonicTime::Now();
    switch (state) {
      case State::kAttached:
        EXPECT_TRUE(absl::IsUnavailable(joiner.Connect()));
        break;
      case State::kConnected:
        (void)SendToken(joiner.socket.get(), joiner.manifest.token()).ok();
        EXPECT_TRUE(absl::IsUnavailable(joiner.Receive()));
        break;
      case State::kTokenShown: {  // all packets may have been sent by then
        const absl::Status status = joiner.Receive();
        EXPECT_TRUE(status.ok() || absl::IsUnavailable(status)) << status;
        break;
      }
      case State::kReceived:
        EXPECT_TRUE(absl::IsUnavailable(joiner.Ready(joiner.manifest.pool_id(), joiner.manifest.weights().sample_checksum())));
        break;
    }
    EXPECT_LT(MonotonicTime::Now() - begin, absl::Seconds(3));
  }
}

// CASES C41: the joiner's turn to vanish; the next one gets in.
TEST_F(PoolMemberTest, JoinerGoneInAnyHandshakeStateBlocksNobody) {
  rollout_ = Launch(v1::ROLE_ROLLOUT);
  ASSERT_EQ(rollout_->ReadLine(), "ready made");
  for (const State state : {State::kAttached, State::kConnected, State::kTokenShown, State::kReceived}) {
    HandJoiner joiner(addresses_[0]);
    GoTo(state, &joiner);
    trainer_ = Launch(v1::ROLE_TRAINER);  // while the other is still there, silent
    ASSERT_EQ(trainer_->ReadLine(), "ready joined");
    EXPECT_EQ(joiner.Attach(joiner.Request()).code(), absl::StatusCode::kAlreadyExists);
    trainer_->Kill();
    ASSERT_EQ(AskUntil(rollout_.get(), "attached", "no"), "no");
  }
}

TEST_F(PoolMemberTest, DifferencesAreRefusedByName) {
  rollout_ = Launch(v1::ROLE_ROLLOUT);
  ASSERT_EQ(rollout_->ReadLine(), "ready made");
  HandJoiner joiner(addresses_[0]);
  const auto refused = [&](auto change, absl::StatusCode code, const std::string& part) {
    v1::AttachRequest request = joiner.Request();
    change(&request);
    const absl::Status status = joiner.Attach(request);
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_TRUE(Contains(std::string(status.message()), part)) << status;
  };
  using Request = v1::AttachRequest;
  refused([](Request* r) { r->set_protocol_version(9); }, absl::StatusCode::kFailedPrecondition,
          "protocol version asked for is '9'");
  refused([](Request* r) { r->set_device_uuid("GPU-1"); }, absl::StatusCode::kFailedPrecondition, "'GPU-1', offered is 'cpu'");
  refused([](Request* r) { r->set_weight_format(v1::WEIGHT_FORMAT_NF4); }, absl::StatusCode::kFailedPrecondition,
          "WEIGHT_FORMAT_NF4");
  refused([](Request* r) { r->set_weight_format(v1::WEIGHT_FORMAT_FP8_BLOCK); }, absl::StatusCode::kFailedPrecondition,
          "weight format asked for is 'WEIGHT_FORMAT_FP8_BLOCK', offered is 'WEIGHT_FORMAT_FP32'");
  refused([](Request* r) { r->set_model_digest("abc"); }, absl::StatusCode::kFailedPrecondition,
          "model digest asked for is 'abc'");
  refused([](Request* r) { r->set_role(v1::ROLE_UNSPECIFIED); }, absl::StatusCode::kInvalidArgument, "role 0");
  refused([](Request* r) { r->set_role(v1::ROLE_ROLLOUT); }, absl::StatusCode::kAlreadyExists, "rollout_server");
  refused([](Request* r) { r->set_pid(0); }, absl::StatusCode::kInvalidArgument, "pid 0");

  ASSERT_TRUE(joiner.Attach(joiner.Request()).ok());
  const std::string& pool = joiner.manifest.pool_id();
  const std::string& checksum = joiner.manifest.weights().sample_checksum();
  EXPECT_EQ(joiner.Ready(pool, checksum).code(), absl::StatusCode::kAborted) << "no token shown";
  EXPECT_EQ(joiner.Ready("other", checksum).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(joiner.Ready(pool, "other").code(), absl::StatusCode::kFailedPrecondition);

  // What a joiner refuses.
  const auto memory = PoolMemory::CreateMemfd();
  EXPECT_TRUE(CheckManifest(joiner.manifest, *memory).ok());
  const auto bad = [&](auto change) {
    v1::PoolManifest manifest = joiner.manifest;
    change(&manifest);
    return !CheckManifest(manifest, *memory).ok();
  };
  EXPECT_TRUE(bad([](v1::PoolManifest* m) { m->set_protocol_version(2); }));
  EXPECT_TRUE(bad([](v1::PoolManifest* m) { m->set_transport("cuda_ipc"); }));
  EXPECT_TRUE(bad([](v1::PoolManifest* m) { m->set_num_chunks(0); }));
  EXPECT_TRUE(bad([](v1::PoolManifest* m) { m->set_num_chunks(~0u); }));
  EXPECT_TRUE(bad([](v1::PoolManifest* m) { m->set_chunk_bytes(~std::uint64_t{0}); }));
  EXPECT_TRUE(bad([](v1::PoolManifest* m) { m->set_chunk_bytes(1000); }));
  EXPECT_TRUE(bad([](v1::PoolManifest* m) { m->mutable_regions()->RemoveLast(); }));
  EXPECT_TRUE(bad([](v1::PoolManifest* m) { m->mutable_weights()->set_bytes(std::uint64_t{1} << 40); }));
  EXPECT_TRUE(bad([](v1::PoolManifest* m) { m->mutable_weights()->set_description_bytes(std::uint64_t{1} << 40); }));
}

TEST_F(PoolMemberTest, AnotherModelAnotherFolderOrASecondOfOneRoleIsRefused) {
  rollout_ = Launch(v1::ROLE_ROLLOUT);
  ASSERT_EQ(rollout_->ReadLine(), "ready made");
  ASSERT_TRUE(WriteTinyModel(folder_ + "/other", {.num_layers = 3}).ok());
  PoolProcessOptions options = OptionsOf(v1::ROLE_TRAINER);
  options.model = folder_ + "/other";
  std::string answer = PoolProcess(options).ReadLine();
  EXPECT_TRUE(Contains(answer, "failed FAILED_PRECONDITION") && Contains(answer, "/other")) << answer;

  options = OptionsOf(v1::ROLE_TRAINER);
  options.run_dir = folder_ + "/elsewhere";
  answer = PoolProcess(options).ReadLine();
  EXPECT_TRUE(Contains(answer, "failed FAILED_PRECONDITION") && Contains(answer, "run_dir")) << answer;

  answer = PoolProcess(OptionsOf(v1::ROLE_ROLLOUT)).ReadLine();
  EXPECT_TRUE(Contains(answer, "failed ALREADY_EXISTS")) << answer;

  // The same model under another path is the same model; and no model given takes what is there.
  std::filesystem::create_directory_symlink(folder_ + "/model", folder_ + "/alias");
  options = OptionsOf(v1::ROLE_TRAINER);
  options.model = folder_ + "/alias";
  EXPECT_EQ(PoolProcess(options).ReadLine(), "ready joined");
  options.model = "";
  ASSERT_EQ(AskUntil(rollout_.get(), "attached", "no"), "no");
  EXPECT_EQ(PoolProcess(options).ReadLine(), "ready joined");
}

// CASES C34, C40
TEST_F(PoolMemberTest, HundredSwitchesMakeNoDescriptorAndNoMap) {
  StartPair();
  ASSERT_EQ(trainer_->Ask("acquire"), "trainer_server 2");
  ASSERT_EQ(trainer_->Ask("release"), "ok");
  const auto figures = [&] {
    std::string text;
    for (PoolProcess* process : {rollout_.get(), trainer_.get()}) {
      const std::string maps = process->Ask("maps");
      absl::StrAppend(&text, process->Ask("descriptors"), " ", maps.substr(0, maps.find(' ')), " ", process->Ask("ledger"), "; ");
    }
    return text;
  };
  const std::string before = figures();
  for (int cycle = 1; cycle < 101; ++cycle) {
    ASSERT_EQ(trainer_->Ask("acquire"), absl::StrCat("trainer_server ", 2 * cycle + 2));
    ASSERT_EQ(trainer_->Ask("acquire"), absl::StrCat("trainer_server ", 2 * cycle + 2)) << "idempotent";
    ASSERT_EQ(rollout_->Ask("lease"), absl::StrCat("trainer_server ", 2 * cycle + 2));
    ASSERT_EQ(trainer_->Ask("release"), "ok");
    ASSERT_TRUE(Contains(trainer_->Ask("release"), "FAILED_PRECONDITION"));
    ASSERT_EQ(rollout_->Ask("lease"), absl::StrCat("rollout_server ", 2 * cycle + 3, " mine"));
  }
  EXPECT_EQ(figures(), before);
}

// CASES C34
TEST_F(PoolMemberTest, StrictLeasesKillTheStrayWriterOnly) {
  StartPair({"strict=1"});
  ASSERT_EQ(rollout_->Ask(absl::StrCat("put ", kElastic, " 5")), "ok");
  ASSERT_EQ(trainer_->Ask("acquire"), "trainer_server 2");
  ASSERT_EQ(trainer_->Ask("get 5"), "5");
  ASSERT_EQ(trainer_->Ask("put 5 6"), "ok");
  ASSERT_EQ(trainer_->Ask("release"), "ok");
  EXPECT_EQ(rollout_->Ask("get 5"), "6");
  trainer_->Send("put 5 7");
  const int status = trainer_->Wait(absl::Seconds(5));
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV) << status;
  EXPECT_EQ(rollout_->Ask("get 5"), "6") << "the holder goes on";
  trainer_ = Launch(v1::ROLE_TRAINER, {"strict=1"});
  ASSERT_EQ(trainer_->ReadLine(), "ready joined");
  EXPECT_EQ(trainer_->Ask("acquire"), "trainer_server 4");
  rollout_->Send("put 5 8");  // now the other is the stray
  EXPECT_TRUE(WIFSIGNALED(rollout_->Wait(absl::Seconds(5))));
  EXPECT_EQ(trainer_->Ask("get 5"), "6");
  // Weights and model are nobody's to write.
  trainer_->Send("put 1 1");
  EXPECT_TRUE(WIFSIGNALED(trainer_->Wait(absl::Seconds(5))));
}

TEST_F(PoolMemberTest, TrainerDyingWithTheLeaseGivesItBack) {
  StartPair();
  ASSERT_EQ(trainer_->Ask("acquire"), "trainer_server 2");
  EXPECT_EQ(AskUntil(rollout_.get(), "events", "attached,yield"), "attached,yield");
  trainer_->Kill();
  EXPECT_EQ(AskUntil(rollout_.get(), "lease", "rollout_server 3 mine"), "rollout_server 3 mine");
  EXPECT_EQ(AskUntil(rollout_.get(), "events", "lost,returned"), "lost,returned");
  trainer_ = Launch(v1::ROLE_TRAINER);
  ASSERT_EQ(trainer_->ReadLine(), "ready joined");
  EXPECT_EQ(trainer_->Ask("lease"), "rollout_server 3");
  EXPECT_EQ(trainer_->Ask("acquire"), "trainer_server 4");
}

TEST_F(PoolMemberTest, TrainerKeepsTheLeaseOverADeathOfTheRolloutServer) {
  StartPair();
  ASSERT_EQ(trainer_->Ask("acquire"), "trainer_server 2");
  ASSERT_EQ(trainer_->Ask("put 5 11"), "ok");
  rollout_->Kill();
  ASSERT_EQ(AskUntil(trainer_.get(), "attached", "no"), "no");
  EXPECT_EQ(trainer_->Ask("lease"), "trainer_server 2 mine");
  rollout_ = Launch(v1::ROLE_ROLLOUT);
  ASSERT_EQ(rollout_->ReadLine(), "ready joined");
  EXPECT_EQ(rollout_->Ask("lease"), "trainer_server 2") << "it comes up without the lease";
  EXPECT_EQ(trainer_->Ask("get 5"), "11");
  EXPECT_EQ(trainer_->Ask("release"), "ok");
  EXPECT_EQ(rollout_->Ask("lease"), "rollout_server 3 mine");
  EXPECT_EQ(AskUntil(rollout_.get(), "events", "attached,returned"), "attached,returned");

  // Released while nobody is there to take it: the next rollout server takes it.
  ASSERT_EQ(trainer_->Ask("acquire"), "trainer_server 4");
  rollout_->Kill();
  ASSERT_EQ(AskUntil(trainer_.get(), "attached", "no"), "no");
  EXPECT_EQ(trainer_->Ask("release"), "ok");
  EXPECT_EQ(trainer_->Ask("lease"), "nobody 5");
  rollout_ = Launch(v1::ROLE_ROLLOUT);
  ASSERT_EQ(rollout_->ReadLine(), "ready joined");
  EXPECT_EQ(rollout_->Ask("lease"), "rollout_server 6 mine");
}

TEST_F(PoolMemberTest, NobodyHoldsWhatADeadRolloutServerHeld) {
  StartPair();
  rollout_->Kill();
  EXPECT_EQ(AskUntil(trainer_.get(), "lease", "nobody 2"), "nobody 2");
  EXPECT_TRUE(Contains(trainer_->Ask("acquire"), "UNAVAILABLE"));
  rollout_ = Launch(v1::ROLE_ROLLOUT);
  ASSERT_EQ(rollout_->ReadLine(), "ready joined");
  EXPECT_EQ(rollout_->Ask("lease"), "rollout_server 3 mine");
  EXPECT_EQ(trainer_->Ask("acquire"), "trainer_server 4");
}

TEST_F(PoolMemberTest, AcquisitionThatTimesOutLeavesTheLeaseWhereItWas) {
  StartPair();
  ASSERT_EQ(rollout_->Ask("yield_time 600ms"), "ok");
  EXPECT_TRUE(Contains(trainer_->Ask("acquire 200ms"), "DEADLINE_EXCEEDED"));
  absl::SleepFor(absl::Milliseconds(700));
  EXPECT_EQ(rollout_->Ask("events"), "attached,yield,returned");
  EXPECT_EQ(rollout_->Ask("lease"), "rollout_server 1 mine");
  ASSERT_EQ(rollout_->Ask("yield_time 0s"), "ok");
  EXPECT_EQ(trainer_->Ask("acquire"), "trainer_server 2");
  EXPECT_EQ(trainer_->Ask("release"), "ok");
}

TEST_F(PoolMemberTest, TrainerDyingWhileStreamsStopLeavesTheLeaseWhereItWas) {
  StartPair();
  ASSERT_EQ(rollout_->Ask("yield_time 500ms"), "ok");
  trainer_->Send("acquire");
  absl::SleepFor(absl::Milliseconds(200));
  trainer_->Kill();
  absl::SleepFor(absl::Milliseconds(600));
  EXPECT_EQ(rollout_->Ask("lease"), "rollout_server 1 mine");
  const std::string events = rollout_->Ask("events");
  EXPECT_TRUE(Contains(events, "lost") && Contains(events, "returned")) << events;
}

TEST_F(PoolMemberTest, StoppedHolderKeepsItsMemoryUnlessKilled) {
  StartPair({"holder_timeout=300ms"});
  ASSERT_EQ(trainer_->Ask("acquire"), "trainer_server 2");
  trainer_->Signal(SIGSTOP);
  absl::SleepFor(absl::Milliseconds(1500));
  EXPECT_EQ(rollout_->Ask("lease"), "trainer_server 2") << "silence frees nothing";
  trainer_->Signal(SIGCONT);
  EXPECT_EQ(trainer_->Ask("release"), "ok");
  rollout_->Kill();
  trainer_->Kill();

  StartPair({"holder_timeout=300ms", "kill_silent=1"});
  ASSERT_EQ(trainer_->Ask("acquire"), "trainer_server 2");
  trainer_->Signal(SIGSTOP);
  EXPECT_EQ(AskUntil(rollout_.get(), "lease", "rollout_server 3 mine"), "rollout_server 3 mine");
  EXPECT_TRUE(WIFSIGNALED(trainer_->Wait(absl::Seconds(5))));
}

// Proportional and resident size differ by what is shared: two processes that touch all weights count each page half.
TEST_F(PoolMemberTest, WeightsExistOnce) {
  StartPair();
  for (PoolProcess* process : {rollout_.get(), trainer_.get()}) ASSERT_NE(process->Ask("read_weights"), "");
  std::uint64_t count[2], rss[2], pss[2];
  int i = 0;
  for (PoolProcess* process : {rollout_.get(), trainer_.get()}) {
    std::istringstream(process->Ask("maps")) >> count[i] >> rss[i] >> pss[i];
    ++i;
  }
  EXPECT_GT(rss[0], 300u) << "KiB: the tiny model's weights";
  EXPECT_NEAR(static_cast<double>(pss[0] + pss[1]), static_cast<double>(std::max(rss[0], rss[1])), 64);
}

}  // namespace
}  // namespace tandem
