// The handshake of the pool, from both ends.
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <memory>

#include "common/base/check.h"
#include "common/base/clock.h"
#include "common/memory/pool_chunks.h"
#include "common/sharing/descriptor_server.h"
#include "common/sharing/fd_channel.h"
#include "common/sharing/manifest.h"
#include "common/sharing/pool_member.h"
#include "tests/fuzz/fuzz_input.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/support/tiny_model.h"

namespace tandem::fuzz {
namespace {

constexpr std::uint32_t kNumDescriptors = 3;

int NumDescriptors() {
  int count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) ++count;
  return count;
}

}  // namespace

// The joiner's end: packets from whoever listens at the socket.
FuzzTarget DescriptorPacketsTarget() {
  const auto file = std::make_shared<UniqueFd>(::memfd_create("chunk", MFD_CLOEXEC));
  const auto read = [file](const std::string& input) {
    int ends[2];
    TANDEM_CHECK(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) == 0, "socketpair");
    const UniqueFd joiner(ends[0]);
    const int before = NumDescriptors();
    {
      const UniqueFd offerer(ends[1]);
      for (const std::string& message : SplitMessages(input)) {
        // Behind the packet's bytes: how many descriptors come with it.
        const std::size_t count = message.empty() ? 0 : static_cast<unsigned char>(message.back()) % 6;
        std::string bytes = message.empty() ? "" : message.substr(0, message.size() - 1);
        alignas(cmsghdr) char control[CMSG_SPACE(6 * sizeof(int))] = {};
        iovec part{.iov_base = bytes.data(), .iov_len = bytes.size()};
        msghdr packet{};
        packet.msg_iov = &part;
        packet.msg_iovlen = 1;
        if (count > 0) {
          packet.msg_control = control;
          packet.msg_controllen = CMSG_SPACE(count * sizeof(int));
          cmsghdr* const header = CMSG_FIRSTHDR(&packet);
          header->cmsg_level = SOL_SOCKET;
          header->cmsg_type = SCM_RIGHTS;
          header->cmsg_len = CMSG_LEN(count * sizeof(int));
          for (std::size_t i = 0; i < count; ++i) {
            const int fd = file->get();
            std::memcpy(CMSG_DATA(header) + i * sizeof fd, &fd, sizeof fd);
          }
        }
        (void)!::sendmsg(offerer.get(), &packet, MSG_NOSIGNAL | MSG_DONTWAIT);
      }
    }
    const auto received = ReceiveDescriptors(joiner.get(), kNumDescriptors, MonotonicTime::Now() + absl::Seconds(5));
    const int held = received.ok() ? static_cast<int>(received->size()) : 0;
    TANDEM_CHECK(!received.ok() || held == static_cast<int>(kNumDescriptors), held);
    TANDEM_CHECK(NumDescriptors() == before - 1 + held, "descriptors are left open: ", NumDescriptors(), " of ", before);
  };
  const auto packet = [](std::uint32_t first, std::uint32_t count) {
    const DescriptorPacket header{.first = first, .count = count, .total = kNumDescriptors};
    return std::string(reinterpret_cast<const char*>(&header), sizeof header) + static_cast<char>(count);
  };
  return {.read = read, .seeds = {JoinMessages({packet(0, 3)}), JoinMessages({packet(0, 2), packet(2, 1)})}, .words = {}};
}

// The offerer's end: what is shown in place of the token.
FuzzTarget SocketTokenTarget() {
  struct Offerer {
    testing::TemporaryDirectory directory;
    std::vector<UniqueFd> files;
    std::unique_ptr<DescriptorServer> server;
  };
  const auto offerer = std::make_shared<Offerer>();
  offerer->files.emplace_back(::memfd_create("chunk", MFD_CLOEXEC));
  offerer->server = DescriptorServer::Create(offerer->directory.File("socket"), offerer->files).value();
  const auto read = [offerer](const std::string& input) {
    const std::string token = offerer->server->IssueToken(::getpid());
    const UniqueFd socket = ConnectUnix(offerer->directory.File("socket"), MonotonicTime::Now() + absl::Seconds(5)).value();
    for (const std::string& message : SplitMessages(input)) {
      (void)!::send(socket.get(), message.data(), message.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    }
    ::shutdown(socket.get(), SHUT_WR);
    for (int round = 0; round < 3; ++round) offerer->server->Serve();
    TANDEM_CHECK(!offerer->server->TakeAccepted().has_value(), "a token was guessed");
    // Served and dropped: the next one is not held up.
    pollfd entry{.fd = socket.get(), .events = POLLIN, .revents = 0};
    int ready = 0;
    do { ready = ::poll(&entry, 1, 10'000); } while (ready < 0 && errno == EINTR);  // libFuzzer's clock
    TANDEM_CHECK(ready == 1, "a connection that closed is still served");
  };
  return {.read = read,
          .seeds = {JoinMessages({std::string(kTokenBytes, 'a')}), JoinMessages({"", std::string(33, 'b'), "c"})},
          .words = {}};
}

FuzzTarget PoolManifestTarget() {
  const auto memory = std::shared_ptr<PoolMemory>(PoolMemory::CreateMemfd());
  const auto read = [memory](const std::string& input) {
    v1::PoolManifest manifest;
    if (!manifest.ParseFromString(input)) return;
    if (!CheckManifest(manifest, *memory).ok()) return;
    // The regions of a manifest that passed lie in its pool, one behind the other.
    std::uint64_t end = 0;
    for (const v1::Region& region : manifest.regions()) {
      TANDEM_CHECK(region.range().begin_bytes() >= end && region.range().end_bytes() >= region.range().begin_bytes(),
                   manifest.ShortDebugString());
      end = region.range().end_bytes();
    }
    TANDEM_CHECK(end <= manifest.num_chunks() * manifest.chunk_bytes(), manifest.ShortDebugString());
  };
  v1::PoolManifest manifest;
  manifest.set_protocol_version(kProtocolVersion);
  manifest.set_device_uuid(memory->device_uuid());
  manifest.set_transport(memory->transport());
  manifest.set_chunk_bytes(memory->granularity_bytes());
  manifest.set_num_chunks(5);
  for (int kind = v1::REGION_KIND_WEIGHTS; kind <= v1::REGION_KIND_ELASTIC; ++kind) {
    v1::Region* const region = manifest.add_regions();
    region->set_kind(static_cast<v1::RegionKind>(kind));
    region->mutable_range()->set_begin_bytes((kind - 1) * memory->granularity_bytes());
    region->mutable_range()->set_end_bytes(kind * memory->granularity_bytes());
  }
  TANDEM_CHECK(CheckManifest(manifest, *memory).ok(), CheckManifest(manifest, *memory).ToString());
  return {.read = read, .seeds = {manifest.SerializeAsString()}, .words = {"memfd", "cuda_vmm", "cpu"}};
}

FuzzTarget PoolServiceTarget() {
  struct Offered {
    testing::TemporaryDirectory directory;
    std::unique_ptr<PoolMember> member;
  };
  const auto offered = std::make_shared<Offered>();
  TinyModelOptions model;
  model.num_layers = 1;
  model.hidden_size = model.intermediate_size = 8;
  model.num_heads = 2;
  model.num_kv_heads = 1;
  model.head_dim = 4;
  PoolMemberOptions options;
  options.role = v1::ROLE_ROLLOUT;
  options.peer_address = "unix:" + offered->directory.File("nobody.grpc");
  options.run_dir = offered->directory.File("run");
  options.model_path = WriteTinyModel(offered->directory.File("model"), model).value();
  options.pool_bytes = 32 << 20;
  options.rollout_standing_bytes = options.trainer_standing_bytes = 1 << 20;
  auto member = PoolMember::Start(options);
  TANDEM_CHECK(member.ok(), member.status().ToString());
  offered->member = *std::move(member);
  offered->member->Offer({.on_peer_attached = [](v1::Role, int) {},
                          .on_peer_lost = [](v1::Role) {},
                          .on_yield_elastic = [](v1::StreamMode, MonotonicTime) { return absl::OkStatus(); },
                          .on_elastic_returned = [] {}});
  const auto read = [offered](const std::string& input) {
    v1::PoolService::Service* const service = offered->member->service();
    grpc::ServerContext context;
    // The first byte of each message says which call.
    for (const std::string& message : SplitMessages(input)) {
      if (message.empty()) continue;
      const std::string bytes = message.substr(1);
      v1::AttachRequest attach;
      v1::ReadyRequest ready;
      v1::AcquireLeaseRequest acquire;
      v1::ReleaseLeaseRequest release;
      v1::PoolManifest manifest;
      v1::ReadyResponse ready_response;
      v1::LeaseState lease;
      switch (static_cast<unsigned char>(message[0]) % 4) {
        case 0:
          if (attach.ParseFromString(bytes)) service->Attach(&context, &attach, &manifest);
          break;
        case 1:
          if (ready.ParseFromString(bytes)) service->Ready(&context, &ready, &ready_response);
          break;
        case 2:
          if (acquire.ParseFromString(bytes)) service->AcquireLease(&context, &acquire, &lease);
          break;
        case 3:
          if (release.ParseFromString(bytes)) service->ReleaseLease(&context, &release, &lease);
          break;
      }
    }
    // Nobody showed a token: the pool is this daemon's alone.
    TANDEM_CHECK(!offered->member->is_peer_attached() && offered->member->holds_elastic(),
                 offered->member->lease().ShortDebugString());
  };
  v1::AttachRequest attach;
  attach.set_protocol_version(kProtocolVersion);
  attach.set_role(v1::ROLE_TRAINER);
  attach.set_device_uuid("cpu");
  attach.set_pid(1);
  v1::ReadyRequest ready;
  ready.set_pool_id(offered->member->manifest().pool_id());
  ready.set_role(v1::ROLE_TRAINER);
  v1::AcquireLeaseRequest acquire;
  acquire.set_role(v1::ROLE_TRAINER);
  acquire.set_request_epoch(1);
  acquire.set_mode(v1::STREAM_MODE_PAUSE);
  v1::ReleaseLeaseRequest release;
  release.set_role(v1::ROLE_TRAINER);
  release.set_epoch(1);
  const auto call = [](char method, const google::protobuf::Message& message) { return method + message.SerializeAsString(); };
  return {.read = read,
          .seeds = {JoinMessages({call(0, attach), call(1, ready)}), JoinMessages({call(2, acquire), call(3, release)})},
          .words = {}};
}

}  // namespace tandem::fuzz
