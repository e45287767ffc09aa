#include "passes/loop/name_kernels.h"

#include <algorithm>
#include <cctype>
#include <map>

#include "base/text.h"

namespace deplo {
namespace {

constexpr size_t kMostWords = 5;
constexpr size_t kMostCharacters = 64;

// Ops that only arrange data say little about a kernel that also computes.
bool arranges(const std::string& op) {
  static const std::set<std::string> ops{"view",    "_unsafe_view", "reshape", "permute", "transpose", "t",     "expand", "unsqueeze",
                                         "squeeze", "clone",        "slice",   "select",  "_to_copy",  "alias", "full",   "arange"};
  return ops.count(op) > 0;
}

/// The parts of "addmm:addmm_1 of linear": the ATen op, and what the user called, which is the op itself where nothing else is said.
struct Origin {
  std::string op;
  std::string function;
};

Origin origin_of(const std::string& provenance) {
  static constexpr std::string_view kOf = " of ";
  size_t of = provenance.find(kOf);
  std::string op = provenance.substr(0, std::min(provenance.find(':'), of));
  return {op, of == std::string::npos ? op : provenance.substr(of + kOf.size())};
}

std::string word_of(const std::string& function) {
  std::string word;
  for (char c : function) word += std::isalnum(static_cast<unsigned char>(c)) ? c : '_';
  size_t start = word.find_first_not_of('_');
  return start == std::string::npos ? "" : word.substr(start);
}

std::string name_of(const loop_ir::Kernel& kernel, size_t number) {
  std::vector<std::string> words;
  std::string name = "k" + std::to_string(number);
  for (bool all : {false, true}) {
    for (const std::string& from : kernel.provenance) {
      Origin origin = origin_of(from);
      std::string word = word_of(origin.function);
      if (word.empty() || (!all && arranges(origin.op)) || std::find(words.begin(), words.end(), word) != words.end()) continue;
      if (words.size() == kMostWords || (!words.empty() && name.size() + 1 + word.size() > kMostCharacters)) return name;
      words.push_back(word);
      name += "_" + word;
    }
    if (!words.empty()) break;
  }
  return name;
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
