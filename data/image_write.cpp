#include <unistd.h>

#include <cctype>
#include <cerrno>
#include <fstream>
#include <functional>
#include <string>
#include <system_error>

#include "data/image.h"
#include "data/stb.h"
#include "data/text.h"
#include "runtime/error.h"

namespace detr::data {
namespace {

constexpr std::int64_t kMaxPngBytes = std::int64_t{1} << 29;   // stb_image_write counts in int, with some bytes more a row

bool is_png_name(const std::filesystem::path& file) {
  std::string ending = file.extension().string();
  for (char& c : ending) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return ending == ".png";
}

/// A hidden name in the file's folder, so that renaming stays on one file system; short, whatever the length of the file's name.
std::filesystem::path temporary_name(const std::filesystem::path& file) {
  return file.parent_path() / concat(".tmp-", ::getpid(), "-", std::hash<std::string>{}(file.filename().string()));
}

}  // namespace

std::vector<std::uint8_t> encode_png(const Image& image) {
  DETR_CHECK(image.width >= 1 && image.height >= 1, "encode_png: the picture is empty");
  DETR_CHECK(image.width * image.height * 3 <= kMaxPngBytes, "encode_png: the picture is too large: ", image.width, " x ",
             image.height);
  return stb_encode_png(image);
}

void write_image(const std::filesystem::path& file, const Image& image) {
  const std::vector<std::uint8_t> bytes = is_png_name(file) ? encode_png(image) : encode_jpeg(image);
  const std::filesystem::path temporary = temporary_name(file);
  errno = 0;
  std::ofstream out(temporary, std::ios::binary | std::ios::trunc);
  if (out) {
    out.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    out.close();
  }
  std::error_code error;
  if (!out) {
    error.assign(errno ? errno : EIO, std::generic_category());
  } else {
    std::filesystem::rename(temporary, file, error);
  }
  if (error) {
    std::error_code ignored;
    std::filesystem::remove(temporary, ignored);
    throw StorageError(printable(file), ": the picture cannot be written: ", error.message());
  }
}

}  // namespace detr::data
