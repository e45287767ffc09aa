#pragma once

namespace deplo {

/// Where a part of a module stands in the text that it was read from; line 0 for what no text has. No part of what it is: any two are equal.
struct Location {
  int line = 0;
  int column = 0;
  bool known() const { return line > 0; }
  bool operator==(const Location& /*other*/) const { return true; }
};

}  // namespace deplo
