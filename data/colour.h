#pragma once
#include "data/image.h"

namespace detr::data {

// Photometric changes of 8-bit RGB pictures in place, with the arithmetic of Pillow 11 to 13 (float blend cut to 8 bits, integer
// luma, 8-bit HSV) as torchvision's adjust_... functions apply it to PIL images: same bytes. A factor of 1 (0 for hue) changes
// nothing, but hue goes through HSV all the same, which rounds. Throws InvalidArgument for a factor that is out of range.

/// Blend with black: v' = factor v. factor >= 0.
void adjust_brightness(Image& image, double factor);
/// Blend with a grey of the picture's mean luma m, rounded: v' = m + factor (v - m). factor >= 0.
void adjust_contrast(Image& image, double factor);
/// Blend with the luma L = (19595 R + 38470 G + 7471 B + 32768) / 65536 of each pixel: v' = L + factor (v - L). factor >= 0.
void adjust_saturation(Image& image, double factor);
/// Turns the hue by `factor` of the circle, -0.5 to 0.5, in steps of 1/255 cut towards zero.
void adjust_hue(Image& image, double factor);

}  // namespace detr::data
