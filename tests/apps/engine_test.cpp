// Which engine the ranks of a run get.
#include "apps/engine.h"

#include "dist/build.h"
#include "dist/hub.h"
#include "runtime/error.h"
#include "tests/support.h"

namespace detr::test {
namespace {

using apps::engine_name;
using Pairs = std::vector<std::pair<std::string, std::string>>;

train::CommConfig backend(const std::string& name) {
  train::CommConfig comm;
  comm.backend = name;
  return comm;
}

TEST_CASE("engine: what is asked for, where it is there", "[cpu]") {
  if constexpr (dist::kHasGloo) {
    CHECK(engine_name(backend("auto"), true) == "gloo");
    CHECK(engine_name(backend("gloo"), true) == "gloo");
    CHECK(engine_name(backend("gloo"), false) == "gloo-staged");
    // The manifest holds what was found, however it was asked for.
    dist::Hub hub{dist::HubOptions{}};
    auto [here, there] = dist::socket_pair();
    hub.attach(0, std::move(there));
    const auto control = dist::Control::over(std::move(here), {});
    for (const char* name : {"auto", "gloo"}) {
      std::string described;
      CHECK(apps::run_ranks({}, backend(name), control, Stream::cpu(1), described).settings == Pairs{{"engine", "gloo"}});
      CHECK(described == "1 ranks over gloo on 127.0.0.1");
    }
    control->leave();
  } else {
    expect_throws<DeviceError>([] { static_cast<void>(engine_name(backend("auto"), true)); }, "this build has no Gloo");
  }
  if constexpr (dist::kHasNccl) CHECK(engine_name(backend("auto"), false) == "nccl");
  else expect_throws<DeviceError>([] { static_cast<void>(engine_name(backend("auto"), false)); }, "this build has no NCCL");
  expect_throws<ConfigError>([] { static_cast<void>(engine_name(backend("nccl"), true)); }, "nccl is for GPUs");
}

TEST_CASE("engine: where ranks of several hosts listen", "[cpu]") {
  using Addresses = std::vector<std::string>;
  const auto addresses = apps::gloo_addresses;
  // One host: socket pairs, or a meeting point on the loopback.
  CHECK(addresses({{"", ""}, {"", ""}}) == Addresses{"127.0.0.1", "127.0.0.1"});
  CHECK(addresses({{"127.0.0.1", "127.0.0.1"}, {"127.0.0.1", "127.0.0.1"}}) == Addresses{"127.0.0.1", "127.0.0.1"});
  CHECK(addresses({{"::1", "::1"}, {"::1", "::1"}}) == Addresses{"127.0.0.1", "127.0.0.1"});
  // Two hosts: those beside the hub are where the others see it, whatever their own name leads to.
  CHECK(addresses({{"", ""}, {"", ""}, {"10.77.0.2", "10.77.0.1"}}) == Addresses{"10.77.0.1", "10.77.0.1", "10.77.0.2"});
  CHECK(addresses({{"127.0.1.1", "127.0.1.1"}, {"10.77.0.2", "10.77.0.1"}, {"10.77.0.3", "10.77.0.1"}}) == Addresses{"10.77.0.1", "10.77.0.2", "10.77.0.3"});
  CHECK(addresses({{"10.77.0.1", "10.77.0.1"}, {"10.77.0.2", "10.77.0.1"}}) == Addresses{"10.77.0.1", "10.77.0.2"});
  CHECK(addresses({{"fd00::1", "fd00::1"}, {"fd00::2", "fd00::1"}}) == Addresses{"fd00::1", "fd00::2"});

  CHECK(apps::describe_ranks("nccl", {}, 8) == "8 ranks over nccl");
  CHECK(apps::describe_ranks("gloo", {"10.0.0.1", "10.0.0.1", "10.0.0.2"}, 3) == "3 ranks over gloo on 10.0.0.1, 10.0.0.2");
  CHECK(apps::describe_ranks("gloo", {"a", "b", "c", "d", "e", "f"}, 6) == "6 ranks over gloo on a, b, c, d and 2 more");
}

TEST_CASE("engine: little shared memory is told with the option for containers", "[cpu]") {
  const TempDir dir;
  CHECK(apps::shared_memory_warning(dir.path(), 1) == "");
  const std::string text = apps::shared_memory_warning(dir.path(), std::uintmax_t{1} << 62);
  CHECK(text.starts_with(dir.path().string() + ": "));
  CHECK(text.find(" MiB are free, and NCCL may want up to ") != std::string::npos);
  CHECK(text.find("--shm-size=") != std::string::npos);
  CHECK(text.find('\n') == std::string::npos);
  CHECK(apps::shared_memory_warning(dir / "nowhere", 1).find("No such file") != std::string::npos);
}

}  // namespace
}  // namespace detr::test
