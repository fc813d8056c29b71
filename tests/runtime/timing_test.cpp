#include "runtime/timing.h"

#include "tests/support.h"

using namespace detr;
using namespace detr::test;

TEST_CASE("timing: percentiles", "[cpu]") {
  std::vector<double> values;
  for (int i = 100; i >= 0; --i) values.push_back(i);
  const Percentiles p = percentiles(values);
  CHECK(p.median == 50);
  CHECK(p.p10 == 10);
  CHECK(p.p90 == 90);
  CHECK(percentiles({3}).p90 == 3);
  expect_throws<InvalidArgument>([] { percentiles({}); }, "at least one");
}

TEST_CASE("timing: the clock goes forward", "[cpu]") {
  const double begin = now_s();
  double end = begin;
  while (end == begin) end = now_s();
  CHECK(end > begin);
  CHECK(end - begin < 60);
}
