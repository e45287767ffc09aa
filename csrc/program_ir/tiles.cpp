#include "program_ir/tiles.h"

#include "base/text.h"
#include "program_ir/text.h"

namespace deplo {
namespace {

std::string print(const TileFactor& f) {
  return fmt::format("{} by {} {} strides {} at {} from {} rows {}{}", f.buffer, f.tiles, print_shape(f.extents), print_shape(f.strides),
                     print_shape(f.at), deplo::print(f.offset), f.rows, f.turned ? " turned" : "");
}

TileFactor parse_tile_factor(Lexer& lexer) {
  TileFactor f;
  f.buffer = lexer.identifier("a parameter");
  lexer.expect("by");
  f.tiles = lexer.identifier("a shared array");
  f.extents = parse_shape(lexer);
  lexer.expect("strides");
  f.strides = parse_shape(lexer);
  lexer.expect("at");
  f.at = parse_shape(lexer);
  lexer.expect("from");
  f.offset = parse_expr(lexer);
  lexer.expect("rows");
  f.rows = lexer.small_integer("a number of rows");
  f.turned = lexer.accept("turned");
  return f;
}

}  // namespace

std::string print(const TileProducts& s) {
  return fmt::format("{} * {} thread {} groups {} stages {} flags {} after {}", print(s.a), print(s.b), deplo::print(s.thread), s.groups, s.stages,
                     s.flags, deplo::print(s.after));
}

TileProducts parse_tile_products(Lexer& lexer) {
  TileProducts s;
  s.a = parse_tile_factor(lexer);
  lexer.expect("*");
  s.b = parse_tile_factor(lexer);
  lexer.expect("thread");
  s.thread = parse_expr(lexer);
  lexer.expect("groups");
  s.groups = lexer.small_integer("a number of groups of threads");
  lexer.expect("stages");
  s.stages = lexer.small_integer("a number of stages");
  lexer.expect("flags");
  s.flags = lexer.identifier("a shared array");
  lexer.expect("after");
  s.after = parse_expr(lexer);
  return s;
}

std::string problem_of(const TileProducts& s) {
  if (s.groups < 1 || s.groups > 4) return fmt::format("{} groups of threads", s.groups);
  if (s.stages < 2) return fmt::format("{} stages", s.stages);
  if (s.a.rows != s.groups * kTileGroupRows) return fmt::format("{} rows, the groups have {} each", s.a.rows, kTileGroupRows);
  if (s.b.rows % kTileColumnStep != 0 || s.b.rows < kTileColumnStep || s.b.rows > kMostTileColumns) return fmt::format("{} columns", s.b.rows);
  for (const TileFactor* f : {&s.a, &s.b}) {
    const size_t n = f->extents.size();
    if (n < 2 || n > kMostTileDimensions || f->strides.size() != n || f->at.size() + 1 != n || !f->strides[0].is(1))
      return f->buffer + " has no two to five dimensions, of which the first one is memory's";
  }
  return "";
}

}  // namespace deplo
