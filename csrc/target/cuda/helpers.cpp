#include "target/cuda/helpers.h"

#include <algorithm>
#include <cctype>
#include <string_view>
#include <vector>

#include "target/cuda/prelude.h"
#include "target/cuda/prelude_tiles.h"

namespace deplo {
namespace {

bool in_name(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_'; }

/// Whether the text uses a name as a whole word.
bool mentions(std::string_view text, std::string_view name) {
  for (size_t at = text.find(name); at != std::string_view::npos; at = text.find(name, at + 1)) {
    size_t end = at + name.size();
    if ((at == 0 || !in_name(text[at - 1])) && (end == text.size() || !in_name(text[end]))) return true;
  }
  return false;
}

/// One declaration of the prelude.
struct Helper {
  std::string_view name;
  std::string_view text;
};

/// The prelude's declarations in order: each starts at the left margin, and its name is the word before the first bracket or, of a type, before
/// the semicolon.
void split_prelude(std::string_view all, std::vector<Helper>& helpers) {
  for (size_t start = 0; start < all.size();) {
    size_t end = all.find('\n', start) + 1;
    while (end < all.size() && (all[end] == ' ' || all[end] == '}')) end = all.find('\n', end) + 1;
    std::string_view text = all.substr(start, end - start);
    size_t stop = std::min(text.find('('), text.rfind(';'));
    for (std::string_view name : {" deplo_pack {", " deplo_words {", " deplo_tensor_map {"})
      if (size_t type = text.find(name); type != std::string_view::npos) stop = text.find(" {", type + 1);
    size_t from = stop;
    while (from > 0 && in_name(text[from - 1])) --from;
    helpers.push_back({text.substr(from, stop - from), text});
    start = end;
  }
}

}  // namespace

std::string helpers_for(const std::string& kernels) {
  static const std::vector<Helper> kHelpers = [] {
    std::vector<Helper> all;
    split_prelude(kCudaPrelude, all);
    split_prelude(cuda_tile_prelude(), all);
    return all;
  }();
  std::string used;
  for (size_t i = kHelpers.size(); i-- > 0;)  // later ones use earlier ones
    if (mentions(kernels, kHelpers[i].name) || mentions(used, kHelpers[i].name)) used.insert(0, kHelpers[i].text);
  return used.empty() ? used : used + "\n";
}

}  // namespace deplo
