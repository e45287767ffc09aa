#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "program_ir/module.h"

namespace deplo {

/// The symbol that tells whether all elements of a static input of integers lie in a range; a new fact unless there is one.
std::string add_fact(ProgramBody& program, const std::string& buffer, int64_t lo, int64_t hi);

/// Which steps may run for some sizes, as far as the symbols tell that are known.
std::vector<bool> possible_steps(const ProgramBody& program, const std::map<std::string, int64_t>& known);

}  // namespace deplo
