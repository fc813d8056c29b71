#include "data/stb.h"

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "runtime/error.h"

namespace {

// stb_image inflates before it compares with the header, so a small file could ask for gigabytes: the largest picture that
// the default limits let through (64 million pixels, four channels of 16 bits) fits in half of this.
constexpr std::size_t kMaxAllocationBytes = std::size_t{1} << 30;

void* bounded_malloc(std::size_t bytes) { return bytes <= kMaxAllocationBytes ? std::malloc(bytes) : nullptr; }
void* bounded_realloc(void* block, std::size_t bytes) {
  return bytes <= kMaxAllocationBytes ? std::realloc(block, bytes) : nullptr;
}

}  // namespace

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"   // fields that stb_image reads only where it reads by callback
#endif

// Only the formats whose completeness image_decode.cpp can check; the libraries' symbols stay in this file.
#define STB_IMAGE_IMPLEMENTATION
#define STB_IMAGE_STATIC
#define STBI_ONLY_PNG
#define STBI_ONLY_BMP
#define STBI_ONLY_GIF
#define STBI_NO_STDIO
#define STBI_NO_LINEAR
#define STBI_MALLOC(bytes) bounded_malloc(bytes)
#define STBI_REALLOC(block, bytes) bounded_realloc(block, bytes)
#define STBI_FREE(block) std::free(block)
#include <stb/stb_image.h>

#define STB_IMAGE_WRITE_IMPLEMENTATION
#define STB_IMAGE_WRITE_STATIC
#define STBI_WRITE_NO_STDIO
#include <stb/stb_image_write.h>

namespace detr::data {
namespace {

struct Free {
  void operator()(unsigned char* block) const noexcept { std::free(block); }
};
using UniqueBytes = std::unique_ptr<unsigned char, Free>;

}  // namespace

bool stb_decode(std::span<const std::uint8_t> bytes, Image& image, std::string& reason) {
  int width = 0, height = 0, channels = 0;
  const UniqueBytes pixels(
      stbi_load_from_memory(bytes.data(), static_cast<int>(bytes.size()), &width, &height, &channels, 3));
  if (!pixels) {
    const char* text = stbi_failure_reason();
    reason = text ? text : "no reason given";
    return false;
  }
  image = Image(width, height);
  std::memcpy(image.rgb.data(), pixels.get(), image.rgb.size());
  return true;
}

std::vector<std::uint8_t> stb_encode_png(const Image& image) {
  int size = 0;
  const int width = static_cast<int>(image.width), height = static_cast<int>(image.height);
  const UniqueBytes png(stbi_write_png_to_mem(image.rgb.data(), width * 3, width, height, 3, &size));
  if (!png) throw StorageError("a PNG of ", width, " x ", height, " pixels could not be encoded: out of memory");
  return {png.get(), png.get() + size};
}

}  // namespace detr::data
