#include "schedule/reader.h"

#include <algorithm>

#include "base/error.h"
#include "base/text.h"

namespace deplo {

ScheduleReader::ScheduleReader(std::string kernel, Schedule schedule) : kernel_(std::move(kernel)), schedule_(std::move(schedule)) {}

void ScheduleReader::fail(const std::string& message) const {
  throw UserError(fmt::format("schedule of kernel {}: {} (schedule: {})", kernel_, message, print(schedule_)));
}

void ScheduleReader::fail(const Directive& d, const std::string& message) const { fail(fmt::format("{}: {}", print(d), message)); }

std::vector<const Directive*> ScheduleReader::all(const std::string& word) {
  std::vector<const Directive*> found;
  for (const Directive& d : schedule_.directives)
    if (d.word == word) found.push_back(&d);
  used_.insert(found.begin(), found.end());
  return found;
}

const Directive& ScheduleReader::one(const std::string& word) {
  auto found = all(word);
  if (found.empty()) fail(fmt::format("a {} schedule needs one '{}(...)'", schedule_.kind, word));
  if (found.size() > 1) fail(*found[1], fmt::format("a second '{}', one is allowed", word));
  return *found[0];
}

const Directive* ScheduleReader::find(const std::string& word, const std::string& name) {
  const Directive* found = nullptr;
  for (const Directive& d : schedule_.directives) {
    if (d.word != word || d.arguments.empty() || d.arguments[0].name != name) continue;
    if (found) fail(d, fmt::format("a second '{}' for {}, one is allowed", word, name));
    found = &d;
  }
  if (found) used_.insert(found);
  return found;
}

int64_t ScheduleReader::number(const Directive& d, const std::string& name, int64_t least, int64_t most, std::optional<int64_t> otherwise) const {
  for (const Argument& a : d.arguments) {
    if (a.name != name) continue;
    const auto* value = std::get_if<int64_t>(&a.value);
    if (!value || *value < least || *value > most)
      fail(d, fmt::format("{} is allowed to be a number from {} to {}", name.empty() ? "it" : name, least, most));
    return *value;
  }
  if (!otherwise) fail(d, fmt::format("it needs {}", name.empty() ? "a number" : fmt::format("'{}=' and a number from {} to {}", name, least, most)));
  return *otherwise;
}

std::string ScheduleReader::word(const Directive& d, const std::string& name, const std::vector<std::string>& allowed) const {
  for (const Argument& a : d.arguments) {
    if (a.name != name) continue;
    const auto* value = std::get_if<std::string>(&a.value);
    if (!value || std::find(allowed.begin(), allowed.end(), *value) == allowed.end())
      fail(d, fmt::format("{} is allowed to be {}", name, joined(allowed, " or ")));
    return *value;
  }
  fail(d, fmt::format("it needs '{}=', of {}", name, joined(allowed, " or ")));
}

std::vector<std::string> ScheduleReader::names(const Directive& d) const {
  std::vector<std::string> found;
  for (const Argument& a : d.arguments)
    if (a.value.index() == 0) found.push_back(a.name);
  return found;
}

void ScheduleReader::only(const Directive& d, const std::set<std::string>& allowed) const {
  std::set<std::string> seen;
  for (const Argument& a : d.arguments) {
    if (!allowed.count(a.name)) fail(d, fmt::format("'{}' is not known here; allowed: {}", print(a), joined({allowed.begin(), allowed.end()})));
    if (!seen.insert(a.name).second) fail(d, fmt::format("'{}' is given twice", a.name));
  }
}

void ScheduleReader::finish(const std::string& known) const {
  for (const Directive& d : schedule_.directives)
    if (!used_.count(&d)) fail(d, fmt::format("it does not fit a {} schedule of this kernel; allowed: {}", schedule_.kind, known));
}

std::string group_name(const std::vector<std::string>& axes) { return joined(axes, "*"); }

std::vector<std::string> group_axes(const std::string& group) {
  std::vector<std::string> axes;
  for (size_t at = 0; at <= group.size();) {
    size_t end = std::min(group.find('*', at), group.size());
    axes.push_back(group.substr(at, end - at));
    at = end + 1;
  }
  return axes;
}

}  // namespace deplo
