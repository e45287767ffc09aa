#include <cctype>
#include <optional>

#include "base/error.h"
#include "kernel_ir/text.h"
#include "loop_ir/text.h"
#include "program_ir/text.h"

namespace deplo::kernel_ir {
namespace {

struct Parser {
  Lexer& lexer;

  Type type() {
    Token where = lexer.peek();
    std::string text = lexer.identifier("a type");
    size_t x = text.find('x');
    auto dtype = deplo::parse_dtype(text.substr(0, x));
    Type t;
    bool valid = dtype.has_value();
    if (valid && x != std::string::npos) {
      std::string digits = text.substr(x + 1);
      valid = !digits.empty() && digits.size() < 5;
      for (char c : digits) valid = valid && std::isdigit(static_cast<unsigned char>(c));
      if (valid) t.lanes = std::stoi(digits);
      valid = valid && t.lanes > 0;
    }
    if (!valid) lexer.fail(where, fmt::format("expected a type such as f32 or f32x8, found '{}'", text));
    t.dtype = *dtype;
    return t;
  }

  std::string name() { return lexer.identifier("a name"); }
  std::string optional_name(const char* word) { return lexer.accept(word) ? name() : ""; }
  Expr optional_expr(const char* word, Expr fallback) { return lexer.accept(word) ? parse_expr(lexer) : fallback; }

  std::pair<std::string, Expr> place() {
    std::string buffer = name();
    lexer.expect("[");
    Expr offset = parse_expr(lexer);
    lexer.expect("]");
    return {buffer, offset};
  }

  Block block() {
    Block body;
    lexer.expect(":");
    lexer.expect("end of line");
    return indented();
  }

  Block indented() {
    Block body;
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

  Stmt statement() {
    const std::string& after = lexer.peek(1).text;
    bool keyword = after != ":" && after != "<";
    if (keyword && lexer.accept("for")) return {loop()};
    if (keyword && lexer.accept("if")) return {branch()};
    Stmt stmt = keyword ? effect() : definition();
    lexer.expect("end of line");
    return stmt;
  }

  For loop() {
    For s;
    s.name = name();
    lexer.expect("in");
    s.lo = parse_expr(lexer);
    lexer.expect("..");
    s.hi = parse_expr(lexer);
    lexer.expect("step");
    s.step = parse_expr(lexer);
    if (lexer.accept("unroll")) s.unroll = lexer.small_integer("an unroll factor");
    s.body = block();
    return s;
  }

  If branch() {
    If s;
    if (lexer.peek(1).kind == Token::Kind::identifier && lexer.accept("value"))
      s.condition = name();
    else
      s.guard = parse_guard(lexer);
    s.then = block();
    if (lexer.accept("else")) s.otherwise = block();
    return s;
  }

  Stmt effect() {
    if (lexer.accept("store")) return {store()};
    if (lexer.accept("var")) {
      Var s;
      s.name = name();
      lexer.expect(":");
      s.type = type();
      lexer.expect("=");
      s.init = name();
      return {s};
    }
    if (lexer.accept("alloc")) return {alloc()};
    if (lexer.accept("prefetch")) {
      Prefetch s;
      std::tie(s.buffer, s.offset) = place();
      lexer.expect("level");
      s.level = lexer.small_integer("a cache level");
      return {s};
    }
    if (lexer.accept("matrix")) return {matrix()};
    if (lexer.accept("barrier")) return {Barrier{}};
    if (lexer.accept("copy_async")) return {copy_async()};
    if (lexer.accept("copy_commit")) return {CopyGroup{}};
    if (lexer.accept("copy_wait")) return {CopyGroup{lexer.small_integer("a number of groups")}};
    if (lexer.accept("mma")) return {mma()};
    if (lexer.accept("multiply_tiles")) {
      MultiplyTiles s{{name()}, {}};
      while (lexer.accept(",")) s.sums.push_back(name());
      lexer.expect("+=");
      s.products = parse_tile_products(lexer);
      return {s};
    }
    if (lexer.accept("multiply_group")) {
      MultiplyGroup s{{name()}, {}};
      while (lexer.accept(",")) s.sums.push_back(name());
      lexer.expect("+=");
      s.products = parse_group_products(lexer);
      return {s};
    }
    if (lexer.accept("error")) {
      SetError s;
      Token where = lexer.peek();
      std::string code = lexer.identifier("an error code");
      bool found = false;
      for (auto c : {loop_ir::ErrorCode::index_out_of_range, loop_ir::ErrorCode::division_by_zero, loop_ir::ErrorCode::assertion}) {
        if (loop_ir::to_string(c) != code) continue;
        s.code = c;
        found = true;
      }
      if (!found) lexer.fail(where, fmt::format("'{}' is not an error code", code));
      lexer.expect("if");
      s.condition = name();
      return {s};
    }
    lexer.fail(fmt::format("expected a statement, found '{}'", lexer.peek().text));
  }

  int matrix_register() {
    Token where = lexer.peek();
    std::string text = lexer.identifier("a matrix register");
    if (text.size() != 2 || text[0] != 't' || text[1] < '0' || text[1] >= '0' + kMatrixRegisters)
      lexer.fail(where, fmt::format("'{}' is not a matrix register: t0 to t{}", text, kMatrixRegisters - 1));
    return text[1] - '0';
  }

  /// A register that a product takes, and as what; bf16 where nothing is said.
  std::pair<int, DType> factor() {
    const std::string& text = lexer.peek().text;
    const DType dtype = text == "u8" || text == "i8" ? deplo::parse_dtype(lexer) : DType::bf16;
    return {matrix_register(), dtype};
  }

  Matrix matrix() {
    Matrix s;
    auto rows = [&] {
      std::tie(s.buffer, s.offset) = place();
      lexer.expect("stride");
      s.stride = parse_expr(lexer);
    };
    if (lexer.peek(1).text == "[") {
      s.kind = Matrix::Kind::store;
      rows();
      lexer.expect("=");
      s.target = matrix_register();
      return s;
    }
    s.target = matrix_register();
    if (lexer.accept("+=")) {
      s.kind = Matrix::Kind::multiply;
      std::tie(s.a, s.a_dtype) = factor();
      lexer.expect("*");
      std::tie(s.b, s.b_dtype) = factor();
      return s;
    }
    const bool typed = lexer.accept(":");
    if (typed) s.dtype = deplo::parse_dtype(lexer);
    lexer.expect("=");
    if ((typed || lexer.peek().text == "0") && lexer.integer("0") == 0) return s;
    s.kind = Matrix::Kind::load;
    rows();
    return s;
  }

  CopyAsync copy_async() {
    CopyAsync s;
    std::tie(s.buffer, s.offset) = place();
    lexer.expect("=");
    std::tie(s.from, s.from_offset) = place();
    lexer.expect("by");
    s.elements = lexer.small_integer("a number of elements");
    s.count = optional_expr("first", s.elements);
    if (lexer.accept("if")) s.guard = parse_guard(lexer);
    return s;
  }

  Mma mma() {
    Mma s;
    s.low = name();
    lexer.expect(",");
    s.high = name();
    lexer.expect("lane");
    s.lane = lexer.small_integer("a lane");
    lexer.expect("+=");
    s.a = name();
    lexer.expect("*");
    s.b = name();
    lexer.expect("half");
    s.half = lexer.small_integer("a half");
    return s;
  }

  Store store() {
    Store s;
    s.atomic = lexer.peek(1).kind == Token::Kind::identifier && lexer.accept("atomic");
    if (lexer.peek(1).kind == Token::Kind::identifier) {
      Token where = lexer.peek();
      auto combiner = parse_combiner(lexer.identifier("a combiner"));
      if (!combiner) lexer.fail(where, fmt::format("'{}' is not a combiner", where.text));
      s.combiner = *combiner;
    }
    std::tie(s.buffer, s.offset) = place();
    lexer.expect("=");
    s.value = name();
    s.stride = optional_expr("stride", 1);
    s.gather = optional_name("gather");
    s.mask = optional_name("mask");
    return s;
  }

  Alloc alloc() {
    Alloc s;
    s.name = name();
    lexer.expect(":");
    s.dtype = type().dtype;
    lexer.expect("[");
    s.count = parse_expr(lexer);
    lexer.expect("]");
    if (lexer.accept("stack"))
      s.space = Space::stack;
    else if (lexer.accept("shared"))
      s.space = Space::shared;
    else {
      lexer.expect("scratch");
      s.space = Space::scratch;
      s.offset = parse_expr(lexer);
    }
    return s;
  }

  Stmt definition() {
    std::string target = name();
    if (lexer.accept("<")) {
      lexer.expect("-");
      return {Assign{target, name()}};
    }
    lexer.expect(":");
    Type t = type();
    lexer.expect("=");
    bool word = lexer.peek(1).text != "(";
    if (word && lexer.accept("constant")) return {Let{target, t, Fn::constant, {}, parse_literal(lexer, t.dtype), 0, 0}};
    if (word && lexer.accept("splat")) return {Splat{target, t, name()}};
    if (lexer.accept("index")) {
      Expr value = parse_expr(lexer);
      return {Let{target, t, Fn::index, {}, {}, value, optional_expr("step", 0)}};
    }
    if (lexer.accept("first")) return {FirstLanes{target, t.lanes, parse_expr(lexer)}};
    if (word && lexer.accept("lanes")) {
      Fn f = function();
      lexer.expect("(");
      std::string operand = name();
      lexer.expect(")");
      return {ReduceLanes{target, t.dtype, f, operand}};
    }
    if (word && lexer.accept("extract")) {
      std::string operand = name();
      return {Extract{target, t.dtype, operand, lexer.small_integer("a lane")}};
    }
    if (word && lexer.accept("exchange")) {
      std::string operand = name();
      const Partner partner = lexer.accept("from") ? Partner::number : lexer.accept("below") ? Partner::below : Partner::differs;
      if (partner == Partner::differs) lexer.expect("xor");
      return {Exchange{target, t.dtype, operand, lexer.small_integer("a thread"), partner}};
    }
    if (word && lexer.accept("load_matrix")) {
      LoadMatrix s{target, t, "", 0, false};
      std::tie(s.buffer, s.offset) = place();
      s.transposed = lexer.accept("transposed");
      return {s};
    }
    if (word && lexer.accept("join_matrix")) {
      JoinMatrix s{target, t, {name()}, 0};
      while (lexer.accept(",")) s.parts.push_back(name());
      lexer.expect("lane");
      s.lane = lexer.small_integer("a lane");
      return {s};
    }
    if (word && lexer.accept("shuffle")) return {shuffle(target, t)};
    if (word && lexer.accept("load")) {
      Load s;
      s.name = target;
      s.type = t;
      std::tie(s.buffer, s.offset) = place();
      s.stride = optional_expr("stride", 1);
      s.gather = optional_name("gather");
      s.mask = optional_name("mask");
      s.passthrough = optional_name("else");
      return {s};
    }
    Let s{target, t, function(), {}, {}, 0, 0};
    lexer.expect("(");
    do s.operands.push_back(name());
    while (lexer.accept(","));
    lexer.expect(")");
    return {s};
  }

  Shuffle shuffle(const std::string& target, Type t) {
    Shuffle s{target, t, name(), "", {}};
    if (lexer.accept(",")) s.b = name();
    lexer.expect("[");
    do s.lanes.push_back(lexer.small_integer("a lane"));
    while (lexer.accept(","));
    lexer.expect("]");
    return s;
  }

  Fn function() {
    Token where = lexer.peek();
    auto fn = parse_fn(lexer.identifier("a function"));
    if (!fn) lexer.fail(where, fmt::format("'{}' is not a scalar function", where.text));
    return *fn;
  }

  std::vector<Expr> exprs() {
    std::vector<Expr> list;
    lexer.expect("(");
    do list.push_back(parse_expr(lexer));
    while (lexer.accept(","));
    lexer.expect(")");
    return list;
  }

  Param param() {
    Param p;
    p.location = lexer.peek().location();
    if (lexer.peek(1).text != ":" && lexer.accept("out"))
      p.kind = loop_ir::ParamKind::out;
    else if (lexer.peek(1).text != ":" && lexer.accept("inout"))
      p.kind = loop_ir::ParamKind::inout;
    p.name = name();
    lexer.expect(":");
    lexer.expect("ptr");
    p.dtype = type().dtype;
    return p;
  }

  Kernel kernel() {
    Kernel k;
    k.location = lexer.peek().location();
    lexer.expect("kernel");
    std::string label = lexer.identifier("a kernel name");
    if (label.size() < 2 || label[0] != '@') lexer.fail(fmt::format("expected a kernel name like @k0, found '{}'", label));
    k.name = label.substr(1);
    lexer.expect("(");
    if (!lexer.at(")")) do
        k.params.push_back(param());
      while (lexer.accept(","));
    lexer.expect(")");
    lexer.expect("symbols");
    lexer.expect("(");
    if (!lexer.at(")")) do
        k.symbols.push_back(name());
      while (lexer.accept(","));
    lexer.expect(")");
    if (lexer.accept("sizes")) {
      lexer.expect("(");
      do {
        std::string size = name();
        lexer.expect("=");
        k.sizes.push_back({std::move(size), parse_expr(lexer)});
      } while (lexer.accept(","));
      lexer.expect(")");
    }
    lexer.expect("chunks");
    k.chunks = parse_expr(lexer);
    lexer.expect("scratch");
    k.scratch_bytes = parse_expr(lexer);
    if (lexer.accept("grid")) k.grid = exprs();
    if (lexer.accept("block")) k.block = exprs();
    k.provenance = parse_provenance(lexer);
    lexer.expect("end of line");
    k.body = indented();
    return k;
  }
};

}  // namespace

Module parse(const std::string& text, const std::string& file) {
  return parse_module<Kernel>(text, file, "kernel", [](Lexer& lexer) { return Parser{lexer}.kernel(); });
}

}  // namespace deplo::kernel_ir
