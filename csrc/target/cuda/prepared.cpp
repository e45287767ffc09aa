#include "target/cuda/prepared.h"

#include <algorithm>

#include "base/error.h"
#include "base/text.h"

namespace deplo {
namespace {

constexpr size_t kScratch = SIZE_MAX;
constexpr size_t kFewest = 2;  // launches that are worth a graph

std::string describe(const kernel_ir::Kernel& kernel) {
  return kernel.provenance.empty() ? fmt::format("kernel {}", kernel.name) : fmt::format("kernel {} ({})", kernel.name, joined(kernel.provenance));
}

}  // namespace

CudaLaunches::CudaLaunches(std::shared_ptr<CudaDevice> device, bool replay) : device_(std::move(device)), replay_(replay) {}

void CudaLaunches::add(Kernel kernel, const std::vector<size_t>& buffers, const std::vector<long long>& sizes, uint64_t error, bool has_scratch,
                       int64_t scratch_bytes, std::vector<CudaMap> maps) {
  Entry entry{std::move(kernel), values_.size(), 0, 0, patches_.size(), 0, maps_.size(), 0};
  for (size_t buffer : buffers) {
    patches_.push_back({values_.size(), buffer});
    values_.push_back(0);
  }
  for (long long size : sizes) values_.push_back(static_cast<unsigned long long>(size));
  values_.push_back(error);
  if (has_scratch) {
    if (scratch_bytes > 0) patches_.push_back({values_.size(), kScratch});
    values_.push_back(0);
  }
  entry.last_value = values_.size();
  for (CudaMap& map : maps) {
    const size_t address = entry.first_value + map.buffer;
    maps_.push_back({std::move(map), address, values_.size(), 0});
    values_.resize(values_.size() + std::tuple_size_v<TensorMap>);
  }
  entry.last_map = maps_.size();
  scratch_bytes_ = std::max(scratch_bytes_, scratch_bytes);
  entry.last_patch = patches_.size();
  entries_.push_back(std::move(entry));
}

void CudaLaunches::finish() {
  for (Entry& entry : entries_) {
    entry.first_argument = arguments_.size();
    for (size_t v = entry.first_value; v < entry.last_value; ++v) arguments_.push_back(&values_[v]);
    for (size_t m = entry.first_map; m < entry.last_map; ++m) arguments_.push_back(&values_[maps_[m].value]);
  }
}

void CudaLaunches::patch(const Entry& entry, char* const* addresses, uint64_t scratch) {
  for (size_t p = entry.first_patch; p < entry.last_patch; ++p)
    values_[patches_[p].value] = patches_[p].buffer == kScratch ? scratch : reinterpret_cast<uint64_t>(addresses[patches_[p].buffer]);
}

/// Maps of buffers that lie elsewhere than before.
void CudaLaunches::remap(const Entry& entry) {
  if (entry.kernel.is_empty) return;
  for (size_t m = entry.first_map; m < entry.last_map; ++m) {
    Map& map = maps_[m];
    const unsigned long long address = values_[map.address];
    if (map.made_of == address) continue;
    const TensorMap made = device_->encode(map.map.tensor, address + map.map.offset);
    std::copy(made.begin(), made.end(), values_.begin() + static_cast<std::ptrdiff_t>(map.value));
    map.made_of = address;
  }
}

void CudaLaunches::start(size_t first, size_t last, char* const* addresses, uint64_t scratch, void* stream) {
  std::lock_guard lock(mutex_);
  CudaDevice::Current current(*device_);
  for (size_t k = first; k < last; ++k) {
    patch(entries_[k], addresses, scratch);
    remap(entries_[k]);
  }
  if (replay_ && last - first >= kFewest && start_recorded(first, last, stream)) return;
  for (size_t k = first; k < last; ++k) {
    Entry& entry = entries_[k];
    if (entry.kernel.is_empty) continue;
    entry.kernel.launch.stream = stream;
    try {
      device_->launch_in_context(entry.kernel.code->function, entry.kernel.launch, &arguments_[entry.first_argument]);
    } catch (const ExecutionError& error) {
      throw ExecutionError(fmt::format("{} could not be started: {}", describe(*entry.kernel.kernel), error.what()));
    }
  }
}

bool CudaLaunches::start_recorded(size_t first, size_t last, void* stream) {
  Recorded& range = recorded_[{first, last}];
  // Sizes that come once are not worth a graph; what the stream records itself, it is given launch by launch.
  if (++range.starts < 2 || device_->is_capturing(stream)) return false;
  try {
    if (range.graph)
      update(first, last, range);
    else
      record(first, last, range);
    range.graph->launch(stream);
  } catch (const ExecutionError& error) {
    range = {};  // nobody knows what it holds
    throw ExecutionError(fmt::format("the graph of {} launches from {} on could not be started: {}", last - first,
                                     describe(*entries_[first].kernel.kernel), error.what()));
  }
  return true;
}

void CudaLaunches::record(size_t first, size_t last, Recorded& range) {
  auto graph = std::make_unique<CudaGraph>(device_);
  for (size_t k = first; k < last; ++k) {
    const Entry& entry = entries_[k];
    for (size_t p = entry.first_patch; p < entry.last_patch; ++p) range.addresses.push_back(values_[patches_[p].value]);
    if (!entry.kernel.is_empty) graph->add(entry.kernel.code->function, entry.kernel.launch, &arguments_[entry.first_argument]);
  }
  graph->finish();
  range.graph = std::move(graph);
}

void CudaLaunches::update(size_t first, size_t last, Recorded& range) {
  size_t node = 0;
  auto known = range.addresses.begin();
  for (size_t k = first; k < last; ++k) {
    const Entry& entry = entries_[k];
    bool changed = false;
    for (size_t p = entry.first_patch; p < entry.last_patch; ++p, ++known) {
      changed = changed || *known != values_[patches_[p].value];
      *known = values_[patches_[p].value];
    }
    if (entry.kernel.is_empty) continue;
    if (changed) range.graph->change(node, entry.kernel.code->function, entry.kernel.launch, &arguments_[entry.first_argument]);
    ++node;
  }
}

}  // namespace deplo
