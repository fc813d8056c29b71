// The identity of a program's file.
#include "runtime/build.h"

#include <fstream>
#include <iterator>

#include "tests/support.h"

using namespace detr;

TEST_CASE("build: the identity is the one in the program's file", "[cpu]") {
  const std::string id = build_id();
  REQUIRE(id.size() >= 16);
  std::string bytes;
  for (std::size_t i = 0; i < id.size(); i += 2) bytes += static_cast<char>(std::stoi(id.substr(i, 2), nullptr, 16));
  std::ifstream file("/proc/self/exe", std::ios::binary);
  const std::string program((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  CHECK(program.find(std::string("GNU\0", 4) + bytes) != std::string::npos);
}
