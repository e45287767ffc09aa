#include "package/package.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <set>
#include <thread>

#include "base/error.h"
#include "base/processors.h"
#include "base/sha256.h"
#include "base/text.h"
#include "package/checksum.h"
#include "package/code.h"
#include "target/cpu/features.h"

namespace deplo::package {
namespace {

// As PNG's: the high bit, both kinds of line ends and the end-of-file character show a file that went through a conversion of text.
constexpr std::array<char, 16> kMagic{'\x89', 'd', 'e', 'p', 'l', 'o', ' ', 'p', 'a', 'c', 'k', 'a', 'g', 'e', '\r', '\n'};

/// The first bytes of a file. Numbers are little-endian.
struct Header {
  std::array<char, 16> magic;
  uint32_t format;
  uint32_t reserved;
  uint64_t file_bytes;
  uint64_t manifest_offset;
  uint64_t manifest_bytes;
  std::array<char, 64> manifest_sha256;  ///< in hexadecimal, as in the manifest
  std::array<char, 64> header_sha256;    ///< of all that comes before
};
static_assert(sizeof(Header) == 176);

/// Sets of features by rank; "native" has what comes after all of them.
int rank_of(const std::string& features) {
  const std::vector<std::string> names{"sse", "avx2", "avx512", "native"};
  auto found = std::find(names.begin(), names.end(), features.empty() ? "native" : features);
  DEPLO_CHECK(found != names.end(), "no CPU features are called '{}': expected one of {}", features, joined(names));
  return static_cast<int>(found - names.begin());
}

}  // namespace

Mapping::Mapping(const std::string& path) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  DEPLO_CHECK(file >= 0, "{} cannot be opened: {}", path, std::strerror(errno));
  struct stat status{};
  const bool is_file = fstat(file, &status) == 0 && S_ISREG(status.st_mode);
  bytes_ = is_file ? static_cast<uint64_t>(status.st_size) : 0;
  void* mapped = bytes_ > 0 ? mmap(nullptr, bytes_, PROT_READ, MAP_SHARED, file, 0) : MAP_FAILED;
  close(file);
  DEPLO_CHECK(is_file, "{} is no file", path);
  DEPLO_CHECK(mapped != MAP_FAILED, "{} is no package of deplo: {}", path, bytes_ > 0 ? "it cannot be mapped into memory" : "it is empty");
  memory_ = static_cast<char*>(mapped);
}

Mapping::~Mapping() { munmap(memory_, bytes_); }

std::string read_manifest(const Mapping& file, const std::string& path) {
  const uint64_t bytes = file.bytes();
  Header header{};
  const size_t found = std::min<size_t>(bytes, sizeof(Header));
  std::memcpy(&header, file.data(), found);
  DEPLO_CHECK(std::equal(kMagic.begin(), kMagic.begin() + static_cast<std::ptrdiff_t>(std::min(found, kMagic.size())), header.magic.begin()),
              "{} is no package of deplo: it begins with other bytes", path);
  DEPLO_CHECK(found == sizeof(Header), "{} is truncated: it has {} bytes", path, bytes);
  DEPLO_CHECK(header.format <= kFormat, "{} is of format {}, and this deplo reads format {}: a newer one wrote it", path, header.format, kFormat);
  const size_t before = sizeof(Header) - header.header_sha256.size();
  DEPLO_CHECK(sha256_hex(file.data(), before) == std::string(header.header_sha256.data(), header.header_sha256.size()),
              "{} is damaged: its header has another checksum", path);
  DEPLO_CHECK(header.format == kFormat, "{} is of format {}, and this deplo reads format {}: export it again", path, header.format, kFormat);
  DEPLO_CHECK(bytes >= header.file_bytes, "{} is truncated: it has {} bytes of {}", path, bytes, header.file_bytes);
  DEPLO_CHECK(bytes == header.file_bytes, "{} is damaged: it has {} bytes, not {}", path, bytes, header.file_bytes);
  DEPLO_CHECK(header.manifest_offset <= bytes && header.manifest_bytes <= bytes - header.manifest_offset,
              "{} is damaged: its manifest lies outside of it", path);
  std::string text(file.data() + header.manifest_offset, header.manifest_bytes);
  DEPLO_CHECK(sha256_hex(text.data(), text.size()) == std::string(header.manifest_sha256.data(), header.manifest_sha256.size()),
              "{} is damaged: its manifest has another checksum", path);
  return text;
}

Package::Package(const std::string& path, const std::string& features, Check check)
    : path_(path), file_(path), manifest_(parse_manifest(read_manifest(file_, path), path, file_.bytes())) {
  choose(features);
  check_tensors(check);
}

void Package::choose(const std::string& features) {
  const int most = rank_of(features);
  std::vector<std::string> reasons;
  for (chosen_ = 0; chosen_ < manifest_.variants.size(); ++chosen_) {
    const Variant& variant = manifest_.variants[chosen_];
    if (rank_of(variant.name) > most) {
      reasons.push_back(fmt::format("{} is more than {}", variant.name, features));
      continue;
    }
    std::vector<std::string> lacking = lacking_features(variant.features);
    if (lacking.empty()) return;
    reasons.push_back(fmt::format("for {} this CPU lacks {}", variant.name, joined(lacking)));
  }
  throw UserError(fmt::format("{} holds no code for this CPU: {}", path_, joined(reasons, "; ")));
}

void Package::check_tensors(Check check) const {
  if (check == Check::code) return;
  std::set<size_t> used;
  for (const Variant::Argument& argument : variant().arguments)
    if (argument.is_tensor) used.insert(argument.index);
  // The largest first, so that threads end at about the same time.
  std::vector<size_t> order(used.begin(), used.end());
  auto bytes_of = [&](size_t tensor) { return manifest_.tensors[tensor].section.bytes; };
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return bytes_of(a) > bytes_of(b); });
  std::atomic<size_t> next{0};
  std::atomic<size_t> damaged{SIZE_MAX};
  auto work = [&] {
    for (size_t k = next++; k < order.size(); k = next++) {
      const PackedTensor& tensor = manifest_.tensors[order[k]];
      const bool same = check == Check::quick ? quick_checksum(data_of(tensor), tensor.section.bytes) == tensor.quick
                                              : sha256_hex(data_of(tensor), tensor.section.bytes) == tensor.section.sha256;
      if (!same) damaged = order[k];
    }
  };
  constexpr uint64_t kWorthThreads = 1 << 24;
  uint64_t bytes = 0;
  for (size_t tensor : order) bytes += bytes_of(tensor);
  std::vector<std::thread> helpers;
  constexpr int kMostThreads = 8;  // memory gives no more
  if (bytes >= kWorthThreads)
    for (int k = 1; k < std::min(available_processors(), kMostThreads); ++k) helpers.emplace_back(work);
  work();
  for (std::thread& helper : helpers) helper.join();
  if (damaged != SIZE_MAX)
    throw UserError(fmt::format("{} is damaged: the constant {} has another checksum", path_, manifest_.tensors[damaged].name));
}

std::unique_ptr<runtime::Program> Package::make_program(LibraryFactory library, const runtime::Program::Options& options) const {
  const Variant& chosen = variant();
  DEPLO_SUPPORT(library || chosen.library.empty(), "{} calls {} of ATen, which only PyTorch can run: load it with deplo.load in Python", path_,
                joined(chosen.library));
  const std::string text(file_.data() + chosen.program.offset, chosen.program.bytes);
  DEPLO_CHECK(sha256_hex(text.data(), text.size()) == chosen.program.sha256, "{} is damaged: its program has another checksum", path_);
  kernel_ir::Module module = kernel_ir::parse(text, path_);
  DEPLO_CHECK(module.kernels.size() == chosen.entries.size() && module.input_order.size() == chosen.arguments.size(),
              "{} is damaged: its program has {} kernels and {} inputs, its manifest {} and {}", path_, module.kernels.size(),
              module.input_order.size(), chosen.entries.size(), chosen.arguments.size());
  for (const UserOutput& output : manifest_.outputs)
    DEPLO_CHECK(output.kind != UserOutput::Kind::result || output.index < module.outputs.size(), "{} is damaged: its program has {} results", path_,
                module.outputs.size());
  auto code = std::make_shared<const LoadedCode>(path_, file_.data() + chosen.code.offset, chosen.text_bytes, chosen.code.bytes - chosen.text_bytes,
                                                 chosen.externals, chosen.code.sha256);
  KernelCode kernels;
  for (uint64_t entry : chosen.entries) kernels.functions.push_back(std::make_shared<PackagedKernel>(code, entry));
  return std::make_unique<runtime::Program>(std::move(module), std::move(kernels), library, options);
}

}  // namespace deplo::package
