#include "package/link.h"

#include <elf.h>

#include <cstring>
#include <map>

#include "base/error.h"

namespace deplo::package {
namespace {

uint64_t round_up(uint64_t bytes, uint64_t alignment) { return (bytes + alignment - 1) / alignment * alignment; }

/// The parts of one relocatable object file.
class Object {
 public:
  explicit Object(const std::string& bytes) : bytes_(bytes) {
    header_ = read<Elf64_Ehdr>(0);
    DEPLO_ASSERT(std::memcmp(header_.e_ident, ELFMAG, SELFMAG) == 0 && header_.e_machine == EM_X86_64 && header_.e_type == ET_REL,
                 "a kernel's code is no object file for x86-64");
    for (size_t s = 0; s < header_.e_shnum; ++s) sections_.push_back(read<Elf64_Shdr>(header_.e_shoff + s * sizeof(Elf64_Shdr)));
    for (const Elf64_Shdr& section : sections_)
      if (section.sh_type == SHT_SYMTAB) {
        names_ = sections_.at(section.sh_link).sh_offset;
        symbols_ = all<Elf64_Sym>(section);
      }
  }

  template <class T>
  std::vector<T> all(const Elf64_Shdr& section) const {
    std::vector<T> items;
    for (uint64_t k = 0; k < section.sh_size / sizeof(T); ++k) items.push_back(read<T>(section.sh_offset + k * sizeof(T)));
    return items;
  }
  const std::vector<Elf64_Shdr>& sections() const { return sections_; }
  const std::vector<Elf64_Sym>& symbols() const { return symbols_; }
  std::string name_of(const Elf64_Sym& symbol) const { return text_at(names_ + symbol.st_name); }
  std::string name_of(const Elf64_Shdr& section) const { return text_at(sections_.at(header_.e_shstrndx).sh_offset + section.sh_name); }
  std::string_view content(const Elf64_Shdr& section) const {
    DEPLO_ASSERT(section.sh_offset + section.sh_size <= bytes_.size(), "an object file of {} bytes ends within a section", bytes_.size());
    return std::string_view(bytes_).substr(section.sh_offset, section.sh_size);
  }

 private:
  template <class T>
  T read(uint64_t at) const {
    DEPLO_ASSERT(at + sizeof(T) <= bytes_.size(), "an object file of {} bytes is read at {}", bytes_.size(), at);
    T value;
    std::memcpy(&value, bytes_.data() + at, sizeof(T));
    return value;
  }
  std::string text_at(uint64_t at) const {
    DEPLO_ASSERT(at < bytes_.size(), "an object file of {} bytes has a name at {}", bytes_.size(), at);
    return {bytes_.c_str() + at};
  }

  const std::string& bytes_;
  Elf64_Ehdr header_{};
  std::vector<Elf64_Shdr> sections_;
  std::vector<Elf64_Sym> symbols_;
  uint64_t names_ = 0;
};

/// Where a section has come to lie.
struct Place {
  bool is_text = false;
  uint64_t offset = 0;
};

class Linker {
 public:
  void add(const std::string& object, const std::string& symbol) {
    Input& input = inputs_.emplace_back(Object(object));
    for (size_t s = 0; s < input.object.sections().size(); ++s) {
      const Elf64_Shdr& section = input.object.sections()[s];
      // Tables for unwinding: kernels throw nothing.
      if (!(section.sh_flags & SHF_ALLOC) || section.sh_size == 0 || input.object.name_of(section) == ".eh_frame") continue;
      DEPLO_ASSERT(!(section.sh_flags & SHF_WRITE) && section.sh_type == SHT_PROGBITS, "a kernel's code has the section {}",
                   input.object.name_of(section));
      const bool is_text = section.sh_flags & SHF_EXECINSTR;
      std::string& into = is_text ? text_ : data_;
      into.resize(round_up(into.size(), std::max<uint64_t>(section.sh_addralign, 1)), is_text ? '\xcc' : '\0');
      input.places[s] = {is_text, into.size()};
      into += input.object.content(section);
    }
    for (const Elf64_Sym& known : input.object.symbols())
      if (known.st_shndx != SHN_UNDEF && input.places.contains(known.st_shndx) && input.object.name_of(known) == symbol) {
        DEPLO_ASSERT(input.places.at(known.st_shndx).is_text, "the kernel {} is no function", symbol);
        entries_.push_back(input.places.at(known.st_shndx).offset + known.st_value);
        return;
      }
    throw InternalError(fmt::format("a kernel's object file does not define {}", symbol));
  }

  LinkedCode link() {
    find_externals();
    const uint64_t stubs = round_up(text_.size(), 16);
    text_.resize(stubs, '\xcc');
    LinkedCode code;
    for (const auto& [name, number] : externals_) code.externals.push_back(name);
    constexpr uint64_t kStub = 16;
    code.text_bytes = round_up(std::max<uint64_t>(stubs + kStub * externals_.size(), 1), kPage);
    code.data_bytes = round_up(data_.size(), kPage);
    const uint64_t addresses = code.text_bytes + code.data_bytes;
    for (uint64_t k = 0; k < externals_.size(); ++k) {
      const uint64_t at = stubs + kStub * k;
      const auto distance = static_cast<int32_t>(addresses + 8 * k - (at + 6));
      text_ += "\xff\x25";  // jmp *distance(%rip)
      text_.append(reinterpret_cast<const char*>(&distance), sizeof(distance));
      text_.resize(at + kStub, '\xcc');
    }
    code.bytes = std::move(text_);
    code.bytes.resize(code.text_bytes, '\xcc');
    code.bytes += data_;
    code.bytes.resize(addresses, '\0');
    for (const Input& input : inputs_) relocate(input, code, stubs, kStub);
    code.entries = entries_;
    return code;
  }

 private:
  struct Input {
    explicit Input(Object made) : object(std::move(made)) {}
    Object object;
    std::map<size_t, Place> places;  ///< by section
  };

  template <class F>
  static void each_relocation(const Input& input, const F& take) {
    for (const Elf64_Shdr& section : input.object.sections()) {
      if (section.sh_type != SHT_RELA || !input.places.contains(section.sh_info)) continue;
      for (const Elf64_Rela& relocation : input.object.all<Elf64_Rela>(section))
        take(input.places.at(section.sh_info), relocation, input.object.symbols().at(ELF64_R_SYM(relocation.r_info)));
    }
  }

  void find_externals() {
    for (const Input& input : inputs_)
      each_relocation(input, [&](const Place& /*place*/, const Elf64_Rela& /*relocation*/, const Elf64_Sym& symbol) {
        if (symbol.st_shndx == SHN_UNDEF) externals_.try_emplace(input.object.name_of(symbol), 0);
      });
    uint64_t count = 0;
    for (auto& [name, number] : externals_) number = count++;
  }

  void relocate(const Input& input, LinkedCode& code, uint64_t stubs, uint64_t stub_bytes) const {
    auto address = [&](const Place& place) { return place.offset + (place.is_text ? 0 : code.text_bytes); };
    each_relocation(input, [&](const Place& place, const Elf64_Rela& relocation, const Elf64_Sym& symbol) {
      const auto type = ELF64_R_TYPE(relocation.r_info);
      DEPLO_ASSERT(type == R_X86_64_PC32 || type == R_X86_64_PLT32, "a kernel's code has a relocation of type {}", type);
      uint64_t value = 0;
      if (symbol.st_shndx == SHN_UNDEF) {
        value = stubs + stub_bytes * externals_.at(input.object.name_of(symbol));
      } else {
        DEPLO_ASSERT(input.places.contains(symbol.st_shndx), "a kernel's code refers to section {}", symbol.st_shndx);
        value = address(input.places.at(symbol.st_shndx)) + symbol.st_value;
      }
      const uint64_t at = address(place) + relocation.r_offset;
      const auto distance = static_cast<int64_t>(value + static_cast<uint64_t>(relocation.r_addend) - at);
      DEPLO_ASSERT(distance == static_cast<int32_t>(distance) && at + 4 <= code.bytes.size(), "a kernel's code refers to {} from {}", value, at);
      const auto word = static_cast<int32_t>(distance);
      std::memcpy(code.bytes.data() + at, &word, sizeof(word));
    });
  }

  std::vector<Input> inputs_;
  std::string text_;
  std::string data_;
  std::vector<uint64_t> entries_;
  std::map<std::string, uint64_t> externals_;
};

}  // namespace

LinkedCode link_code(const std::vector<std::shared_ptr<CompiledKernel>>& kernels) {
  Linker linker;
  std::map<const CompiledKernel*, size_t> places;
  std::vector<size_t> order;
  std::vector<std::pair<std::string, std::string>> objects;
  objects.reserve(kernels.size());  // Object refers to its text
  for (const auto& kernel : kernels) {
    auto [place, is_new] = places.try_emplace(kernel.get(), objects.size());
    order.push_back(place->second);
    if (!is_new) continue;
    objects.push_back(kernel->object());
    DEPLO_SUPPORT(!objects.back().first.empty(), "the kernels of this target have no object files, which a package holds");
    linker.add(objects.back().first, objects.back().second);
  }
  LinkedCode code = linker.link();
  std::vector<uint64_t> entries;
  for (size_t place : order) entries.push_back(code.entries[place]);
  code.entries = std::move(entries);
  return code;
}

}  // namespace deplo::package
