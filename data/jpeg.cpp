#include "data/jpeg.h"

#include <algorithm>
#include <array>
#include <csetjmp>
#include <cstddef>
#include <cstdio>
#include <new>
#include <utility>

// jpeglib.h needs FILE from <cstdio>, and jerror.h needs jpeglib.h.
#include <jpeglib.h>
#include <jerror.h>

#include "data/exif.h"
#include "runtime/error.h"

namespace detr::data {
namespace {

// Note [libjpeg errors]
// libjpeg reports a fatal error by calling error_exit, which must not return. Throwing from there would unwind frames of a C
// library, which is undefined unless it was built for that; so the way out is longjmp, which is defined as long as it passes no
// object that has a destructor. Hence every call into libjpeg lies in one of the small `guarded_...` functions below: each does
// its setjmp first, holds pointers and numbers alone, and returns false after a jump. Owners live in their callers.

constexpr int kMaxScans = 500;   // a crafted progressive file repeats tiny scans over a huge picture for minutes

/// Error manager with what it collected. The callbacks get back to it by cinfo->err, its first member.
struct Messages {
  jpeg_error_mgr manager{};
  std::jmp_buf jump{};
  std::array<char, JMSG_LENGTH_MAX> error{}, warning{};
  bool input_ended = false;

  Messages() {
    jpeg_std_error(&manager);
    manager.error_exit = on_error;
    manager.emit_message = on_message;
    manager.output_message = [](j_common_ptr) {};
  }

 private:
  [[noreturn]] static void on_error(j_common_ptr info) {
    auto* messages = reinterpret_cast<Messages*>(info->err);
    info->err->format_message(info, messages->error.data());
    std::longjmp(messages->jump, 1);
  }

  static void on_message(j_common_ptr info, int level) {
    if (level >= 0) return;   // traces
    auto* messages = reinterpret_cast<Messages*>(info->err);
    if (info->err->num_warnings++ == 0) info->err->format_message(info, messages->warning.data());
    if (info->err->msg_code == JWRN_JPEG_EOF) messages->input_ended = true;
  }
};

struct Progress {
  jpeg_progress_mgr manager{};

  Progress() { manager.progress_monitor = monitor; }

 private:
  static void monitor(j_common_ptr info) {
    if (reinterpret_cast<j_decompress_ptr>(info)->input_scan_number <= kMaxScans) return;
    auto* messages = reinterpret_cast<Messages*>(info->err);
    std::snprintf(messages->error.data(), messages->error.size(), "more than %d scans", kMaxScans);
    std::longjmp(messages->jump, 1);
  }
};

class JpegReader {
 public:
  JpegReader() { info_.err = &messages_.manager; }
  ~JpegReader() { jpeg_destroy_decompress(&info_); }   // harmless where nothing was created
  JpegReader(const JpegReader&) = delete;
  JpegReader& operator=(const JpegReader&) = delete;

  /// Reads up to the first scan.
  bool read_header(std::span<const std::uint8_t> bytes) { return guarded_header(bytes.data(), bytes.size()); }

  ImageHeader header() const {
    ImageHeader header{info_.image_width, info_.image_height, 1};
    for (jpeg_saved_marker_ptr marker = info_.marker_list; marker; marker = marker->next) {
      const int orientation = exif_orientation({marker->data, marker->data_length});
      if (orientation != 0) {   // the first block that states one
        header.orientation = orientation;
        break;
      }
    }
    return header;
  }

  /// Decodes the rest; false if rows are missing.
  bool read_pixels(Image& image) {
    const bool four = info_.num_components == 4;
    std::vector<std::uint8_t> row(four ? static_cast<std::size_t>(image.width * 4) : 0);
    return guarded_pixels(image.rgb.data(), four ? row.data() : nullptr);
  }

  /// Reads what lies behind the last row up to the end marker.
  bool finish() { return guarded_finish(); }

  /// Whether the bytes end where that costs, or may have cost, parts of the picture. A sequential Huffman scan that lacks bits
  /// warns of it besides the end; the other kinds do not tell.
  bool truncated() const {
    const bool tells = !info_.progressive_mode && !info_.arith_code && info_.comps_in_scan == info_.num_components;
    return messages_.input_ended && !(tells && info_.err->num_warnings == 1);
  }

  const Messages& messages() const { return messages_; }

 private:
  bool guarded_header(const std::uint8_t* bytes, std::size_t size) {
    if (setjmp(messages_.jump)) return false;
    jpeg_create_decompress(&info_);
    info_.progress = &progress_.manager;
    jpeg_mem_src(&info_, bytes, static_cast<unsigned long>(size));
    jpeg_save_markers(&info_, JPEG_APP0 + 1, 0xffff);
    jpeg_read_header(&info_, TRUE);
    return true;
  }

  bool guarded_pixels(std::uint8_t* rgb, std::uint8_t* cmyk_row) {
    if (setjmp(messages_.jump)) return false;
    info_.out_color_space = cmyk_row ? JCS_CMYK : JCS_RGB;
    jpeg_start_decompress(&info_);
    while (info_.output_scanline < info_.output_height) {
      std::uint8_t* out = rgb + std::size_t{info_.output_scanline} * info_.output_width * 3;
      JSAMPROW row = cmyk_row ? cmyk_row : out;
      jpeg_read_scanlines(&info_, &row, 1);
      if (cmyk_row) convert_row(cmyk_row, out, info_.output_width);
    }
    return true;
  }

  bool guarded_finish() {
    if (setjmp(messages_.jump)) return false;
    jpeg_finish_decompress(&info_);
    return true;
  }

  /// Inverted CMYK (255: no ink) to RGB, in Pillow's integer arithmetic: r = k - (255 - c) k / 255, rounded.
  static void convert_row(const std::uint8_t* cmyk, std::uint8_t* rgb, std::size_t width) {
    for (std::size_t x = 0; x < width; ++x, cmyk += 4, rgb += 3) {
      const int k = cmyk[3];
      for (int c = 0; c < 3; ++c) {
        const int product = (255 - cmyk[c]) * k + 128;
        rgb[c] = static_cast<std::uint8_t>(std::clamp(k - (((product >> 8) + product) >> 8), 0, 255));
      }
    }
  }

  Messages messages_;
  Progress progress_;
  jpeg_decompress_struct info_{};
};

/// Where the encoder writes: a vector that doubles.
struct Destination {
  jpeg_destination_mgr manager{};
  std::vector<std::uint8_t> bytes;

  Destination() {
    manager.init_destination = [](j_compress_ptr info) { extend(info, std::size_t{1} << 16); };
    manager.empty_output_buffer = [](j_compress_ptr info) -> boolean {
      extend(info, of(info).bytes.size());
      return TRUE;
    };
    manager.term_destination = [](j_compress_ptr info) {
      of(info).bytes.resize(of(info).bytes.size() - info->dest->free_in_buffer);
    };
  }

 private:
  static Destination& of(j_compress_ptr info) { return *static_cast<Destination*>(info->client_data); }

  /// Offers so many more bytes, behind those that are full.
  static void extend(j_compress_ptr info, std::size_t more) {
    if (!of(info).grow(more)) ERREXIT1(info, JERR_OUT_OF_MEMORY, 0);
    info->dest->next_output_byte = of(info).bytes.data() + of(info).bytes.size() - more;
    info->dest->free_in_buffer = more;
  }

  bool grow(std::size_t more) noexcept {
    try {
      bytes.resize(bytes.size() + more);
      return true;
    } catch (const std::bad_alloc&) {
      return false;
    }
  }
};

class JpegWriter {
 public:
  JpegWriter() { info_.err = &messages_.manager; }
  ~JpegWriter() { jpeg_destroy_compress(&info_); }
  JpegWriter(const JpegWriter&) = delete;
  JpegWriter& operator=(const JpegWriter&) = delete;

  bool write(const Image& image, int quality) {
    return guarded_write(image.rgb.data(), static_cast<JDIMENSION>(image.width), static_cast<JDIMENSION>(image.height), quality);
  }
  std::vector<std::uint8_t> take_bytes() { return std::move(destination_.bytes); }
  const char* error() const { return messages_.error.data(); }

 private:
  bool guarded_write(const std::uint8_t* rgb, JDIMENSION width, JDIMENSION height, int quality) {
    if (setjmp(messages_.jump)) return false;
    jpeg_create_compress(&info_);
    info_.client_data = &destination_;
    info_.dest = &destination_.manager;
    info_.image_width = width;
    info_.image_height = height;
    info_.input_components = 3;
    info_.in_color_space = JCS_RGB;
    jpeg_set_defaults(&info_);
    jpeg_set_quality(&info_, quality, TRUE);
    jpeg_start_compress(&info_, TRUE);
    while (info_.next_scanline < height) {
      // The library takes a pointer to non-const and only reads.
      JSAMPROW row = const_cast<std::uint8_t*>(rgb) + std::size_t{info_.next_scanline} * width * 3;
      jpeg_write_scanlines(&info_, &row, 1);
    }
    jpeg_finish_compress(&info_);
    return true;
  }

  Messages messages_;
  Destination destination_;
  jpeg_compress_struct info_{};
};

}  // namespace

JpegOutcome read_jpeg_header(std::span<const std::uint8_t> bytes, ImageHeader& header) {
  JpegReader reader;
  JpegOutcome outcome;
  if (reader.read_header(bytes)) {
    header = reader.header();
  } else {
    outcome.ended_early = reader.messages().input_ended;
    outcome.error = outcome.ended_early ? "truncated: the JPEG ends within its header" : reader.messages().error.data();
  }
  outcome.warning = reader.messages().warning.data();
  return outcome;
}

JpegOutcome decode_jpeg(std::span<const std::uint8_t> bytes, const std::function<void(const ImageHeader&)>& accept,
                        ImageHeader& header, Image& image) {
  JpegReader reader;
  JpegOutcome outcome;
  if (!reader.read_header(bytes)) {
    outcome.ended_early = reader.messages().input_ended;
    outcome.error = outcome.ended_early ? "truncated: the JPEG ends within its header" : reader.messages().error.data();
    return outcome;
  }
  header = reader.header();
  accept(header);
  image = Image(header.stored_width, header.stored_height);
  const bool complete = reader.read_pixels(image);
  const bool finished = complete && reader.finish();
  if (reader.truncated()) {
    outcome.error = "truncated: the JPEG ends before its last pixel";
  } else if (!complete) {
    outcome.error = reader.messages().error.data();
  } else {
    outcome.warning = reader.messages().warning.data();
    if (!finished && outcome.warning.empty()) outcome.warning = reader.messages().error.data();
  }
  return outcome;
}

std::vector<std::uint8_t> encode_jpeg(const Image& image, int quality) {
  DETR_CHECK(image.width >= 1 && image.height >= 1, "encode_jpeg: the picture is empty");
  DETR_CHECK(image.width <= JPEG_MAX_DIMENSION && image.height <= JPEG_MAX_DIMENSION, "encode_jpeg: at most ",
             JPEG_MAX_DIMENSION, " pixels a side, got ", image.width, " x ", image.height);
  DETR_CHECK(quality >= 1 && quality <= 100, "encode_jpeg: quality must be 1 to 100, got ", quality);
  JpegWriter writer;
  if (!writer.write(image, quality)) throw StorageError("a picture could not be encoded as JPEG: ", writer.error());
  return writer.take_bytes();
}

}  // namespace detr::data
