#include "passes/loop/choose_layouts.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <unordered_map>

#include "analysis/contraction.h"
#include "analysis/cost.h"
#include "expr/node.h"
#include "loop_ir/places.h"
#include "passes/loop/program_graph.h"
#include "target/target.h"

namespace deplo {
namespace {

using namespace loop_ir;

constexpr double kLeastReads = 4;      ///< of each element of a parameter in a call: a training step copies anew
constexpr double kOperandReads = 512;  ///< of each element of an operand: blocks of a contraction pack it again and again
constexpr double kGatheredReads = 64;  ///< of each element that a contraction would gather, for its lanes lie apart: a copy costs less
constexpr double kLongAxis = 16;       ///< iterations; shorter ones do not fill vectors
constexpr double kMoreAlong = 1.5;     ///< times as many accesses that another dimension should serve
constexpr double kLeastSay =
    1 / 64.;  ///< of the memory that an access moves over: what a loop has less of beside it, as indices of rows, does not count

// What an element of an image costs less where channels lie innermost, in reads of it: measured on convolutions of a Zen 4.
constexpr double kPointGain = 0.3;   ///< read by a convolution that sums over channels alone: its rows need no packing
constexpr double kStoreGain = 0.1;   ///< stored, or read with what is stored, by a convolution: its sums lie along channels
constexpr double kWindowGain = 0.3;  ///< read or stored by a depthwise convolution or a pooling layer: its vectors are whole
constexpr double kTapsGain = -3;     ///< read by a convolution of several taps: it packs lines of points
constexpr double kMixedGain = -0.5;  ///< of other memory beside it that stays as it is
constexpr double kLeastChannels = 8;

/// One load or store, and the loops around it.
struct LayoutAccess {
  std::string buffer;
  std::vector<Expr> index;
  Expr offset;
  std::vector<Axis> loops;
  double points = 1;
  double places = 1;  ///< of the memory that it moves over: loops that leave it where it is find it in registers, but locals are filled anew
};

/// A contraction of which one operand is made of parameters.
struct Layer {
  std::string operand;                  ///< the other one's buffer
  std::set<std::string> summed, lanes;  ///< axes: summed over, and of the parameters alone
};

struct KernelAccesses {
  std::vector<LayoutAccess> all;
  std::vector<Layer> layers;
  size_t contractions = 0;
  std::set<std::string> operands;  ///< buffers that contractions read
  std::set<std::string> lanes;     ///< those whose elements vary along the axis along which results lie
  std::set<std::string> summed;    ///< axes that they sum over
  std::set<std::string> factors;   ///< parameters that are summed with larger ones: scales of codes, which lie, or are packed, as these do
  /// Of sums of products of bytes: axes whose steps are multiplied four at a time, of the operand that changes, and those that only parameters have,
  /// which get the lanes.
  std::set<std::string> byte_operands, byte_steps, byte_lanes;
};

struct Chooser {
  ProgramGraph graph;
  const PassContext& context;
  mutable std::map<std::string, bool> parameters_;                              ///< buffers that were asked for, and whether they are
  std::map<std::pair<std::string, size_t>, std::string> copies;                 ///< parameter and dimension that lies innermost -> the copy
  std::unordered_map<size_t, std::shared_ptr<const KernelAccesses>> accesses_;  ///< of kernels, until they change

  double size(Expr e) const { return std::max(1.0, analysis::estimate(e, context.hints, graph.program().symbols)); }

  bool is_fused(size_t at) {
    const auto& node = graph.nodes()[at];
    return node.alive && node.is_kernel && !node.once;
  }

  std::shared_ptr<const KernelAccesses> accesses_of(size_t at) {
    auto [it, fresh] = accesses_.try_emplace(at);
    if (fresh) it->second = std::make_shared<const KernelAccesses>(find_accesses(at));
    return it->second;
  }

  KernelAccesses find_accesses(size_t at) {
    KernelAccesses found;
    Kernel kernel;
    kernel.symbols = graph.program().symbols;
    kernel.body = graph.nodes()[at].body;
    for (const auto& c : analysis::find_contractions(kernel)) {
      for (const auto* operand : {&c.a, &c.b}) found.operands.insert(operand->buffers.begin(), operand->buffers.end());
      for (const auto& axis : c.axes_of(analysis::AxisClass::k)) found.summed.insert(axis.name);
      if (c.dtype == DType::i32) note_bytes(c, found);
      note_layer(c, found);
    }
    std::map<std::string, std::vector<Expr>> locals;
    visit(kernel.body, [&](const Stmt& stmt, const std::vector<Axis>& loops) {
      if (const auto* local = std::get_if<Local>(&stmt.node)) locals[local->name] = contiguous_strides(local->shape);
      const auto* load = std::get_if<Load>(&stmt.node);
      const auto* store = std::get_if<Store>(&stmt.node);
      if (!load && !store) return;
      LayoutAccess access{load ? load->buffer : store->buffer, load ? load->index : store->index, 0, loops, 1};
      auto local = locals.find(access.buffer);
      const std::vector<Expr>& strides = local == locals.end() ? graph.buffer(access.buffer).strides : local->second;
      for (size_t d = 0; d < access.index.size(); ++d) access.offset = access.offset + access.index[d] * strides[d];
      for (const Axis& axis : loops) {
        access.points *= size(axis.extent);
        if (local != locals.end() || uses(access.offset, axis.name)) access.places *= size(axis.extent);
      }
      found.all.push_back(std::move(access));
    });
    note_lanes(kernel, at, found);
    note_factors(kernel, found);
    return found;
  }

  void note_factors(const Kernel& kernel, KernelAccesses& found) const {
    visit(kernel.body, [&](const Stmt& stmt, const std::vector<Axis>&) {
      const auto* reduce = std::get_if<Reduce>(&stmt.node);
      if (!reduce || reduce->combiner != Combiner::sum) return;
      std::map<std::string, double> elements;
      double most = 0;
      for (const auto& inner : reduce->body) {
        const auto* load = std::get_if<Load>(&inner->node);
        if (!load || !is_parameter(load->buffer)) continue;
        elements[load->buffer] = size(product(graph.buffer(load->buffer).shape));
        most = std::max(most, elements[load->buffer]);
      }
      for (const auto& [name, count] : elements)
        if (count < most) found.factors.insert(name);
    });
  }

  /// Operands that vary along the axis along which their results lie, which gets the lanes of a CPU's vectors.
  void note_lanes(const Kernel& kernel, size_t at, KernelAccesses& found) {
    std::string unit;
    for (const LayoutAccess& access : found.all)
      for (const Axis& axis : access.loops)
        if (auto step = linear_coefficient(access.offset, axis.name); step && step->is(1) && graph.nodes()[at].writes.count(access.buffer))
          unit = axis.name;
    for (const auto& c : analysis::find_contractions(kernel))
      for (const auto* operand : {&c.a, &c.b})
        if (operand->axes.count(unit) > 0 && (operand == &c.a ? c.b : c.a).axes.count(unit) == 0 && operand->buffers.size() == 1)
          found.lanes.insert(operand->buffers.front());
  }

  void note_layer(const analysis::Contraction& c, KernelAccesses& found) const {
    ++found.contractions;
    auto fixed = [&](const analysis::ContractionOperand& operand) {
      return std::all_of(operand.buffers.begin(), operand.buffers.end(), [&](const auto& name) { return is_parameter(name); });
    };
    const bool first = fixed(c.b);
    const analysis::ContractionOperand& changes = first ? c.a : c.b;
    if (fixed(changes) || !fixed(first ? c.b : c.a) || changes.buffers.size() != 1) return;
    Layer layer{changes.buffers.front(), {}, {}};
    for (const auto& axis : c.axes) {
      if (axis.kind == analysis::AxisClass::k) layer.summed.insert(axis.name);
      if (axis.kind == (first ? analysis::AxisClass::n : analysis::AxisClass::m)) layer.lanes.insert(axis.name);
    }
    found.layers.push_back(std::move(layer));
  }

  void note_bytes(const analysis::Contraction& c, KernelAccesses& found) const {
    constexpr int64_t kWord = 4;
    for (const auto* operand : {&c.a, &c.b}) {
      if (operand->buffers.empty() || is_parameter(operand->buffers.front())) continue;
      found.byte_operands.insert(operand->buffers.front());
      const bool first = operand == &c.a;
      for (const auto& axis : c.axes) {
        if (axis.kind == (first ? analysis::AxisClass::n : analysis::AxisClass::m)) found.byte_lanes.insert(axis.name);
        const bool fours = axis.extent.is_constant() && axis.extent.value() % kWord == 0;
        if (axis.kind == analysis::AxisClass::k && fours) found.byte_steps.insert(axis.name);
      }
    }
  }

  bool is_parameter(const std::string& name) const {
    auto [it, added] = parameters_.emplace(name, false);
    if (added) {
      const Buffer* b = graph.find_buffer(name);
      it->second = b && b->kind == BufferKind::input && b->is_static && !graph.is_versioned(name);
    }
    return it->second;
  }

  /// Of the loops around an access, the one along which most of what is accessed in other buffers lies. Parameters may be copied: they do not count.
  std::string lanes_of(const LayoutAccess& access, const std::vector<LayoutAccess>& all) const {
    std::string best;
    double most = kLeastSay * access.places;
    for (const Axis& axis : access.loops) {
      if (loop_ir::is_short(axis)) continue;
      double score = 0;
      for (const LayoutAccess& other : all) {
        if (other.buffer == access.buffer || is_parameter(other.buffer)) continue;
        auto step = linear_coefficient(other.offset, axis.name);
        if (step && step->is(1)) score += other.places;
      }
      if (score > most) {
        most = score;
        best = axis.name;
      }
    }
    return best;
  }

  /// The dimension that lies along the lanes around an access; nothing where none does.
  std::optional<size_t> dimension_along(const LayoutAccess& access, const std::vector<LayoutAccess>& all) const {
    const std::string lanes = lanes_of(access, all);
    std::optional<size_t> found;
    for (size_t d = 0; d < access.index.size() && !lanes.empty(); ++d) {
      auto along = linear_coefficient(access.index[d], lanes);
      if (along && along->is(0)) continue;
      if (found || !along || !along->is(1)) return std::nullopt;
      found = d;
    }
    return found;
  }

  static std::vector<Expr> moved_last(std::vector<Expr> list, size_t d) {
    std::rotate(list.begin() + static_cast<std::ptrdiff_t>(d), list.begin() + static_cast<std::ptrdiff_t>(d) + 1, list.end());
    return list;
  }

  /// Accesses to `from` become ones to `to`, which has the dimension d last.
  void redirect(size_t at, const std::string& from, const std::string& to, size_t d) {
    auto moved = [&](auto access) {
      access.buffer = to;
      access.index = moved_last(std::move(access.index), d);
      return Block{make_stmt(std::move(access))};
    };
    accesses_.erase(at);
    graph.set_body(at, rewrite(graph.nodes()[at].body, [&](const Ref<Stmt>& stmt) -> Block {
                     if (const auto* load = std::get_if<Load>(&stmt->node); load && load->buffer == from) return moved(*load);
                     if (const auto* store = std::get_if<Store>(&stmt->node); store && store->buffer == from) return moved(*store);
                     return {stmt};
                   }));
  }

  // ---- temporaries ---------------------------------------------------------------------------------------------------

  /// The dimension that sums of products of bytes need innermost: that of their lanes in what they store, else that of the steps that they multiply
  /// together. Nothing where they do not mind.
  std::optional<size_t> dimension_for_bytes(const std::string& name, const FlatSet<size_t>& kernels) {
    std::optional<size_t> stored;
    std::optional<size_t> read;
    for (size_t at : kernels) {
      const auto shared = accesses_of(at);
      const KernelAccesses& accesses = *shared;
      if (accesses.byte_operands.empty()) continue;
      const bool writes = graph.nodes()[at].writes.count(name) > 0;
      if (!writes && accesses.byte_operands.count(name) == 0) continue;
      const std::set<std::string>& wanted = writes ? accesses.byte_lanes : accesses.byte_steps;
      for (const LayoutAccess& access : accesses.all) {
        if (access.buffer != name) continue;
        for (size_t d = 0; d < access.index.size(); ++d)
          if (std::any_of(wanted.begin(), wanted.end(), [&](const auto& axis) { return access.index[d] == Expr::symbol(axis); }))
            (writes ? stored : read) = d;
      }
    }
    return stored ? stored : read;
  }

  void lay_out_temporary(const std::string& name) {
    const Buffer& buffer = graph.buffer(name);
    if (buffer.kind != BufferKind::temp || buffer.shape.size() < 2 || !graph.is_private(name)) return;
    if (buffer.strides != contiguous_strides(buffer.shape)) return;
    FlatSet<size_t> kernels = graph.readers(name);
    kernels.insert(graph.writers(name).begin(), graph.writers(name).end());
    std::vector<double> served(buffer.shape.size(), 0);
    if (std::any_of(kernels.begin(), kernels.end(), [&](size_t at) { return !is_fused(at); })) return;
    if (const auto d = dimension_for_bytes(name, kernels)) {
      if (*d + 1 == served.size()) return;
      for (size_t at : kernels) redirect(at, name, name, *d);
      graph.set_shape(name, moved_last(buffer.shape, *d));
      return;
    }
    for (size_t at : kernels) {
      const auto shared = accesses_of(at);
      const KernelAccesses& accesses = *shared;
      if (accesses.operands.count(name)) return;
      for (const LayoutAccess& access : accesses.all)
        if (access.buffer == name)
          if (auto d = dimension_along(access, accesses.all)) served[*d] += access.points;
    }
    auto best = static_cast<size_t>(std::max_element(served.begin(), served.end()) - served.begin());
    if (best + 1 == served.size() || served[best] <= kMoreAlong * served.back()) return;
    for (size_t at : kernels) redirect(at, name, name, best);
    graph.set_shape(name, moved_last(buffer.shape, best));
  }

  // ---- images --------------------------------------------------------------------------------------------------------

  /// An image that deplo may lay out: which dimension its channels are, and what it gains with them innermost. Images that one kernel moves over
  /// together lie alike: they are a group.
  struct Image {
    std::optional<size_t> channels;
    double gain = 0;
    bool fixed = false;
    std::string group;
  };
  std::map<std::string, Image> images_;

  /// Images in one kernel, with the axis that each dimension of them is, if it is one.
  using Plain = std::map<std::string, std::vector<std::string>>;

  std::string group_of(const std::string& name) {
    std::string at = name;
    while (images_.at(at).group != at) at = images_.at(at).group;
    return at;
  }
  void unite(const std::string& a, const std::string& b) { images_.at(group_of(a)).group = group_of(b); }
  double elements(const std::string& name) const { return size(product(graph.buffer(name).shape)); }

  Plain plain_axes(const KernelAccesses& accesses) const {
    Plain plain;
    for (const LayoutAccess& access : accesses.all) {
      if (images_.count(access.buffer) == 0) continue;
      std::vector<std::string> names;
      for (const Expr& e : access.index) {
        std::string axis;
        for (const Axis& loop : access.loops)
          if (e == Expr::symbol(loop.name)) axis = loop.name;
        names.push_back(axis);
      }
      auto [it, fresh] = plain.try_emplace(access.buffer, names);
      for (size_t d = 0; d < names.size() && !fresh; ++d)
        if (it->second[d] != names[d]) it->second[d].clear();
    }
    return plain;
  }

  /// The only dimension that is one of these axes.
  static std::optional<size_t> dimension_of(const std::vector<std::string>& plain, const std::set<std::string>& axes) {
    std::optional<size_t> found;
    for (size_t d = 0; d < plain.size(); ++d) {
      if (axes.count(plain[d]) == 0) continue;
      if (found) return std::nullopt;
      found = d;
    }
    return found;
  }

  void vote(const std::string& name, std::optional<size_t> d, double gain) {
    Image& image = images_.at(name);
    if (!d || (image.channels && image.channels != d)) image.fixed = true;
    image.channels = d;
    image.gain += gain * elements(name);
  }

  /// Other memory that changes, which a kernel moves over beside images.
  double mixed(const KernelAccesses& accesses, const std::string& operand) const {
    std::set<std::string> others;
    for (const LayoutAccess& access : accesses.all)
      if (graph.find_buffer(access.buffer) && images_.count(access.buffer) == 0 && access.buffer != operand && !is_parameter(access.buffer))
        others.insert(access.buffer);
    double sum = 0;
    for (const auto& name : others) sum += kMixedGain * elements(name);
    return sum;
  }

  void look_at_layer(const KernelAccesses& accesses, const Plain& plain) {
    const bool known = accesses.layers.size() == 1 && accesses.contractions == 1;
    const Layer layer = known ? accesses.layers.front() : Layer{};
    std::string stored;
    for (const auto& [name, axes] : plain) {
      if (!known) images_.at(name).fixed = true;
      if (name == layer.operand) {
        const auto d = dimension_of(axes, layer.summed);
        bool taps = false;
        for (const LayoutAccess& access : accesses.all)
          for (size_t i = 0; i < access.index.size() && access.buffer == name; ++i)
            taps = taps ||
                   (i != d && std::any_of(layer.summed.begin(), layer.summed.end(), [&](const auto& axis) { return uses(access.index[i], axis); }));
        vote(name, d, taps ? kTapsGain : kPointGain);
        continue;
      }
      vote(name, dimension_of(axes, layer.lanes), kStoreGain);
      if (!stored.empty()) unite(name, stored);
      stored = name;
    }
    if (!stored.empty()) images_.at(stored).gain += mixed(accesses, layer.operand);
  }

  /// Channels of images that other kernels move over together are the same axis. Returns whether something was learnt.
  bool spread_channels(const Plain& plain) {
    std::set<std::string> axis;
    for (const auto& [name, axes] : plain)
      if (const auto d = images_.at(name).channels) axis.insert(axes[*d]);
    if (axis.empty()) return false;
    bool learnt = false;
    for (const auto& [name, axes] : plain) {
      Image& image = images_.at(name);
      const auto d = axis.size() == 1 && !axis.begin()->empty() ? dimension_of(axes, axis) : std::nullopt;
      learnt = learnt || (d && !image.channels);
      if (!d) image.fixed = true;
      if (d && !image.channels) image.channels = d;
    }
    return learnt;
  }

  bool may_lie_otherwise(const std::string& name) {
    const Buffer& buffer = graph.buffer(name);
    if (buffer.kind != BufferKind::temp || buffer.shape.size() < 3 || !graph.is_private(name) || !is_float(buffer.dtype)) return false;
    if (buffer.strides != contiguous_strides(buffer.shape)) return false;
    auto fused = [&](size_t at) { return is_fused(at); };
    return std::all_of(graph.readers(name).begin(), graph.readers(name).end(), fused) &&
           std::all_of(graph.writers(name).begin(), graph.writers(name).end(), fused);
  }

  /// Channels of images lie innermost, or where they are, whichever costs less over the whole graph. The cost of a group is its own, so the least for
  /// each one is the least for all.
  void lay_out_images(const std::vector<std::string>& names) {
    FlatSet<size_t> kernels;
    for (const std::string& name : names) {
      if (!may_lie_otherwise(name)) continue;
      images_[name].group = name;
      kernels.insert(graph.readers(name).begin(), graph.readers(name).end());
      kernels.insert(graph.writers(name).begin(), graph.writers(name).end());
    }
    std::vector<Plain> others;
    for (size_t at : kernels) {
      const auto accesses = accesses_of(at);
      const Plain plain = plain_axes(*accesses);
      if (accesses->contractions > 0) {
        look_at_layer(*accesses, plain);
        continue;
      }
      for (const auto& [name, axes] : plain) {
        unite(name, plain.begin()->first);
        images_.at(name).gain += kWindowGain * elements(name);
      }
      const double beside = mixed(*accesses, "");
      // A grid's threads read turned what lies otherwise than the memory beside it.
      double turned = 0;
      for (const auto& [name, axes] : plain) turned += kMixedGain * elements(name);
      images_.at(plain.begin()->first).gain += target_of(context).has_grid && beside < 0 ? std::min(beside, turned) : beside;
      others.push_back(plain);
    }
    for (bool learnt = true; learnt;) {
      learnt = false;
      for (const Plain& plain : others) learnt = spread_channels(plain) || learnt;
    }
    std::map<std::string, double> gains;
    std::set<std::string> fixed;
    for (const auto& [name, image] : images_) {
      const std::string group = group_of(name);
      gains[group] += image.gain;
      if (image.fixed || !image.channels || size(graph.buffer(name).shape[*image.channels]) < kLeastChannels) fixed.insert(group);
    }
    for (const auto& [name, image] : images_) {
      const std::string group = group_of(name);
      if (fixed.count(group) > 0 || gains.at(group) <= 0 || *image.channels + 1 == graph.buffer(name).shape.size()) continue;
      FlatSet<size_t> around = graph.readers(name);
      around.insert(graph.writers(name).begin(), graph.writers(name).end());
      for (size_t at : around) redirect(at, name, name, *image.channels);
      graph.set_shape(name, moved_last(graph.buffer(name).shape, *image.channels));
    }
  }

  // ---- operands of contractions ---------------------------------------------------------------------------------------

  /// The dimension of an operand that should lie innermost: none where a long axis runs along the memory already, and none of an image, whose
  /// points are no single axis.
  std::optional<size_t> dimension_to_pack_along(const LayoutAccess& access, const std::set<std::string>& summed) const {
    std::optional<size_t> found;
    for (const Axis& axis : access.loops) {
      const bool is_long = size(axis.extent) >= kLongAxis;
      auto along = linear_coefficient(access.offset, axis.name);
      if (!along || (is_long && along->is(1))) return std::nullopt;
      if (along->is(0) || summed.count(axis.name)) continue;
      auto own = std::find(access.index.begin(), access.index.end(), Expr::symbol(axis.name));
      if (own == access.index.end()) return std::nullopt;
      if (is_long && !found) found = static_cast<size_t>(own - access.index.begin());
    }
    return found;
  }

  /// The dimension of an operand's lanes where memory runs along what is summed, in several axes: points of an image, whose channels get the lanes
  /// of a gradient of weights. Taps of a window, which are fewer than the points that they are added to, do not matter.
  std::optional<size_t> dimension_of_lanes(const LayoutAccess& access, const std::set<std::string>& summed) const {
    std::optional<size_t> found;
    bool runs = false;
    for (const Axis& axis : access.loops) {
      auto along = linear_coefficient(access.offset, axis.name);
      if (!along) return std::nullopt;
      if (along->is(0)) continue;
      if (summed.count(axis.name)) {
        runs = runs || along->is(1);
        continue;
      }
      auto own = std::find(access.index.begin(), access.index.end(), Expr::symbol(axis.name));
      if (own == access.index.end()) {
        if (is_tap(access, axis, summed)) continue;
        return std::nullopt;
      }
      if (along->is(1) || found || size(axis.extent) < kLongAxis) return std::nullopt;
      found = static_cast<size_t>(own - access.index.begin());
    }
    return runs ? found : std::nullopt;
  }

  /// Whether the axis is added to a longer one that is summed over.
  bool is_tap(const LayoutAccess& access, const Axis& axis, const std::set<std::string>& summed) const {
    return std::any_of(access.index.begin(), access.index.end(), [&](const Expr& index) {
      return uses(index, axis.name) && std::any_of(access.loops.begin(), access.loops.end(), [&](const Axis& other) {
               return summed.count(other.name) > 0 && uses(index, other.name) && size(other.extent) > size(axis.extent);
             });
    });
  }

  void lay_out_operands(size_t at) {
    if (!is_fused(at)) return;
    const auto shared = accesses_of(at);
    const KernelAccesses& accesses = *shared;
    for (const std::string& name : accesses.operands) {
      if (!graph.find_buffer(name) || graph.is_versioned(name) || is_parameter(name) || graph.nodes()[at].writes.count(name)) continue;
      std::optional<size_t> d;
      double points = 0;
      double reads = kOperandReads;
      size_t loads = 0;
      for (const LayoutAccess& access : accesses.all) {
        if (access.buffer != name) continue;
        d = dimension_to_pack_along(access, accesses.summed);
        if (!d && !target_of(context).has_grid && accesses.summed.size() > 1 && accesses.lanes.count(name)) {
          d = dimension_of_lanes(access, accesses.summed);
          reads = kGatheredReads;
        }
        points = access.points;
        ++loads;
      }
      if (loads == 1 && d && points > 0 && points >= reads * size(product(graph.buffer(name).shape))) redirect(at, name, copy_of(at, name, *d), *d);
    }
  }

  /// The dimension of a window's operand that should lie innermost on a GPU, whose copies are made of elements side by side: a long axis that is
  /// summed over, where memory runs along a short one that is (a convolution's channels, where its taps lie innermost).
  std::optional<size_t> dimension_of_steps(const LayoutAccess& access, const std::set<std::string>& summed) const {
    bool short_runs = false;
    std::optional<size_t> found;
    for (const Axis& axis : access.loops) {
      auto along = linear_coefficient(access.offset, axis.name);
      if (!along) return std::nullopt;
      const bool is_long = size(axis.extent) >= kLongAxis;
      if (along->is(1) && (is_long || !summed.count(axis.name))) return std::nullopt;
      short_runs = short_runs || along->is(1);
      if (!is_long || !summed.count(axis.name) || along->is(0)) continue;
      auto own = std::find_if(access.index.begin(), access.index.end(), [&](Expr e) { return is_piece(e, axis); });
      if (own != access.index.end()) found = static_cast<size_t>(own - access.index.begin());
    }
    return short_runs ? found : std::nullopt;
  }

  /// Whether an index is the axis, or an element of one of several pieces of its length.
  static bool is_piece(Expr index, const Axis& axis) {
    if (index == Expr::symbol(axis.name)) return true;
    const auto step = linear_coefficient(index, axis.name);
    if (!step || !step->is(1) || !axis.extent.is_constant() || axis.extent.is(0)) return false;
    const std::vector<Term> rest = terms_of(index - Expr::symbol(axis.name));
    return std::all_of(rest.begin(), rest.end(), [&](const Term& t) { return t.coefficient % axis.extent.value() == 0; });
  }

  void lay_out_windows(size_t at) {
    if (!is_fused(at)) return;
    const auto shared = accesses_of(at);
    for (const std::string& name : shared->operands) {
      if (!graph.find_buffer(name) || graph.is_versioned(name) || graph.nodes()[at].writes.count(name)) continue;
      std::vector<const LayoutAccess*> loads;
      for (const LayoutAccess& access : shared->all)
        if (access.buffer == name) loads.push_back(&access);
      if (loads.size() != 1) continue;
      const auto d = dimension_of_steps(*loads[0], shared->summed);
      const double reads = is_parameter(name) ? kLeastReads : kOperandReads;
      if (d && loads[0]->points >= reads * size(product(graph.buffer(name).shape))) redirect(at, name, copy_of(at, name, *d), *d);
    }
  }

  // ---- parameters ----------------------------------------------------------------------------------------------------

  void lay_out_parameters(size_t at) {
    if (!is_fused(at)) return;
    const auto shared = accesses_of(at);
    const KernelAccesses& accesses = *shared;
    std::map<std::string, std::optional<size_t>> chosen;  ///< nothing where the loads of one buffer disagree
    std::map<std::string, double> points;
    for (const LayoutAccess& access : accesses.all) {
      if (!is_parameter(access.buffer) || accesses.operands.count(access.buffer)) continue;
      if (!target_of(context).has_grid && accesses.factors.count(access.buffer)) continue;
      auto d = dimension_along(access, accesses.all);
      if (d && graph.buffer(access.buffer).strides[*d].is(1)) d = std::nullopt;  // as it should be
      auto [it, is_new] = chosen.try_emplace(access.buffer, d);
      if (!is_new && it->second != d) it->second = std::nullopt;
      points[access.buffer] += access.points;
    }
    for (const auto& [name, d] : chosen)
      if (d && points[name] >= kLeastReads * size(product(graph.buffer(name).shape))) redirect(at, name, copy_of(at, name, *d), *d);
  }

  std::string copy_of(size_t at, const std::string& name, size_t d) {
    auto [it, is_new] = copies.try_emplace({name, d});
    if (!is_new) return it->second;
    const Buffer buffer = graph.buffer(name);
    it->second = graph.add_buffer("laid0", buffer.dtype, moved_last(buffer.shape, d));
    Names names;
    std::vector<Axis> axes;
    std::vector<Expr> index;
    for (const Expr& extent : buffer.shape) {
      axes.push_back({names.fresh("i0"), extent});
      index.push_back(Expr::symbol(axes.back().name));
    }
    Body body(names);
    const std::string value = body.load(name, buffer.dtype, index);
    body.store(it->second, moved_last(index, d), value);
    graph.add_kernel(make_nest(axes, body.take()), at);
    return it->second;
  }

  Module run() {
    std::vector<std::string> names;
    for (const Buffer& buffer : graph.program().buffers) names.push_back(buffer.name);
    lay_out_images(names);
    for (const std::string& name : names) lay_out_temporary(name);
    for (size_t at = 0, count = graph.nodes().size(); at < count; ++at) {
      lay_out_parameters(at);
      if (target_of(context).has_grid) lay_out_windows(at);
      lay_out_operands(at);
    }
    return graph.finish();
  }
};

}  // namespace

Module choose_layouts(Module module, const PassContext& context) { return Chooser{ProgramGraph(std::move(module)), context, {}, {}, {}, {}}.run(); }

}  // namespace deplo
