#include "runtime/build.h"

#include <link.h>

#include <cstddef>
#include <cstring>

namespace detr {
namespace {

constexpr std::size_t aligned(std::size_t bytes) { return (bytes + 3) / 4 * 4; }

/// The identity among the notes of a segment, which are a header, a name and a content each.
std::string id_in_notes(const char* notes, std::size_t length) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string id;
  ElfW(Nhdr) head;
  for (std::size_t at = 0; at + sizeof head <= length;) {
    std::memcpy(&head, notes + at, sizeof head);
    const char* const name = notes + at + sizeof head;
    const char* const content = name + aligned(head.n_namesz);
    if (head.n_type == NT_GNU_BUILD_ID && head.n_namesz == 4 && std::memcmp(name, "GNU", 4) == 0) {
      for (std::size_t i = 0; i < head.n_descsz; ++i) {
        const auto byte = static_cast<unsigned char>(content[i]);
        id += kDigits[byte >> 4U];
        id += kDigits[byte & 15U];
      }
      return id;
    }
    at += sizeof head + aligned(head.n_namesz) + aligned(head.n_descsz);
  }
  return id;
}

/// The first object that is listed is the program itself.
int look_at_program(dl_phdr_info* info, std::size_t, void* id) {
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& segment = info->dlpi_phdr[i];
    auto& found = *static_cast<std::string*>(id);
    if (segment.p_type == PT_NOTE && found.empty()) found = id_in_notes(reinterpret_cast<const char*>(info->dlpi_addr + segment.p_vaddr), segment.p_memsz);
  }
  return 1;
}

}  // namespace

std::string build_id() {
  std::string id;
  ::dl_iterate_phdr(&look_at_program, &id);
  return id;
}

}  // namespace detr
