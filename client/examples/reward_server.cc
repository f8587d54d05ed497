// A remote reward in C++: reward_server_example [host:port], by default 127.0.0.1:7080. It scores a completion 1 when it is
// empty, falling to 0 at 200 bytes.
//
// In the job: rewards { weight: 1 remote { address: "127.0.0.1:7080" function: "brevity" } }
#include <algorithm>
#include <iostream>
#include <string>
#include <vector>

#include "grpcpp/grpcpp.h"
#include "proto/reward.grpc.pb.h"

namespace {

using tandem::v1::ScoreRequest;
using tandem::v1::ScoreResponse;

double Brevity(const std::string& completion) { return std::max(0.0, 1 - static_cast<double>(completion.size()) / 200); }

class Rewards final : public tandem::v1::RewardService::Service {
 public:
  // Thread-safe: a call has all its state here.
  grpc::Status Score(grpc::ServerContext*, grpc::ServerReaderWriter<ScoreResponse, ScoreRequest>* stream) override {
    constexpr std::uint32_t kMaxCompletions = 1024;
    std::vector<std::string> completions;
    ScoreRequest request;
    while (stream->Read(&request)) {
      if (request.has_header()) {
        if (request.header().function() != "brevity") {
          return {grpc::StatusCode::NOT_FOUND, "no function '" + request.header().function() + "' here; there is brevity"};
        }
        completions.resize(std::min(request.header().num_completions(), kMaxCompletions));
      } else if (request.has_row_piece()) {
        continue;  // this function needs nothing of the row
      } else if (request.completion().index() < completions.size()) {
        completions[request.completion().index()] += request.completion().text();
      } else {
        return {grpc::StatusCode::INVALID_ARGUMENT, "a completion beyond those of the header"};
      }
    }
    for (std::size_t i = 0; i < completions.size(); ++i) {
      ScoreResponse response;
      response.set_index(static_cast<std::uint32_t>(i));
      response.set_reward(Brevity(completions[i]));
      stream->Write(response);
    }
    return grpc::Status::OK;
  }
};

}  // namespace

int main(int argc, char** argv) {
  const std::string address = argc > 1 ? argv[1] : "127.0.0.1:7080";
  Rewards rewards;
  int port = 0;
  grpc::ServerBuilder builder;
  builder.AddListeningPort(address, grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(&rewards);
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  if (server == nullptr || port == 0) {
    std::cerr << "reward_server_example: cannot listen on " << address << "\n";
    return 1;
  }
  std::cout << "reward functions at " << address.substr(0, address.rfind(':')) << ":" << port << std::endl;
  server->Wait();
}
