#pragma once

#include <set>
#include <string>
#include <vector>

#include "schedule/schedule.h"

namespace deplo {

/// Takes a schedule apart for whoever applies it. Every misfit is a UserError that names the kernel, the directive, the value and what is
/// allowed; what nobody asked for is a misfit as well.
class ScheduleReader {
 public:
  ScheduleReader(std::string kernel, Schedule schedule);

  const Schedule& schedule() const { return schedule_; }
  /// The only directive of this word; fails if there is none or a second one.
  const Directive& one(const std::string& word);
  /// All directives of this word, in order.
  std::vector<const Directive*> all(const std::string& word);
  /// The directive of this word whose first argument is `name`; null if there is none.
  const Directive* find(const std::string& word, const std::string& name);

  /// The number of `name=number`, in least..most; the default where one is given and the argument is absent.
  int64_t number(const Directive& d, const std::string& name, int64_t least, int64_t most, std::optional<int64_t> otherwise = std::nullopt) const;
  /// The word of `name=word`, one of those allowed.
  std::string word(const Directive& d, const std::string& name, const std::vector<std::string>& allowed) const;
  /// Arguments without a value: axes or groups of them.
  std::vector<std::string> names(const Directive& d) const;
  /// That all arguments have one of these names.
  void only(const Directive& d, const std::set<std::string>& allowed) const;
  /// That every directive was asked for.
  void finish(const std::string& known) const;

  [[noreturn]] void fail(const std::string& message) const;
  [[noreturn]] void fail(const Directive& d, const std::string& message) const;

 private:
  std::string kernel_;
  Schedule schedule_;
  std::set<const Directive*> used_;
};

/// "i*j" for axes i and j.
std::string group_name(const std::vector<std::string>& axes);
std::vector<std::string> group_axes(const std::string& group);

}  // namespace deplo
