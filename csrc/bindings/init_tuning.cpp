#include <ATen/Parallel.h>
#include <pybind11/stl.h>

#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/init.h"
#include "runtime/tuning.h"
#include "runtime/winners.h"

namespace deplo::bindings {
namespace {

namespace py = pybind11;

int threads_of(const CompileOptions& options) { return options.target.threads > 0 ? options.target.threads : at::get_num_threads(); }

Winners winners_of(const std::string& options) {
  const CompileOptions parsed = parse_options(options);
  return {parsed.target.cache_dir, machine_key(parsed, threads_of(parsed))};
}

}  // namespace

void init_tuning(py::module_& module) {
  module.def(
      "tuning_tasks", [](const std::string& text, const std::string& options) { return tuning_tasks(text, parse_options(options)); }, py::arg("text"),
      py::arg("options"), py::call_guard<py::gil_scoped_release>(),
      "JSON list of the kernels that IR text becomes, as programs of their own for which schedules can be searched.");
  module.def(
      "tuning_directions",
      [](const std::string& text, const std::string& version, const std::string& base, bool wide, const std::string& options) {
        return tuning_directions(text, version, base, wide, parse_options(options));
      },
      py::arg("text"), py::arg("version"), py::arg("base"), py::arg("wide"), py::arg("options"), py::call_guard<py::gil_scoped_release>(),
      "JSON list of decisions of a schedule with other choices for each.");
  module.def(
      "tuning_estimates",
      [](const std::string& text, const std::string& version, const std::vector<std::string>& schedules,
         const std::map<std::string, std::string>& others, const std::string& figures, double resident,
         const std::string& options) { return tuning_estimates(text, version, schedules, others, figures, resident, parse_options(options)); },
      py::arg("text"), py::arg("version"), py::arg("schedules"), py::arg("others"), py::arg("figures"), py::arg("resident"), py::arg("options"),
      py::call_guard<py::gil_scoped_release>(),
      "JSON list of seconds that a kernel is estimated to take by each schedule; null where one does not fit.");
  module.def(
      "estimate_program",
      [](const std::string& text, const std::string& figures, const std::string& options) {
        return estimate_program(text, figures, parse_options(options));
      },
      py::arg("text"), py::arg("figures"), py::arg("options"), py::call_guard<py::gil_scoped_release>(),
      "JSON list of what each kernel of a program is estimated to take.");
  module.def(
      "load_winner",
      [](const std::string& key, const std::string& options) -> py::object {
        auto winner = winners_of(options).load(key);
        if (!winner) return py::none();
        return py::make_tuple(winner->schedules, winner->seconds, winner->usual_seconds, winner->rest);
      },
      py::arg("key"), py::arg("options"),
      "What is kept of a kernel for this machine: schedules, seconds, those before, JSON of the search; or None.");
  module.def(
      "store_winner",
      [](const std::string& key, const std::map<std::string, std::string>& schedules, double seconds, double usual_seconds, const std::string& rest,
         const std::string& options) { winners_of(options).store(key, {schedules, seconds, usual_seconds, rest}); },
      py::arg("key"), py::arg("schedules"), py::arg("seconds"), py::arg("usual_seconds"), py::arg("rest"), py::arg("options"),
      "Keeps the fastest schedules of a kernel that were found on this machine.");
  module.def("winners", &list_winners, py::arg("cache_dir"), "JSON list of all that is kept in a folder of compiled kernels.");
  module.def(
      "winners_machine",
      [](const std::string& options) {
        const CompileOptions parsed = parse_options(options);
        return machine_key(parsed, threads_of(parsed));
      },
      py::arg("options"), "The machine that winners are kept for: the target's device, or the CPU and the number of threads.");
}

}  // namespace deplo::bindings
