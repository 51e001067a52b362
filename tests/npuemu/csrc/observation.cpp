// What is noticed about each operator before it runs: that its device still answers, whether it was declared
// unsupported, how often it was called, and whether the host waits for it.
#include <torch/library.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <iostream>
#include <map>
#include <mutex>
#include <set>
#include <sstream>

#include "npuemu.h"

namespace npuemu {

using c10::DeviceIndex;

// ------------------------------------------------------------------------------------------------ the operator log

// How often each operator ran on each device. With NPUEMU_OP_LOG=FILE the process appends its counts there when it
// ends, one line each: process id, device, the device's physical id, calls, operator.
class OperatorLog {
 public:
  void add(const std::string& name, DeviceIndex device) {
    std::lock_guard<std::mutex> lock(mutex_);
    ++calls_[{device, name}];
  }

  c10::Dict<std::string, int64_t> by_name() {
    c10::Dict<std::string, int64_t> sums;
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [key, calls] : calls_) {
      const auto found = sums.find(key.second);
      sums.insert_or_assign(key.second, calls + (found == sums.end() ? 0 : found->value()));
    }
    return sums;
  }

  void append_to(const char* file) {
    std::lock_guard<std::mutex> lock(mutex_);
    std::ostringstream lines;
    for (const auto& [key, calls] : calls_)
      lines << ::getpid() << "\tnpu:" << int(key.first) << '\t' << physical_id(key.first) << '\t' << calls << '\t'
            << key.second << '\n';
    std::ofstream(file, std::ios::app) << lines.str() << std::flush;
  }

 private:
  std::mutex mutex_;
  std::map<std::pair<DeviceIndex, std::string>, int64_t> calls_;
};

static OperatorLog& operator_log() {
  static auto* log = [] {
    auto* created = new OperatorLog();
    std::atexit([] {
      if (const char* file = std::getenv("NPUEMU_OP_LOG"); file && *file) operator_log().append_to(file);
    });
    return created;
  }();
  return *log;
}

// ------------------------------------------------------------------------------------------------ unsupported operators

void warn_once(const std::string& text) {
  static std::mutex mutex;
  static std::set<std::string> said;
  std::lock_guard<std::mutex> lock(mutex);
  if (said.insert(text).second) std::cerr << "[W npuemu] Warning: " << text << std::endl;
}

// NPUEMU_UNSUPPORTED_OPS=aten::isin,aten::sort.values_stable: with an overload's name that overload, without all.
static bool is_unsupported(const std::string& name) {
  static const std::set<std::string> declared = [] {
    std::set<std::string> names;
    const char* variable = std::getenv("NPUEMU_UNSUPPORTED_OPS");
    std::stringstream list(variable ? variable : "");
    for (std::string entry; std::getline(list, entry, ',');) names.insert(entry);
    return names;
  }();
  return !declared.empty() && (declared.count(name) || declared.count(name.substr(0, name.find('.'))));
}

// What torch_npu does with an operator it has no kernel for: one warning a name, then the CPU's; or an error where
// TORCH_NPU_FALLBACK_CPU_DISABLE=1.
static void npu_cpu_fallback(const std::string& name) {
  TORCH_CHECK(integer_from_env("TORCH_NPU_FALLBACK_CPU_DISABLE", 0) != 1, "The operator '", name,
              "' would execute its main computation on CPU through dispatcher backend fallback, but CPU fallback is ",
              "disabled by TORCH_NPU_FALLBACK_CPU_DISABLE=1.");
  warn_once("CAUTION: The operator '" + name + "' is not currently supported on the NPU backend and will fall back to " +
            "run on the CPU. This may have performance implications. (function npu_cpu_fallback)");
}

// ------------------------------------------------------------------------------------------------ waits of the host

// A replay that waits for an update which nobody made yet: everything behind it waits too, and here nothing can be
// queued. The text names it; empty where there is none.
static std::string g_stuck;

void check_not_stuck() { TORCH_CHECK(g_stuck.empty(), g_stuck); }

static std::mutex g_waits_mutex;
static std::map<std::string, int64_t> g_waits;

void count_wait(const std::string& kind) {
  check_not_stuck();
  std::lock_guard<std::mutex> lock(g_waits_mutex);
  ++g_waits[kind];
}

void enter_operator(const std::string& name, DeviceIndex device) {
  check_usable(device);
  check_not_stuck();
  if (is_unsupported(name)) npu_cpu_fallback(name);
  operator_log().add(name, device);
}

TORCH_LIBRARY_FRAGMENT(npuemu, m) {
  m.def("operator_calls() -> Dict(str, int)", [] { return operator_log().by_name(); });
  m.def("waits() -> Dict(str, int)", [] {
    c10::Dict<std::string, int64_t> found;
    std::lock_guard<std::mutex> lock(g_waits_mutex);
    for (const auto& [kind, number] : g_waits) found.insert(kind, number);
    return found;
  });
  m.def("check_not_stuck() -> ()", [] { check_not_stuck(); });
  m.def("set_stuck(str text) -> ()", [](const std::string& text) { g_stuck = text; });
}

}  // namespace npuemu
