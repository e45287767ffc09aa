#include "target/cpu/schedule/rows.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "analysis/contraction.h"
#include "analysis/cost.h"
#include "base/error.h"
#include "base/text.h"
#include "loop_ir/params.h"
#include "loop_ir/rewrite.h"
#include "lower/loop_to_tile/phases.h"
#include "target/cpu/schedule/contraction.h"
#include "target/cpu/schedule/nest_converter.h"

namespace deplo {
namespace {

using namespace loop_to_tile;
using loop_ir::Axis;
using loop_ir::Block;
using loop_ir::Stmt;
using tile_ir::LoopKind;
using tile_ir::Space;

constexpr int64_t kMostRows = 256;     // of a block: more gain little, for the other operand is packed for each
constexpr int64_t kFewRows = 64;       // of a block, where more leave threads idle
constexpr int64_t kLeastRows = 16;     // fewer do not pay for packing the other operand
constexpr int64_t kWantedBlocks = 16;  // keep a few threads busy
constexpr int64_t kChunkWork = 65536;
constexpr int64_t kMostRowTile = 4096;  // that a schedule may ask for
constexpr int64_t kMostWork = int64_t{1} << 40;
constexpr const char* kFirst = "$first";  // stands for the first row of the block

class RowScheduler {
 public:
  RowScheduler(const loop_ir::Kernel& kernel, const PassContext& ctx) : kernel_(kernel), ctx_(ctx), nest_(outer_nest(kernel)) {
    names_.reserve(kernel);
    for (const auto& p : kernel.params)
      if (p.kind == loop_ir::ParamKind::in) inputs_.insert(p.name);
  }

  std::optional<Schedule> propose() {
    if (!recognize()) return std::nullopt;
    nests_.insert(candidates_.begin(), candidates_.end());
    while (!nests_.empty()) {
      plan();
      if (choose()) return describe();
    }
    return std::nullopt;
  }

  /// Every product is one of a phase.
  bool takes_all() { return propose() && chosen_.size() == candidates_.size(); }

  tile_ir::Kernel apply(const Schedule& schedule) {
    ScheduleReader reader(kernel_.name, schedule);
    if (!recognize() || candidates_.empty()) reader.fail("the kernel's rows hold no contraction");
    read(schedule);
    plan();
    emit();
    inner_lanes_.finish();
    tile_ir::Kernel out;
    out.name = kernel_.name;
    out.params = kernel_.params;
    out.symbols = kernel_.symbols;
    out.provenance = kernel_.provenance;
    out.body = std::move(body_);
    Expr work = analysis::cost_of(kernel_).operations;
    out.chunks = max(1, min(parallel_extent_, ceildiv(work, chunk_work_)));
    out.schedule = schedule;
    return out;
  }

 private:
  // ---- phases ----------------------------------------------------------------------------------------------------

  bool recognize() {
    if (nest_.axes.empty() || !colliding_stores(kernel_).empty()) return false;
    row_ = nest_.axes.back();
    batch_.assign(nest_.axes.begin(), nest_.axes.end() - 1);
    find_nests();
    return true;
  }

  /// Inner nests that directly hold a contraction.
  void find_nests() {
    auto contractions = analysis::find_contractions(kernel_);
    for (const auto& stmt : *nest_.inner) {
      const auto* loop = std::get_if<loop_ir::For>(&stmt->node);
      if (!loop) continue;
      loop_ir::Nest inner = loop_ir::peel({stmt});
      for (const auto& s : inner.body)
        for (const auto& c : contractions)
          if (std::get_if<loop_ir::Reduce>(&s->node) == c.reduce && (candidates_.empty() || candidates_.back() != loop)) candidates_.push_back(loop);
    }
  }

  void plan() {
    CutRules rules;
    rules.apart = [&](const loop_ir::For& loop) { return nests_.count(&loop) > 0; };
    // Only arithmetic on inputs is done again.
    rules.again = [&](const Stmt& stmt) {
      const auto* load = std::get_if<loop_ir::Load>(&stmt.node);
      return std::holds_alternative<loop_ir::Let>(stmt.node) || (load && inputs_.count(load->buffer));
    };
    Phases cut = cut_into_phases(*nest_.inner, rules, names_);
    phases_ = std::move(cut.all);
    locals_ = std::move(cut.locals);
    if (rows_of_schedule_ == 0) choose_rows();
    capacity_ = contraction_rows(rows_, ctx_);
    for (Phase& phase : phases_) phase.body = with_place(phase.body, locals_, sym(row_.name) - sym(kFirst), false);
    for (auto& l : locals_) l.shape.insert(l.shape.begin(), Expr(capacity_));
  }

  void choose_rows() {
    double bytes = 1;
    for (const auto& l : locals_) bytes += analysis::estimate(product(l.shape), ctx_.hints, kernel_.symbols) * static_cast<double>(size_of(l.dtype));
    auto fitting = static_cast<int64_t>(static_cast<double>(ctx_.target.l2_bytes) / 2 / bytes);
    rows_ = std::clamp(fitting, kLeastRows, kMostRows);
    auto count_of = [&](Expr e) { return analysis::estimate(e, ctx_.hints, kernel_.symbols); };
    const double batch = count_of(count(batch_));
    const double rows = count_of(row_.extent);
    while (rows_ > kFewRows && batch * std::ceil(rows / static_cast<double>(rows_)) < kWantedBlocks) rows_ = std::max(kFewRows, rows_ / 2);
    if (auto n = row_.extent.as_constant(); n && *n > 0) {
      int64_t blocks = (*n + rows_ - 1) / rows_;
      rows_ = (*n + blocks - 1) / blocks;
    }
  }

  // ---- building --------------------------------------------------------------------------------------------------

  ContractionRows block() const {
    Expr par = sym("par");
    Expr blocks = ceildiv(row_.extent, rows_);
    ContractionRows tile;
    tile.axis = row_.name;
    tile.count = rows_;
    tile.first = mod(par, blocks) * rows_;
    tile.valid = min(rows_, row_.extent - tile.first);
    tile.outer = unflatten(batch_, floordiv(par, blocks));
    tile.outer[kFirst] = tile.first;
    return tile;
  }

  /// The phase's nest as a kernel over the block's arrays.
  loop_ir::Kernel nest_of(const Phase& phase) const {
    std::vector<Axis> axes = nest_.axes;
    loop_ir::Nest inner = loop_ir::peel({phase.body.back()});
    axes.insert(axes.end(), inner.axes.begin(), inner.axes.end());
    Block body(phase.body.begin(), phase.body.end() - 1);
    body.insert(body.end(), inner.body.begin(), inner.body.end());
    return with_locals(kernel_, loop_ir::make_nest(axes, body), locals_);
  }

  /// False if a nest turned out not to be schedulable; it is then an ordinary statement of the rows.
  bool choose() {
    ContractionRows tile = block();
    inner_lanes_ = {};
    chosen_.clear();
    for (const Phase& phase : phases_) {
      if (!phase.nest) {
        loop_ir::Kernel kernel = with_locals(kernel_, phase.body, locals_);
        NestConverter(kernel, ctx_).propose_lanes(kernel.body, inner_lanes_);
        continue;
      }
      auto proposed = propose_contraction_rows(nest_of(phase), tile, ctx_);
      if (!proposed) {
        nests_.erase(phase.nest);
        return false;
      }
      chosen_[phase.nest] = std::move(*proposed);
    }
    return true;
  }

  Schedule describe() const {
    Schedule s{"rows", {}};
    std::vector<Argument> parallel;
    for (const auto& a : batch_) parallel.push_back({a.name, {}});
    parallel.insert(parallel.end(), {{row_.name, {}}, {"work", chunk_work_}});
    s.directives = {{"parallel", std::move(parallel)}, {"tile", {{row_.name, rows_}}}};
    for (Directive& d : inner_lanes_.describe()) s.directives.push_back(std::move(d));
    for (size_t n = 0; n < candidates_.size(); ++n) {
      auto phase = chosen_.find(candidates_[n]);
      if (phase == chosen_.end()) continue;
      s.directives.push_back({"phase", {{"", static_cast<int64_t>(n)}}});
      s.directives.insert(s.directives.end(), phase->second.begin(), phase->second.end());
    }
    return s;
  }

  void read(const Schedule& schedule) {
    Schedule outside{schedule.kind, {}};
    std::vector<Directive>* part = &outside.directives;
    for (const Directive& d : schedule.directives) {
      if (d.word != "phase") {
        part->push_back(d);
        continue;
      }
      ScheduleReader reader(kernel_.name, schedule);
      reader.only(d, {""});
      const loop_ir::For* nest = candidates_[static_cast<size_t>(reader.number(d, "", 0, static_cast<int64_t>(candidates_.size()) - 1))];
      if (!nests_.insert(nest).second) reader.fail(d, "a second time the same phase");
      part = &chosen_[nest];
    }
    reader_.emplace(kernel_.name, outside);
    const Directive& parallel = reader_->one("parallel");
    std::vector<std::string> names = reader_->names(parallel);
    std::vector<std::string> wanted;
    for (const auto& a : nest_.axes) wanted.push_back(a.name);
    if (names.size() != wanted.size() || names.back() != row_.name || !std::is_permutation(names.begin(), names.end(), wanted.begin()))
      reader_->fail(parallel, fmt::format("allowed: {} and work; the last one, the rows, stays in place", joined(wanted)));
    std::vector<Axis> ordered;
    for (const std::string& name : names)
      for (const Axis& a : batch_)
        if (a.name == name) ordered.push_back(a);
    batch_ = std::move(ordered);
    wanted.push_back("work");
    reader_->only(parallel, {wanted.begin(), wanted.end()});
    chunk_work_ = reader_->number(parallel, "work", 1, kMostWork);
    const Directive& tile = reader_->one("tile");
    reader_->only(tile, {row_.name});
    rows_ = rows_of_schedule_ = reader_->number(tile, row_.name, 1, kMostRowTile);
    inner_lanes_ = InnerLanes::read(*reader_, "");
    if (nests_.empty()) reader_->fail(fmt::format("it needs a 'phase(N)', N from 0 to {}", candidates_.size() - 1));
    reader_->finish("parallel, tile, vectorize and phases");
  }

  void emit() {
    ContractionRows tile = block();
    tile_ir::Block out;
    for (const auto& l : locals_) out.push_back(make(tile_ir::Alloc{l.name, l.dtype, l.shape, Space::scratch}));
    for (size_t p = 0; p < phases_.size(); ++p) {
      const Phase& phase = phases_[p];
      if (!phase.nest) {
        out.push_back(row_loop(phase.body, tile));
        continue;
      }
      tile.tag = std::to_string(p) + "_";
      tile_ir::Block block = apply_contraction_rows(nest_of(phase), tile, {"phase", chosen_.at(phase.nest)}, ctx_);
      out.insert(out.end(), block.begin(), block.end());
    }
    parallel_extent_ = count(batch_) * ceildiv(row_.extent, rows_);
    body_ = {make(tile_ir::For{axis("par", 0, parallel_extent_, LoopKind::parallel), std::move(out)})};
  }

  Ref<tile_ir::Stmt> row_loop(const Block& body, const ContractionRows& tile) {
    loop_ir::Kernel kernel = with_locals(kernel_, body, locals_);
    NestConverter converter(kernel, ctx_);
    converter.map() = tile.outer;
    converter.map()[row_.name] = tile.first + sym("row");
    return make(tile_ir::For{axis("row", 0, tile.valid), converter.convert(kernel.body, true, inner_lanes_)});
  }

  const loop_ir::Kernel& kernel_;
  const PassContext& ctx_;
  OuterNest nest_;
  loop_ir::Names names_;
  std::set<std::string> inputs_;
  Axis row_;
  std::vector<Axis> batch_;
  std::vector<const loop_ir::For*> candidates_;  ///< inner nests with a contraction, which may become phases
  std::set<const loop_ir::For*> nests_;          ///< those that do
  std::map<const loop_ir::For*, std::vector<Directive>> chosen_;
  InnerLanes inner_lanes_;
  std::optional<ScheduleReader> reader_;
  int64_t rows_of_schedule_ = 0;
  int64_t chunk_work_ = kChunkWork;
  std::vector<Phase> phases_;
  std::vector<loop_ir::Local> locals_;
  int64_t rows_ = 0;
  int64_t capacity_ = 0;
  Expr parallel_extent_ = 1;
  tile_ir::Block body_;
};

}  // namespace

std::optional<Schedule> propose_cpu_rows(const loop_ir::Kernel& kernel, const PassContext& ctx) { return RowScheduler(kernel, ctx).propose(); }

bool cpu_rows_take_all(const loop_ir::Kernel& kernel, const PassContext& ctx) { return RowScheduler(kernel, ctx).takes_all(); }

tile_ir::Kernel apply_cpu_rows(const loop_ir::Kernel& kernel, const Schedule& schedule, const PassContext& ctx) {
  return RowScheduler(kernel, ctx).apply(schedule);
}

}  // namespace deplo
