#include "target/cuda/schedule/variants.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <set>
#include <string>

namespace deplo {
namespace {

constexpr int64_t kGroupRows = 64;  // of a product that a group of warps forms
constexpr int64_t kMostStages = 8;
const std::set<std::string> kProducts = {"gpu_contraction", "gpu_matrix", "gpu_taps", "gpu_tiles", "gpu_groups", "gpu_online", "gpu_chain"};
// Columns that products of matrix units may have are multiples of 8, of which these are worth a try.
const std::vector<int64_t> kColumns = {16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256};

/// A number of a schedule: that of word(name=number), or of word(number).
struct Place {
  size_t directive = 0;
  size_t argument = 0;
};

/// Threads that share one sum in registers: 1 where each thread has its own.
int64_t sharers(const Schedule& schedule) {
  const std::string word = schedule.kind == "gpu_rows" ? "threads" : "split";
  for (const Directive& d : schedule.directives)
    if (d.word == word && !d.arguments.empty())
      if (const auto* n = std::get_if<int64_t>(&d.arguments[0].value)) return *n;
  return 1;
}

class Directions {
 public:
  Directions(const Schedule& base, int64_t least_sharers, bool wide) : base_(base), least_(least_sharers), wide_(wide) {}

  std::vector<Direction> all() {
    if (kProducts.count(base_.kind))
      product();
    else
      points();
    return std::move(found_);
  }

 private:
  std::vector<Place> places(const std::string& word) const {
    std::vector<Place> out;
    for (size_t d = 0; d < base_.directives.size(); ++d)
      for (size_t a = 0; base_.directives[d].word == word && a < base_.directives[d].arguments.size(); ++a)
        if (std::holds_alternative<int64_t>(base_.directives[d].arguments[a].value)) out.push_back({d, a});
    return out;
  }
  std::optional<Place> place(const std::string& word, const std::string& name) const {
    for (const Place at : places(word))
      if (name_of(at) == name) return at;
    return std::nullopt;
  }
  const std::string& name_of(Place at) const { return base_.directives[at.directive].arguments[at.argument].name; }
  int64_t number(Place at) const { return std::get<int64_t>(base_.directives[at.directive].arguments[at.argument].value); }
  static void set(Schedule& s, Place at, int64_t value) { s.directives[at.directive].arguments[at.argument].value = value; }

  /// A decision whose choices `change` makes of factors by which numbers grow (up to four where all are wanted); a number that is not whole, and
  /// fewer threads for a sum, drop out.
  template <typename Change>
  void scale(const std::string& name, Change change) {
    Direction direction{name, {}};
    for (const auto& [up, down] : std::vector<std::pair<int64_t, int64_t>>{{2, 1}, {1, 2}, {4, 1}, {1, 4}}) {
      if (!wide_ && up + down > 3) break;
      Schedule next = base_;
      bool whole = true;
      const auto scaled = [&, up = up, down = down](Place at, bool other_way = false) {
        const int64_t n = number(at) * (other_way ? down : up);
        const int64_t by = other_way ? up : down;
        whole = whole && n % by == 0 && n / by > 0;
        set(next, at, n / by);
      };
      change(scaled);
      if (whole) add(direction, next);
    }
    keep(std::move(direction));
  }

  void choose(const std::string& name, Place at, const std::vector<int64_t>& values) {
    Direction direction{name, {}};
    for (const int64_t value : values) {
      Schedule next = base_;
      set(next, at, value);
      add(direction, next);
    }
    keep(std::move(direction));
  }

  void add(Direction& direction, const Schedule& next) const {
    if (next == base_ || sharers(next) < least_) return;
    if (std::find(direction.schedules.begin(), direction.schedules.end(), next) == direction.schedules.end()) direction.schedules.push_back(next);
  }
  void keep(Direction direction) {
    if (!direction.schedules.empty()) found_.push_back(std::move(direction));
  }

  static bool is_summed(const std::string& axis) { return axis.find('.') != std::string::npos; }

  void product() {
    for (const Place tile : places("tile")) {
      const std::string& axis = name_of(tile);
      const std::string title = fmt::format("tile({})", axis);
      for (const char* shared : {"warps", "groups"})
        if (const auto with = place(shared, axis)) {
          if (*shared == 'g')
            groups(tile, *with);
          else
            scale(title + " with warps", [&, with = *with](const auto& scaled) { scaled(tile), scaled(with); });
        }
      if (const auto block = place("register_block", axis)) {
        scale(title + " with register_block", [&, block = *block](const auto& scaled) { scaled(tile), scaled(block); });
        if (const auto threads = place("threads", ""))
          scale(title + " with threads", [&, threads = *threads](const auto& scaled) { scaled(tile), scaled(threads); });
      }
      if (is_summed(axis) || base_.kind == "gpu_contraction")
        scale(title, [&](const auto& scaled) { scaled(tile); });
      else
        choose(title, tile, columns_near(number(tile)));
    }
    for (const Place warps : places("warps")) scale(fmt::format("warps({})", name_of(warps)), [&](const auto& scaled) { scaled(warps); });
    if (const auto warps = places("warps"); warps.size() == 2)
      scale("shape of warps", [&](const auto& scaled) { scaled(warps[0]), scaled(warps[1], true); });
    if (const auto threads = place("threads", ""))
      for (const Place block : places("register_block"))
        scale(fmt::format("register_block({})", name_of(block)),
              [&, threads = *threads](const auto& scaled) { scaled(block), scaled(threads, true); });
    if (const auto blocks = places("register_block"); blocks.size() == 2)
      scale("shape of register_block", [&](const auto& scaled) { scaled(blocks[0]), scaled(blocks[1], true); });
    if (const auto tiles = places("tile"); tiles.size() >= 2 && base_.kind == "gpu_contraction")
      scale("shape of tile", [&](const auto& scaled) { scaled(tiles[0]), scaled(tiles[1], true); });
    common();
  }

  /// Rows of a block in whole groups, each of as many rows as now or half or twice.
  void groups(Place tile, Place groups) {
    Direction direction{"groups", {}};
    for (int64_t count = 1; count <= 4; ++count) {
      Schedule next = base_;
      set(next, groups, count);
      set(next, tile, count * kGroupRows);
      add(direction, next);
    }
    keep(std::move(direction));
  }

  std::vector<int64_t> columns_near(int64_t now) const {
    std::vector<int64_t> out;
    for (const int64_t n : kColumns)
      if (wide_ || (2 * n >= now && n <= 2 * now)) out.push_back(n);
    std::stable_sort(out.begin(), out.end(), [&](int64_t a, int64_t b) { return std::abs(a - now) < std::abs(b - now); });
    return out;
  }

  void points() {
    for (const Place tile : places("tile")) scale(fmt::format("tile({})", name_of(tile)), [&](const auto& scaled) { scaled(tile); });
    if (const auto tiles = places("tile"); tiles.size() >= 2)
      scale("shape of tile", [&](const auto& scaled) { scaled(tiles[0]), scaled(tiles[1], true); });
    const auto threads = place("threads", "");
    if (threads) scale("threads", [&](const auto& scaled) { scaled(*threads); });
    for (const char* word : {"rows", "split"})
      if (const auto other = place(word, "")) {
        if (threads) scale(fmt::format("threads for {}", word), [&](const auto& scaled) { scaled(*threads), scaled(*other, true); });
        scale(word, [&](const auto& scaled) { scaled(*other); });
      }
    for (const Place block : places("register_block"))
      scale(fmt::format("register_block({})", name_of(block)), [&](const auto& scaled) { scaled(block); });
    for (const Place lanes : places("vectorize")) scale("lanes", [&](const auto& scaled) { scaled(lanes); });
    if (base_.kind == "gpu_points") toggle("unroll", {"unroll", {{"", int64_t{2}}}});
    if (const auto unroll = place("unroll", "")) scale("unroll", [&](const auto& scaled) { scaled(*unroll); });
    if (base_.kind == "gpu_rows") toggle("keep", {"keep", {{"registers", {}}}});
    common();
  }

  /// The schedule with a directive, if it has none of that word, else without it.
  void toggle(const std::string& name, const Directive& directive) {
    const bool has_vectors = std::any_of(base_.directives.begin(), base_.directives.end(), [](const Directive& d) { return d.word == "vectorize"; });
    if (!has_vectors) return;
    Schedule next = base_;
    const auto same = [&](const Directive& d) { return d.word == directive.word; };
    if (std::none_of(next.directives.begin(), next.directives.end(), same))
      next.directives.push_back(directive);
    else
      std::erase_if(next.directives, same);
    Direction direction{"with or without " + name, {}};
    add(direction, next);
    keep(std::move(direction));
  }

  void common() {
    if (const auto stages = place("stages", "")) {
      std::vector<int64_t> values;
      for (int64_t n = 1; n <= kMostStages; ++n)
        if (wide_ || std::abs(n - number(*stages)) <= 2) values.push_back(n);
      choose("stages", *stages, values);
    }
    if (const auto raster = place("raster", ""))
      choose("raster", *raster, wide_ ? std::vector<int64_t>{1, 2, 4, 8, 16, 32} : std::vector<int64_t>{4, 16});
    if (kProducts.count(base_.kind))
      if (const auto split = place("split", "")) scale("split", [&](const auto& scaled) { scaled(*split); });
  }

  const Schedule& base_;
  int64_t least_;
  bool wide_;
  std::vector<Direction> found_;
};

}  // namespace

std::vector<Direction> gpu_directions(const Schedule& base, const std::vector<Schedule>& proposals, bool wide) {
  std::optional<int64_t> least;
  for (const Schedule& s : proposals)
    if (s.kind == base.kind) least = std::min(least.value_or(sharers(s)), sharers(s));
  return Directions(base, least.value_or(1), wide).all();
}

}  // namespace deplo
