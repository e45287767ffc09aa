#pragma once

#include <functional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "base/context.h"
#include "loop_ir/rewrite.h"
#include "loop_ir/structure.h"

namespace deplo {

/// What a pass makes of kernel bodies. Bodies that differ in the names of buffers alone, as those of equal layers do, are worked on once: the others
/// get the result with their own buffers in it.
class Repeats {
 public:
  explicit Repeats(const PassContext& context) : on_(are_shared(context)) {}

  using Make = std::function<loop_ir::Block()>;
  using Describe = std::function<void(loop_ir::Structure& key, const std::vector<std::string>& buffers)>;

  /// What `make` makes of the body. It must follow from the body and from what `describe` says, for one of its buffers in the order of their first
  /// use: from no name of a buffer. A body that stays as it is comes back as the very statements that it was.
  loop_ir::Block operator()(const loop_ir::Block& body, const Make& make, const Describe& describe = nullptr);
  /// The same, of something that `key` says everything of but the names of these buffers.
  loop_ir::Block operator()(std::string key, std::vector<std::string> buffers, const Make& make);

  static bool are_shared(const PassContext& context) { return !context.disabled.count("share_repeats"); }

  /// How many bodies all objects of this class have worked on in this thread: tests count.
  static size_t& made();

 private:
  struct Result {
    loop_ir::Block block;
    std::vector<std::string> buffers;
  };
  bool on_;
  std::unordered_map<std::string, Result> results_;
  std::unordered_set<std::string> unchanged_;  ///< keys of bodies that stay as they are
};

/// `names` in order as keys, those of `others` as what takes their place.
std::unordered_map<std::string, std::string> renaming(const std::vector<std::string>& names, const std::vector<std::string>& others);

}  // namespace deplo
