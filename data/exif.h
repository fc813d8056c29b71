#pragma once
#include <cstdint>
#include <span>

#include "data/image.h"

namespace detr::data {

/// Orientation that an EXIF block states in its first directory, 1 to 8, or 0 where it states none that is legal. The block
/// is the payload of a JPEG's APP1 marker ("Exif", two zeros, TIFF structure) or of a PNG's eXIf chunk (TIFF structure alone),
/// in either byte order. Rubbish gives 0, and nothing outside the block is read. EXIF 2.3 (CIPA DC-008), 4.6.4, tag 0x0112.
int exif_orientation(std::span<const std::uint8_t> block);

/// The picture turned and mirrored as an orientation of 1 to 8 says: what is stored is brought to how it is shown, so that 6
/// turns by a quarter clockwise and 8 by one anticlockwise; 5 to 8 swap width and height. 1 gives the same picture back.
Image apply_orientation(Image image, int orientation);

}  // namespace detr::data
