#pragma once

namespace deplo {

/// Registers the targets that deplo comes with; further calls do nothing. Whoever links deplo_targets calls it first.
void register_targets();

}  // namespace deplo
