#pragma once

namespace deplo {

/// Processors that this process may use (affinity).
int available_processors();

}  // namespace deplo
