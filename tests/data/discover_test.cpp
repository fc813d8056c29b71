#include "data/discover.h"

#include <sys/stat.h>

#include <atomic>
#include <thread>

#include "tests/support.h"

using namespace detr;
using namespace detr::data;
using namespace detr::test;

namespace fs = std::filesystem;

namespace {

std::string json(const std::vector<std::string>& names) {
  std::string images;
  for (std::size_t i = 0; i < names.size(); ++i)
    images += concat(i ? ", " : "", "{\"id\": ", i, ", \"file_name\": \"", names[i], "\", \"width\": 9, \"height\": 9}");
  return "{\"images\": [" + images + "], \"annotations\": [], \"categories\": [{\"id\": 1, \"name\": \"a\"}]}";
}

CocoData data_of(const fs::path& file, const std::vector<std::string>& names) {
  write_text(file, json(names));
  Findings findings;
  return read_coco(file, findings);
}

}  // namespace

TEST_CASE("discover: annotation files", "[cpu]") {
  const TempDir dir;
  const DataPlace place{dir.path(), {}, {}};
  expect_throws<DataError>([&] { find_annotations(place, "train"); }, "no annotation file for train");
  expect_throws<DataError>([&] { find_annotations(place, "val"); }, "--eval-every 0");
  CHECK(!has_split(place, "val"));

  write_text(dir / "valid/_annotations.coco.json", "{}");
  CHECK(find_annotations(place, "val") == dir / "valid/_annotations.coco.json");
  write_text(dir / "annotations/instances_val2017.json", "{}");
  CHECK(find_annotations(place, "val") == dir / "annotations/instances_val2017.json");
  write_text(dir / "annotations/instances_val2014.json", "{}");
  expect_throws<DataError>([&] { find_annotations(place, "val"); }, "instances_val2014.json, ");
  expect_throws<DataError>([&] { find_annotations(place, "val"); }, "--ann val=FILE");
  CHECK(has_split(place, "val"));
  write_text(dir / "annotations/instances_val.json", "{}");
  CHECK(find_annotations(place, "val") == dir / "annotations/instances_val.json");
  CHECK(find_annotations({dir.path(), "other.json", {}}, "val") == "other.json");
  expect_throws<DataError>([&] { find_annotations({}, "val"); }, "give --data DIR");
  expect_throws<DataError>([&] { find_annotations({dir / "absent", {}, {}}, "val"); }, "no such folder");
  expect_throws<DataError>([&] { find_annotations({dir / "annotations/instances_val.json", {}, {}}, "val"); }, "use --ann");
}

TEST_CASE("discover: image folders, the first that is complete", "[cpu]") {
  const TempDir dir;
  const DataPlace place{dir.path(), {}, {}};
  const CocoData data = data_of(dir / "annotations/instances_val.json", {"a.jpg", "sub folder/b.jpg"});
  expect_throws<DataError>([&] { find_images(place, "val", data); }, "none of 2 images (a.jpg, ...)");
  fs::path complete;
  for (const std::string folder : {".", "images", "val", "val2017", "images/val2017", "images/val"}) {   // the last one wins
    write_text(dir / folder / "a.jpg", "x");
    if (!complete.empty()) CHECK(fs::equivalent(find_images(place, "val", data), complete));
    write_text(dir / folder / "sub folder/b.jpg", "x");
    complete = dir / folder;
    CHECK(fs::equivalent(find_images(place, "val", data), complete));
  }
}

TEST_CASE("discover: a folder that is not complete", "[cpu]") {
  const TempDir dir;
  const DataPlace place{dir.path(), {}, {}};
  const CocoData data = data_of(dir / "annotations/instances_train.json", {"a.jpg", "b.jpg", "c.jpg"});
  write_text(dir / "images/a.jpg", "x");
  write_text(dir / "train/a.jpg", "x");
  write_text(dir / "train/b.jpg", "x");
  fs::create_directories(dir / "train/c.jpg");   // a folder is no image
  const auto find = [&] { find_images(place, "train", data); };
  expect_throws<DataError>(find, "1 of 3 images is missing under " + (dir / "train").string() + " (c.jpg), 2 found");
  CHECK(find_images(place, "train", data, true) == dir / "train");
  for (const char* const name : {"a.jpg", "b.jpg", "c.jpg"}) write_text(dir / "JPEGImages" / name, "x");
  expect_throws<DataError>(find, "they exist under " + (dir / "JPEGImages").string() + ": --images train=");
  CHECK(find_images({dir.path(), {}, dir / "JPEGImages"}, "train", data) == dir / "JPEGImages");
  expect_throws<DataError>([&] { find_images({dir.path(), {}, dir / "absent"}, "train", data); }, "no such folder");
  // Without --data, the parent of `annotations` is searched.
  CHECK(find_images({{}, data.file, {}}, "train", data, true) == dir / "train");
}

TEST_CASE("discover: overrides by split", "[cpu]") {
  const std::vector<std::string> values = {"train=t.json", "v.json", "train=t2.json"};
  CHECK(override_for(values, "train", "train") == "t2.json");
  CHECK(override_for(values, "val", "val") == "v.json");
  CHECK(override_for(values, "val", "train").empty());
  CHECK(override_for({}, "val", "val").empty());
}

TEST_CASE("discover: image paths stay in their folder", "[cpu]") {
  const TempDir dir;
  write_text(dir / "images/sub/a.jpg", "x");
  write_text(dir / "secret.jpg", "x");
  fs::create_symlink(dir / "secret.jpg", dir / "images/link.jpg");
  fs::create_directory_symlink(dir.path(), dir / "images/up");
  fs::create_symlink(dir / "images/sub/a.jpg", dir / "images/fine.jpg");
  fs::create_symlink(dir / "images/loop.jpg", dir / "images/loop.jpg");
  fs::create_directory_symlink(dir / "images", dir / "linked");
  const fs::path images = dir / "images";
  for (const char* const name : {"sub/a.jpg", "sub/../sub/a.jpg", "absent.jpg", "fine.jpg", "...", "..a.jpg"})
    CHECK(image_path(images, name) == images / name);
  CHECK(image_path(dir / "linked", "sub/a.jpg") == dir / "linked/sub/a.jpg");
  const std::vector<std::string> escaping = {"../secret.jpg", "sub/../../secret.jpg", "..", "link.jpg", "up/secret.jpg",
                                             "loop.jpg", "", std::string("a\0b", 3), (images / "sub/a.jpg").string()};
  for (const std::string& name : escaping) {
    INFO(name);
    expect_throws<DataError>([&] { image_path(images, name); }, "image \"");
  }
  expect_throws<DataError>([&] { image_path(images, "../a\nb"); }, "\"../a\\nb\": the path leads out");
}

TEST_CASE("discover: an image is opened inside its folder, and only if it is a file", "[cpu]") {
  const TempDir dir;
  const fs::path images = dir / "images";
  write_text(images / "sub/a.jpg", "inside");
  write_text(dir / "outside/a.jpg", "secret");
  fs::create_symlink(images / "sub/a.jpg", images / "link.jpg");
  fs::create_directory_symlink("sub", images / "linked");
  fs::create_symlink(dir / "outside/a.jpg", images / "out.jpg");
  REQUIRE(::mkfifo((images / "pipe.jpg").c_str(), 0600) == 0);
  write_text(images / "empty.jpg", "");
  const auto content = [&](const std::string& name) {
    const ImageFile file = open_image(images, name);
    const std::vector<std::uint8_t> bytes = file.read(0, file.size());
    return std::string(bytes.begin(), bytes.end());
  };
  for (const char* const name : {"sub/a.jpg", "sub/../sub/a.jpg", "link.jpg", "linked/a.jpg"}) CHECK(content(name) == "inside");
  const auto refused = [&](const std::string& name, const std::string& text) { expect_throws<DataError>([&] { content(name); }, text); };
  refused("out.jpg", "a link leads out of the image folder");
  refused("../outside/a.jpg", "the path leads out of the image folder");
  refused("sub", "sub: is a folder, not an image");
  refused(".", "is a folder, not an image");
  refused("pipe.jpg", "pipe.jpg: is not a regular file");
  refused("empty.jpg", "empty.jpg: the image file is empty");
  refused("none.jpg", "none.jpg: no such image file");
  refused("sub/a.jpg/b.jpg", "b.jpg: no such image file");

  // A folder that becomes a link to another one while images are opened: sooner or later between the check and the opening.
  fs::create_directory_symlink(dir / "outside", images / "swap");
  std::atomic<bool> done{false};
  std::thread swapping([&] {
    std::error_code ignored;
    while (!done) {
      fs::rename(images / "sub", images / "kept", ignored);
      fs::rename(images / "swap", images / "sub", ignored);
      fs::rename(images / "sub", images / "swap", ignored);
      fs::rename(images / "kept", images / "sub", ignored);
    }
  });
  int opened = 0;
  for (int i = 0; i < 3000; ++i) {
    try {
      const std::string text = content("sub/a.jpg");
      if (text != "inside") FAIL_CHECK("read " << text);
      ++opened;
    } catch (const DataError&) {   // not there at that moment, or a link
    }
  }
  done = true;
  swapping.join();
  CHECK(opened > 0);
}

TEST_CASE("discover: the sets beside the tree", "[cpu]") {
  if (shared_data().empty()) SKIP("no shared data");
  Findings findings;
  const DataSplit train = open_split({shared_data() / "bccd", {}, {}}, "train", findings);
  CHECK(train.data.images.size() == 205);
  CHECK(train.data.annotations.size() == 2804);
  CHECK(train.data.categories.size() == 3);
  CHECK(findings.all().empty());
  CHECK(fs::exists(train.images / train.data.images[0].file_name));
  CHECK(open_split({shared_data() / "coco-tiny", {}, {}}, "val", findings).data.images.size() == 56);
  CHECK(open_split({shared_data() / "awkward", {}, {}}, "val", findings).images == shared_data() / "awkward/images");
}
