#pragma once

#include <string>

#include "program_ir/module.h"

namespace deplo {

/// The symbol that tells whether all elements of a static input of integers lie in a range; a new fact unless there is one.
std::string add_fact(ProgramBody& program, const std::string& buffer, int64_t lo, int64_t hi);

}  // namespace deplo
