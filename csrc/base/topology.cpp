#include "base/topology.h"

#include <dlfcn.h>
#include <hwloc.h>

#include <algorithm>
#include <fstream>
#include <string>
#include <thread>

#include "base/error.h"

namespace deplo {
namespace {

/// The functions of libhwloc that are needed, opened at run time.
class Hwloc {
 public:
  Hwloc() {
    library_ = dlopen("libhwloc.so.15", RTLD_NOW | RTLD_LOCAL);
    if (!library_) return;
    ok_ = find(init, "hwloc_topology_init") && find(load, "hwloc_topology_load") && find(destroy, "hwloc_topology_destroy") &&
          find(depth_of, "hwloc_get_type_depth") && find(count_at, "hwloc_get_nbobjs_by_depth") && find(object_at, "hwloc_get_obj_by_depth") &&
          find(set_synthetic, "hwloc_topology_set_synthetic") && find(set_xml, "hwloc_topology_set_xml") &&
          find(set_filter, "hwloc_topology_set_type_filter");
  }
  ~Hwloc() {
    if (library_) dlclose(library_);
  }
  Hwloc(const Hwloc&) = delete;
  Hwloc& operator=(const Hwloc&) = delete;
  bool ok() const { return ok_; }

  decltype(&hwloc_topology_init) init = nullptr;
  decltype(&hwloc_topology_load) load = nullptr;
  decltype(&hwloc_topology_destroy) destroy = nullptr;
  decltype(&hwloc_get_type_depth) depth_of = nullptr;
  decltype(&hwloc_get_nbobjs_by_depth) count_at = nullptr;
  decltype(&hwloc_get_obj_by_depth) object_at = nullptr;
  decltype(&hwloc_topology_set_synthetic) set_synthetic = nullptr;
  decltype(&hwloc_topology_set_xml) set_xml = nullptr;
  decltype(&hwloc_topology_set_type_filter) set_filter = nullptr;

 private:
  template <class F>
  bool find(F& function, const char* name) {
    function = reinterpret_cast<F>(dlsym(library_, name));
    return function != nullptr;
  }
  void* library_ = nullptr;
  bool ok_ = false;
};

void read_hwloc(const Hwloc& hwloc, Topology& found) {
  hwloc_topology_t machine;
  if (hwloc.init(&machine) != 0) return;
  if (hwloc.load(machine) == 0) {
    auto count = [&](hwloc_obj_type_t type) { return static_cast<int>(hwloc.count_at(machine, hwloc.depth_of(machine, type))); };
    auto cache = [&](hwloc_obj_type_t type) -> int64_t {
      hwloc_obj_t object = hwloc.object_at(machine, hwloc.depth_of(machine, type), 0);
      return object ? static_cast<int64_t>(object->attr->cache.size) : 0;
    };
    found.packages = count(HWLOC_OBJ_PACKAGE);
    found.numa_nodes = count(HWLOC_OBJ_NUMANODE);
    found.cores = count(HWLOC_OBJ_CORE);
    found.processors = count(HWLOC_OBJ_PU);
    found.memory_bytes = static_cast<int64_t>(hwloc.object_at(machine, 0, 0)->total_memory);
    found.l1_bytes = cache(HWLOC_OBJ_L1CACHE);
    found.l2_bytes = cache(HWLOC_OBJ_L2CACHE);
    found.l3_bytes = cache(HWLOC_OBJ_L3CACHE);
    found.source = "hwloc";
  }
  hwloc.destroy(machine);
}

std::string kind_of(hwloc_obj_type_t type) {
  switch (type) {
    case HWLOC_OBJ_MACHINE: return "machine";
    case HWLOC_OBJ_PACKAGE: return "package";
    case HWLOC_OBJ_NUMANODE: return "numa";
    case HWLOC_OBJ_L3CACHE: return "l3";
    case HWLOC_OBJ_L2CACHE: return "l2";
    case HWLOC_OBJ_L1CACHE: return "l1";
    case HWLOC_OBJ_CORE: return "core";
    case HWLOC_OBJ_PU: return "pu";
    case HWLOC_OBJ_DIE: return "die";
    default: return "group";
  }
}

TopologyNode node_of(hwloc_obj_t object) {
  TopologyNode node{kind_of(object->type), static_cast<int>(object->os_index), 0, {}, {}};
  if (object->type == HWLOC_OBJ_NUMANODE) node.bytes = static_cast<int64_t>(object->attr->numanode.local_memory);
  if (hwloc_obj_type_t type = object->type; type == HWLOC_OBJ_L1CACHE || type == HWLOC_OBJ_L2CACHE || type == HWLOC_OBJ_L3CACHE)
    node.bytes = static_cast<int64_t>(object->attr->cache.size);
  for (hwloc_obj_t child = object->first_child; child; child = child->next_sibling) node.children.push_back(node_of(child));
  for (hwloc_obj_t child = object->memory_first_child; child; child = child->next_sibling) {
    if (child->type == HWLOC_OBJ_NUMANODE) node.memory.push_back(node_of(child));
    // A cache in front of memory has the node itself below.
    for (hwloc_obj_t below = child->memory_first_child; below; below = below->next_sibling) node.memory.push_back(node_of(below));
  }
  return node;
}

int64_t read_cache(int index) {
  std::ifstream in("/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(index) + "/size");
  int64_t kilobytes = 0;
  return in >> kilobytes ? kilobytes << 10 : 0;
}

/// What /sys and /proc say, where there is no hwloc. Cache index 0 is L1 data, 2 and 3 are L2 and L3 on x86.
void read_system(Topology& found) {
  found.processors = static_cast<int>(std::thread::hardware_concurrency());
  found.l1_bytes = read_cache(0);
  found.l2_bytes = read_cache(2);
  found.l3_bytes = read_cache(3);
  found.source = "sysfs";
}

std::string read_model() {
  std::ifstream in("/proc/cpuinfo");
  for (std::string line; std::getline(in, line);)
    if (line.starts_with("model name"))
      if (size_t at = line.find(": "); at != std::string::npos) return line.substr(at + 2);
  return "";
}

Topology read_topology() {
  Topology found;
  if (Hwloc hwloc; hwloc.ok()) read_hwloc(hwloc, found);
  if (found.source.empty()) read_system(found);
  found.cpu = read_model();
  return found;
}

/// A topology of hwloc's, destroyed with the object.
class Loaded {
 public:
  explicit Loaded(const Hwloc& hwloc) : hwloc_(hwloc) { ok_ = hwloc.init(&machine_) == 0; }
  ~Loaded() {
    if (ok_) hwloc_.destroy(machine_);
  }
  Loaded(const Loaded&) = delete;
  Loaded& operator=(const Loaded&) = delete;
  bool ok() const { return ok_; }
  hwloc_topology_t get() const { return machine_; }

 private:
  const Hwloc& hwloc_;
  hwloc_topology_t machine_{};
  bool ok_ = false;
};

}  // namespace

TopologyNode topology_tree(const std::string& synthetic, const std::string& xml) {
  Hwloc hwloc;
  DEPLO_CHECK(hwloc.ok(), "the tree of a machine is hwloc's, and libhwloc.so.15 is not here (Debian: libhwloc15)");
  Loaded loaded(hwloc);
  DEPLO_CHECK(loaded.ok(), "hwloc does not start");
  if (!synthetic.empty())
    DEPLO_CHECK(hwloc.set_synthetic(loaded.get(), synthetic.c_str()) == 0, "hwloc does not take the synthetic topology '{}'", synthetic);
  if (!xml.empty()) DEPLO_CHECK(hwloc.set_xml(loaded.get(), xml.c_str()) == 0, "hwloc does not read {}: it is no XML file of a topology", xml);
  hwloc.set_filter(loaded.get(), HWLOC_OBJ_MISC, HWLOC_TYPE_FILTER_KEEP_NONE);
  DEPLO_CHECK(hwloc.load(loaded.get()) == 0, "hwloc does not load the topology{}{}", xml.empty() && synthetic.empty() ? "" : " of ",
              xml.empty() ? synthetic : xml);
  hwloc_obj_t root = hwloc.object_at(loaded.get(), 0, 0);
  DEPLO_CHECK(root, "hwloc gives an empty topology");
  return node_of(root);
}

const Topology& topology() {
  static const Topology found = read_topology();
  return found;
}

}  // namespace deplo
