#include "runtime/packed.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cctype>
#include <cstring>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <utility>

#include "base/error.h"
#include "kernel_ir/rewrite.h"
#include "runtime/hash.h"
#include "runtime/owned.h"

namespace deplo::runtime {
namespace {

std::atomic<uint64_t> generation{0};

/// Never destroyed: programs may outlive static destructors.
struct PackedRegistry {
  std::mutex mutex;
  std::map<std::string, uint64_t> contents;
  std::map<std::pair<uint64_t, std::vector<Identity>>, std::weak_ptr<PackedBlock>> blocks;
};
PackedRegistry& packed_registry() {
  static auto* instance = new PackedRegistry;
  return *instance;
}

bool is_of_name(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '.'; }

/// The names that a kernel gives: of parameters, values, axes and arrays. Left out are those that its text may mean otherwise: words of the IR have
/// no digits, or are types or functions.
std::set<std::string> own_names(const kernel_ir::Kernel& kernel, const std::string& text) {
  std::set<std::string> names;
  for (const auto& param : kernel.params) names.insert(param.name);
  kernel_ir::visit_all(kernel.body, [&](const kernel_ir::Stmt& stmt) {
    std::visit(
        [&](const auto& node) {
          if constexpr (requires { node.name; }) names.insert(node.name);
        },
        stmt.node);
  });
  std::erase_if(names, [&](const std::string& name) {
    const bool digits = std::any_of(name.begin(), name.end(), [](char c) { return std::isdigit(static_cast<unsigned char>(c)) != 0; });
    return !digits || parse_dtype(name.substr(0, name.find('x'))) || text.find(name + "(") != std::string::npos;
  });
  return names;
}

/// A kernel's text in which its own names are numbers: kernels that differ in these alone are the same.
std::string print_without_names(const kernel_ir::Kernel& kernel) {
  kernel_ir::Kernel anonymous = kernel;
  anonymous.name = "@k";
  anonymous.provenance.clear();
  const std::string text = kernel_ir::print(anonymous);
  const std::set<std::string> names = own_names(kernel, text);
  std::map<std::string, size_t> numbers;
  std::string out;
  for (size_t at = 0; at < text.size();) {
    if (!is_of_name(text[at])) {
      out += text[at++];
      continue;
    }
    size_t end = at;
    while (end < text.size() && is_of_name(text[end])) ++end;
    const std::string word = text.substr(at, end - at);
    out += names.count(word) > 0 ? fmt::format("%{}", numbers.try_emplace(word, numbers.size()).first->second) : word;
    at = end;
  }
  return out;
}

/// The group's steps over its buffers by number, with their types: names do not matter.
std::string content_of(const OnceGroup& group, const kernel_ir::Module& module, const Layout& layout) {
  std::map<size_t, size_t> numbers;
  std::string text;
  auto name = [&](size_t buffer) {
    auto [at, fresh] = numbers.try_emplace(buffer, numbers.size());
    if (!fresh) return fmt::format(" b{}", at->second);
    const Buffer& b = module.buffers[buffer];
    std::string type = fmt::format(" b{}: {}[", at->second, to_string(b.dtype));
    for (Expr size : b.shape) type += print(size) + ",";
    for (Expr stride : b.strides) type += print(stride) + ";";
    return type + "]";
  };
  for (size_t buffer : group.inputs) text += name(buffer);
  for (size_t buffer : group.packed) text += name(buffer);
  for (size_t step : group.steps) {
    text += "\ncall";
    for (size_t buffer : layout.steps[step].buffers) text += name(buffer);
    text += "\n" + print_without_names(*module.kernels[*layout.steps[step].kernel]);
  }
  return text;
}

uint64_t number_of(const std::string& content) {
  PackedRegistry& all = packed_registry();
  std::lock_guard lock(all.mutex);
  return all.contents.try_emplace(content, all.contents.size()).first->second;
}

constexpr int64_t kWhole = 4096;  ///< bytes up to which every element is compared

template <class Bits>
uint64_t word_at(const char* place) {
  Bits bits;
  std::memcpy(&bits, place, sizeof(Bits));
  return bits;
}

/// A step that visits every index below `size` once, each far from the one before.
int64_t scattering_step(int64_t size) {
  auto step = static_cast<int64_t>(0.6180339887498949 * static_cast<double>(size));
  while (std::gcd(step, size) != 1) ++step;
  return step % size;
}

/// From the first to the last element.
int64_t bytes_of(const TensorView& view) {
  int64_t last = 0;
  for (int d = 0; d < view.rank; ++d) {
    if (view.sizes[d] == 0) return 0;
    last += (view.sizes[d] - 1) * view.strides[d];
  }
  return (last + 1) * size_of(view.dtype);
}

/// Of every element, in order; of those that fill one block of memory, in its order.
template <class Bits>
uint64_t sample_of_all(const TensorView& view, int64_t count) {
  Hash hash;
  if (const int64_t bytes = bytes_of(view); bytes == count * static_cast<int64_t>(sizeof(Bits))) {
    hash.add(view.data, view.data + bytes);
    return hash.value();
  }
  std::vector<int64_t> index(static_cast<size_t>(view.rank));
  int64_t offset = 0;
  for (int64_t k = 0; k < count; ++k) {
    hash.add(word_at<Bits>(view.data + offset * static_cast<int64_t>(sizeof(Bits))));
    for (int d = view.rank; d-- > 0;) {
      const bool wraps = ++index[d] == view.sizes[d];
      offset += view.strides[d];
      if (!wraps) break;
      offset -= view.sizes[d] * view.strides[d];
      index[d] = 0;
    }
  }
  return hash.value();
}

constexpr int64_t kLine = 64;  // bytes that one access to memory brings

struct Piece {
  const char* begin;
  int64_t bytes;  // up to a line
};

/// Tells its content: any change of one word changes it. Products of different words do not wait for one another.
uint64_t bits_of_piece(const Piece& piece) {
  constexpr size_t kWords = kLine / sizeof(uint64_t);
  std::array<uint64_t, kWords> words{};
  std::memcpy(words.data(), piece.begin, static_cast<size_t>(piece.bytes));
  uint64_t factor = 0x9e3779b97f4a7c15ULL;
  uint64_t all = 0;
  for (uint64_t word : words) {
    all += (word ^ word >> 32) * factor;
    factor += 0xd1342543de82ef96ULL;  // odd ones stay odd
  }
  return all;
}

/// Of one piece of memory in each row, such that they hold an element of each column, and so on. A piece is a line of memory:
/// innermost axes that follow one another count as one until it fills some. The axis with the most places is walked from its start to its end, the
/// others with scattering steps, so that parts which users write (rows, columns, blocks, a triangle, a diagonal's side) hold some of them. Such a
/// weight is seldom in a cache: the places of a block are fetched while those of the block before are looked at, and nothing branches on where an
/// axis wraps.
template <class Bits>
uint64_t sample_of_some(const TensorView& view) {
  constexpr auto kSize = static_cast<int64_t>(sizeof(Bits));
  constexpr int64_t kInPiece = kLine / kSize;
  std::vector<std::pair<int64_t, int64_t>> places;  // extents and strides, in elements
  for (int d = 0; d < view.rank; ++d)
    if (view.sizes[d] > 1) places.emplace_back(view.sizes[d], view.strides[d]);
  int64_t run = 1;
  while (run <= kInPiece) {
    const auto next = std::find_if(places.begin(), places.end(), [&](const auto& p) { return p.second == run; });
    if (next == places.end()) break;
    run *= next->first;
    places.erase(next);
  }
  const int64_t pieces = (run + kInPiece - 1) / kInPiece;
  places.emplace_back(pieces, kInPiece);
  const auto longest = std::max_element(places.begin(), places.end(), [](const auto& x, const auto& y) { return x.first < y.first; });
  const int64_t samples = longest->first;

  struct Axis {
    int64_t index, size, step, advance, wrap;  // the last two in bytes
  };
  std::vector<Axis> axes;
  for (const auto& p : places) {
    const int64_t step = p.first == 1 ? 0 : &p == &*longest ? 1 : scattering_step(p.first);
    axes.push_back({0, p.first, step, step * p.second * kSize, p.first * p.second * kSize});
  }
  constexpr int64_t kBlock = 64;
  std::array<std::array<Piece, kBlock>, 2> fetched{};
  const char* place = view.data;
  const bool is_aligned = reinterpret_cast<uintptr_t>(place) % kLine == 0 &&
                          std::all_of(places.begin(), places.end(), [](const auto& p) { return p.second * kSize % kLine == 0; });
  // Places first: between prefetches nothing else takes room in the window of instructions that the processor has under way.
  auto fetch = [&](int64_t first) {
    auto& block = fetched[static_cast<size_t>(first / kBlock % 2)];
    const int64_t count = std::min(kBlock, samples - first);
    for (int64_t k = 0; k < count; ++k) {
      block[static_cast<size_t>(k)] = {place, std::min(kLine, (run - axes.back().index * kInPiece) * kSize)};
      for (Axis& axis : axes) {
        axis.index += axis.step;
        const int64_t wraps = -static_cast<int64_t>(axis.index >= axis.size);
        axis.index -= axis.size & wraps;
        place += axis.advance - (axis.wrap & wraps);
      }
    }
    for (int64_t k = 0; k < count; ++k) __builtin_prefetch(block[static_cast<size_t>(k)].begin);
    if (is_aligned) return;
    for (int64_t k = 0; k < count; ++k) __builtin_prefetch(block[static_cast<size_t>(k)].begin + block[static_cast<size_t>(k)].bytes - 1);
  };
  Hash hash;
  fetch(0);
  for (int64_t first = 0; first < samples; first += kBlock) {
    if (first + kBlock < samples) fetch(first + kBlock);
    const auto& block = fetched[static_cast<size_t>(first / kBlock % 2)];
    for (int64_t k = 0, n = std::min(kBlock, samples - first); k < n; ++k) hash.add(bits_of_piece(block[static_cast<size_t>(k)]));
  }
  return hash.value();
}

template <class Bits>
uint64_t sample_of_elements(const TensorView& view, int64_t count) {
  return count * static_cast<int64_t>(sizeof(Bits)) <= kWhole ? sample_of_all<Bits>(view, count) : sample_of_some<Bits>(view);
}

/// Tells a weight that was written unseen, if a sampled element changed.
uint64_t sample_of(const TensorView& view) {
  int64_t count = 1;
  for (int d = 0; d < view.rank; ++d) count *= view.sizes[d];
  if (count == 0) return 0;
  switch (size_of(view.dtype)) {
    case 1: return sample_of_elements<uint8_t>(view, count);
    case 2: return sample_of_elements<uint16_t>(view, count);
    case 4: return sample_of_elements<uint32_t>(view, count);
    default: return sample_of_elements<uint64_t>(view, count);
  }
}

}  // namespace

Identity identity_of(const TensorView& view, bool sampled) {
  static std::atomic<uint64_t> unknown{1ULL << 63};
  const OwnedContent owned = view.device < 0 ? owned_content(view.data, bytes_of(view)) : OwnedContent{};
  const uint64_t sample = !sampled || view.device >= 0 ? 0 : owned.is_known ? owned.sample : sample_of(view);
  return {view.storage, view.data, view.has_version ? view.version : unknown.fetch_add(1), sample, owned.writes};
}

std::vector<OnceGroup> find_once_groups(const kernel_ir::Module& module, const Layout& layout) {
  std::vector<size_t> parent(layout.steps.size());
  std::iota(parent.begin(), parent.end(), size_t{0});
  auto root = [&](size_t step) {
    while (parent[step] != step) step = parent[step];
    return step;
  };
  std::map<size_t, size_t> step_of_packed;
  for (size_t s = 0; s < layout.steps.size(); ++s) {
    if (!layout.steps[s].once) continue;
    for (size_t buffer : layout.steps[s].buffers) {
      if (module.buffers[buffer].kind != BufferKind::packed) continue;
      auto [at, fresh] = step_of_packed.try_emplace(buffer, s);
      if (!fresh) parent[root(s)] = root(at->second);
    }
  }
  std::map<size_t, OnceGroup> groups;
  for (size_t s = 0; s < layout.steps.size(); ++s) {
    if (!layout.steps[s].once) continue;
    OnceGroup& group = groups[root(s)];
    group.steps.push_back(s);
    for (size_t buffer : layout.steps[s].buffers) {
      const Buffer& b = module.buffers[buffer];
      DEPLO_ASSERT(b.kind == BufferKind::packed || (b.kind == BufferKind::input && b.is_static),
                   "a once step of {} uses {}, which is neither a static input nor packed", module.name, b.name);
      auto& list = b.kind == BufferKind::packed ? group.packed : group.inputs;
      if (std::find(list.begin(), list.end(), buffer) == list.end()) list.push_back(buffer);
    }
  }
  std::vector<OnceGroup> result;
  for (auto& [key, group] : groups) {
    group.content = number_of(content_of(group, module, layout));
    result.push_back(std::move(group));
  }
  return result;
}

std::set<std::string> loaded_params(const kernel_ir::Kernel& kernel) {
  std::set<std::string> loaded;
  bool tells = !kernel.body.empty();
  kernel_ir::visit_all(kernel.body, [&](const kernel_ir::Stmt& stmt) {
    if (const auto* load = std::get_if<kernel_ir::Load>(&stmt.node)) loaded.insert(load->buffer);
    if (const auto* store = std::get_if<kernel_ir::Store>(&stmt.node)) loaded.insert(store->buffer);
    if (const auto* matrix = std::get_if<kernel_ir::Matrix>(&stmt.node)) loaded.insert(matrix->buffer);
    tells = tells && !std::holds_alternative<kernel_ir::CopyAsync>(stmt.node) && !std::holds_alternative<kernel_ir::MultiplyTiles>(stmt.node) &&
            !std::holds_alternative<kernel_ir::MultiplyGroup>(stmt.node) && !std::holds_alternative<kernel_ir::LoadMatrix>(stmt.node);
  });
  if (!tells)
    for (const auto& param : kernel.params) loaded.insert(param.name);
  return loaded;
}

std::vector<std::vector<Reader>> find_readers(const kernel_ir::Module& module, const Layout& layout) {
  std::map<std::string, std::set<std::string>> loads_of;  // by kernel
  std::vector<std::vector<Reader>> readers(module.buffers.size());
  for (size_t s = 0; s < layout.steps.size(); ++s) {
    const Layout::Step& step = layout.steps[s];
    if (step.once) continue;
    if (!step.kernel) {
      for (size_t buffer : step.buffers) readers[buffer].push_back({s, std::get<LibraryStep>(module.steps[s]).op});
      continue;
    }
    const kernel_ir::Kernel& kernel = *module.kernels[*step.kernel];
    auto [loads, is_new] = loads_of.try_emplace(kernel.name);
    if (is_new) loads->second = loaded_params(kernel);
    for (size_t p = 0; p < step.buffers.size(); ++p)
      if (loads->second.count(kernel.params[p].name) > 0) readers[step.buffers[p]].push_back({s, kernel.name});
  }
  return readers;
}

PackedNeeds packed_needs(const kernel_ir::Module& module, const Layout& layout, const std::vector<std::vector<Reader>>& readers,
                         const std::vector<bool>& possible) {
  PackedNeeds needs{std::vector<bool>(module.buffers.size()), std::vector<bool>(layout.steps.size())};
  for (size_t b = 0; b < module.buffers.size(); ++b)
    if (module.buffers[b].kind == BufferKind::packed)
      needs.kept[b] = std::any_of(readers[b].begin(), readers[b].end(), [&](const Reader& reader) { return possible[reader.step]; });
  std::vector<bool> wanted = needs.kept;
  for (size_t s = layout.steps.size(); s-- > 0;) {
    const Layout::Step& step = layout.steps[s];
    if (!step.once || !step.kernel) continue;
    const auto& params = module.kernels[*step.kernel]->params;
    for (size_t p = 0; p < step.buffers.size(); ++p)
      if (params[p].kind != loop_ir::ParamKind::in && wanted[step.buffers[p]]) needs.made[s] = true;
    if (!needs.made[s]) continue;
    for (size_t buffer : step.buffers) wanted[buffer] = true;
  }
  return needs;
}

std::shared_ptr<PackedBlock> share_packed(uint64_t content, const std::vector<Identity>& inputs, const std::function<void(PackedBlock&)>& make) {
  std::shared_ptr<PackedBlock> block;
  {
    PackedRegistry& all = packed_registry();
    std::lock_guard lock(all.mutex);
    std::weak_ptr<PackedBlock>& entry = all.blocks[{content, inputs}];
    block = entry.lock();
    if (!block) {
      block = std::make_shared<PackedBlock>();
      entry = block;
      std::erase_if(all.blocks, [](const auto& item) { return item.second.expired(); });
    }
  }
  std::lock_guard lock(block->making);
  if (!block->ready) make(*block);
  block->ready = true;
  return block;
}

int64_t packed_bytes() {
  PackedRegistry& all = packed_registry();
  std::lock_guard lock(all.mutex);
  int64_t bytes = 0;
  for (const auto& [key, entry] : all.blocks)
    if (auto block = entry.lock()) bytes += block->bytes;
  return bytes;
}

void forget_packed() {
  PackedRegistry& all = packed_registry();
  std::lock_guard lock(all.mutex);
  all.blocks.clear();
  generation.fetch_add(1);
}

uint64_t packed_generation() { return generation.load(std::memory_order_acquire); }

}  // namespace deplo::runtime
