#include "data/exif.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <utility>

#include "runtime/error.h"

namespace detr::data {
namespace {

constexpr std::array<std::uint8_t, 6> kExifPrefix = {'E', 'x', 'i', 'f', 0, 0};
constexpr std::uint64_t kOrientationTag = 0x0112, kShort = 3, kLong = 4, kEntryBytes = 12;

/// A TIFF structure in one of the two byte orders; reads beyond its end give zeros.
struct Tiff {
  std::span<const std::uint8_t> bytes;
  bool big_endian = false;

  std::uint64_t number(std::uint64_t offset, std::uint64_t size) const {
    if (offset + size > bytes.size()) return 0;
    std::uint64_t value = 0;
    for (std::uint64_t i = 0; i < size; ++i) {
      value = value << 8 | bytes[offset + (big_endian ? i : size - 1 - i)];
    }
    return value;
  }
};

}  // namespace

int exif_orientation(std::span<const std::uint8_t> block) {
  if (block.size() >= kExifPrefix.size() && std::equal(kExifPrefix.begin(), kExifPrefix.end(), block.begin())) {
    block = block.subspan(kExifPrefix.size());
  }
  if (block.size() < 8 || block[0] != block[1] || (block[0] != 'I' && block[0] != 'M')) return 0;
  const Tiff tiff{block, block[0] == 'M'};
  if (tiff.number(2, 2) != 42) return 0;
  const std::uint64_t directory = tiff.number(4, 4);
  const std::uint64_t entries = tiff.number(directory, 2);
  for (std::uint64_t i = 0; i < entries; ++i) {
    const std::uint64_t entry = directory + 2 + i * kEntryBytes;
    if (entry + kEntryBytes > block.size()) return 0;
    if (tiff.number(entry, 2) != kOrientationTag) continue;
    const std::uint64_t type = tiff.number(entry + 2, 2);
    // The standard says SHORT; some cameras write LONG.
    const std::uint64_t value = type == kShort ? tiff.number(entry + 8, 2) : type == kLong ? tiff.number(entry + 8, 4) : 0;
    return value >= 1 && value <= 8 ? static_cast<int>(value) : 0;
  }
  return 0;
}

Image apply_orientation(Image image, int orientation) {
  DETR_CHECK(orientation >= 1 && orientation <= 8, "apply_orientation: orientation must be 1 to 8, got ", orientation);
  if (orientation == 1) return image;

  // Where the shown picture's row runs backwards through the stored one, where its column does, and whether they change places.
  const bool transposed = orientation >= 5;
  const bool from_right = orientation == 2 || orientation == 3 || orientation == 7 || orientation == 8;
  const bool from_bottom = orientation == 3 || orientation == 4 || orientation == 6 || orientation == 7;

  const std::int64_t width = image.width, height = image.height;
  const std::int64_t step_stored_x = from_right ? -3 : 3;                       // bytes
  const std::int64_t step_stored_y = from_bottom ? -3 * width : 3 * width;
  const std::int64_t step_x = transposed ? step_stored_y : step_stored_x;       // for one pixel to the right, as shown
  const std::int64_t step_y = transposed ? step_stored_x : step_stored_y;
  const std::int64_t origin = 3 * ((from_right ? width - 1 : 0) + width * (from_bottom ? height - 1 : 0));

  Image shown(transposed ? height : width, transposed ? width : height);
  constexpr std::int64_t kTile = 64;   // a transposed read walks down columns: tiles keep its lines in the cache
  for (std::int64_t tile_y = 0; tile_y < shown.height; tile_y += kTile) {
    for (std::int64_t tile_x = 0; tile_x < shown.width; tile_x += kTile) {
      const std::int64_t end_y = std::min(tile_y + kTile, shown.height), end_x = std::min(tile_x + kTile, shown.width);
      for (std::int64_t y = tile_y; y < end_y; ++y) {
        std::uint8_t* out = shown.at(tile_x, y);
        for (std::int64_t x = tile_x; x < end_x; ++x, out += 3) {
          const std::uint8_t* in = image.rgb.data() + origin + x * step_x + y * step_y;
          out[0] = in[0], out[1] = in[1], out[2] = in[2];
        }
      }
    }
  }
  return shown;
}

}  // namespace detr::data
