#include "runtime/program.h"

#include <algorithm>
#include <map>
#include <utility>

#include "base/error.h"
#include "base/memory.h"
#include "program_ir/facts.h"
#include "runtime/device_call.h"
#include "runtime/guard.h"
#include "runtime/kernel_error.h"
#include "runtime/owned.h"
#include "runtime/step_memory.h"
#include "runtime/turns.h"

namespace deplo::runtime {
namespace {

constexpr char kUntouched = 0x3C;  // every byte of what a guarded kernel is to write

/// Parts per thread where a kernel can be split that finely: threads that finish early then help those that were
/// interrupted.
constexpr int64_t kPartsPerThread = 4;
/// Scratch of different threads never shares a page.
constexpr int64_t kScratchAlignment = 4096;

struct KernelJob {
  KernelFn function;
  KernelArgs args;
  int64_t parts;
  char* scratch;
  int64_t scratch_stride;
};

void run_part(void* context, int64_t part, int worker) {
  const auto& job = *static_cast<const KernelJob*>(context);
  KernelArgs args = job.args;
  args.scratch = job.scratch + worker * job.scratch_stride;
  job.function(&args, part, job.parts);
}

int64_t parts_for(int64_t chunks, int threads) {
  if (threads == 1 || chunks == 1) return 1;
  int64_t fine = threads * kPartsPerThread;
  // As many for each thread, which late ones leave to others.
  return chunks >= fine ? fine : std::max(std::min<int64_t>(chunks, threads), chunks / threads * threads);
}

/// What is packed depends on sizes, too, and on what of it is kept.
Identity identity_of_choice(int64_t value) { return {nullptr, nullptr, static_cast<uint64_t>(value), 0}; }

}  // namespace

/// What one call works on; reused by later calls.
struct Program::CallState {
  std::vector<char*> pointers;  ///< by buffer
  std::vector<int64_t> symbols;
  std::vector<std::optional<Identity>> identities;  ///< of arguments, as far as this call has looked at them
};

/// What was packed from one state of the static inputs.
struct Program::PackedState {
  std::vector<Identity> identities;  ///< of every group's inputs, then of its choices, group after group
  uint64_t generation = 0;
  std::vector<std::shared_ptr<PackedBlock>> blocks;  ///< by group; none where no call so far ran a step that reads it
};

/// Borrows a CallState.
class Program::CallGuard {
 public:
  explicit CallGuard(Program& program) : program_(program) {
    {
      std::lock_guard lock(program.mutex_);
      if (!program.idle_.empty()) {
        state_ = std::move(program.idle_.back());
        program.idle_.pop_back();
      }
    }
    if (!state_) {
      state_ = std::make_unique<CallState>();
      state_->pointers.resize(program.module_.buffers.size());
    }
  }
  ~CallGuard() {
    std::lock_guard lock(program_.mutex_);
    program_.idle_.push_back(std::move(state_));
  }
  CallGuard(const CallGuard&) = delete;
  CallGuard& operator=(const CallGuard&) = delete;
  CallState& operator*() { return *state_; }
  CallState* operator->() { return state_.get(); }

 private:
  Program& program_;
  std::unique_ptr<CallState> state_;
};

Program::Program(kernel_ir::Module module, KernelCode code, LibraryFactory library, Options options)
    : module_(std::move(module)), code_(std::move(code)), options_(options), layout_(make_layout(module_)), solver_(module_) {
  bool has_functions = !code_.device && code_.missing.empty();
  DEPLO_ASSERT(!has_functions || code_.functions.size() == module_.kernels.size(), "{} kernels, {} compiled", module_.kernels.size(),
               code_.functions.size());
  groups_ = find_once_groups(module_, layout_);
  facts_.resize(solver_.facts().size());
  argument_of_.resize(module_.buffers.size());
  for (size_t i = 0; i < layout_.input_order.size(); ++i)
    if (layout_.input_order[i]) argument_of_[*layout_.input_order[i]] = i;
  LibraryContext context{&module_, solver_.names()};
  for (size_t s = 0; s < layout_.steps.size(); ++s) {
    const auto& kernel = layout_.steps[s].kernel;
    functions_.push_back(kernel && has_functions ? code_.functions[*kernel]->function() : nullptr);
    if (kernel) continue;
    const auto& step = std::get<LibraryStep>(module_.steps[s]);
    DEPLO_SUPPORT(library, "{} is a library call, and there is no tensor library here", step.op);
    libraries_.push_back(library(step, context));
  }
  times_.resize(layout_.steps.size());
  if (!groups_.empty()) readers_ = find_readers(module_, layout_);
  if (options_.device >= 0 && code_.device)
    resident_ = std::make_unique<Resident>(*code_.device, module_, layout_, solver_.names(), options_.device, options_.replay);
}

Program::~Program() {
  packed_.reset();
  drop_unused_copies();
}

std::shared_ptr<const Plan> Program::plan_for(const std::vector<int64_t>& symbols) {
  {
    std::lock_guard lock(mutex_);
    for (auto at = plans_.begin(); at != plans_.end(); ++at) {
      if ((*at)->symbols != symbols) continue;
      if (at != plans_.begin()) plans_.splice(plans_.begin(), plans_, at);
      return plans_.front();
    }
  }
  auto plan = make_plan(module_, layout_, solver_.names(), symbols);
  DEPLO_CHECK(options_.memory_limit == 0 || plan->arena_bytes <= options_.memory_limit,
              "program {} needs {} bytes of temporaries, more than memory_limit = {}", module_.name, plan->arena_bytes, options_.memory_limit);
  if (resident_) resident_->prepare(*plan);
  if (!groups_.empty()) plan->needs = needs_for(symbols);
  std::lock_guard lock(mutex_);
  plans_.push_front(plan);
  if (plans_.size() > static_cast<size_t>(options_.plans_kept)) plans_.pop_back();
  return plan;
}

std::shared_ptr<const Plan> Program::latest_plan() const {
  std::lock_guard lock(mutex_);
  return plans_.empty() ? nullptr : plans_.front();
}

void Program::check_arguments(const CallArgument* arguments, size_t count, const Plan& plan) const {
  for (size_t i = 0; i < count; ++i) {
    const auto& buffer = layout_.input_order[i];
    DEPLO_CHECK(arguments[i].is_tensor == buffer.has_value(), "input {}: expected {}", module_.input_order[i], buffer ? "a tensor" : "an integer");
    if (buffer) check_input(module_.buffers[*buffer], plan.shapes[*buffer], arguments[i].tensor);
  }
  if (!layout_.written_inputs.empty()) check_overlaps(arguments, plan);
}

void Program::check_overlaps(const CallArgument* arguments, const Plan& plan) const {
  for (size_t w : layout_.written_inputs) {
    const TensorView& written = arguments[w].tensor;
    int64_t bytes = plan.shapes[*layout_.input_order[w]].bytes;
    for (size_t i = 0; i < layout_.input_order.size(); ++i) {
      if (i == w || !layout_.input_order[i]) continue;
      const TensorView& other = arguments[i].tensor;
      if (other.data >= written.data + bytes || written.data >= other.data + plan.shapes[*layout_.input_order[i]].bytes) continue;
      DEPLO_CHECK(!may_share_memory(written, other), "input {}, which the program writes, shares memory with input {}", module_.input_order[w],
                  module_.input_order[i]);
    }
  }
}

bool Program::is_wanted(const OnceGroup& group, const Plan& plan) {
  return std::any_of(group.steps.begin(), group.steps.end(), [&](size_t step) { return plan.steps[step].runs && plan.needs->made[step]; });
}

std::shared_ptr<const PackedNeeds> Program::needs_for(const std::vector<int64_t>& symbols) {
  std::vector<int64_t> facts;
  for (const auto& fact : solver_.facts()) facts.push_back(symbols[fact.symbol]);
  std::lock_guard lock(mutex_);
  auto& needs = needs_[facts];
  if (!needs) needs = std::make_shared<const PackedNeeds>(packed_needs(module_, layout_, readers_, possible_steps_of(symbols)));
  return needs;
}

template <class Visit>
void Program::visit_choices(const OnceGroup& group, const Plan& plan, Visit visit) {
  for (size_t step : group.steps)
    for (int64_t value : plan.steps[step].symbols) visit(value);
  for (size_t buffer : group.packed) visit(plan.needs->kept[buffer] ? 1 : 0);
}

const Identity& Program::identity(size_t argument, const CallArgument* arguments, CallState& state) const {
  auto& known = state.identities[argument];
  if (!known) known = identity_of(arguments[argument].tensor, options_.sampled);
  return *known;
}

namespace {

constexpr int64_t kPiece = int64_t{4} << 20;  // bytes
constexpr int64_t kFewIntegers = 1 << 16;     // zero points of channels and groups

/// All elements of a tensor on the device, piece by piece until one does not hold; those of a tensor with gaps, or of many wider integers, count as
/// if they did not.
bool all_within_on_device(DeviceKernels& device, const TensorView& integers, int64_t lo, int64_t hi) {
  int64_t count = 1;
  for (int d = integers.rank; d-- > 0; count *= integers.sizes[d])
    if (integers.sizes[d] != 1 && integers.strides[d] != count) return false;
  const int64_t each = size_of(integers.dtype);
  if (each != 1 && count > kFewIntegers) return false;
  device.synchronize();
  const int64_t in_piece = kPiece / each;
  std::vector<int64_t> piece(static_cast<size_t>((std::min(count, in_piece) * each + 7) / 8));
  for (int64_t at = 0; at < count; at += in_piece) {
    const int64_t elements = std::min(count - at, in_piece);
    const int64_t stride = 1;
    device.copy_to_host(piece.data(), static_cast<uint64_t>(reinterpret_cast<uintptr_t>(integers.data)) + static_cast<uint64_t>(at * each),
                        elements * each);
    TensorView view = integers;
    view.data = reinterpret_cast<char*>(piece.data());
    view.rank = 1;
    view.sizes = &elements;
    view.strides = &stride;
    if (!all_within(view, lo, hi)) return false;
  }
  return true;
}

}  // namespace

void Program::find_facts(const CallArgument* arguments, CallState& state, Host& host) {
  const auto& facts = solver_.facts();
  const uint64_t generation = packed_generation();
  for (size_t i = 0; i < facts.size(); ++i) {
    const TensorView& view = arguments[facts[i].argument].tensor;
    int64_t& value = state.symbols[facts[i].symbol];
    value = 0;
    const bool is_on_device = view.device >= 0;
    const bool may_hold = view.has_version && (!is_on_device || resident_);
    // A stream that records launches will launch them again when weights were written: what is packed of them would be old.
    if (!may_hold || (is_on_device && !code_.device->may_wait(host.stream()))) continue;
    std::optional<KnownFact> known;
    {
      std::lock_guard lock(mutex_);
      if (facts_[i] && facts_[i]->generation == generation) known = facts_[i];
    }
    // What does not hold is always safe to go on with: a write that nobody counted is not looked for.
    const bool refuted = known && known->value == 0;
    const Identity now = refuted ? identity_of(view, false) : identity(facts[i].argument, arguments, state);
    if (known && known->identity == now) {
      value = known->value;
      continue;
    }
    // Elements on a device are looked at once for each version of them.
    value = (is_on_device ? all_within_on_device(*code_.device, view, facts[i].lo, facts[i].hi) : all_within(view, facts[i].lo, facts[i].hi)) ? 1 : 0;
    std::lock_guard lock(mutex_);
    facts_[i] =
        KnownFact{value ? identity(facts[i].argument, arguments, state) : identity_of(view, false), host.watch(facts[i].argument), generation, value};
  }
}

bool Program::same_identities(const PackedState& state, const CallArgument* arguments, CallState& call, const Plan& plan) const {
  for (size_t g = 0; g < groups_.size(); ++g)
    if (!state.blocks[g] && is_wanted(groups_[g], plan)) return false;
  auto at = state.identities.begin();
  for (const OnceGroup& group : groups_) {
    for (size_t buffer : group.inputs)
      if (*at++ != identity(argument_of_[buffer], arguments, call)) return false;
    bool same = true;
    visit_choices(group, plan, [&](int64_t value) { same = *at++ == identity_of_choice(value) && same; });
    if (!same) return false;
  }
  return true;
}

std::shared_ptr<const Program::PackedState> Program::packed_for(const CallArgument* arguments, CallState& state, const Plan& plan, Host& host,
                                                                TeamLease& team) {
  if (groups_.empty()) return nullptr;
  std::shared_ptr<const PackedState> current;
  {
    std::lock_guard lock(mutex_);
    current = packed_;
  }
  uint64_t generation = packed_generation();
  bool fresh = current && current->generation == generation;
  if (!resident_ && options_.sampled) {
    // Samples of weights wait for memory most of the time: threads wait side by side.
    std::vector<size_t> unknown;
    for (const OnceGroup& group : groups_)
      for (size_t buffer : group.inputs)
        if (!state.identities[argument_of_[buffer]]) unknown.push_back(argument_of_[buffer]);
    std::sort(unknown.begin(), unknown.end());
    unknown.erase(std::unique(unknown.begin(), unknown.end()), unknown.end());
    auto find = [&](int64_t part) { identity(unknown[static_cast<size_t>(part)], arguments, state); };
    constexpr size_t kFew = 16;  // are looked at before other threads have come
    if (unknown.size() >= kFew)
      team.run(static_cast<int64_t>(unknown.size()), [](void* f, int64_t part, int) { (*static_cast<decltype(find)*>(f))(part); }, &find);
  }
  if (fresh && same_identities(*current, arguments, state, plan)) {
    if (options_.own && weights_shown() > 0) {
      const std::vector<bool> possible = possible_steps_of(plan.symbols);
      for (const OnceGroup& group : groups_)
        for (size_t buffer : group.inputs)
          if (!reader_of(buffer, possible)) let_go_again(arguments[argument_of_[buffer]].tensor.data);
    }
    return current;
  }
  drop_unused_copies();
  auto made = std::make_shared<PackedState>();
  made->generation = generation;
  std::vector<size_t> starts;
  for (const OnceGroup& group : groups_) {
    starts.push_back(made->identities.size());
    for (size_t buffer : group.inputs) made->identities.push_back(identity(argument_of_[buffer], arguments, state));
    visit_choices(group, plan, [&](int64_t value) { made->identities.push_back(identity_of_choice(value)); });
  }
  starts.push_back(made->identities.size());
  for (size_t g = 0; g < groups_.size(); ++g) {
    auto at = [&](const PackedState& state, size_t start) { return state.identities.begin() + static_cast<std::ptrdiff_t>(start); };
    bool same = fresh && std::equal(at(*made, starts[g]), at(*made, starts[g + 1]), at(*current, starts[g]));
    if (!is_wanted(groups_[g], plan) || (same && current->blocks[g])) {
      made->blocks.push_back(same ? current->blocks[g] : nullptr);
      continue;
    }
    std::vector<Identity> inputs(at(*made, starts[g]), at(*made, starts[g + 1]));
    made->blocks.push_back(share_packed(groups_[g].content, inputs, [&](PackedBlock& block) { pack(groups_[g], state, plan, host, team, block); }));
    if (options_.own) own_inputs(groups_[g], made->blocks.back(), arguments, state, plan, host, team);
  }
  int64_t bytes = plan.arena_bytes;
  for (const auto& block : made->blocks)
    if (block) bytes += block->bytes;
  DEPLO_CHECK(options_.memory_limit == 0 || bytes <= options_.memory_limit,
              "program {} needs {} bytes for packed weights and temporaries, more than memory_limit = {}", module_.name, bytes,
              options_.memory_limit);
  std::lock_guard lock(mutex_);
  packed_ = made;
  return made;
}

void Program::pack(const OnceGroup& group, const CallState& state, const Plan& plan, Host& host, TeamLease& team, PackedBlock& block) {
  // What only other steps of the group read goes when they have run.
  int64_t passing_bytes = 0;
  block.bytes = 0;
  std::vector<int64_t> offsets;
  for (size_t buffer : group.packed) {
    int64_t& bytes = plan.needs->kept[buffer] ? block.bytes : passing_bytes;
    offsets.push_back(bytes);
    bytes += round_up(plan.shapes[buffer].bytes, kAlignment);
  }
  Memory passing_memory;
  DeviceBlock passing_device;
  if (resident_) {
    block.device = host.allocate_on_device(block.bytes);
    passing_device = host.allocate_on_device(passing_bytes);
  } else {
    block.memory = Memory(block.bytes);
    passing_memory = Memory(passing_bytes);
  }
  char* data = resident_ ? block.device.data : block.memory.data();
  char* passing = resident_ ? passing_device.data : passing_memory.data();
  block.pointers.clear();
  std::vector<char*> pointers(module_.buffers.size(), nullptr);
  for (size_t i = 0; i < group.packed.size(); ++i) {
    const size_t buffer = group.packed[i];
    const bool is_kept = plan.needs->kept[buffer];
    pointers[buffer] = (is_kept ? data : passing) + offsets[i];
    block.pointers.push_back(is_kept ? pointers[buffer] : nullptr);
  }
  std::vector<size_t> steps;
  for (size_t step : group.steps)
    if (plan.needs->made[step]) steps.push_back(step);
  block.watches.clear();
  for (size_t buffer : group.inputs) {
    pointers[buffer] = state.pointers[buffer];
    block.watches.push_back(host.watch(argument_of_[buffer]));
  }
  if (resident_) {
    DeviceBlock scratch = host.allocate_on_device(plan.launches->scratch_bytes());
    for (size_t step : steps) resident_->start(step, plan, pointers.data(), scratch.data, host.stream());
    block.stream = host.stream();
    block.filled = host.mark();
    return;
  }
  if (code_.device) {
    DeviceCall call(*code_.device, module_, layout_, plan, solver_.names(), steps, pointers.data());
    for (size_t step : steps) call.launch(step);
    std::vector<size_t> kept;
    for (size_t i = 0; i < group.packed.size(); ++i)
      if (block.pointers[i]) kept.push_back(group.packed[i]);
    call.finish(kept);
    return;
  }
  Memory scratch(round_up(plan.scratch_bytes, kScratchAlignment) * team.threads());
  for (size_t step : steps) run_kernel(step, plan, pointers.data(), scratch.data(), team);
}

namespace {

/// Extents of a tensor whose elements fill one block of memory, slowest first; nothing for others.
std::optional<std::vector<int64_t>> extents_in_memory(const BufferShape& shape) {
  std::vector<std::pair<int64_t, int64_t>> axes;
  for (size_t d = 0; d < shape.sizes.size(); ++d)
    if (shape.sizes[d] != 1) axes.emplace_back(shape.strides[d], shape.sizes[d]);
  std::sort(axes.rbegin(), axes.rend());
  std::vector<int64_t> extents;
  int64_t count = 1;
  for (size_t d = axes.size(); d-- > 0;) {
    if (axes[d].first != count) return std::nullopt;
    count *= axes[d].second;
    extents.insert(extents.begin(), axes[d].second);
  }
  return extents;
}

/// Rows and columns of few places in all.
std::pair<int64_t, int64_t> rows_and_columns(const std::vector<int64_t>& extents) {
  int64_t count = 1;
  for (int64_t extent : extents) count *= extent;
  std::pair<int64_t, int64_t> best{count, 1};
  int64_t rows = 1;
  for (int64_t extent : extents) {
    rows *= extent;
    if (rows + count / rows < best.first + best.second) best = {rows, count / rows};
  }
  return best;
}

/// How inputs of groups with this content, these sizes and this number among the group's inputs lie in what is packed of them: found once. Null: in
/// no way that is known. Never destroyed, like the registry of blocks.
struct KnownUnpackings {
  std::mutex mutex;
  std::map<std::vector<uint64_t>, std::shared_ptr<const Unpacking>> by_content;
};
KnownUnpackings& known_unpackings() {
  static auto* instance = new KnownUnpackings;
  return *instance;
}

}  // namespace

std::shared_ptr<const Unpacking> Program::unpacking_of(const OnceGroup& group, size_t input, const CallState& state, const Plan& plan,
                                                       TeamLease& team) {
  const size_t buffer = group.inputs[input];
  std::vector<uint64_t> key{group.content, input};
  visit_choices(group, plan, [&](int64_t value) { key.push_back(static_cast<uint64_t>(value)); });
  KnownUnpackings& known = known_unpackings();
  {
    std::lock_guard lock(known.mutex);
    if (auto found = known.by_content.find(key); found != known.by_content.end()) return found->second;
  }
  const auto extents = extents_in_memory(plan.shapes[buffer]);
  if (!extents || extents->empty()) return nullptr;
  const auto [rows, cols] = rows_and_columns(*extents);
  int64_t bytes = 0;
  for (size_t packed : group.packed) bytes += round_up(plan.shapes[packed].bytes, kAlignment);
  Zeros memory(bytes);
  std::vector<char*> pointers(module_.buffers.size(), nullptr);
  for (size_t other : group.inputs) pointers[other] = state.pointers[other];
  std::vector<Bytes> outputs;
  int64_t offset = 0;
  for (size_t packed : group.packed) {
    pointers[packed] = memory.data() + offset;
    outputs.push_back({pointers[packed], plan.needs->kept[packed] ? plan.shapes[packed].bytes : 0});
    offset += round_up(plan.shapes[packed].bytes, kAlignment);
  }
  Memory scratch(round_up(plan.scratch_bytes, kScratchAlignment) * team.threads());
  auto found = find_unpacking(module_.buffers[buffer].dtype, rows, cols, outputs, [&](const char* elements) {
    pointers[buffer] = const_cast<char*>(elements);
    for (size_t step : group.steps)
      if (plan.needs->made[step]) run_kernel(step, plan, pointers.data(), scratch.data(), team);
  });
  std::shared_ptr<const Unpacking> how;
  if (found) how = std::make_shared<const Unpacking>(std::move(*found));
  std::lock_guard lock(known.mutex);  // not while kernels run: a fork meanwhile would leave it locked in the child
  return known.by_content.try_emplace(std::move(key), std::move(how)).first->second;
}

std::vector<bool> Program::possible_steps_of(const std::vector<int64_t>& symbols) const {
  std::map<std::string, int64_t> facts;
  for (const auto& fact : solver_.facts()) facts[solver_.names()[fact.symbol]] = symbols[fact.symbol];
  return possible_steps(module_, facts);
}

const Reader* Program::reader_of(size_t buffer, const std::vector<bool>& possible) const {
  for (const Reader& reader : readers_[buffer])
    if (possible[reader.step]) return &reader;
  return nullptr;
}

void Program::own_inputs(const OnceGroup& group, const std::shared_ptr<PackedBlock>& block, const CallArgument* arguments, const CallState& state,
                         const Plan& plan, Host& host, TeamLease& team) {
  constexpr int64_t kLeast = 1 << 17;  // bytes of weights that are worth it
  const std::vector<bool> possible = possible_steps_of(plan.symbols);
  for (size_t i = 0; i < group.inputs.size(); ++i) {
    const size_t buffer = group.inputs[i];
    const size_t argument = argument_of_[buffer];
    const TensorView& view = arguments[argument].tensor;
    if (view.device >= 0 || plan.shapes[buffer].bytes < kLeast) continue;
    auto attempt = [&]() -> std::string {
      if (const Reader* reader = reader_of(buffer, possible)) return fmt::format("{} reads it as it lies, too", reader->name);
      if (!view.has_version) return "it is an inference tensor, whose writes leave no trace";
      char* memory = host.report_end(argument, forget_memory);
      if (!memory) return "PyTorch's allocator did not make its memory: a mapped file, shared memory or another library's";
      auto how = unpacking_of(group, i, state, plan, team);
      if (!how) return "its packed copy does not hold all of it";
      return own({view.data, plan.shapes[buffer].bytes, memory, identity_of(view, true).sample, block, std::move(how)});
    };
    const std::string why = attempt();
    std::lock_guard lock(mutex_);
    if (why.empty())
      kept_twice_.erase(module_.buffers[buffer].name);
    else
      kept_twice_[module_.buffers[buffer].name] = why;
  }
}

std::map<std::string, std::string> Program::kept_twice() const {
  std::lock_guard lock(mutex_);
  return kept_twice_;
}

void Program::await_packed(const PackedState& packed, Host& host) {
  for (const auto& block : packed.blocks) {
    if (!block || block->stream == host.stream()) continue;
    host.wait_for(block->filled);
    host.use(block->device);
  }
}

int64_t Program::packed_bytes() const {
  std::lock_guard lock(mutex_);
  int64_t bytes = 0;
  if (packed_)
    for (const auto& block : packed_->blocks)
      if (block) bytes += block->bytes;
  return bytes;
}

void Program::run_kernel(size_t step, const Plan& plan, char* const* pointers, char* scratch, TeamLease& team) {
  if (options_.guard) return run_guarded(step, plan, pointers, team);
  const Layout::Step& at = layout_.steps[step];
  constexpr size_t kInline = 32;
  void* few[kInline];
  std::vector<void*> many;
  void** buffers = few;
  if (at.buffers.size() > kInline) {
    many.resize(at.buffers.size());
    buffers = many.data();
  }
  for (size_t a = 0; a < at.buffers.size(); ++a) buffers[a] = pointers[at.buffers[a]];
  call_kernel(step, plan, buffers, scratch, round_up(plan.scratch_bytes, kScratchAlignment), team);
}

void Program::run_guarded(size_t step, const Plan& plan, char* const* pointers, TeamLease& team) {
  const Layout::Step& at = layout_.steps[step];
  const kernel_ir::Kernel& kernel = *module_.kernels[*at.kernel];
  auto fill = [&](GuardedCall& call, char pattern) {
    std::vector<void*> buffers;
    for (size_t a = 0; a < at.buffers.size(); ++a) {
      const Buffer& buffer = module_.buffers[at.buffers[a]];
      bool is_written = kernel.params[a].kind != loop_ir::ParamKind::in;
      if (buffer.kind == BufferKind::packed && !pointers[at.buffers[a]]) {  // not kept, as no kernel reads it
        buffers.push_back(nullptr);
        continue;
      }
      buffers.push_back(call.add(buffer.name, pointers[at.buffers[a]], plan.shapes[at.buffers[a]], size_of(buffer.dtype),
                                 buffer.kind != BufferKind::input, is_written));
    }
    for (size_t a = 0; a < at.buffers.size(); ++a)
      if (kernel.params[a].kind == loop_ir::ParamKind::out && module_.buffers[at.buffers[a]].kind != BufferKind::packed)
        call.forget(module_.buffers[at.buffers[a]].name, pattern);
    return buffers;
  };
  const std::string name = fmt::format("kernel {} of program {}", kernel.name, module_.name);
  // What is packed for one of several kernels is not made where another one runs.
  auto is_read = [&](const std::string& buffer) {
    bool read = kernel.name.rfind("pack_", 0) != 0;
    for (size_t s = 0; s < layout_.steps.size() && !read; ++s) {
      if (s == step || !plan.steps[s].runs) continue;
      for (size_t b : layout_.steps[s].buffers) read = read || module_.buffers[b].name == buffer;
    }
    return read;
  };
  GuardedCall call(name);
  std::vector<void*> buffers = fill(call, kUntouched);
  std::map<std::string, int64_t> symbols;
  for (size_t i = 0; i < plan.symbols.size(); ++i) symbols[solver_.names()[i]] = plan.symbols[i];
  int64_t scratch_bytes = evaluate(kernel.scratch_bytes, symbols);
  GuardedMemory scratch(scratch_bytes, kAlignment, team.threads());
  for (int64_t worker = 0; worker < team.threads(); ++worker) poison(scratch.data() + worker * scratch.stride(), scratch_bytes);
  call_kernel(step, plan, buffers.data(), scratch.data(), scratch.stride(), team);
  int64_t where = 0;
  if (!scratch.intact(where))
    throw InternalError(fmt::format("kernel {} wrote byte {} of its scratch memory, which has {}", kernel.name, where, scratch_bytes));
  call.check();
  auto first = call.untouched();
  std::map<std::string, bool> reads;
  std::erase_if(first, [&](const auto& place) {
    const auto [known, is_new] = reads.try_emplace(place.first);
    if (is_new) known->second = is_read(place.first);
    return !known->second;
  });
  if (!first.empty()) {
    // What holds the pattern may have been written so: what holds another one after another run was not.
    GuardedCall again(name);
    buffers = fill(again, static_cast<char>(~kUntouched));
    call_kernel(step, plan, buffers.data(), scratch.data(), scratch.stride(), team);
    const auto second = again.untouched();
    for (const auto& place : first)
      if (std::find(second.begin(), second.end(), place) != second.end())
        throw InternalError(fmt::format("{} never wrote byte {} of {}", name, place.second, place.first));
  }
  call.finish();
}

void Program::call_kernel(size_t step, const Plan& plan, void* const* buffers, char* scratch, int64_t scratch_stride, TeamLease& team) {
  int32_t error = 0;
  KernelArgs args{buffers, plan.steps[step].symbols.data(), &error, scratch};
  int64_t parts = parts_for(plan.steps[step].chunks, team.threads());
  if (parts == 1) {
    functions_[step](&args, 0, 1);
  } else {
    KernelJob job{functions_[step], args, parts, scratch, scratch_stride};
    team.run(parts, run_part, &job);
  }
  if (error != 0) throw_kernel_error(error, module_.kernels[*layout_.steps[step].kernel]->name);
}

void Program::run_steps(CallState& state, const Plan& plan, const CallArgument* arguments, Host& host, TeamLease& team) {
  const int64_t scratch_bytes = round_up(plan.scratch_bytes, kScratchAlignment) * team.threads();
  StepMemory memory(module_, layout_, plan, arguments, state.pointers.data(), host, {.scratch_bytes = scratch_bytes, .poisons = options_.guard});
  bool profiling = profiling_.load(std::memory_order_relaxed);
  auto start = profiling ? std::chrono::steady_clock::now() : std::chrono::steady_clock::time_point();
  for (size_t s = 0; s < layout_.steps.size(); ++s) {
    const Layout::Step& step = layout_.steps[s];
    memory.before(s);
    if (!step.once && plan.steps[s].runs) {
      if (step.kernel)
        run_kernel(s, plan, state.pointers.data(), memory.scratch(), team);
      else
        libraries_[step.library]->run(host);
      if (profiling) add_time(s, start);
    }
    memory.after(s);
  }
  memory.finish();
}

void Program::run_timed(CallState& state, const Plan& plan, const CallArgument* arguments, Host& host, TeamLease& team) {
  auto start = std::chrono::steady_clock::now();
  run_steps(state, plan, arguments, host, team);
  plan.duration.add(std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - start).count());
}

void Program::run_steps_on_device(CallState& state, const Plan& plan, Host& host) {
  allocate_outputs(module_, layout_, plan, state.pointers.data(), host);
  Memory memory(libraries_.empty() ? 0 : plan.arena_bytes);  // what library calls read lies where the host can
  for (size_t t = 0; t < layout_.temporaries.size(); ++t)
    state.pointers[layout_.temporaries[t].buffer] = libraries_.empty() ? nullptr : memory.data() + plan.offsets[t];
  std::vector<size_t> steps;
  for (size_t s = 0; s < layout_.steps.size(); ++s)
    if (!layout_.steps[s].once && plan.steps[s].runs) steps.push_back(s);
  DeviceCall call(*code_.device, module_, layout_, plan, solver_.names(), steps, state.pointers.data());
  bool profiling = profiling_.load(std::memory_order_relaxed);
  auto start = std::chrono::steady_clock::now();
  for (size_t s : steps) {
    const Layout::Step& step = layout_.steps[s];
    if (step.kernel) {
      call.launch(s);
    } else {
      call.finish(step.buffers);
      libraries_[step.library]->run(host);
      call.made_on_host(step.buffers);
    }
    if (!profiling) continue;
    call.synchronize();
    add_time(s, start);
  }
  std::vector<size_t> results;
  for (const Layout::Output& output : layout_.outputs)
    if (output.buffer) results.push_back(*output.buffer);
  for (size_t argument : layout_.written_inputs) results.push_back(*layout_.input_order[argument]);
  call.finish(results);
}

void Program::run_steps_of_residents(CallState& state, const Plan& plan, const CallArgument* arguments, Host& host) {
  char** pointers = state.pointers.data();
  // Recorded launches are repeated with the addresses that they were recorded with.
  StepMemory memory(module_, layout_, plan, arguments, pointers, host,
                    {.scratch_bytes = plan.launches->scratch_bytes(), .is_on_device = true, .inputs_end = !options_.replay});
  bool profiling = profiling_.load(std::memory_order_relaxed);
  if (profiling) code_.device->synchronize();
  auto start = profiling ? std::chrono::steady_clock::now() : std::chrono::steady_clock::time_point();
  auto is_packing = [&](size_t step) { return layout_.steps[step].once; };
  for (size_t s = 0, last = 0; s < layout_.steps.size(); s = last) {
    last = s + 1;
    memory.before(s);
    if (!is_packing(s) && plan.steps[s].runs) {
      if (layout_.steps[s].kernel) {
        const size_t calm = profiling ? last : memory.calm_until(s);
        while (last < calm && layout_.steps[last].kernel && !is_packing(last)) ++last;
        resident_->start(s, last, plan, pointers, memory.scratch(), host.stream());
      } else {
        libraries_[layout_.steps[s].library]->run(host);
      }
      if (profiling) {
        code_.device->synchronize();
        add_time(s, start);
      }
    }
    memory.after(last - 1);
  }
  memory.finish();
  if (profiling) resident_->check_errors();
}

void Program::add_time(size_t step, std::chrono::steady_clock::time_point& start) {
  auto now = std::chrono::steady_clock::now();
  std::lock_guard lock(times_mutex_);
  ++times_[step].calls;
  times_[step].nanoseconds += std::chrono::duration_cast<std::chrono::nanoseconds>(now - start).count();
  start = now;
}

std::shared_ptr<const Plan> Program::bind(const CallArgument* arguments, size_t count, CallState& state, Host& host) {
  DEPLO_SUPPORT(code_.missing.empty(), "{}", code_.missing);
  DEPLO_CHECK(count == layout_.input_order.size(), "program {} takes {} inputs, got {}", module_.name, layout_.input_order.size(), count);
  solver_.solve(arguments, state.symbols);
  state.identities.assign(count, std::nullopt);
  if (!solver_.facts().empty()) find_facts(arguments, state, host);
  std::shared_ptr<const Plan> plan = plan_for(state.symbols);
  check_arguments(arguments, count, *plan);
  return plan;
}

void Program::prepare(const CallArgument* arguments, size_t count, Host& host) {
  if (code_.device) return;
  host.will_take_long();
  CallGuard state(*this);
  std::shared_ptr<const Plan> plan = bind(arguments, count, *state, host);
  for (size_t i = 0; i < count; ++i)
    if (layout_.input_order[i]) state->pointers[*layout_.input_order[i]] = arguments[i].tensor.data;
  TeamLease alone(0);  // callers keep the workers
  packed_for(arguments, *state, *plan, host, alone);
}

std::shared_ptr<const Plan> Program::run(const CallArgument* arguments, size_t count, Host& host, int threads) {
  CallGuard state(*this);
  std::shared_ptr<const Plan> plan = bind(arguments, count, *state, host);
  const bool is_brief = libraries_.empty() && !code_.device && plan->duration.is_brief();
  // Alone, or where Python is most of what callers do, handing its lock on and waiting for it takes longer than a brief program.
  if (!is_brief || (has_company() && useful_callers() > 1)) host.will_take_long();
  Turn turn;
  if (!code_.device && !turn.begin()) {
    host.will_take_long();
    turn.wait();
  }
  TeamLease team(code_.device ? 0 : threads);
  DeviceBlock scalars;
  if (resident_) {
    resident_->check_errors();
    scalars = resident_->bind(arguments, state->pointers.data(), host);
  } else {
    for (size_t i = 0; i < count; ++i)
      if (layout_.input_order[i]) state->pointers[*layout_.input_order[i]] = arguments[i].tensor.data;
  }
  std::shared_ptr<const PackedState> packed = packed_for(arguments, *state, *plan, host, team);
  if (resident_ && packed) await_packed(*packed, host);
  for (size_t g = 0; g < groups_.size(); ++g)
    for (size_t i = 0; packed->blocks[g] && i < groups_[g].packed.size(); ++i) state->pointers[groups_[g].packed[i]] = packed->blocks[g]->pointers[i];
  host.symbols = &plan->symbols;
  host.shapes = &plan->shapes;
  host.pointers = state->pointers.data();
  if (resident_)
    run_steps_of_residents(*state, *plan, arguments, host);
  else if (code_.device)
    run_steps_on_device(*state, *plan, host);
  else if (plan->duration.open())
    run_timed(*state, *plan, arguments, host, team);
  else
    run_steps(*state, *plan, arguments, host, team);
  return plan;
}

void Program::set_profiling(bool on) {
  std::lock_guard lock(times_mutex_);
  profiling_ = on;
  if (on) std::fill(times_.begin(), times_.end(), StepTime{});
}

std::vector<StepTime> Program::step_times() const {
  std::lock_guard lock(times_mutex_);
  return times_;
}

}  // namespace deplo::runtime
