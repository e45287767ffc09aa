#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/context.h"
#include "base/error.h"
#include "kernel_ir/ir.h"
#include "loop_ir/ir.h"
#include "tensor_ir/ir.h"
#include "tile_ir/ir.h"
#include "torch_ir/ir.h"

namespace deplo {

template <class Module>
struct Pass {
  std::string name;  ///< verb_noun: also the file, the function, the dump tag and the test folder
  std::function<Module(Module, const PassContext&)> run;
  std::string doc;
};

/// The only list of passes, in the order in which they run at each level.
const std::vector<Pass<torch_ir::Graph>>& torch_passes();
const std::vector<Pass<tensor_ir::Graph>>& tensor_passes();
const std::vector<Pass<loop_ir::Module>>& loop_passes();
const std::vector<Pass<tile_ir::Module>>& tile_passes();
const std::vector<Pass<kernel_ir::Module>>& kernel_passes();

/// Sees the text after each lowering and pass: level ("tensor"), pass name ("lower" for the lowering itself, "import" for Torch IR), text, whether it
/// changed.
using Observer = std::function<void(const std::string& level, const std::string& pass, const std::string& text, bool changed)>;

struct PipelineOptions {
  std::string stop_after;    ///< a level, a pass or lower_to_<level> (a level before its passes); empty: run to kernel
  std::string dump;          ///< a level, a pass or lower_to_<level> that the observer shows, or all: its name is checked
  bool verify_each = false;  ///< after every pass: verify, and check that the text reads back as the same module
  bool whole = false;        ///< passes see all of many equal layers (passes/torch/roll_layers.h), as somebody does who reads what they make
  bool by_hand = false;      ///< a person wrote the text: what is wrong with it is a UserError that says where
  Observer observer;         ///< may be empty
};

/// What the pipeline made, level by level; levels after stop_after are empty.
struct Compiled {
  torch_ir::Graph torch;
  tensor_ir::Graph tensor;
  loop_ir::Module loop;
  tile_ir::Module tile;
  kernel_ir::Module kernel;
  std::string reached;  ///< the last level that was made
};

/// "torch", "tensor", "loop", "tile" or "kernel": the level of IR text, by its keywords. UserError if it has none.
std::string level_of(const std::string& text, const std::string& file);

/// Parses and verifies text that a person wrote: UserError `file:line:column: ...` for whatever is wrong with it.
void verify_by_hand(const std::string& text, const std::string& file);

/// lower_torch_to_tensor of text that a person wrote. The lowering is Torch IR's type checker: only it knows what each ATen call gives.
tensor_ir::Graph lower_torch_by_hand(const torch_ir::Graph& graph, const std::string& file);

/// Refuses a stop_after, a dump or a disabled pass that does not exist: a misspelt one would silently change nothing.
void check_names(const PassContext& context, const PipelineOptions& options);

Compiled run_pipeline(const torch_ir::Graph& graph, const PassContext& context, const PipelineOptions& options);
/// Resumes from IR text of any level (named by its first keyword). UserError `file:line:column: ...` if the text does not parse.
Compiled run_pipeline_from_text(const std::string& text, const std::string& file, const PassContext& context, const PipelineOptions& options);

}  // namespace deplo
