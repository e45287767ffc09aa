#include "target/cuda/schedule/four_bits.h"

#include <algorithm>
#include <map>
#include <optional>

#include "loop_ir/build.h"
#include "loop_ir/rewrite.h"
#include "lower/loop_to_tile/convert.h"

namespace deplo::loop_to_tile {

using namespace loop_ir;

namespace {

constexpr int64_t kBytes = 16;
constexpr int64_t kCodes = 2 * kBytes;
constexpr int64_t kMask = 15;
constexpr int64_t kMost = 8;  // signed codes are from -8 on

Scalar whole(int64_t value) { return Scalar::of_int(DType::i32, value); }

/// The index of a load's bytes along memory if they run through all of the summed axes and nothing else.
bool runs_through(const Load& load, const Param& param, const std::vector<Axis>& k) {
  if (load.index.empty() || !load.guard.empty() || param.strides != contiguous_strides(param.shape)) return false;
  for (const Expr& extent : param.shape)
    if (!extent.is_constant()) return false;
  Expr rest = load.index.back();
  int64_t length = 1;
  for (size_t a = k.size(); a-- > 0;) {
    const auto step = linear_coefficient(load.index.back(), k[a].name);
    if (!step || !step->is(length) || !k[a].extent.is_constant()) return false;
    length *= k[a].extent.value();
    rest = rest - *step * Expr::symbol(k[a].name);
    for (size_t d = 0; d + 1 < load.index.size(); ++d)
      if (uses(load.index[d], k[a].name)) return false;
  }
  return rest.is(0) && param.shape.back().is(length) && k.back().extent.value() % kCodes == 0;
}

Kernel pack_kernel(const std::string& name, const Param& codes, const Param& packed) {
  Kernel out;
  out.name = name;
  out.params = {codes, packed};
  out.params[0].name = "codes";
  out.params[1].name = "packed";
  out.params[1].kind = ParamKind::out;
  out.params[1].is_static = false;
  Names names;
  names.reserve(out);
  std::vector<Axis> axes;
  std::vector<Expr> index;
  for (size_t d = 0; d + 1 < codes.shape.size(); ++d) {
    axes.push_back({names.fresh("i0"), codes.shape[d]});
    index.push_back(Expr::symbol(axes.back().name));
  }
  axes.push_back({names.fresh("i0"), exact_quotient(codes.shape.back(), kCodes).value()});
  axes.push_back({names.fresh("i0"), kBytes});
  const Expr block = Expr::symbol(axes[axes.size() - 2].name);
  const Expr byte = Expr::symbol(axes.back().name);
  Body body(names);
  const bool is_signed = codes.dtype == DType::i8;
  const auto code = [&](int64_t half) {
    std::vector<Expr> at = index;
    at.push_back(block * kCodes + half * kBytes + byte);
    std::string value = body.cast(body.load("codes", codes.dtype, at), codes.dtype, DType::i32);
    if (is_signed) value = body.let(Fn::add, DType::i32, {value, body.constant(whole(kMost))});
    return body.let(Fn::bit_and, DType::i32, {value, body.constant(whole(kMask))});
  };
  const std::string low = code(0);
  const std::string high = body.let(Fn::shl, DType::i32, {code(1), body.constant(whole(4))});
  const std::string both = body.let(Fn::bit_or, DType::i32, {low, high});
  std::vector<Expr> at = index;
  at.push_back(block * kBytes + byte);
  body.store("packed", at, body.cast(both, DType::i32, DType::u8));
  out.body = make_nest(axes, body.take());
  return out;
}

/// What takes the place of a load of codes and of its conversions to floats: see FourBits.
class Decoder {
 public:
  Decoder(const Kernel& kernel, const std::vector<Codes>& codes) : kernel_(kernel) {
    names_.reserve(kernel);
    for (const Codes& c : codes) {
      const Param* param = kernel.find_param(c.load->buffer);
      const bool is_byte = c.load->dtype == DType::i8 || c.load->dtype == DType::u8;
      int loads = 0;
      visit(kernel.body, [&](const Stmt& stmt, const auto&) {
        const auto* load = std::get_if<Load>(&stmt.node);
        loads += load && load->buffer == c.load->buffer;
      });
      if (param && is_byte && loads == 1 && runs_through(*c.load, *param, c.k)) codes_.emplace(c.load->name, c);
    }
  }

  FourBits run() {
    FourBits out;
    if (codes_.empty()) return out;
    out.kernel = kernel_;
    out.kernel.name += "_four_bits";
    out.kernel.body = rewrite(kernel_.body, [&](const Ref<Stmt>& stmt) -> Block {
      const auto* reduce = std::get_if<Reduce>(&stmt->node);
      return reduce ? Block{decoded(*reduce)} : Block{stmt};
    });
    for (const auto& [name, c] : codes_) {
      Param& param = *std::find_if(out.kernel.params.begin(), out.kernel.params.end(), [&](const Param& p) { return p.name == c.load->buffer; });
      const Param before = param;
      param.dtype = DType::u8;
      param.shape.back() = exact_quotient(param.shape.back(), 2).value();
      param.strides = contiguous_strides(param.shape);
      const bool is_signed = before.dtype == DType::i8;
      const std::string number = out.packed.empty() ? "" : std::to_string(out.packed.size());
      out.packed.push_back({before.name, is_signed ? -kMost : 0, is_signed ? kMost - 1 : kMask,
                            pack_kernel(out.kernel.name + "_pack" + number, before, param), param.shape});
    }
    out.kernel.body = clean(out.kernel.body, out.kernel.symbols);
    return out;
  }

 private:
  Ref<Stmt> decoded(const Reduce& reduce) {
    Reduce out = reduce;
    for (const auto& stmt : reduce.body) {
      const auto* load = std::get_if<Load>(&stmt->node);
      const auto found = load ? codes_.find(load->name) : codes_.end();
      if (found != codes_.end()) out = decoded(out, found->second);
    }
    return make_stmt(std::move(out));
  }

  /// With the last axis cut in blocks of 32, halves and bytes.
  Reduce decoded(const Reduce& reduce, const Codes& codes) {
    const std::string& last = codes.k.back().name;
    Reduce out = reduce;
    const auto at = std::find_if(out.axes.begin(), out.axes.end(), [&](const Axis& axis) { return axis.name == last; });
    if (at == out.axes.end()) return cut_ ? with_codes(reduce, codes) : reduce;
    const Expr blocks = exact_quotient(at->extent, kCodes).value();
    block_ = names_.fresh("k0");
    half_ = names_.fresh("k0");
    byte_ = names_.fresh("k0");
    cut_ = true;
    *at = {block_, blocks};
    out.axes.insert(at + 1, {{half_, Expr(2)}, {byte_, Expr(kBytes)}});
    Renaming renaming;
    renaming.exprs[last] = Expr::symbol(block_) * kCodes + Expr::symbol(half_) * kBytes + Expr::symbol(byte_);
    out.body = copy_block(out.body, renaming, nullptr);
    return with_codes(out, codes);
  }

  Reduce with_codes(const Reduce& reduce, const Codes& codes) {
    Reduce out = reduce;
    Body body(names_);
    std::string number;
    for (const auto& stmt : reduce.body) {
      const auto* load = std::get_if<Load>(&stmt->node);
      const auto* let = std::get_if<Let>(&stmt->node);
      if (load && load->name == codes.load->name) {
        number = decode(*load, body);
      } else if (let && let->fn == Fn::cast && let->operands[0] == codes.load->name && is_float(let->dtype) && let->dtype != DType::f64) {
        Let from = *let;
        from.operands = {number};
        // A float32 number of its own name, for what reads it.
        if (from.dtype == DType::f32) from = Let{let->name, DType::f32, Fn::sub, {code_, offset_}, {}, 0};
        body.append(make_stmt(std::move(from)));
      } else {
        body.append(stmt);
      }
    }
    out.body = body.take();
    return out;
  }

  /// Defines the code under its name; returns it as float32.
  std::string decode(const Load& load, Body& body) {
    const bool is_signed = load.dtype == DType::i8;
    std::vector<Expr> index = load.index;
    Expr last = Expr::symbol(byte_);
    // All axes but the last one go over half as many bytes.
    const Expr others = substitute(load.index.back(), {{block_, Expr(0)}, {half_, Expr(0)}, {byte_, Expr(0)}});
    index.back() = exact_quotient(others, 2).value() + Expr::symbol(block_) * kBytes + last;
    const std::string bytes = body.load(load.buffer, DType::u8, index);
    const std::string wide = body.cast(bytes, DType::u8, DType::i32);
    const std::string shifted = body.let(Fn::shr, DType::i32, {wide, body.index(DType::i32, Expr::symbol(half_) * 4)});
    const std::string nibble = body.let(Fn::bit_and, DType::i32, {shifted, body.constant(whole(kMask))});
    const std::string less = is_signed ? body.let(Fn::sub, DType::i32, {nibble, body.constant(whole(kMost))}) : nibble;
    body.append(make_stmt(Let{load.name, load.dtype, Fn::cast, {less}, {}, 0}));
    code_ = body.cast(body.cast(nibble, DType::i32, DType::u8), DType::u8, DType::f32);
    offset_ = body.constant(Scalar::of_float(DType::f32, is_signed ? static_cast<double>(kMost) : 0.0));
    return body.let(Fn::sub, DType::f32, {code_, offset_});
  }

  const Kernel& kernel_;
  Names names_;
  std::map<std::string, Codes> codes_;  ///< by the names of their loads
  std::string block_, half_, byte_, code_, offset_;
  bool cut_ = false;
};

}  // namespace

FourBits with_four_bits(const Kernel& kernel, const std::vector<Codes>& codes) { return Decoder(kernel, codes).run(); }

}  // namespace deplo::loop_to_tile
