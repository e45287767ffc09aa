#include "passes/loop/name_kernels.h"

#include <algorithm>
#include <cctype>
#include <map>

#include "base/text.h"

namespace deplo {
namespace {

constexpr size_t kMostWords = 5;

// Ops that only arrange data say little about a kernel that also computes.
bool arranges(const std::string& word) {
  static const std::set<std::string> words{"view",    "_unsafe_view", "reshape", "permute", "transpose", "t",     "expand", "unsqueeze",
                                           "squeeze", "clone",        "slice",   "select",  "_to_copy",  "alias", "full",   "arange"};
  return words.count(word) > 0;
}

std::string word_of(const std::string& provenance) {
  std::string word;
  for (char c : provenance.substr(0, provenance.find(':'))) word += std::isalnum(static_cast<unsigned char>(c)) ? c : '_';
  size_t start = word.find_first_not_of('_');
  return start == std::string::npos ? "" : word.substr(start);
}

std::string name_of(const loop_ir::Kernel& kernel, size_t number) {
  std::vector<std::string> words;
  for (bool all : {false, true}) {
    for (const std::string& from : kernel.provenance) {
      std::string word = word_of(from);
      if (word.empty() || (!all && arranges(from.substr(0, from.find(':'))))) continue;
      if (words.size() < kMostWords && std::find(words.begin(), words.end(), word) == words.end()) words.push_back(word);
    }
    if (!words.empty()) break;
  }
  words.insert(words.begin(), "k" + std::to_string(number));
  return joined(words, "_");
}

}  // namespace

loop_ir::Module name_kernels(loop_ir::Module module, const PassContext&) {
  std::map<std::string, std::string> renamed;
  for (size_t number = 0; number < module.kernels.size(); ++number) {
    loop_ir::Kernel kernel = *module.kernels[number];
    std::string name = name_of(kernel, number);
    renamed[kernel.name] = name;
    kernel.name = name;
    module.kernels[number] = std::make_shared<loop_ir::Kernel>(std::move(kernel));
  }
  for (Step& step : module.steps)
    if (auto* call = std::get_if<CallStep>(&step)) call->kernel = renamed.at(call->kernel);
  return module;
}

}  // namespace deplo
