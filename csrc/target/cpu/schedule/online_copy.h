#pragma once

#include <map>
#include <string>

#include "base/text.h"
#include "loop_ir/ir.h"
#include "lower/loop_to_tile/convert.h"

namespace deplo::loop_to_tile {

constexpr int64_t kNarrow = int64_t{1} << 30;  // places so far from 0 are 32 bits, also some blocks further

/// A value that stands for an element of a buffer, and ranges of what guards of its loads use.
struct Known {
  std::string value;
  Ranges ranges;
};

/// Copies statements under a substitution of axes; names get a suffix, for a body holds several copies. Values in `given` stand for others.
struct Copy {
  Substitution map;
  std::string suffix;
  std::map<std::string, std::string> renamed;

  void add(const loop_ir::Block& block, tile_ir::Block& into, const std::map<std::string, loop_ir::Load>& instead = {},
           const std::map<std::string, Known>& values = {}) {
    for (const auto& stmt : block) {
      if (const auto* from = std::get_if<loop_ir::Let>(&stmt->node)) {
        if (renamed.count(from->name)) continue;
        loop_ir::Let s = substituted(*from, map);
        for (std::string& o : s.operands) o = value(o);
        define(from->name, s.name = from->name + suffix);
        into.push_back(make(std::move(s)));
      } else if (const auto* from = std::get_if<loop_ir::Load>(&stmt->node)) {
        if (renamed.count(from->name)) continue;
        if (auto known = values.find(from->buffer); known != values.end()) {
          define(from->name, guarded(*from, known->second, into));
          continue;
        }
        auto other = instead.find(from->buffer);
        loop_ir::Load s = substituted(*from, map);
        if (other != instead.end()) {
          s.buffer = other->second.buffer;
          s.index = other->second.index;
        }
        define(from->name, s.name = from->name + suffix);
        into.push_back(make(std::move(s)));
      } else if (const auto* from = std::get_if<loop_ir::Store>(&stmt->node)) {
        loop_ir::Store s = substituted(*from, map);
        s.value = value(s.value);
        into.push_back(make(std::move(s)));
      }
    }
  }
  /// What a load under a guard gives where the value is at hand.
  std::string guarded(const loop_ir::Load& from, const Known& known, tile_ir::Block& into) const {
    if (from.guard.empty()) return known.value;
    std::string all;
    for (size_t n = 0; n < from.guard.size(); ++n) {
      const Cond& cond = from.guard[n];
      const Interval range = bounds(cond.expr, known.ranges);
      const DType dtype = range.lo && range.hi && *range.lo >= -kNarrow && *range.hi <= kNarrow ? DType::i32 : DType::i64;
      const std::string tag = fmt::format("{}{}", n, suffix);
      into.push_back(make(loop_ir::Let{"place" + tag, dtype, Fn::index, {}, {}, substitute(cond.expr, map)}));
      into.push_back(make(loop_ir::Let{"edge" + tag, dtype, Fn::constant, {}, Scalar::of_int(dtype, 0), 0}));
      const Fn fn = cond.kind == Cond::Kind::ge0 ? Fn::ge : cond.kind == Cond::Kind::eq0 ? Fn::eq : Fn::ne;
      into.push_back(make(loop_ir::Let{"counts" + tag, DType::boolean, fn, {"place" + tag, "edge" + tag}, {}, 0}));
      if (n > 0) into.push_back(make(loop_ir::Let{"all" + tag, DType::boolean, Fn::bit_and, {all, "counts" + tag}, {}, 0}));
      all = (n > 0 ? "all" : "counts") + tag;
    }
    into.push_back(make(loop_ir::Let{"fill" + suffix, from.dtype, Fn::constant, {}, from.fill, 0}));
    into.push_back(make(loop_ir::Let{from.name + suffix, from.dtype, Fn::where, {all, known.value, "fill" + suffix}, {}, 0}));
    return from.name + suffix;
  }
  void define(const std::string& from, const std::string& to) {
    renamed[from] = to;
    map[from] = Expr::symbol(to);
  }
  std::string value(const std::string& name) const {
    auto it = renamed.find(name);
    return it == renamed.end() ? name : it->second;
  }
};

}  // namespace deplo::loop_to_tile
