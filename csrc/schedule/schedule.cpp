#include "schedule/schedule.h"

#include "base/error.h"
#include "base/text.h"

namespace deplo {
namespace {

Argument parse_argument(Lexer& lexer) {
  Argument a;
  if (lexer.peek().kind == Token::Kind::integer || lexer.at("-")) {
    a.value = lexer.integer("an argument");
    return a;
  }
  a.name = lexer.identifier("an axis, a key or an integer");
  while (lexer.accept("*")) a.name += "*" + lexer.identifier("an axis");
  if (!lexer.accept("=")) return a;
  if (lexer.peek().kind == Token::Kind::identifier)
    a.value = lexer.next().text;
  else
    a.value = lexer.integer("a name or a number");
  return a;
}

bool at_named_schedule(const Lexer& lexer) { return lexer.at("schedule") && lexer.peek(1).text.starts_with("@"); }

}  // namespace

Schedule parse_schedule(Lexer& lexer) {
  Schedule s;
  s.kind = lexer.identifier("a kind of schedule");
  while (!lexer.at_end() && lexer.peek().kind != Token::Kind::newline && !at_named_schedule(lexer)) {
    Directive d;
    d.word = lexer.identifier("a directive");
    lexer.expect("(");
    if (!lexer.accept(")")) {
      do d.arguments.push_back(parse_argument(lexer));
      while (lexer.accept(","));
      lexer.expect(")");
    }
    s.directives.push_back(std::move(d));
  }
  return s;
}

std::string print(const Argument& argument) {
  if (const auto* number = std::get_if<int64_t>(&argument.value))
    return argument.name.empty() ? std::to_string(*number) : fmt::format("{}={}", argument.name, *number);
  if (const auto* word = std::get_if<std::string>(&argument.value)) return argument.name + "=" + *word;
  return argument.name;
}

std::string print(const Directive& directive) {
  std::vector<std::string> arguments;
  for (const Argument& a : directive.arguments) arguments.push_back(print(a));
  return fmt::format("{}({})", directive.word, joined(arguments));
}

std::string print(const Schedule& schedule) {
  std::string text = schedule.kind;
  for (const Directive& d : schedule.directives) text += " " + print(d);
  return text;
}

Schedule parse_schedule(const std::string& text, const std::string& source) {
  Lexer lexer(text, source, false);
  Schedule s = parse_schedule(lexer);
  if (!lexer.at_end()) lexer.fail(fmt::format("expected the end of the schedule, found '{}'", lexer.peek().text));
  return s;
}

uint64_t hash(const Schedule& schedule) {
  uint64_t h = 0xcbf29ce484222325U;  // FNV-1a
  for (char c : print(schedule)) h = (h ^ static_cast<unsigned char>(c)) * 0x100000001b3U;
  return h;
}

std::map<std::string, Schedule> parse_schedules(const std::string& text, const std::string& source) {
  Lexer lexer(text, source, false);
  if (!at_named_schedule(lexer)) return {{"", parse_schedule(text, source)}};
  std::map<std::string, Schedule> all;
  while (!lexer.at_end()) {
    lexer.expect("schedule");
    Token name = lexer.next();
    lexer.expect(":");
    if (!all.emplace(name.text.substr(1), parse_schedule(lexer)).second) lexer.fail(name, fmt::format("a second schedule for {}", name.text));
  }
  return all;
}

}  // namespace deplo
