// What ranks say to each other between steps.
#include "train/replicas.h"

#include "dist/build.h"
#include "tests/dist/ranks.h"
#include "tests/train/rig.h"

using namespace detr;
using namespace detr::test;
using train::Replicas;

namespace {

/// Calls body for each rank; what each threw.
std::vector<std::string> on_ranks(int size, const std::function<void(Replicas&, const std::shared_ptr<dist::Control>&)>& body) {
  return dist::test::run_ranks(size, [&](const dist::Meeting& meeting) {
    train::RunRanks ranks;
    ranks.control = dist::test::meet(meeting);
    Replicas replicas(ranks);
    body(replicas, ranks.control);
  });
}

data::Detection detection(std::int64_t image, double score) { return {image, 1, {1, 2, 3, 4}, score}; }

}  // namespace

TEST_CASE("replicas: one rank talks to nobody", "[cpu]") {
  Replicas alone{train::RunRanks()};
  CHECK(alone.size() == 1);
  CHECK(alone.root());
  CHECK(alone.name().empty());
  CHECK(alone.from_root("text", "a") == "text");
  CHECK(alone.any(true, "b"));
  CHECK_FALSE(alone.any(false, "c"));
  CHECK(alone.gather({detection(5, 0.5), detection(2, 0.25)}).front().image_id == 5);   // as they came
  alone.expect_equal_hash("1", 3);
}

TEST_CASE("replicas: a hash that differs is named by its rank", "[cpu]") {
  const auto texts = [](const std::vector<std::string>& hashes) {
    const auto thrown = on_ranks(static_cast<int>(hashes.size()), [&](Replicas& replicas, const auto&) { replicas.expect_equal_hash(hashes[static_cast<std::size_t>(replicas.rank())], 40); });
    for (const std::string& text : thrown) CHECK(text == thrown[0]);
    return thrown[0];
  };
  CHECK(texts({"a", "a", "a"}).empty());
  CHECK(texts({"a", "b", "a"}).starts_with("rank 1 differs from the others in weights, moments or moving average at step 40"));
  CHECK(texts({"b", "a", "a", "c"}).starts_with("ranks 0, 3 differ from the others"));
  CHECK(texts({"a", "b"}).starts_with("ranks 0, 1 differ from each other"));
  CHECK(texts({"a", "b", "b", "a"}).starts_with("ranks 0, 1, 2, 3 differ from each other"));
}

TEST_CASE("replicas: flags, texts and detections of all ranks", "[cpu]") {
  std::vector<std::string> seen(3);
  std::vector<std::vector<data::Detection>> gathered(3);
  const std::size_t many = (std::size_t{1} << 20) / sizeof(data::Detection) + 7;   // more than one message
  const auto thrown = on_ranks(3, [&](Replicas& replicas, const auto&) {
    const auto r = static_cast<std::size_t>(replicas.rank());
    seen[r] = replicas.from_root(concat("from ", r), "text") + (replicas.any(r == 2, "one") ? " some" : " none") + (replicas.any(false, "no") ? " some" : " none");
    std::vector<data::Detection> own(r == 1 ? many : r);
    for (std::size_t i = 0; i < own.size(); ++i) own[i] = detection(static_cast<std::int64_t>(100 - r), static_cast<double>(i));
    gathered[r] = replicas.gather(own);
  });
  for (std::size_t r = 0; r < 3; ++r) {
    CHECK(thrown[r].empty());
    CHECK(seen[r] == "from 0 some none");
  }
  REQUIRE(gathered[0].size() == many + 2);
  CHECK(gathered[1].empty());
  for (std::size_t i = 0; i < 2; ++i) CHECK((gathered[0][i].image_id == 98 && gathered[0][i].score == static_cast<double>(i)));   // sorted by image
  bool in_order = true;
  for (std::size_t i = 0; i < many; ++i) in_order = in_order && gathered[0][i + 2].image_id == 99 && gathered[0][i + 2].score == static_cast<double>(i);
  CHECK(in_order);
}

TEST_CASE("replicas: all ranks begin with rank 0's state", "[cpu]") {
  if constexpr (!dist::kHasGloo) SKIP("this build has no Gloo");
  std::vector<std::string> hashes(3);
  std::vector<std::int64_t> steps(3), averages(3);
  std::vector<double> best(3);
  const auto thrown = on_ranks(3, [&](Replicas& replicas, const std::shared_ptr<dist::Control>& control) {
    const auto communicator = dist::test::communicator_of(control);
    const auto r = static_cast<std::size_t>(replicas.rank());
    Rig rig(r);   // another seed on each rank
    const data::Batch batch = make_batch(two_pictures(), rig.model.config().decoder);
    for (std::size_t i = 0; i <= 2 - r; ++i) rig.step.run(batch, 1);
    train::CheckpointInfo info;
    info.state.step = 10 + static_cast<std::int64_t>(r);
    info.state.best_ap = 0.1 + static_cast<double>(r);
    info.ema_updates = rig.optimizer.ema_updates();
    replicas.share(*communicator, rig.stream, rig.store, rig.optimizer, info);
    best[r] = info.state.best_ap;
    hashes[r] = rig.hash();
    steps[r] = info.state.step;
    averages[r] = rig.optimizer.ema_updates();
    communicator->barrier(dist::Milliseconds(20000), "end");
  });
  for (std::size_t r = 0; r < 3; ++r) {
    CHECK(thrown[r] == "");
    CHECK(hashes[r] == hashes[0]);
    CHECK(steps[r] == 10);
    CHECK(averages[r] == 3);
    CHECK(best[r] == 0.1);
  }
}

TEST_CASE("replicas: the digest of a data set sees what training depends on", "[cpu]") {
  data::CocoData data;
  data.categories = {{1, "a"}, {2, "b"}};
  data.images = {{7, "x.jpg", 10, 10, 0, 1}};
  data.annotations = {{1, 0, 1, {1, 1, 2, 2}, {1, 1, 3, 3}, 4, false, true}};
  const std::string wanted = train::digest(data);
  const auto changed = [&](const auto& change) {
    data::CocoData other = data;
    change(other);
    return train::digest(other) != wanted;
  };
  CHECK(changed([](data::CocoData& d) { d.categories[1].name = "c"; }));
  CHECK(changed([](data::CocoData& d) { d.images[0].file_name = "y.jpg"; }));
  CHECK(changed([](data::CocoData& d) { d.images[0].id = 8; }));
  CHECK(changed([](data::CocoData& d) { d.annotations[0].box_xyxy[2] = 3.5; }));
  CHECK(changed([](data::CocoData& d) { d.annotations[0].label = 0; }));
  CHECK(changed([](data::CocoData& d) { d.annotations.clear(); }));
  CHECK_FALSE(changed([](data::CocoData& d) { d.file = "elsewhere.json"; }));
}
