// Where ranks meet: those that another launcher has started, those of several hosts; and what the binary makes of its flags.
#include <chrono>
#include <csignal>
#include <map>
#include <memory>
#include <thread>
#include <tuple>

#include "dist/socket.h"
#include "tests/apps/small_run.h"

namespace detr::test {
namespace {

using Words = std::vector<std::string>;

Setting job_setting(std::map<std::string, std::string> variables) { return {DETR_JOB_BINARY, std::move(variables), -1}; }

/// A port that nobody listens on, as far as that can be known.
int free_port() { return dist::Listener().port(); }

/// A rank as torchrun would start it.
std::unique_ptr<Detrtrain> torchrun_rank(int rank, int size, int port, const Words& flags, const std::string& run = "a", const std::string& fault = "", const std::string& host = "127.0.0.1") {
  return std::make_unique<Detrtrain>(Words{"-d", "cpu"} + flags, Detrtrain::Streams::kept,
                                     job_setting({{"RANK", std::to_string(rank)}, {"WORLD_SIZE", std::to_string(size)}, {"LOCAL_RANK", std::to_string(rank)},
                                                  {"LOCAL_WORLD_SIZE", std::to_string(size)}, {"MASTER_ADDR", host}, {"MASTER_PORT", std::to_string(port)},
                                                  {"TORCHELASTIC_RUN_ID", run}, {"DETRTRAIN_FAULT", fault}}));
}

TEST_CASE("meeting: ranks that another launcher starts", "[cpu]") {
  for (const char* host : {"127.0.0.1", "0.0.0.0"}) {   // the latter: of all addresses
    const int port = free_port();
    std::vector<std::unique_ptr<Detrtrain>> ranks;
    for (const int rank : {2, 0, 1}) ranks.push_back(torchrun_rank(rank, 3, port, {"--steps", "50"}, "a", "", host));
    for (std::size_t i = 0; i < 3; ++i) {
      const ProcessResult result = ranks[i]->wait();
      INFO(result.err);
      CHECK(result.code == 0);
      CHECK(result.out == (i == 1 ? "50 steps\n" : ""));
    }
  }
  const dist::Listener taken;
  const ProcessResult result = torchrun_rank(0, 2, taken.port(), {})->wait();
  CHECK(result.code == 2);
  CHECK(result.err.find(concat("127.0.0.1:", taken.port(), ": Address already in use; another rank 0 of this job, or another program; --rdzv HOST:PORT names another one")) != std::string::npos);
}

TEST_CASE("meeting: a failure of ranks that another launcher has started", "[cpu]") {
  for (const int failing : {0, 2}) {
    const int port = free_port();
    std::vector<std::unique_ptr<Detrtrain>> ranks;
    for (const int rank : {0, 1, 2}) ranks.push_back(torchrun_rank(rank, 3, port, {}, "a", concat("throw:step=30,rank=", failing)));
    for (std::size_t rank = 0; rank < 3; ++rank) {
      const ProcessResult result = ranks[rank]->wait();
      INFO("rank " << rank << ": " << result.err);
      CHECK(result.code == 1);
      CHECK((result.last_line().starts_with(concat("detrtrain: error: rank ", failing, ": DETRTRAIN_FAULT"))) == (rank == 0));
    }
  }
  // Rank 0 takes the hub with it: that is what can be known.
  const int port = free_port();
  std::vector<std::unique_ptr<Detrtrain>> ranks;
  for (const int rank : {0, 1}) ranks.push_back(torchrun_rank(rank, 2, port, {}, "a", "signal:sig=KILL,rank=0,step=30"));
  CHECK(ranks[0]->wait().signal == SIGKILL);
  const ProcessResult other = ranks[1]->wait();
  CHECK(other.code == 6);
  CHECK(other.err.find("rank 0 lost") != std::string::npos);
}

TEST_CASE("meeting: a rank that never comes, or comes twice", "[cpu]") {
  {
    const int port = free_port();
    std::vector<std::unique_ptr<Detrtrain>> ranks;
    for (const int rank : {0, 2}) ranks.push_back(torchrun_rank(rank, 3, port, {"--start-timeout", "1"}));
    const ProcessResult first = ranks[0]->wait();
    CHECK(first.code == 6);
    CHECK(first.last_line().find("rank 1") != std::string::npos);
    CHECK(ranks[1]->wait().code == 6);
  }
  const int port = free_port();
  const auto first = torchrun_rank(0, 3, port, {});
  const auto second = torchrun_rank(1, 3, port, {});
  first->wait_until([&] { return first->err().find(" pid ") != std::string::npos; });
  second->wait_until([&] { return second->err().find(" pid ") != std::string::npos; });
  const ProcessResult twin = torchrun_rank(1, 3, port, {})->wait();
  CHECK(twin.code == 2);
  CHECK(twin.err.find("there is a rank 1 already") != std::string::npos);
  CHECK(torchrun_rank(2, 3, port, {}, "another job")->wait().code == 6);
  const auto third = torchrun_rank(2, 3, port, {});
  first->wait_until([&] { return first->err().find(" runs\n") != std::string::npos; });
  second->send(SIGTERM);
  for (const auto* rank : {&first, &second, &third}) CHECK((*rank)->wait().code == 75);
}

TEST_CASE("meeting: two hosts", "[cpu]") {
  const auto host = [](int port, int node, const Words& flags, const std::string& fault = "") {
    return std::make_unique<Detrtrain>(Words{"--ranks", "2", "-d", "cpu", "--nnodes", "2", "--node-rank", std::to_string(node), "--rdzv", concat("127.0.0.1:", port), "--rdzv-id", "x",
                                             "--comm-timeout", "3"} + flags,
                                       Detrtrain::Streams::kept, job_setting({{"DETRTRAIN_FAULT", fault}}));
  };
  {
    const int port = free_port();
    const auto second = host(port, 1, {"--steps", "20"}), first = host(port, 0, {"--steps", "20"});
    CHECK(first->wait().code == 0);
    const ProcessResult result = second->wait();
    CHECK(result.code == 0);
    CHECK(result.err.find("[rank 2] rank 2 of 4 on cpu runs\n") != std::string::npos);
    CHECK(result.out.empty());
  }
  for (const auto& [fault, code, error] : {std::tuple("signal:rank=3,sig=KILL,step=20", 6, "rank 3: killed by signal 9 (SIGKILL)"), std::tuple("throw:rank=2,step=20", 1, "rank 2: DETRTRAIN_FAULT"),
                                           std::tuple("signal:rank=2,sig=SEGV,step=20", 1, "rank 2: killed by signal 11 (SIGSEGV)"),
                                           std::tuple("exit:rank=3,code=0,step=20", 1, "rank 3: ended with exit code 0 and no word"),
                                           std::tuple("exit:rank=2,code=3,phase=rendezvous", 1, "rank 2: ended with exit code 3 and no word"),
                                           std::tuple("throw:rank=1,step=20", 1, "rank 1: DETRTRAIN_FAULT"), std::tuple("signal:rank=0,sig=SEGV,step=20", 1, "rank 0: killed by signal 11")}) {
    INFO(fault);
    const int port = free_port();
    const auto first = host(port, 0, {}, fault), second = host(port, 1, {}, fault);
    for (const auto* one : {&first, &second}) {
      const ProcessResult result = (*one)->wait();
      INFO(result.err);
      CHECK(result.code == code);
      CHECK(result.last_line().starts_with(concat("detrtrain: error: ", error)));
    }
  }
  const int port = free_port();
  const auto first = host(port, 0, {}), second = host(port, 1, {});
  second->wait_until([&] { return second->err().find(" runs\n") != std::string::npos; });
  second->send(SIGTERM);
  for (const auto* one : {&first, &second}) CHECK((*one)->wait().code == 75);
}

TEST_CASE("meeting: the launchers of two hosts end with one exit code", "[cpu]") {
  const auto host = [](int port, int node, const Words& flags) {
    return std::make_unique<Detrtrain>(Words{"--ranks", "2", "-d", "cpu", "--nnodes", "2", "--node-rank", std::to_string(node), "--rdzv", concat("127.0.0.1:", port), "--comm-timeout", "3"} + flags,
                                       Detrtrain::Streams::kept, job_setting({}));
  };
  {
    const int port = free_port();   // rank 1 alone ends with another code
    const auto first = host(port, 0, {"--steps", "5", "--last-code", "9"}), second = host(port, 1, {"--steps", "5", "--last-code", "9"});
    for (const auto* one : {&first, &second}) {
      const ProcessResult result = (*one)->wait();
      INFO(result.err);
      CHECK(result.code == 9);
      CHECK(result.last_line() == "detrtrain: error: the ranks ended with different exit codes: rank 0: 0; rank 1: 9; rank 2: 0; rank 3: 0");
    }
    CHECK(first->err().find(concat("ranks meet at 127.0.0.1:", port, "\n")) != std::string::npos);
  }
  for (const int node : {0, 1}) {   // a second signal to either ends both at once
    const int port = free_port();
    const auto first = host(port, 0, {"--step-ms", "100000"}), second = host(port, 1, {"--step-ms", "100000"});
    for (const auto* one : {&first, &second}) (*one)->wait_until([&] { return (*one)->err().find(" pid ") != std::string::npos; });
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    const auto& signalled = node == 0 ? first : second;
    signalled->send(SIGINT);
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    CHECK(signalled->running());
    signalled->send(SIGINT);
    for (const auto* one : {&first, &second}) {
      const ProcessResult result = (*one)->wait();
      INFO(result.err);
      CHECK(result.code == 130);
      CHECK(result.last_line() == "detrtrain: error: ended at once by a second signal (SIGINT)");
    }
  }
  const int port = free_port();   // the launcher that has the hub is gone
  const auto first = host(port, 0, {}), second = host(port, 1, {});
  second->wait_until([&] { return second->err().find(" runs\n") != std::string::npos; });
  first->send(SIGKILL);
  CHECK(first->wait().signal == SIGKILL);
  const ProcessResult result = second->wait();
  INFO(result.err);
  CHECK(result.code == 6);
  CHECK(result.last_line().find("is gone") != std::string::npos);
}

TEST_CASE("meeting: what the meeting point is, and whether others may come, is told", "[cpu]") {
  const int port = free_port();
  Setting setting = job_setting({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "0"}, {"MASTER_ADDR", "0.0.0.0"},
                                 {"MASTER_PORT", std::to_string(port - 1)}, {"TORCHELASTIC_USE_AGENT_STORE", "True"}});
  const ProcessResult result = Detrtrain({"-d", "cpu", "--start-timeout", "0.5"}, Detrtrain::Streams::kept, setting).wait();
  INFO(result.err);
  CHECK(result.err.find(concat("ranks meet at 0.0.0.0:", port, " (MASTER_PORT + 1: torchrun listens on MASTER_PORT itself)\n")) != std::string::npos);
  CHECK(result.err.find("warning: without --rdzv-id NAME") != std::string::npos);
  const ProcessResult named = Detrtrain({"-d", "cpu", "--start-timeout", "0.5", "--rdzv-id", "x"}, Detrtrain::Streams::kept, setting).wait();
  CHECK(named.err.find("--rdzv-id") == std::string::npos);
}

TEST_CASE("meeting: eval and predict are no ranks", "[cpu]") {
  for (const auto& [rank, size] : {std::pair("RANK", "WORLD_SIZE"), std::pair("PMI_RANK", "PMI_SIZE"), std::pair("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")}) {
    std::map<std::string, std::string> variables = {{rank, "1"}, {"LOCAL_RANK", "1"}, {"OMPI_COMM_WORLD_LOCAL_RANK", "1"}, {"MPI_LOCALRANKID", "1"},
                                                    {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "1"}};
    const auto with = [&](const Words& words) { return Detrtrain(words, Detrtrain::Streams::kept, {"", variables, -1}).wait(); };
    for (const char* count : {"", "2", "1"}) {
      variables[size] = count;
      if (std::string(count) == "1") variables[rank] = "0";
      for (const Words& words : {Words{"eval", "-r", "none.safetensors"}, Words{"predict", "-r", "none.safetensors", "--input", "none"}, Words{"train", "--test-only", "-r", "none.safetensors"}}) {
        const ProcessResult result = with(words);
        INFO(rank << "=" << variables[rank] << " " << size << "=" << count << ": " << result.err);
        CHECK(result.code == (std::string(count) == "1" ? 7 : 2));
        if (std::string(count) == "2") CHECK(result.err.find("runs as one process, and this is rank 1 of 2") != std::string::npos);
        if (std::string(count).empty()) CHECK(result.err.find(size) != std::string::npos);   // half a set
      }
    }
  }
}

TEST_CASE("meeting: the binary's flags", "[cpu]") {
  for (const char* ranks : {"0", "-1", "1000", "x", "2.5"}) expect_error({"train", "-c", "tiny", "--ranks", ranks}, 2, "--ranks");
  expect_error({"train", "-c", "tiny", "--nproc-per-node", "0"}, 2, "--ranks");
  expect_error({"train", "-c", "tiny", "--gpus", "0"}, 2, "--gpus 0");
  expect_error({"train", "-c", "tiny", "--gpus", "2"}, 8, "there is no GPU");
  expect_error({"train", "-c", "tiny", "--gpus", "all"}, 8, "there is no GPU");
  expect_error({"train", "-c", "tiny", "--gpus", "2", "-d", "cpu"}, 2, "contradict");
  expect_error({"train", "-c", "tiny", "--ranks", "2", "--comm", "mpi"}, 2, "--comm");
  expect_error({"train", "-c", "tiny", "--ranks", "2", "-d", "cpu", "--comm", "nccl"}, 2, "comm.backend (--comm): nccl is for GPUs");
  expect_error({"train", "-c", "tiny", "--ranks", "2", "--comm-timeout", "0"}, 2, "--comm-timeout");
  expect_error({"train", "-c", "tiny", "--ranks", "2", "-d", "cpu", "--nnodes", "2"}, 2, "--node-rank");
  expect_error({"train", "-c", "tiny", "-d", "cuda:0,1"}, 8, "-d cuda:0,1: there is no GPU");
  expect_error({"train", "-c", "tiny", "--rdzv", "bad"}, 2, "--rdzv is for several ranks");
  expect_error({"train", "-c", "tiny", "-d", "cpu", "--ranks", "4", "--batch-size", "18"}, 2, "--batch-size 18 does not divide by 4 ranks x accum 1; 16 and 20 do");
  expect_error({"train", "-c", "tiny", "-d", "cpu", "--ranks", "4", "--accum", "2", "--batch-size", "6"}, 2, "--batch-size 6 does not divide by 4 ranks x accum 2; 8 does");
  const auto with = [](const std::map<std::string, std::string>& variables, const Words& flags) {
    return Detrtrain(Words{"train", "-c", "tiny"} + flags, Detrtrain::Streams::kept, {"", variables, -1}).wait();
  };
  const ProcessResult half = with({{"RANK", "1"}}, {});
  CHECK(half.code == 2);
  CHECK(half.err.find("WORLD_SIZE") != std::string::npos);
  CHECK(with({{"RANK", "4"}, {"WORLD_SIZE", "4"}}, {}).code == 2);
  const ProcessResult fault = with({{"DETRTRAIN_FAULT", "thorw"}}, {"--ranks", "2", "-d", "cpu"});
  CHECK(fault.code == 2);
  CHECK(fault.errors().size() == 1);
  CHECK(with({{"DETRTRAIN_FAULT", "thorw"}}, {}).code == 2);
}

TEST_CASE("meeting: the configuration says how ranks meet, and flags win", "[cpu]") {
  const SmallData small;
  for (const char* key : {"comm.timeout_s=0", "comm.start_timeout_s=-1", "comm.backend=mpi", "comm.timeout_s=soon"}) {
    expect_error(small.train("run", {"--ranks", "2", "-d", "cpu", "-u", key}), 2, std::string(key).substr(0, std::string(key).find('=')));
  }
  expect_error(small.train("run", {"--ranks", "2", "-d", "cpu", "-u", "comm.backend=nccl"}), 2, "nccl is for GPUs");
  const nlohmann::json shown = expect_success({"info", "config", "-c", "tiny", "-u", "comm.timeout_s=7", "--json"}).json();
  CHECK(shown.at("config").at("comm").at("timeout_s") == 7);
  CHECK(shown.at("origins").at("comm.timeout_s") == "-u");

  const auto after = [](const Words& words, const std::map<std::string, std::string>& variables, const std::string& error) {
    const auto start = std::chrono::steady_clock::now();
    const ProcessResult result = Detrtrain(words, Detrtrain::Streams::kept, {"", variables, -1}).wait();
    INFO(result.err);
    CHECK(result.code == 6);
    CHECK(result.last_line().find(error) != std::string::npos);
    CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(30));   // the defaults are 120 and 60 s
  };
  const std::map<std::string, std::string> hangs = {{"DETRTRAIN_FAULT", "hang:rank=1,phase=rendezvous"}};
  const Words two = {"--ranks", "2", "-d", "cpu"};
  after(small.train("key", two + Words{"-u", "comm.timeout_s=1"}), hangs, "rank 1: ");
  after(small.train("flag", two + Words{"-u", "comm.timeout_s=100", "--comm-timeout", "1"}), hangs, "rank 1: ");
  std::map<std::string, std::string> lonely = {{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "0"}, {"LOCAL_WORLD_SIZE", "2"}, {"MASTER_ADDR", "127.0.0.1"}};
  lonely["MASTER_PORT"] = std::to_string(free_port());
  after(small.train("lonely", {"-d", "cpu", "-u", "comm.start_timeout_s=1"}), lonely, "rank 1: did not come within the start timeout");

  // A checkpoint brings its configuration along.
  expect_success(small.train("first", two + Words{"--max-steps", "2", "--eval-every", "0", "-u", "comm.timeout_s=1.5"}));
  after({"train", "-r", "auto", "--output-dir", small.path("first"), "--data", small.data(), "--max-steps", "4", "--ranks", "2", "-d", "cpu"}, hangs, "rank 1: ");
}

TEST_CASE("meeting: --json has the job's failure", "[cpu]") {
  for (const auto& [failing, kind] : {std::pair(0, "throw:"), std::pair(1, "throw:"), std::pair(0, "signal:sig=SEGV,"), std::pair(1, "exit:code=0,")}) {
    const std::string fault = concat("sleep:ms=60000,phase=rendezvous,rank=", 1 - failing, ";", kind, "phase=rendezvous,rank=", failing);
    INFO(fault);
    Detrtrain process({"train", "-c", "tiny", "--data", "none", "--ranks", "2", "-d", "cpu", "--json"}, Detrtrain::Streams::kept, {"", {{"DETRTRAIN_FAULT", fault}}, -1});
    const ProcessResult result = process.wait();
    INFO(result.err);
    CHECK(result.code == 1);
    const nlohmann::json object = result.json();
    CHECK(object.at("command") == "train");
    REQUIRE(result.errors().size() == 1);
    CHECK(result.errors()[0] == "detrtrain: error: " + object.at("error").get<std::string>());
    CHECK(result.last_line() == result.errors()[0]);
  }
  // An error that all ranks have is told once.
  const ProcessResult result = detrtrain({"train", "-c", "tiny", "--data", "/nonexistent", "--ranks", "3", "--batch-size", "3", "-d", "cpu", "--json"});
  INFO(result.err);
  CHECK(result.code == 3);
  CHECK(result.json().at("error").get<std::string>().find("/nonexistent") != std::string::npos);
  CHECK(result.errors().size() == 1);
}

}  // namespace
}  // namespace detr::test
