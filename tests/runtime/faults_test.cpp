// Failures on demand: the text they are asked for with, and where they happen.
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <csignal>

#include "runtime/faults.h"
#include "tests/support.h"

namespace detr {
namespace {

/// The wait status of a process that comes to a phase of a step; one that goes on ends with 77.
int status_of(const Faults& faults, const std::string& phase, std::int64_t step) {
  const pid_t child = ::fork();
  if (child == 0) {
    for (const int signal : {SIGSEGV, SIGABRT, SIGFPE}) ::signal(signal, SIG_DFL);   // the test's own handlers would report it
    ::alarm(1);                                                                      // for one that hangs
    try {
      faults.at(phase, step);
    } catch (const Error&) {
      ::_exit(78);
    }
    ::_exit(77);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return status;
}

TEST_CASE("faults: no text, no fault", "[cpu]") {
  for (const Faults& faults : {Faults(), Faults("", 0, 1)}) {
    faults.at("forward", 0);
    CHECK(faults.text().empty());
    CHECK(!faults.drop(0));
    CHECK(!faults.constant_loss(0));
    CHECK(!faults.no_batch(0));
    CHECK(faults.set_values(0).empty());
    CHECK(faults.flip_bits(0).empty());
    CHECK(!faults.swapped_slots(0));
    CHECK(!faults.short_slot(0));
    CHECK(faults.failing_allocation() == 0);
    CHECK(faults.manifest_fields().empty());
  }
}

TEST_CASE("faults: rank, step and phase", "[cpu]") {
  const auto constant = [](const std::string& text, int rank, std::int64_t step) { return Faults("constloss:" + text, rank, 4).constant_loss(step); };
  CHECK(Faults("constloss", 3, 4).constant_loss(0));
  CHECK(constant("rank=*,step=*", 0, 7));
  CHECK(constant("rank=2", 2, 7));
  CHECK(!constant("rank=2", 1, 7));
  CHECK(constant("step=5", 0, 5));
  CHECK(!constant("step=5", 0, 4));
  CHECK(!constant("step=5", 0, 6));
  for (std::int64_t step = 0; step < 12; ++step) {
    CHECK(constant("step=5-9", 0, step) == (step >= 5 && step <= 9));
    CHECK(constant("step=5-", 0, step) == (step >= 5));
  }
  const auto throws = [](const std::string& text, const std::string& phase, std::int64_t step) {
    try {
      Faults(text, 0, 1).at(phase, step);
      return false;
    } catch (const Error& error) {
      CHECK(std::string(error.what()).find(concat("step ", step, ", ", phase)) != std::string::npos);
      return true;
    }
  };
  for (const auto phase : Faults::kPhases) CHECK(throws("throw", std::string(phase), 3));
  CHECK(throws("throw:phase=load", "load", 3));
  CHECK(!throws("throw:phase=load", "save", 3));
  CHECK(throws("throw:phase=*", "save", 3));
  CHECK(throws("throw:phase=rendezvous", "rendezvous", -1));
  CHECK(throws("throw:phase=rendezvous,step=*", "rendezvous", -1));
  CHECK(!throws("throw:step=0-", "rendezvous", -1));
  test::expect_throws<InvalidArgument>([] { Faults("throw", 0, 1).at("foward", 0); }, "foward");
}

TEST_CASE("faults: what a phase can do", "[cpu]") {
  CHECK(WEXITSTATUS(status_of(Faults("throw:step=5", 0, 1), "forward", 5)) == 78);
  CHECK(WEXITSTATUS(status_of(Faults("throw:step=5", 0, 1), "forward", 4)) == 77);
  CHECK(WEXITSTATUS(status_of(Faults("exit:code=9", 0, 1), "forward", 5)) == 9);
  CHECK(WEXITSTATUS(status_of(Faults("exit:code=0", 0, 1), "forward", 5)) == 0);
  for (const auto& [text, signal] : {std::pair("SEGV", SIGSEGV), std::pair("SIGABRT", SIGABRT), std::pair("KILL", SIGKILL), std::pair("9", SIGKILL), std::pair("FPE", SIGFPE)}) {
    const int status = status_of(Faults(concat("signal:sig=", text), 0, 1), "forward", 5);
    INFO(text);
    CHECK(WIFSIGNALED(status));
    CHECK(WTERMSIG(status) == signal);
  }
  const int hung = status_of(Faults("hang:phase=update", 0, 1), "update", 5);
  CHECK(WIFSIGNALED(hung));
  CHECK(WTERMSIG(hung) == SIGALRM);
  CHECK(WEXITSTATUS(status_of(Faults("sleep:ms=10", 0, 1), "load", 5)) == 77);
  CHECK(WTERMSIG(status_of(Faults("sleep:ms=100000", 0, 1), "load", 5)) == SIGALRM);
}

TEST_CASE("faults: what their owners ask for", "[cpu]") {
  const std::string text = "set:rank=1,step=3,param=a.weight,index=7,value=nan;set:step=3-4,param=b,index=0,value=-1e38;flip:step=2,buffer=ema,index=11,bit=31;swap:step=9,a=3,b=4;"
                           "short:slot=2;nobatch:rank=0,step=8-;allocfail:rank=1,n=12;manifest:field=seed;manifest:field=batch";
  const Faults faults(text, 1, 2), other(text, 0, 2);
  CHECK(faults.text() == text);
  CHECK(other.text() == text);
  REQUIRE(faults.set_values(3).size() == 2);
  CHECK(faults.set_values(3)[0].parameter == "a.weight");
  CHECK(faults.set_values(3)[0].index == 7);
  CHECK(std::isnan(faults.set_values(3)[0].value));
  CHECK(faults.set_values(3)[1].value == -1e38F);
  CHECK(faults.set_values(4).size() == 1);
  CHECK(other.set_values(3).size() == 1);
  REQUIRE(faults.flip_bits(2).size() == 1);
  CHECK(faults.flip_bits(2)[0].buffer == "ema");
  CHECK(faults.flip_bits(2)[0].index == 11);
  CHECK(faults.flip_bits(2)[0].bit == 31);
  CHECK(faults.flip_bits(3).empty());
  REQUIRE(faults.swapped_slots(9));
  CHECK(faults.swapped_slots(9)->a == 3);
  CHECK(faults.swapped_slots(9)->b == 4);
  CHECK(!faults.swapped_slots(8));
  CHECK(faults.short_slot(0) == 2);
  CHECK(!faults.no_batch(8));
  CHECK(other.no_batch(8));
  CHECK(!other.no_batch(7));
  CHECK(faults.failing_allocation() == 12);
  CHECK(other.failing_allocation() == 0);
  CHECK(faults.manifest_fields() == std::vector<std::string>{"seed", "batch"});
}

TEST_CASE("faults: dropped parameters", "[cpu]") {
  const Faults named("drop:step=5,param=^decoder\\.(a|b)$", 0, 1);
  REQUIRE(named.drop(5));
  CHECK(!named.drop(4));
  CHECK(named.drop(5)("decoder.a"));
  CHECK(!named.drop(5)("decoder.ab"));
  CHECK(Faults("drop:param=coder", 0, 1).drop(0)("decoder.ab"));   // found anywhere in the name

  // A share is drawn anew for each rank and step, and is the same whenever it is asked for.
  const auto pattern = [](const std::string& text, int rank, std::int64_t step) {
    const auto drop = Faults(text, rank, 3).drop(step);
    std::string drawn;
    for (int i = 0; i < 1000; ++i) drawn += drop(concat("layer.", i, ".weight")) ? '1' : '0';
    return drawn;
  };
  const std::string first = pattern("drop:p=0.3,seed=7", 1, 5);
  const auto dropped = std::count(first.begin(), first.end(), '1');
  CHECK(dropped > 240);   // four standard deviations of 14.5 about 300
  CHECK(dropped < 360);
  CHECK(pattern("drop:p=0.3,seed=7", 1, 5) == first);
  CHECK(pattern("drop:p=0.3,seed=8", 1, 5) != first);
  CHECK(pattern("drop:p=0.3,seed=7", 2, 5) != first);
  CHECK(pattern("drop:p=0.3,seed=7", 1, 6) != first);
  CHECK(pattern("drop:p=0.3", 1, 5) == pattern("drop:p=0.3,seed=0", 1, 5));
  CHECK(pattern("drop:p=0", 0, 0) == std::string(1000, '0'));
  CHECK(pattern("drop:p=1", 0, 0) == std::string(1000, '1'));
}

TEST_CASE("faults: a malformed text is refused", "[cpu]") {
  const std::pair<const char*, const char*> cases[] = {
      {"trow", "did you mean 'throw'"},
      {";", "there is no fault ''"},
      {"throw;", "there is no fault ''"},
      {"throw:", "key=value"},
      {"throw:step", "key=value"},
      {"throw:step=", "key=value"},
      {"throw:=5", "key=value"},
      {"throw:step=5,,rank=1", "key=value"},
      {"throw:stpe=5", "did you mean 'step'"},
      {"throw:step=5,step=6", "twice"},
      {"throw:code=5", "has no key 'code'"},
      {"throw:step=-1", "step"},
      {"throw:step=x", "step"},
      {"throw:step=9-5", "step"},
      {"throw:step=5-x", "step"},
      {"throw:step=5 ", "step"},
      {"throw:rank=4", "rank=4: wanted a whole number from 0 to 3"},
      {"throw:rank=-1", "rank"},
      {"throw:rank=x", "rank"},
      {"throw:phase=foward", "did you mean 'forward'"},
      {"throw:phase=manifest,step=5", "before the first step"},
      {"exit", "needs code="},
      {"exit:code=256", "code=256"},
      {"exit:code=-1", "code"},
      {"signal", "needs sig="},
      {"signal:sig=SEG", "sig=SEG"},
      {"signal:sig=0", "sig=0"},
      {"sleep", "needs ms="},
      {"sleep:ms=-5", "ms"},
      {"sleep:ms=99999999999", "ms"},
      {"drop", "either param= or p="},
      {"drop:param=a,p=0.5", "either param= or p="},
      {"drop:param=a,seed=1", "seed belongs to p"},
      {"drop:param=(", "no regular expression"},
      {"drop:p=1.5", "from 0 to 1"},
      {"drop:p=-0.1", "from 0 to 1"},
      {"drop:p=nan", "from 0 to 1"},
      {"drop:p=x", "wanted a number"},
      {"drop:p=0.5,seed=-1", "seed"},
      {"constloss:phase=load", "has no key 'phase'"},
      {"set:param=a,index=0", "needs value="},
      {"set:param=a,value=1", "needs index="},
      {"set:index=0,value=1", "needs param="},
      {"set:param=a,index=-1,value=1", "index"},
      {"set:param=a,index=0,value=much", "value=much"},
      {"set:param=a,index=0,value=1e39", "f32"},
      {"flip:buffer=grads,index=0,bit=0", "weights, moments or ema"},
      {"flip:buffer=ema,index=0,bit=32", "bit=32"},
      {"flip:buffer=ema,bit=0", "needs index="},
      {"swap:a=1", "needs b="},
      {"swap:a=1,b=1", "the same slot"},
      {"short", "needs slot="},
      {"allocfail:n=0", "n=0"},
      {"allocfail:n=1,step=3", "has no key 'step'"},
      {"manifest", "needs field="},
      {"throw:rank=1;exit", "needs code="},   // also a part that concerns no rank, or another one
      {"exit:rank=3", "needs code="},
  };
  for (const auto& [text, wanted] : cases) {
    INFO(text);
    test::expect_throws<ConfigError>([&] { Faults(text, 0, 4); }, "DETRTRAIN_FAULT");
    test::expect_throws<ConfigError>([&] { Faults(text, 0, 4); }, wanted);
  }
}

TEST_CASE("faults: the environment", "[cpu]") {
  ::setenv("DETRTRAIN_FAULT", "nobatch:rank=1,step=3", 1);
  CHECK(Faults::from_environment(1, 2).no_batch(3));
  CHECK(!Faults::from_environment(0, 2).no_batch(3));
  ::unsetenv("DETRTRAIN_FAULT");
  CHECK(Faults::from_environment(1, 2).text().empty());
}

TEST_CASE("faults: what they name must be there, where they are this rank's", "[cpu]") {
  const std::vector<std::pair<std::string, std::int64_t>> parameters = {{"decoder.a", 3}, {"decoder.b", 1}};
  const auto refused = [](const std::string& text, const auto& check, const std::string& wanted) {
    const Faults mine(text, 1, 2), other(text, 0, 2);
    INFO(text);
    test::expect_throws<ConfigError>([&] { check(mine); }, concat("DETRTRAIN_FAULT, '", text, "': "));
    test::expect_throws<ConfigError>([&] { check(mine); }, wanted);
    check(other);
  };
  const auto by_parameters = [&](const Faults& faults) { faults.expect_parameters(parameters); };
  const auto by_fields = [](const Faults& faults) { faults.expect_fields({"/seed", "version"}); };
  const auto by_slots = [](const Faults& faults) { faults.expect_slots(3); };
  refused("set:param=decoder.c,index=0,value=1,rank=1", by_parameters, "did you mean 'decoder.");
  refused("set:param=decoder.a,index=3,value=1,rank=1", by_parameters, "3 values, 0 to 2");
  refused("drop:param=encoder,rank=1", by_parameters, "the name of no trainable parameter");
  refused("manifest:field=seed,rank=1", by_fields, "no field 'seed'; did you mean '/seed'?");
  refused("manifest:field=/seed,rank=1", [](const Faults& faults) { faults.expect_fields({}); }, "nobody to compare");
  refused("swap:a=3,b=0,rank=1", by_slots, "there are 3 slots, 0 to 2");
  refused("swap:a=0,b=3,rank=1", by_slots, "there are 3 slots, 0 to 2");
  refused("short:slot=3,rank=1", by_slots, "there are 3 slots, 0 to 2");
  const Faults good("set:param=decoder.a,index=2,value=1;drop:param=^decoder;drop:p=0.5;manifest:field=version;swap:a=0,b=2;short:slot=2", 0, 1);
  by_parameters(good);
  by_fields(good);
  by_slots(good);
}

}  // namespace
}  // namespace detr
