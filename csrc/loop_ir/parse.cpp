#include "base/error.h"
#include "loop_ir/text.h"

namespace deplo::loop_ir {
namespace {

struct Parser {
  Lexer& lexer;
  TypeScope scope;

  Axis axis() {
    std::string name = lexer.identifier("an axis");
    lexer.expect("in");
    return {std::move(name), parse_expr(lexer)};
  }

  Block block() {
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

  Stmt statement() {
    const std::string& after = lexer.peek(1).text;
    bool keyword = after != "=" && after != ":" && after != "[";
    if (keyword && lexer.accept("for")) {
      Axis a = axis();
      lexer.expect(":");
      return {For{a.name, a.extent, block()}};
    }
    if (keyword && lexer.accept("reduce")) return {reduce()};
    if (keyword && lexer.accept("scan")) return {scan()};
    Stmt stmt;
    if (keyword && lexer.accept("local")) {
      std::string name = lexer.identifier("a buffer");
      lexer.expect(":");
      TypeText type = parse_type(lexer);
      scope.buffers[name] = type.dtype;
      stmt = {Local{name, type.dtype, type.shape}};
    } else {
      stmt = std::visit([](auto&& s) { return Stmt{std::forward<decltype(s)>(s)}; }, parse_simple(lexer, scope));
    }
    lexer.expect("end of line");
    return stmt;
  }

  Reduce reduce() {
    Combination c = parse_combination(lexer, scope);
    Reduce s{c.results, c.dtypes, c.combiner, c.operands, {}, {}};
    lexer.expect("over");
    do s.axes.push_back(axis());
    while (lexer.accept(","));
    lexer.expect(":");
    s.body = block();
    return s;
  }

  Scan scan() {
    Combination c = parse_combination(lexer, scope);
    Scan s{c.results, c.dtypes, c.combiner, c.operands, {}, {}, {}};
    lexer.expect("over");
    s.axis = axis();
    lexer.expect(":");
    s.body = block();
    lexer.expect("then");
    lexer.expect(":");
    s.then = block();
    return s;
  }

  Kernel kernel() {
    Kernel k;
    k.location = lexer.peek().location();
    lexer.expect("loop");
    std::string name = lexer.identifier("a kernel name");
    if (name.size() < 2 || name[0] != '@') lexer.fail(fmt::format("expected a kernel name like @k0, found '{}'", name));
    k.name = name.substr(1);
    k.params = parse_params(lexer, scope);
    k.symbols = parse_ranges(lexer);
    k.provenance = parse_provenance(lexer);
    k.body = block();
    return k;
  }
};

}  // namespace

Module parse(const std::string& text, const std::string& file) {
  return parse_module<Kernel>(text, file, "loop", [](Lexer& lexer) { return Parser{lexer, {}}.kernel(); });
}

}  // namespace deplo::loop_ir
