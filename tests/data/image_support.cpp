#include "tests/data/image_support.h"

#include <array>
#include <bit>
#include <cstddef>
#include <utility>
#include <vector>

namespace detr::test {
namespace {

/// The first 32 bits of the fractional part of a prime's square or cube root: the largest r with r^degree <= prime 2^(32 degree),
/// found bit by bit. Primes are below 2^9 here, so roots take 37 bits and their squares fit in 128.
std::uint32_t root_fraction(std::uint64_t prime, int degree) {
  using Wide = unsigned __int128;
  const Wide target = Wide{prime} << (32 * degree);
  std::uint64_t root = 0;
  for (int bit = 36; bit >= 0; --bit) {
    const std::uint64_t candidate = root | (std::uint64_t{1} << bit);
    const Wide square = Wide{candidate} * candidate;
    if (square <= (degree == 2 ? target : target / candidate)) root = candidate;
  }
  return static_cast<std::uint32_t>(root);
}

std::vector<std::uint64_t> first_primes(std::size_t count) {
  std::vector<std::uint64_t> primes;
  for (std::uint64_t n = 2; primes.size() < count; ++n) {
    bool prime = true;
    for (const std::uint64_t p : primes) prime = prime && n % p != 0;
    if (prime) primes.push_back(n);
  }
  return primes;
}

}  // namespace

data::Image pattern(std::int64_t width, std::int64_t height) {
  data::Image image(width, height);
  for (std::int64_t y = 0; y < height; ++y) {
    for (std::int64_t x = 0; x < width; ++x) {
      for (std::int64_t c = 0; c < 3; ++c) {
        image.at(x, y)[c] = static_cast<std::uint8_t>(7 * x * x + 13 * y + 3 * x * y + 5 * (x ^ y) + 91 * c);
      }
    }
  }
  return image;
}

std::string sha256(std::span<const std::uint8_t> bytes) {
  const std::vector<std::uint64_t> primes = first_primes(64);
  std::array<std::uint32_t, 8> state;
  std::array<std::uint32_t, 64> constants;
  for (std::size_t i = 0; i < 8; ++i) state[i] = root_fraction(primes[i], 2);
  for (std::size_t i = 0; i < 64; ++i) constants[i] = root_fraction(primes[i], 3);

  std::vector<std::uint8_t> message(bytes.begin(), bytes.end());
  message.push_back(0x80);
  while (message.size() % 64 != 56) message.push_back(0);
  const std::uint64_t bits = std::uint64_t{bytes.size()} * 8;
  for (int shift = 56; shift >= 0; shift -= 8) message.push_back(static_cast<std::uint8_t>(bits >> shift));

  for (std::size_t start = 0; start < message.size(); start += 64) {
    std::array<std::uint32_t, 64> word{};
    for (std::size_t i = 0; i < 16; ++i) {
      for (std::size_t b = 0; b < 4; ++b) word[i] = word[i] << 8 | message[start + 4 * i + b];
    }
    for (std::size_t i = 16; i < 64; ++i) {
      const std::uint32_t x = word[i - 15], y = word[i - 2];
      word[i] = word[i - 16] + (std::rotr(x, 7) ^ std::rotr(x, 18) ^ (x >> 3)) + word[i - 7] +
                (std::rotr(y, 17) ^ std::rotr(y, 19) ^ (y >> 10));
    }
    auto [a, b, c, d, e, f, g, h] = state;
    for (std::size_t i = 0; i < 64; ++i) {
      const std::uint32_t first =
          h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) + ((e & f) ^ (~e & g)) + constants[i] + word[i];
      const std::uint32_t second = (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
      h = g, g = f, f = e, e = d + first, d = c, c = b, b = a, a = first + second;
    }
    const std::array<std::uint32_t, 8> mixed = {a, b, c, d, e, f, g, h};
    for (std::size_t i = 0; i < 8; ++i) state[i] += mixed[i];
  }
  std::string text;
  for (const std::uint32_t word : state) {
    for (int shift = 28; shift >= 0; shift -= 4) text += "0123456789abcdef"[(word >> shift) & 15];
  }
  return text;
}

namespace bytes {

Bytes operator+(Bytes a, const Bytes& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

Bytes bytes_of(const std::string& text) { return {text.begin(), text.end()}; }

Bytes first(const Bytes& bytes, std::size_t count) { return {bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(count)}; }

void append(Bytes& out, std::uint32_t value, int count, bool big_endian) {
  for (int i = 0; i < count; ++i) out.push_back(static_cast<std::uint8_t>(value >> (8 * (big_endian ? count - 1 - i : i))));
}

Bytes tiff(std::uint32_t orientation, bool big_endian, std::uint32_t type) {
  Bytes out = bytes_of(big_endian ? "MM" : "II");
  append(out, 42, 2, big_endian);
  append(out, 8, 4, big_endian);   // where the directory is
  append(out, 2, 2, big_endian);
  for (const auto& [tag, value] : {std::pair{0x0100u, 77u}, std::pair{0x0112u, orientation}}) {
    append(out, tag, 2, big_endian);
    append(out, type, 2, big_endian);
    append(out, 1, 4, big_endian);
    append(out, value, type == 3 ? 2 : 4, big_endian);
    if (type == 3) append(out, 0, 2, big_endian);
  }
  append(out, 0, 4, big_endian);
  return out;
}

Bytes marker(std::uint8_t number, const Bytes& payload) {
  Bytes out = {0xff, number};
  append(out, static_cast<std::uint32_t>(payload.size() + 2), 2, true);
  return out + payload;
}

Bytes exif_marker(const Bytes& tiff_structure) { return marker(0xe1, Bytes{'E', 'x', 'i', 'f', 0, 0} + tiff_structure); }

Bytes with_markers(const Bytes& jpeg, const Bytes& segments) {
  return first(jpeg, 2) + segments + Bytes(jpeg.begin() + 2, jpeg.end());
}

Bytes png_chunk(const std::string& type, const Bytes& data) {
  std::uint32_t crc = ~0u;
  for (const std::uint8_t byte : bytes_of(type) + data) {
    crc ^= byte;
    for (int bit = 0; bit < 8; ++bit) crc = crc & 1 ? 0xedb88320u ^ (crc >> 1) : crc >> 1;
  }
  Bytes out;
  append(out, static_cast<std::uint32_t>(data.size()), 4, true);
  out = out + bytes_of(type) + data;
  append(out, ~crc, 4, true);
  return out;
}

}  // namespace bytes
}  // namespace detr::test
