#include <cctype>
#include <string>

#include "data/image.h"
#include "data/stb.h"
#include "runtime/error.h"
#include "runtime/files.h"

namespace detr::data {
namespace {

constexpr std::int64_t kMaxPngBytes = std::int64_t{1} << 29;   // stb_image_write counts in int, with some bytes more a row

bool is_png_name(const std::filesystem::path& file) {
  std::string ending = file.extension().string();
  for (char& c : ending) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return ending == ".png";
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
  replace_file_unsynced(file, std::string_view(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
}

}  // namespace detr::data
