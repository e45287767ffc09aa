#include <elf.h>
#include <fmt/format.h>
#include <link.h>

#include <cstring>

#include "runtime/compile.h"

namespace deplo {
namespace {

constexpr size_t padded(size_t bytes) { return (bytes + 3) / 4 * 4; }

std::string id_in_notes(const char* notes, size_t size) {
  for (size_t at = 0; at + sizeof(ElfW(Nhdr)) <= size;) {
    ElfW(Nhdr) head;
    std::memcpy(&head, notes + at, sizeof(head));
    size_t name = at + sizeof(head);
    size_t content = name + padded(head.n_namesz);
    at = content + padded(head.n_descsz);
    if (head.n_type != NT_GNU_BUILD_ID || head.n_namesz != 4 || std::memcmp(notes + name, "GNU", 4) != 0 || at > size) continue;
    std::string id;
    for (size_t k = 0; k < head.n_descsz; ++k) id += fmt::format("{:02x}", static_cast<unsigned char>(notes[content + k]));
    return id;
  }
  return "";
}

struct Search {
  ElfW(Addr) code;
  std::string id;
};

int look_at(dl_phdr_info* object, size_t /*size*/, void* data) {
  auto& search = *static_cast<Search*>(data);
  bool is_ours = false;
  std::string id;
  for (int k = 0; k < object->dlpi_phnum; ++k) {
    const ElfW(Phdr) & part = object->dlpi_phdr[k];
    ElfW(Addr) start = object->dlpi_addr + part.p_vaddr;
    is_ours = is_ours || (part.p_type == PT_LOAD && search.code >= start && search.code < start + part.p_memsz);
    if (part.p_type == PT_NOTE && id.empty())
      id = id_in_notes(reinterpret_cast<const char*>(start), part.p_memsz);  // NOLINT(performance-no-int-to-ptr): addresses of the loader
  }
  if (is_ours) search.id = id;
  return is_ours ? 1 : 0;
}

}  // namespace

std::string build_id() {
  Search search{reinterpret_cast<ElfW(Addr)>(&build_id), ""};
  dl_iterate_phdr(look_at, &search);
  return search.id;
}

}  // namespace deplo
