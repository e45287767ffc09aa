#include "base/error.h"
#include "loop_ir/text.h"
#include "tile_ir/text.h"

namespace deplo::tile_ir {
namespace {

struct Parser {
  Lexer& lexer;
  loop_ir::TypeScope scope;

  // A loop kind, unless the word is itself an axis name ("lanes in 0..4").
  std::optional<LoopKind> loop_kind() {
    if (lexer.peek(1).text == "in") return std::nullopt;
    for (const auto& [kind, word] : kLoopKinds)
      if (lexer.accept(word)) return kind;
    return std::nullopt;
  }

  Axis axis() {
    Axis a;
    if (auto kind = loop_kind()) a.kind = *kind;
    a.name = lexer.identifier("an axis");
    lexer.expect("in");
    a.lo = parse_expr(lexer);
    lexer.expect("..");
    a.hi = parse_expr(lexer);
    if (lexer.accept("step")) a.step = lexer.integer("a step");
    if (lexer.accept("by")) a.by = lexer.integer("a count");
    return a;
  }

  Block block() {
    Block body;
    lexer.expect(":");
    lexer.expect("end of line");
    lexer.expect("indent");
    while (!lexer.accept("dedent")) {
      if (lexer.peek(1).kind == Token::Kind::newline && lexer.accept("pass")) {
        lexer.expect("end of line");
        continue;
      }
      Location location = lexer.peek().location();
      auto stmt = std::make_shared<Stmt>(statement());
      stmt->location = location;
      body.push_back(std::move(stmt));
    }
    return body;
  }

  bool starts_loop() {
    if (lexer.accept("for")) return true;
    for (const auto& [kind, word] : kLoopKinds)
      if (lexer.at(word)) return true;
    return false;
  }

  Stmt statement() {
    const std::string& after = lexer.peek(1).text;
    bool keyword = after != "=" && after != ":" && after != "[";
    if (keyword && starts_loop()) {
      Axis a = axis();
      return {For{a, block()}};
    }
    if (keyword && lexer.accept("reduce")) return {reduce()};
    if (keyword && lexer.accept("scan")) return {scan()};
    if (keyword && lexer.accept("if")) {
      std::vector<Cond> guard = parse_guard(lexer);
      return {If{guard, block()}};
    }
    Stmt stmt = line(keyword);
    lexer.expect("end of line");
    return stmt;
  }

  Matrix::Place place() {
    Matrix::Place p;
    p.buffer = lexer.identifier("a buffer");
    p.index = parse_shape(lexer);
    return p;
  }

  Matrix matrix() {
    Matrix s;
    if (lexer.peek(1).text == "[") {
      s.kind = Matrix::Kind::store;
      s.a = place();
      lexer.expect("=");
      s.array = lexer.identifier("a matrix array");
      return s;
    }
    s.array = lexer.identifier("a matrix array");
    if (lexer.accept("+=")) {
      s.kind = Matrix::Kind::multiply;
      s.a = place();
      lexer.expect("*");
      if (lexer.peek(1).text != "[") s.bytes = parse_dtype(lexer);
      s.b = place();
      return s;
    }
    lexer.expect("=");
    if (lexer.peek().text == "0" && lexer.integer("0") == 0) return s;
    s.kind = Matrix::Kind::load;
    s.a = place();
    return s;
  }

  CopyAsync copy_async() {
    CopyAsync s;
    s.buffer = lexer.identifier("a shared array");
    s.index = parse_shape(lexer);
    lexer.expect("=");
    s.from = lexer.identifier("a buffer");
    s.from_index = parse_shape(lexer);
    lexer.expect("along");
    s.along = lexer.small_integer("a dimension");
    lexer.expect("by");
    s.elements = lexer.small_integer("a number of elements");
    s.count = lexer.accept("first") ? parse_expr(lexer) : Expr(s.elements);
    if (lexer.accept("if")) s.guard = parse_guard(lexer);
    return s;
  }

  LoadMatrix load_matrix() {
    LoadMatrix s;
    s.name = lexer.identifier("a value");
    lexer.expect("=");
    lexer.expect("load_matrix");
    s.buffer = lexer.identifier("a shared array");
    s.index = parse_shape(lexer);
    if (auto found = scope.buffers.find(s.buffer); found != scope.buffers.end()) s.dtype = found->second;
    Token where = lexer.peek();
    const std::string count = lexer.identifier("x1, x2 or x4");
    if (count != "x1" && count != "x2" && count != "x4") lexer.fail(where, fmt::format("expected x1, x2 or x4, found '{}'", count));
    s.count = count[1] - '0';
    s.transposed = lexer.accept("transposed");
    return s;
  }

  JoinMatrix join_matrix() {
    JoinMatrix s;
    s.name = lexer.identifier("a value");
    lexer.expect("=");
    lexer.expect("join_matrix");
    s.dtype = parse_dtype(lexer);
    s.array = lexer.identifier("a register array");
    s.places.push_back(parse_shape(lexer));
    while (lexer.accept(",")) {
      Token where = lexer.peek();
      if (lexer.identifier("the same array") != s.array) lexer.fail(where, fmt::format("expected {}, which the other places lie in", s.array));
      s.places.push_back(parse_shape(lexer));
    }
    return s;
  }

  Mma mma() {
    Mma s;
    s.array = lexer.identifier("a register array");
    s.low = parse_shape(lexer);
    lexer.expect(",");
    Token where = lexer.peek();
    if (lexer.identifier("the same array") != s.array) lexer.fail(where, fmt::format("expected {}, which the other sums lie in", s.array));
    s.high = parse_shape(lexer);
    lexer.expect("+=");
    s.a = lexer.identifier("a matrix");
    lexer.expect("*");
    s.b = lexer.identifier("a matrix");
    lexer.expect("half");
    s.half = lexer.small_integer("a half");
    return s;
  }

  Stmt line(bool keyword) {
    if (keyword && lexer.accept("matrix")) return {matrix()};
    if (keyword && lexer.accept("barrier")) return {Barrier{}};
    if (keyword && lexer.accept("copy_async")) return {copy_async()};
    if (keyword && lexer.accept("copy_commit")) return {CopyGroup{}};
    if (keyword && lexer.accept("copy_wait")) return {CopyGroup{lexer.small_integer("a number of groups")}};
    if (keyword && lexer.accept("mma")) return {mma()};
    if (keyword && lexer.accept("multiply_tiles")) {
      MultiplyTiles s;
      s.array = lexer.identifier("a register array");
      lexer.expect("+=");
      s.products = parse_tile_products(lexer);
      return {s};
    }
    if (keyword && lexer.accept("multiply_group")) {
      MultiplyGroup s;
      s.array = lexer.identifier("a register array");
      lexer.expect("[");
      s.unit = parse_expr(lexer);
      lexer.expect("]");
      lexer.expect("+=");
      s.products = parse_group_products(lexer);
      return {s};
    }
    if (!keyword && lexer.peek(2).text == "load_matrix") return {load_matrix()};
    if (!keyword && lexer.peek(2).text == "join_matrix") return {join_matrix()};
    if (keyword && lexer.accept("alloc")) return {alloc()};
    if (keyword && lexer.accept("prefetch")) {
      Prefetch s;
      s.buffer = lexer.identifier("a buffer");
      s.index = parse_shape(lexer);
      if (lexer.accept("level")) s.level = lexer.small_integer("a cache level");
      return {s};
    }
    return std::visit([](auto&& s) { return Stmt{std::forward<decltype(s)>(s)}; }, parse_simple(lexer, scope));
  }

  Alloc alloc() {
    Alloc s;
    s.name = lexer.identifier("a buffer");
    lexer.expect(":");
    s.dtype = parse_dtype(lexer);
    s.shape = parse_shape(lexer);
    scope.buffers[s.name] = s.dtype;
    for (const auto& [space, word] : kSpaces)
      if (lexer.accept(word)) {
        s.space = space;
        return s;
      }
    lexer.fail(fmt::format("expected register, stack, scratch, shared or matrix, found '{}'", lexer.peek().text));
  }

  Reduce reduce() {
    auto c = parse_combination(lexer, scope);
    Reduce s{c.results, c.dtypes, c.combiner, c.operands, {}, {}};
    lexer.accept("over");
    do s.axes.push_back(axis());
    while (lexer.accept(","));
    s.body = block();
    return s;
  }

  Scan scan() {
    auto c = parse_combination(lexer, scope);
    Scan s{c.results, c.dtypes, c.combiner, c.operands, {}, {}, {}};
    lexer.accept("over");
    do s.axes.push_back(axis());
    while (lexer.accept(","));
    s.body = block();
    lexer.expect("then");
    s.then = block();
    return s;
  }

  std::string kernel_name() {
    std::string name = lexer.identifier("a kernel name");
    if (name.size() < 2 || name[0] != '@') lexer.fail(fmt::format("expected a kernel name like @k0, found '{}'", name));
    return name.substr(1);
  }

  Kernel kernel() {
    Kernel k;
    std::string scheduled;
    if (lexer.accept("schedule")) {
      scheduled = kernel_name();
      lexer.expect(":");
      k.schedule = parse_schedule(lexer);
      lexer.expect("end of line");
    }
    k.location = lexer.peek().location();
    lexer.expect("tile");
    k.name = kernel_name();
    if (!scheduled.empty() && scheduled != k.name) lexer.fail(fmt::format("the schedule of @{} stands before kernel @{}", scheduled, k.name));
    k.params = parse_params(lexer, scope);
    k.symbols = parse_ranges(lexer);
    if (lexer.accept("chunks")) k.chunks = parse_expr(lexer);
    k.provenance = parse_provenance(lexer);
    k.body = kernel_block();
    return k;
  }

  // A kernel's head has no colon.
  Block kernel_block() {
    Block body;
    lexer.expect("end of line");
    lexer.expect("indent");
    while (!lexer.accept("dedent")) {
      if (lexer.peek(1).kind == Token::Kind::newline && lexer.accept("pass")) {
        lexer.expect("end of line");
        continue;
      }
      Location location = lexer.peek().location();
      auto stmt = std::make_shared<Stmt>(statement());
      stmt->location = location;
      body.push_back(std::move(stmt));
    }
    return body;
  }
};

}  // namespace

Module parse(const std::string& text, const std::string& file) {
  return parse_module<Kernel>(text, file, "tile", [](Lexer& lexer) { return Parser{lexer, {}}.kernel(); });
}

}  // namespace deplo::tile_ir
