#include "base/error.h"

#include <string_view>

namespace deplo {

void throw_internal(const char* file, int line, const char* condition, const std::string& text) {
  std::string_view path(file);
  if (auto at = path.rfind("csrc/"); at != std::string_view::npos) path = path.substr(at);
  throw InternalError(fmt::format("{} ({}:{}: {})", text, path, line, condition));
}

}  // namespace deplo
