#pragma once
#include <array>
#include <cstdint>
#include <span>
#include <string>

#include "data/image.h"

namespace detr::data {

/// A box to be drawn.
struct DrawnBox {
  std::array<double, 4> xyxy_px{};   ///< left, top, right, bottom in pixels of the picture
  std::int64_t label = 0;            ///< class index: the colour
  std::string text;                  ///< UTF-8, such as "dog 0.87"; empty: no strip
  bool dashed = false;               ///< a truth rather than a prediction
};

/// The colour of a class index: one of 20 fixed hues, neighbours far apart; the same from picture to picture.
std::array<std::uint8_t, 3> class_colour(std::int64_t label);

/// Draws boxes in the order given, so pass predictions in rising score. An outline is 1/300 of the longer side wide, at least
/// 2 px, and lies inside the box, which is cut to the picture; a box beside the picture or with a coordinate that is not finite
/// is left out. The text stands on a strip of the box's colour, above the box where there is room, in black or white, whichever
/// contrasts more, and stays inside the picture: moved, then smaller, then cut. Characters beyond Latin-1 are hollow boxes.
void draw_boxes(Image& image, std::span<const DrawnBox> boxes);

}  // namespace detr::data
