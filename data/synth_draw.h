#pragma once
#include <array>
#include <cstdint>
#include <string>

#include "data/image.h"
#include "runtime/random.h"

/// Inside of `make_synthetic`: its pictures.
namespace detr::data::synth {

using Colour = std::array<double, 3>;   ///< RGB, 0 to 255

constexpr std::int64_t kKinds = 10;      ///< outlines
constexpr std::int64_t kPatterns = 8;    ///< fillings; class = pattern * kKinds + kind

/// "circle", "striped star".
std::string shape_name(std::int64_t label);

/// Where and how a shape is drawn: centre, half sides and turn (radians) in pixels, two colours for its pattern.
struct Shape {
  std::int64_t label = 0;
  double cx = 0, cy = 0, half_w = 0, half_h = 0, turn = 0;
  Colour ink{}, second{};
};

/// Pixels of a drawn shape: bounds [x0, x1) x [y0, y1) and how many. No pixel: count 0.
struct Drawn {
  std::int64_t x0 = 0, y0 = 0, x1 = 0, y1 = 0, count = 0;
};

/// A smooth blotchy ground around `mean`.
Image ground(RandomKey key, std::int64_t width, std::int64_t height, const Colour& mean);

/// Draws the part of a shape that lies in the picture.
Drawn draw(Image& image, const Shape& shape);

/// Adds noise of up to `amplitude` grey levels, of each channel on its own.
void add_noise(RandomKey key, Image& image, int amplitude);

/// A colour that stands out from `ground`.
Colour contrasting(RandomSequence& random, const Colour& ground);
/// A colour that stands out from `ink` on the same shape.
Colour second_of(const Colour& ink);

}  // namespace detr::data::synth
