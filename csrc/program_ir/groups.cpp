#include "program_ir/groups.h"

#include "base/text.h"
#include "program_ir/text.h"

namespace deplo {
namespace {

std::string print(const GroupFactor& f) { return fmt::format("{} at {} lines {}{}", f.tile, deplo::print(f.at), f.lines, f.turned ? " turned" : ""); }

GroupFactor parse_group_factor(Lexer& lexer) {
  GroupFactor f;
  f.tile = lexer.identifier("a shared array");
  lexer.expect("at");
  f.at = parse_expr(lexer);
  lexer.expect("lines");
  f.lines = lexer.small_integer("a number of lines");
  f.turned = lexer.accept("turned");
  return f;
}

}  // namespace

std::string print(const GroupProducts& s) {
  std::string text = s.matrices.empty() ? print(s.a) : "(" + joined(s.matrices) + ")";
  text += fmt::format(" * {} columns {} depth {} lanes {}", print(s.b), s.columns, s.depth, s.lanes);
  return s.pending > 0 ? text + fmt::format(" pending {}", s.pending) : text;
}

GroupProducts parse_group_products(Lexer& lexer) {
  GroupProducts s;
  if (lexer.accept("(")) {
    do s.matrices.push_back(lexer.identifier("a matrix"));
    while (lexer.accept(","));
    lexer.expect(")");
  } else {
    s.a = parse_group_factor(lexer);
  }
  lexer.expect("*");
  s.b = parse_group_factor(lexer);
  lexer.expect("columns");
  s.columns = lexer.small_integer("a number of columns");
  lexer.expect("depth");
  s.depth = lexer.small_integer("a number of k");
  lexer.expect("lanes");
  s.lanes = lexer.small_integer("a number of sums");
  if (lexer.accept("pending")) s.pending = lexer.small_integer("a number of statements");
  return s;
}

std::string problem_of(const GroupProducts& s) {
  if (s.columns % kGroupColumnStep != 0 || s.columns < kGroupColumnStep || s.columns > kMostGroupColumns) return fmt::format("{} columns", s.columns);
  if (s.depth % kGroupDepth != 0 || s.depth < 0) return fmt::format("{} of k", s.depth);
  if (s.lanes < 2 || s.lanes % 2 != 0 || s.columns % (4 * s.lanes) != 0)
    return fmt::format("{} sums side by side, of {} columns", s.lanes, s.columns);
  if (s.pending < 0) return "a number of statements is negative";
  if (!s.matrices.empty() && static_cast<int64_t>(s.matrices.size()) * kGroupDepth != s.depth)
    return fmt::format("{} matrices for {} of k", s.matrices.size(), s.depth);
  for (const GroupFactor* f : {&s.a, &s.b})
    if ((f == &s.b || s.matrices.empty()) && (f->lines < kGroupLines || f->lines % kGroupLines != 0))
      return fmt::format("{} lines of {} are no multiple of {}", f->lines, f->tile, kGroupLines);
  return "";
}

}  // namespace deplo
