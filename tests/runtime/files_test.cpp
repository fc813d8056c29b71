#include "runtime/files.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstring>

#include "tests/support.h"

using namespace detr;
using namespace detr::test;
namespace fs = std::filesystem;

namespace {

std::span<const std::byte> bytes_of(const std::string& text) { return std::as_bytes(std::span(text.data(), text.size())); }

std::size_t entries(const fs::path& folder) {
  std::size_t count = 0;
  for ([[maybe_unused]] const auto& entry : fs::directory_iterator(folder)) ++count;
  return count;
}

}  // namespace

TEST_CASE("files: replace_file", "[cpu]") {
  const TempDir dir;
  const fs::path file = dir / "a.txt", old = dir / "a.txt.previous";
  replace_file(file, "one");
  CHECK(read_text(file) == "one");
  replace_file(file, "");
  CHECK(read_text(file).empty());
  CHECK(entries(dir.path()) == 1);

  const auto write = [&](const std::string& text) {
    replace_file(file, text.size(), old, [&](int descriptor) { write_all(descriptor, bytes_of(text), file); });
  };
  replace_file(file, "two");
  write("three");
  CHECK(read_text(file) == "three");
  CHECK(read_text(old) == "two");
  write("four");
  CHECK(read_text(file) == "four");
  CHECK(read_text(old) == "three");
  CHECK(entries(dir.path()) == 2);

  fs::remove(file);   // nothing stands there: the previous one stays
  write("five");
  CHECK(read_text(file) == "five");
  CHECK(read_text(old) == "three");
}

TEST_CASE("files: a failed write leaves the old file and no temporary", "[cpu]") {
  const TempDir dir;
  const fs::path file = dir / "a.txt", old = dir / "a.txt.previous";
  replace_file(file, "old");
  const auto fail_half_way = [&](const fs::path& previous) {
    replace_file(file, 100, previous, [&](int descriptor) {
      write_all(descriptor, bytes_of("half"), file);
      CHECK(read_text(file) == "old");   // the new one is elsewhere until it is complete
      CHECK(entries(dir.path()) == 2);
      throw StorageError("stopped half way");
    });
  };
  expect_throws<StorageError>([&] { fail_half_way({}); }, "stopped half way");
  expect_throws<StorageError>([&] { fail_half_way(old); }, "stopped half way");
  CHECK(read_text(file) == "old");
  CHECK_FALSE(fs::exists(old));
  CHECK(entries(dir.path()) == 1);

  // A folder stands where the file should go: found out at the rename.
  fs::create_directories(dir / "folder" / "x");
  expect_throws<StorageError>([&] { replace_file(dir / "folder", "text"); }, "folder: cannot be renamed into place: ");
  CHECK(entries(dir.path()) == 2);
}

TEST_CASE("files: a folder is made with those above it, once or again", "[cpu]") {
  const TempDir dir;
  for (int i = 0; i < 2; ++i) {
    make_folder(dir / "a" / "b");
    CHECK(fs::is_directory(dir / "a" / "b"));
  }
  write_text(dir / "file", "x");
  expect_throws<StorageError>([&] { make_folder(dir / "file" / "b\n"); }, "/file/b\\n: cannot be made: Not a directory");
}

TEST_CASE("files: a folder that is not there", "[cpu]") {
  const TempDir dir;
  expect_throws<StorageError>([&] { replace_file(dir / "none" / "a.txt", "text"); }, "a.txt: cannot be created: No such file or directory");
  CHECK(entries(dir.path()) == 0);
}

TEST_CASE("files: a size that cannot be reserved", "[cpu]") {
  const TempDir dir;
  const fs::path file = dir / "a.txt";
  replace_file(file, "old");
  expect_throws<StorageError>([&] { replace_file(file, std::size_t{1} << 62, {}, [](int) { FAIL_CHECK("nothing to write into"); }); }, "a.txt: cannot reserve its size: ");
  CHECK(read_text(file) == "old");
  CHECK(entries(dir.path()) == 1);
}

TEST_CASE("files: read_all and write_all", "[cpu]") {
  const TempDir dir;
  const fs::path file = dir / "a.bin";
  write_text(file, "0123456789");
  const FileHandle handle(::open(file.c_str(), O_RDONLY));
  std::string part(4, ' ');
  read_all(handle.get(), std::as_writable_bytes(std::span(part.data(), part.size())), 3, file);
  CHECK(part == "3456");
  read_all(handle.get(), {}, 100, file);   // nothing asked
  expect_throws<StorageError>([&] { read_all(handle.get(), std::as_writable_bytes(std::span(part.data(), part.size())), 8, file); }, "a.bin: ends at byte 10, more was expected");
  expect_throws<StorageError>([&] { write_all(handle.get(), bytes_of("x"), file); }, "a.bin: cannot be written: Bad file descriptor");
  expect_throws<StorageError>([&] { read_all(-1, std::as_writable_bytes(std::span(part.data(), part.size())), 0, file); }, "a.bin: cannot be read: ");
}

TEST_CASE("files: a handle closes its descriptor once", "[cpu]") {
  const int descriptor = ::open("/dev/null", O_RDONLY);
  REQUIRE(descriptor >= 0);
  {
    FileHandle a(descriptor);
    FileHandle b(std::move(a));
    CHECK(a.get() == -1);
    FileHandle c;
    c = std::move(b);
    CHECK(c.get() == descriptor);
    CHECK(::fcntl(descriptor, F_GETFD) >= 0);
  }
  CHECK(::fcntl(descriptor, F_GETFD) == -1);
}

TEST_CASE("files: temporaries of a killed process are removed, those of a living one stay", "[cpu]") {
  const TempDir folder;
  const std::string mine = concat(".last.safetensors.", ::getpid(), ".3.tmp");
  for (const std::string& name : {std::string(".last.safetensors.999999999.3.tmp"), std::string(".log.txt.999999999.12.old.tmp"), mine, std::string("last.safetensors"), std::string(".notes.tmp")})
    write_text(folder / name, "x");
  remove_stale_temporaries(folder.path());
  CHECK_FALSE(std::filesystem::exists(folder / ".last.safetensors.999999999.3.tmp"));
  CHECK_FALSE(std::filesystem::exists(folder / ".log.txt.999999999.12.old.tmp"));
  for (const std::string& name : {mine, std::string("last.safetensors"), std::string(".notes.tmp")}) CHECK(std::filesystem::exists(folder / name));
}
