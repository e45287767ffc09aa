#include "target/cpu/schedule/variants.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <set>

#include "analysis/cost.h"
#include "base/text.h"
#include "target/cpu/schedule/contraction_scheduler.h"

namespace deplo {
namespace {

constexpr int64_t kMostVariantVectors = 4;  // of a register block's lanes
constexpr int64_t kMostOrders = 6;          // of the parallel axes that are tried
constexpr int64_t kMostParts = 32;          // that an axis is cut into
constexpr int64_t kMostChoices = 12;        // of one decision, unless all are wanted

int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }
int64_t parts_of(int64_t n, int64_t size) { return (n + size - 1) / size; }

/// The extent of a group of axes, as i0*i1, i0_i1 (merged) or r0.k0*k1; nothing if one is unknown.
std::optional<int64_t> extent_of(const std::string& group, const Extents& extents) {
  const size_t dot = group.find('.');
  std::string rest = dot == std::string::npos ? group : group.substr(dot + 1);
  int64_t product = 1;
  for (size_t at = 0; at <= rest.size();) {
    const size_t end = std::min(rest.find_first_of("*_", at), rest.size());
    const auto found = extents.find(rest.substr(at, end - at));
    if (found == extents.end()) return std::nullopt;
    product *= std::max<int64_t>(1, found->second);
    at = end + 1;
  }
  return product;
}

void collect(const loop_ir::Block& block, const PassContext& ctx, const Ranges& symbols, Extents& extents) {
  auto note = [&](const loop_ir::Axis& axis) {
    extents[axis.name] = std::max(extents[axis.name], static_cast<int64_t>(analysis::estimate(axis.extent, ctx.hints, symbols)));
  };
  for (const auto& stmt : block)
    std::visit(Overloaded{[&](const loop_ir::For& s) {
                            note({s.axis, s.extent});
                            collect(s.body, ctx, symbols, extents);
                          },
                          [&](const loop_ir::Reduce& s) {
                            for (const loop_ir::Axis& axis : s.axes) note(axis);
                          },
                          [&](const loop_ir::Scan& s) { note(s.axis); }, [](const auto&) {}},
               stmt->node);
}

/// A number among the arguments of a schedule: word(..., name=number, ...) where `axis` is the directive's first argument.
struct Place {
  size_t directive = 0;
  size_t argument = 0;
};

class Directions {
 public:
  Directions(const Schedule& base, const Extents& extents, const std::map<std::string, int64_t>& longest, bool wide, const PassContext& ctx)
      : base_(base),
        extents_(extents),
        longest_(longest),
        wide_(wide),
        vector_(ctx.target.vector_bytes / 4),
        registers_(ctx.target.vector_registers) {}

  std::vector<Direction> all() {
    for (const auto& [begin, end] : parts()) {
      begin_ = begin;
      end_ = end;
      prefix_ = begin == 0 ? "" : fmt::format("phase {} ", number({begin - 1, 0}));
      if (base_.kind == "contraction" || begin > 0)
        contraction();
      else if (base_.kind == "online")
        online();
      else
        nest();
    }
    begin_ = 0;
    end_ = base_.directives.size();
    prefix_ = "";
    work();
    order();
    return std::move(found_);
  }

 private:
  // ---- reading and changing schedules ----------------------------------------------------------------------------

  /// Ranges of directives that are about one nest: all that stand before a phase, then each phase.
  std::vector<std::pair<size_t, size_t>> parts() const {
    std::vector<std::pair<size_t, size_t>> out{{0, 0}};
    for (size_t d = 0; d < base_.directives.size(); ++d) {
      if (base_.directives[d].word == "phase") out.emplace_back(d + 1, d + 1);
      out.back().second = d + 1;
    }
    return out;
  }

  std::vector<size_t> find(const std::string& word) const {
    std::vector<size_t> out;
    for (size_t d = begin_; d < end_; ++d)
      if (base_.directives[d].word == word) out.push_back(d);
    return out;
  }

  /// The number of word(name=number).
  std::optional<Place> find(const std::string& word, const std::string& name) const {
    for (size_t d : find(word))
      for (size_t a = 0; a < base_.directives[d].arguments.size(); ++a)
        if (base_.directives[d].arguments[a].name == name && is_number({d, a})) return Place{d, a};
    return std::nullopt;
  }

  bool is_number(Place at) const { return std::holds_alternative<int64_t>(base_.directives[at.directive].arguments[at.argument].value); }
  int64_t number(Place at) const { return std::get<int64_t>(base_.directives[at.directive].arguments[at.argument].value); }
  static void set(Schedule& s, Place at, int64_t value) { s.directives[at.directive].arguments[at.argument].value = value; }
  const std::string& name(Place at) const { return base_.directives[at.directive].arguments[at.argument].name; }

  static bool has(const Directive& d, const std::string& argument) {
    return std::any_of(d.arguments.begin(), d.arguments.end(), [&](const Argument& a) { return a.name == argument; });
  }

  void add(const std::string& direction, std::vector<Schedule> schedules) {
    std::vector<Schedule> kept;
    for (Schedule& s : schedules) {
      if (s == base_ || std::find(kept.begin(), kept.end(), s) != kept.end()) continue;
      const auto sums = longest_sums(s, extents_);
      const bool is_bounded = std::all_of(sums.begin(), sums.end(), [&](const auto& sum) {
        const auto most = longest_.find(sum.first);
        return most != longest_.end() && sum.second <= most->second;
      });
      if (is_bounded && (wide_ || static_cast<int64_t>(kept.size()) < kMostChoices)) kept.push_back(std::move(s));
    }
    if (!kept.empty()) found_.push_back({prefix_ + direction, std::move(kept)});
  }

  /// The schedule with each of these numbers in one place.
  void vary(const std::string& direction, Place at, const std::vector<int64_t>& values) {
    std::vector<Schedule> schedules;
    for (int64_t value : values) {
      if (value < 1) continue;
      schedules.push_back(base_);
      set(schedules.back(), at, value);
    }
    add(direction, std::move(schedules));
  }

  /// Sizes of tiles that cut `extent` into equal parts of whole units, those nearest to `now` first.
  std::vector<int64_t> sizes(std::optional<int64_t> extent, int64_t now, int64_t unit) const {
    std::vector<int64_t> out;
    if (extent) {
      const int64_t units = parts_of(*extent, unit);
      for (int64_t n = 1; n <= std::min(units, wide_ ? 4 * kMostParts : kMostParts); ++n) out.push_back(parts_of(units, n) * unit);
    }
    for (int64_t twice : {now * 2, now * 4, now / 2, now / 4, now * 3 / 2, now * 2 / 3})
      if (twice > 0 && (!extent || twice <= round_up(*extent, unit))) out.push_back(round_up(twice, unit));
    std::sort(out.begin(), out.end());
    out.erase(std::unique(out.begin(), out.end()), out.end());
    std::erase(out, now);
    auto ratio = [&](int64_t n) { return static_cast<double>(std::max(n, now)) / static_cast<double>(std::min(n, now)); };
    std::stable_sort(out.begin(), out.end(), [&](int64_t a, int64_t b) { return ratio(a) < ratio(b); });
    if (wide_ || static_cast<int64_t>(out.size()) <= kMostChoices) return out;
    // Some near, some far.
    std::vector<int64_t> some;
    for (int64_t i = 0; i < kMostChoices; ++i) some.push_back(out[static_cast<size_t>(i) * out.size() / static_cast<size_t>(kMostChoices)]);
    return some;
  }

  static std::vector<int64_t> scaled(int64_t now) { return {now / 16, now / 4, now / 2, now * 2, now * 4, now * 16}; }

  // ---- contractions, and phases that are some --------------------------------------------------------------------

  bool has_windows() const {
    const auto packs = find("pack");
    return std::any_of(packs.begin(), packs.end(), [&](size_t d) { return has(base_.directives[d], "windows"); });
  }

  void contraction() {
    depths();
    register_blocks();
    tiles();
    for (size_t d : find("unroll")) {
      if (!is_number({d, 0})) continue;
      vary(fmt::format("unroll({})", name({d, 0})), {d, 0}, {1, 2, 4, 8});
    }
    for (size_t d : find("pack")) packs(d);
    for (size_t d : find("partition"))
      for (size_t a = 0; a < base_.directives[d].arguments.size(); ++a)
        if (is_number({d, a})) vary("partition", {d, a}, {1, 2, 4, 6, 8});
  }

  /// Blocks of k, with chains in them that are as long as now.
  void depths() {
    for (size_t d : find("tile")) {
      const Place at{d, 0};
      const std::string axes = name(at);
      if (axes.find('.') == std::string::npos) continue;
      const auto chain = find("chain", axes);
      const auto dot = find("dot", axes);
      const int64_t group = dot ? number(*dot) : 1;
      const int64_t now = number(at);
      const int64_t usual = chain ? number(*chain) : now;
      const int64_t unit = has_windows() ? std::gcd(now, usual) : std::lcm(group, int64_t{4});
      std::vector<Schedule> schedules;
      auto with = [&](int64_t block, int64_t length) {
        Schedule s = base_;
        set(s, at, block);
        std::erase_if(s.directives, [&](const Directive& other) { return other.word == "chain" && other.arguments[0].name == axes; });
        // Bytes are exact in any order, and a matrix unit has chains of its own.
        if (group <= 2 && length < block) s.directives.insert(s.directives.begin() + static_cast<long>(d) + 1, {"chain", {{axes, length}}});
        schedules.push_back(std::move(s));
      };
      for (int64_t block : sizes(extent_of(axes, extents_), now, unit))
        with(block, std::min(block, round_up(parts_of(block, parts_of(block, usual)), unit)));
      add(fmt::format("tile({})", axes), std::move(schedules));
      schedules.clear();
      if (chain && group <= 2)
        for (int64_t length : {usual / 2, usual * 2 / 3, usual * 3 / 2, usual * 2}) with(now, std::max(unit, length / unit * unit));
      add(fmt::format("chain({})", axes), std::move(schedules));
    }
  }

  /// Other register blocks, with tiles of about the same size.
  void register_blocks() {
    for (size_t d : find("register_block")) {
      const auto& arguments = base_.directives[d].arguments;
      if (has_windows() && arguments.size() == 3) return window_blocks(d);
      if (arguments.size() != 2) continue;
      const Place rows{d, 0};
      const Place lanes{d, 1};
      std::vector<Schedule> schedules;
      const auto extent = extent_of(name(rows), extents_);
      for (auto [mr, nr] : register_shapes(number(rows), number(lanes), extent)) {
        Schedule s = base_;
        set(s, rows, mr);
        set(s, lanes, nr);
        if (auto tile = find("tile", name(rows))) set(s, *tile, round_up(number(*tile), mr));
        if (auto tile = find("tile", name(lanes))) set(s, *tile, round_up(number(*tile), nr));
        if (auto tail = find("partition", "tail")) set(s, *tail, std::min(number(*tail), mr));
        schedules.push_back(std::move(s));
      }
      add("register_block", std::move(schedules));
    }
  }

  /// Rows and lanes, those near to the present ones first.
  std::vector<std::pair<int64_t, int64_t>> register_shapes(int64_t mr, int64_t nr, std::optional<int64_t> rows) const {
    std::vector<std::pair<int64_t, int64_t>> out;
    for (int64_t vectors = 1; vectors <= kMostVariantVectors; ++vectors) {
      const int64_t most = std::max<int64_t>(1, (registers_ - 2 - vectors) / vectors);
      std::set<int64_t> counts{most, std::max<int64_t>(1, most - 1), std::min(most, mr)};
      if (vectors * vector_ == nr)
        counts.insert({std::max<int64_t>(1, mr - 1), std::min(most, mr + 1), std::max<int64_t>(1, mr - 2), std::min(most, mr + 2)});
      if (rows) counts.insert(std::min(most, parts_of(*rows, parts_of(*rows, most))));
      if (wide_)
        for (int64_t n = 1; n <= most; ++n) counts.insert(n);
      for (int64_t n : counts)
        if (!rows || n <= *rows) out.emplace_back(n, vectors * vector_);
    }
    auto distance = [&](const std::pair<int64_t, int64_t>& p) {
      return std::abs(p.first * p.second - mr * nr) + vector_ * std::abs(p.second - nr) / 4;
    };
    std::stable_sort(out.begin(), out.end(), [&](const auto& a, const auto& b) { return distance(a) < distance(b); });
    return out;
  }

  void window_blocks(size_t d) {
    const Place lines{d, 0};
    const Place points{d, 1};
    const Place lanes{d, 2};
    const auto width = extent_of(name(points), extents_);
    const auto height = extent_of(name(lines), extents_);
    if (!width || !height) return;
    std::vector<Schedule> schedules;
    for (int64_t vectors = 1; vectors <= kMostVariantVectors; ++vectors) {
      const int64_t most = std::max<int64_t>(1, (registers_ - 2 - vectors) / vectors);
      std::set<std::pair<int64_t, int64_t>> shapes;
      for (int64_t dx = std::max<int64_t>(1, most / 2); dx <= std::min(most, *width); ++dx)
        if (wide_ || dx == most || dx == number(points) || parts_of(*width, parts_of(*width, dx)) == dx) shapes.emplace(1, dx);
      for (int64_t dy = 2; dy <= *height && dy * *width <= most; ++dy) shapes.emplace(dy, *width);
      for (auto [dy, dx] : shapes) {
        schedules.push_back(base_);
        set(schedules.back(), lines, dy);
        set(schedules.back(), points, dx);
        set(schedules.back(), lanes, vectors * vector_);
        if (auto tile = find("tile", name(lines))) set(schedules.back(), *tile, round_up(number(*tile), dy));
        if (auto tile = find("tile", name(lanes))) set(schedules.back(), *tile, round_up(number(*tile), vectors * vector_));
      }
    }
    add("register_block", std::move(schedules));
  }

  /// Tiles of rows and lanes: whole register blocks.
  void tiles() {
    std::vector<std::pair<Place, std::vector<int64_t>>> both;
    for (size_t d : find("tile")) {
      const Place at{d, 0};
      if (name(at).find('.') != std::string::npos) continue;
      const auto unit = find("register_block", name(at));
      both.emplace_back(at, sizes(extent_of(name(at), extents_), number(at), unit ? number(*unit) : 1));
      vary(fmt::format("tile({})", name(at)), at, both.back().second);
    }
    if (both.size() != 2) return;
    std::vector<Schedule> schedules;
    const size_t most = wide_ ? 8 : 3;
    for (size_t i = 0; i < std::min(most, both[0].second.size()); ++i)
      for (size_t j = 0; j < std::min(most, both[1].second.size()); ++j) {
        schedules.push_back(base_);
        set(schedules.back(), both[0].first, both[0].second[i]);
        set(schedules.back(), both[1].first, both[1].second[j]);
      }
    add("tiles", std::move(schedules));
  }

  void packs(size_t d) {
    const Directive& pack = base_.directives[d];
    for (size_t a = 0; a < pack.arguments.size(); ++a)
      if (pack.arguments[a].name == "pad" && is_number({d, a})) {
        std::vector<Schedule> schedules;
        for (int64_t pad : {0, 4, 16, 32}) {
          schedules.push_back(base_);
          set(schedules.back(), {d, a}, pad);
        }
        add(fmt::format("pad({})", pack.arguments[0].name), std::move(schedules));
      }
    if (!pack.arguments[0].name.ends_with(".lanes") || has(pack, "fold")) return;
    Schedule s = base_;
    auto& arguments = s.directives[d].arguments;
    if (has(pack, "widen"))
      std::erase_if(arguments, [](const Argument& a) { return a.name == "widen"; });
    else
      arguments.push_back({"widen", {}});
    add(fmt::format("widen({})", pack.arguments[0].name), {std::move(s)});
  }

  // ---- attention with shared keys ---------------------------------------------------------------------------------

  void online() {
    const auto blocks = find("register_block");
    if (blocks.size() != 2) return;
    const Place keys{blocks[0], 1};
    const Place columns{blocks[1], 1};
    const Place rows{blocks[0], 0};
    std::vector<Schedule> schedules;
    for (auto [mr, nr] : register_shapes(number(rows), number(keys), extent_of(name(rows), extents_))) {
      Schedule s = base_;
      set(s, rows, mr);
      set(s, {blocks[1], 0}, mr);
      set(s, keys, nr);
      set(s, columns, std::min(number(columns), nr));
      auto tile = find("tile", name(rows));
      auto share = find("share", name(rows));
      if (!tile || !share) return;
      const int64_t block = round_up(number(*tile), mr);
      set(s, *tile, block);
      set(s, *share, round_up(number(*share), block));
      if (auto key_tile = find("tile", name(keys))) set(s, *key_tile, round_up(number(*key_tile), nr));
      schedules.push_back(std::move(s));
    }
    add("register_block", std::move(schedules));
    if (auto at = find("tile", name(keys))) vary("tile(keys)", *at, sizes(extent_of(name(keys), extents_), number(*at), number(keys)));
    auto tile = find("tile", name(rows));
    auto share = find("share", name(rows));
    if (!tile || !share) return;
    schedules.clear();
    for (int64_t block : sizes(extent_of(name(rows), extents_), number(*tile), number(rows))) {
      schedules.push_back(base_);
      set(schedules.back(), *tile, block);
      set(schedules.back(), *share, round_up(number(*share), block));
    }
    add("tile(rows)", std::move(schedules));
    vary("share", *share, sizes(extent_of(name(rows), extents_), number(*share), number(*tile)));
  }

  // ---- nests, and what rows have beside their phases -------------------------------------------------------------

  void nest() {
    for (size_t d : find("vectorize")) vectors({d}, fmt::format("vectorize {}", print(base_.directives[d].arguments)));
    if (find("vectorize").size() > 1) vectors(find("vectorize"), "vectorize all");
    for (size_t d : find("tile")) {
      const int64_t now = number({d, 0});
      std::vector<int64_t> values{now / 4, now / 2, now * 2, now * 4};
      if (base_.kind == "rows") values = sizes(extent_of(name({d, 0}), extents_), now, 1);
      vary(fmt::format("tile({})", name({d, 0})), {d, 0}, values);
    }
    for (const char* word : {"register_block", "window"})
      for (size_t d : find(word)) vary(word, {d, 0}, {1, 2, 3, 4, 6, 8, 12, 16});
    if (base_.kind != "nest") return;
    lanes();
    streams();
  }

  static std::string print(const std::vector<Argument>& arguments) {
    std::vector<std::string> texts;
    for (const Argument& a : arguments)
      if (a.name != "by") texts.push_back(deplo::print(a));
    return joined(texts);
  }

  void vectors(const std::vector<size_t>& directives, const std::string& direction) {
    std::vector<Schedule> schedules;
    for (int64_t by : {1, 2, 4, 8}) {
      schedules.push_back(base_);
      for (size_t d : directives) {
        auto& arguments = schedules.back().directives[d].arguments;
        std::erase_if(arguments, [](const Argument& a) { return a.name == "by"; });
        if (by > 1) arguments.insert(arguments.begin() + 1, {"by", by});
      }
    }
    add(direction, std::move(schedules));
  }

  std::vector<std::string> parallel_axes() const {
    std::vector<std::string> out;
    for (size_t d : find("parallel"))
      for (const Argument& a : base_.directives[d].arguments)
        if (a.value.index() == 0) out.push_back(a.name);
    return out;
  }

  /// Blocks of the axis that has the lanes, and lanes on another axis.
  void lanes() {
    const auto parallel = find("parallel");
    if (parallel.empty()) return;
    const auto axes = parallel_axes();
    std::vector<Schedule> schedules;
    auto with = [&](const std::string& axis, int64_t tile, int64_t by, bool alone) {
      Schedule s = base_;
      auto& list = s.directives[parallel[0]].arguments;
      std::erase_if(list, [&](const Argument& a) { return a.name == axis; });
      if (tile > 0) list.insert(list.end() - 1, {axis, {}});
      std::erase_if(s.directives, [&](const Directive& d) {
        return (d.word == "tile" || d.word == "vectorize" || d.word == "transpose") && (alone || d.arguments[0].name == axis);
      });
      if (tile > 0) s.directives.push_back({"tile", {{axis, tile}}});
      std::vector<Argument> arguments{{axis, {}}};
      if (by > 1) arguments.push_back({"by", by});
      s.directives.insert(s.directives.begin() + 1, {"vectorize", std::move(arguments)});
      schedules.push_back(std::move(s));
    };
    for (size_t d : find("vectorize")) {
      const std::string axis = base_.directives[d].arguments[0].name;
      if (find("tile", axis)) continue;
      for (int64_t tile : {256, 1024, 4096})
        if (extent_of(axis, extents_).value_or(0) > tile) with(axis, tile, 1, false);
    }
    add("tile of the lanes", std::move(schedules));
    schedules.clear();
    for (const std::string& axis : axes) {
      if (find("vectorize", axis) || find("tile", axis) || extent_of(axis, extents_).value_or(vector_) < vector_) continue;
      for (int64_t by : {1, 2, 4}) with(axis, vector_ * by, by, true);
    }
    add("axis of the lanes", std::move(schedules));
  }

  /// Sums of several rows side by side.
  void streams() {
    if (!find("register_block").empty() || !find("window").empty()) return;
    std::vector<Schedule> schedules;
    for (const std::string& axis : parallel_axes())
      for (int64_t rows : {2, 4, 8}) {
        if (find("tile", axis) || extent_of(axis, extents_).value_or(rows) < rows) continue;
        schedules.push_back(base_);
        schedules.back().directives.push_back({"register_block", {{axis, rows}}});
      }
    add("streams", std::move(schedules));
  }

  // ---- threads ---------------------------------------------------------------------------------------------------

  void work() {
    if (auto at = find("parallel", "work")) vary("work", *at, scaled(number(*at)));
  }

  /// Orders of the parallel axes; the last two of contractions stay last.
  void order() {
    const auto parallel = find("parallel");
    if (parallel.empty()) return;
    auto& all = base_.directives[parallel[0]].arguments;
    size_t movable = parallel_axes().size();
    if (base_.kind == "contraction") movable = movable > 2 ? movable - 2 : 0;
    if (base_.kind == "rows" || base_.kind == "online") movable = movable > 1 ? movable - 1 : 0;
    if (movable < 2 || movable > 6) return;
    std::vector<size_t> places(movable);
    std::iota(places.begin(), places.end(), 0);
    std::vector<Schedule> schedules;
    const int64_t most = wide_ ? 4 * kMostOrders : kMostOrders;
    while (std::next_permutation(places.begin(), places.end()) && static_cast<int64_t>(schedules.size()) < most) {
      schedules.push_back(base_);
      for (size_t i = 0; i < movable; ++i) schedules.back().directives[parallel[0]].arguments[i] = all[places[i]];
    }
    add("order", std::move(schedules));
  }

  const Schedule& base_;
  const Extents& extents_;
  const std::map<std::string, int64_t>& longest_;
  const bool wide_;
  const int64_t vector_;
  const int64_t registers_;
  size_t begin_ = 0;
  size_t end_ = 0;
  std::string prefix_;
  std::vector<Direction> found_;
};

}  // namespace

Extents extents_of(const loop_ir::Kernel& kernel, const PassContext& ctx) {
  Extents extents;
  collect(kernel.body, ctx, kernel.symbols, extents);
  return extents;
}

std::map<std::string, int64_t> longest_sums(const Schedule& schedule, const Extents& extents) {
  std::map<std::string, int64_t> blocks;
  std::map<std::string, int64_t> chains;
  std::map<std::string, int64_t> groups;
  std::set<std::string> in_parts;
  std::set<std::string> parallel;
  for (const Directive& d : schedule.directives)
    if (d.word == "parallel")
      for (const Argument& a : d.arguments) parallel.insert(a.name);
  std::string phase;
  for (const Directive& d : schedule.directives) {
    if (d.word == "phase") phase = print(d) + " ";
    if (d.arguments.empty() || !std::holds_alternative<int64_t>(d.arguments[0].value)) continue;
    const std::string& axes = d.arguments[0].name;
    const int64_t value = std::get<int64_t>(d.arguments[0].value);
    // Of attention with shared keys, sums over the keys are formed tile by tile as well.
    const bool is_sum = axes.find('.') != std::string::npos || (schedule.kind == "online" && parallel.count(axes) == 0);
    if (!is_sum) continue;
    if (d.word == "tile") blocks[phase + axes] = value;
    if (d.word == "chain") chains[phase + axes] = value;
    if (d.word == "dot") groups[phase + axes] = value;
    if (d.word == "dot" && d.arguments.size() > 1 && d.arguments[1].name == "parts") in_parts.insert(phase + axes);
  }
  std::map<std::string, int64_t> longest;
  for (const auto& [name, block] : blocks) {
    const int64_t group = groups.count(name) > 0 ? groups[name] : 1;
    const int64_t extent = extent_of(name.substr(name.rfind(' ') + 1), extents).value_or(block);
    const int64_t tile = std::min(block, extent);
    const int64_t chain = std::min(tile, chains.count(name) > 0 ? chains[name] : tile);
    // A matrix unit adds tiles of float32 in parts up to the length of its chains.
    const int64_t matrix_chain = in_parts.count(name) > 0 ? std::min(extent, std::max<int64_t>(1, loop_to_tile::kMatrixChain / tile) * tile) : 0;
    if (matrix_chain > 0)
      longest[name] = parts_of(matrix_chain, 2) + parts_of(extent, matrix_chain);
    else
      longest[name] = group > 2 ? 0 : parts_of(chain, group) + parts_of(tile, chain) + parts_of(extent, tile);
  }
  return longest;
}

std::vector<Direction> cpu_directions(const Schedule& base, const Extents& extents, const std::map<std::string, int64_t>& longest, bool wide,
                                      const PassContext& ctx) {
  return Directions(base, extents, longest, wide, ctx).all();
}

}  // namespace deplo
