#include "base/processors.h"

#include <sched.h>

#include <algorithm>
#include <mutex>

namespace deplo {
namespace {

std::mutex adding;
cpu_set_t added{};

cpu_set_t available() {
  cpu_set_t set;
  CPU_ZERO(&set);
  sched_getaffinity(0, sizeof(set), &set);
  std::lock_guard lock(adding);
  CPU_OR(&set, &set, &added);
  return set;
}

}  // namespace

int available_processors() {
  const cpu_set_t set = available();
  return std::max(1, CPU_COUNT(&set));
}

void add_processors_of_thread() {
  const cpu_set_t set = available();
  std::lock_guard lock(adding);
  CPU_OR(&added, &added, &set);
}

void use_available_processors() {
  const cpu_set_t set = available();
  sched_setaffinity(0, sizeof(set), &set);
}

}  // namespace deplo
