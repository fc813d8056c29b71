// Which engine the ranks of a run get.
#include "apps/engine.h"

#include "dist/build.h"
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
    for (const char* name : {"auto", "gloo"}) CHECK(apps::run_ranks({}, backend(name), nullptr, Stream::cpu(1)).settings == Pairs{{"engine", "gloo"}});
  } else {
    expect_throws<DeviceError>([] { static_cast<void>(engine_name(backend("auto"), true)); }, "this build has no Gloo");
  }
  if constexpr (dist::kHasNccl) CHECK(engine_name(backend("auto"), false) == "nccl");
  else expect_throws<DeviceError>([] { static_cast<void>(engine_name(backend("auto"), false)); }, "this build has no NCCL");
  expect_throws<ConfigError>([] { static_cast<void>(engine_name(backend("nccl"), true)); }, "nccl is for GPUs");
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
