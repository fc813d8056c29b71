#include "runtime/files.h"

#include <fcntl.h>
#include <sys/stat.h>
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

TEST_CASE("files: what is written can be checked before it is put in place", "[cpu]") {
  const TempDir dir;
  const fs::path file = dir / "a.txt";
  replace_file(file, "old");
  const auto check = [&](const fs::path& written) {
    CHECK(written.parent_path() == file.parent_path());
    CHECK(read_text(written) == "new");
    CHECK(read_text(file) == "old");
  };
  expect_throws<DataError>([&] {
    replace_file(file, "new", [&](const fs::path& written) {
      check(written);
      throw DataError("no good");
    });
  }, "no good");
  CHECK(read_text(file) == "old");
  CHECK(entries(dir.path()) == 1);
  replace_file(file, "new", check);
  CHECK(read_text(file) == "new");
  replace_file_unsynced(file, "newer");
  CHECK(read_text(file) == "newer");
  CHECK(entries(dir.path()) == 1);
}

TEST_CASE("files: a file has the mode that the umask gives, its temporary is the user's own", "[cpu]") {
  const TempDir dir;
  const auto mode = [](const fs::path& file) { return static_cast<unsigned>(fs::status(file).permissions()); };
  const mode_t before = ::umask(0027);
  replace_file(dir / "a.txt", 1, {}, [&](int descriptor) {
    struct stat info {};
    REQUIRE(::fstat(descriptor, &info) == 0);
    CHECK((info.st_mode & 0777) == 0600);
  });
  CHECK(mode(dir / "a.txt") == 0640);
  ::umask(0002);
  replace_file(dir / "a.txt", "x");
  CHECK(mode(dir / "a.txt") == 0664);
  ::umask(before);
}

TEST_CASE("files: a link is followed, and a pipe written into", "[cpu]") {
  const TempDir dir;
  replace_file(dir / "real.txt", "old");
  fs::create_symlink("real.txt", dir / "link.txt");
  replace_file(dir / "link.txt", "new");
  CHECK(fs::is_symlink(dir / "link.txt"));
  CHECK(read_text(dir / "real.txt") == "new");
  replace_file(dir / "link.txt", 5, dir / "link.old", [&](int descriptor) { write_all(descriptor, bytes_of("newer"), dir / "link.txt"); });
  CHECK_FALSE(fs::is_symlink(dir / "link.txt"));
  CHECK(fs::is_symlink(dir / "link.old"));
  CHECK(read_text(dir / "link.old") == "new");
  fs::create_symlink("none", dir / "broken");
  replace_file(dir / "broken", "text");
  CHECK_FALSE(fs::is_symlink(dir / "broken"));
  CHECK(read_text(dir / "broken") == "text");

  const fs::path pipe = dir / "pipe";
  REQUIRE(::mkfifo(pipe.c_str(), 0600) == 0);
  const FileHandle reader(::open(pipe.c_str(), O_RDONLY | O_NONBLOCK));
  replace_file(pipe, "through");
  std::string text(7, ' ');
  CHECK(::read(reader.get(), text.data(), text.size()) == 7);
  CHECK(text == "through");
  CHECK(fs::is_fifo(pipe));
  CHECK(entries(dir.path()) == 5);
}

TEST_CASE("files: names as long as the file system takes", "[cpu]") {
  const TempDir dir;
  const fs::path file = dir / (std::string(250, 'a') + ".txt");
  replace_file(file, "one");
  replace_file(file, 3, dir / "old", [&](int descriptor) { write_all(descriptor, bytes_of("two"), file); });
  CHECK(read_text(file) == "two");
  CHECK(read_text(dir / "old") == "one");
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

TEST_CASE("files: temporaries of a killed process are removed; those of a living one, of another host and of others stay", "[cpu]") {
  const TempDir folder;
  std::string mine;   // .last.safetensors.<host>.<pid>.<count>.tmp
  replace_file(folder / "last.safetensors", "x", [&](const fs::path& written) { mine = written.filename(); });
  const auto with = [&](const std::string& from, const std::string& to) {
    const std::size_t at = mine.find(from);
    REQUIRE(at != std::string::npos);
    return mine.substr(0, at) + to + mine.substr(at + from.size());
  };
  const std::string process = concat('.', ::getpid(), '.');
  const std::string dead = with(process, ".999999999."), dead_old = dead.substr(0, dead.size() - 4) + ".old.tmp";
  std::string elsewhere = dead;
  elsewhere.replace(elsewhere.find(".host-"), 6, ".host-another-");
  const std::vector<std::string> staying = {mine, elsewhere, "last.safetensors", ".notes.tmp", ".last.safetensors.999999999.3.tmp"};
  for (const std::string& name : {dead, dead_old}) write_text(folder / name, "x");
  for (const std::string& name : staying) write_text(folder / name, "x");
  remove_stale_temporaries(folder.path());
  CHECK_FALSE(fs::exists(folder / dead));
  CHECK_FALSE(fs::exists(folder / dead_old));
  for (const std::string& name : staying) CHECK(fs::exists(folder / name));
}
