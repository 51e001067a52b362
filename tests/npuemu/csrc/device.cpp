// Which devices there are, which one is current, and whether it still answers; the device guard and hooks by which
// PyTorch asks. Everything is synchronous: an operator has finished when it returns, so streams and events only keep
// their identities and times.
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pthread.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "npuemu.h"

namespace npuemu {

using c10::Device;
using c10::DeviceIndex;

int64_t integer_from_env(const char* name, int64_t otherwise) {
  const char* value = std::getenv(name);
  return value && *value ? std::atoll(value) : otherwise;
}

// ------------------------------------------------------------------------------------------------ visible devices

// Physical ids behind npu:0, npu:1, …, by the rules of CANN and torch_npu for ASCEND_RT_VISIBLE_DEVICES: what stands
// behind the first character that is neither digit nor comma is not read, the list ends without a word at the first
// empty entry or id that does not exist, and ids that do not ascend leave no device at all.
static std::vector<int> read_visible_devices() {
  const int physical = static_cast<int>(std::min<int64_t>(integer_from_env("NPUEMU_DEVICES", 2), kMaxDevices));
  std::vector<int> ids;
  const char* variable = std::getenv("ASCEND_RT_VISIBLE_DEVICES");
  if (!variable) {
    for (int id = 0; id < physical; ++id) ids.push_back(id);
    return ids;
  }
  for (const char* at = variable; *at >= '0' && *at <= '9';) {
    char* end = nullptr;
    const long id = std::strtol(at, &end, 10);
    if (!ids.empty() && id <= ids.back()) return {};
    if (id >= physical) break;
    ids.push_back(static_cast<int>(id));
    if (*end != ',') break;
    at = end + 1;
  }
  return ids;
}

// As in torch_npu the environment is read anew until the first use of a device and never after it.
static std::mutex g_init_mutex;
static std::atomic<bool> g_initialized{false};
static std::atomic<bool> g_bad_fork{false};
static std::vector<int> g_visible;

static void initialize() {
  TORCH_CHECK(!g_bad_fork, "Cannot re-initialize NPU in forked subprocess. To use NPU with multiprocessing, you must ",
              "use the 'spawn' start method");
  if (g_initialized) return;
  std::lock_guard<std::mutex> lock(g_init_mutex);
  if (g_initialized) return;
  g_visible = read_visible_devices();
  pthread_atfork(nullptr, nullptr, [] { g_bad_fork = true; });
  g_initialized = true;
}

DeviceIndex device_count() {
  return static_cast<DeviceIndex>(g_initialized ? g_visible.size() : read_visible_devices().size());
}

static void check_index(DeviceIndex device) {
  initialize();
  TORCH_CHECK(device >= 0 && device < device_count(),
              "Initialize: NPU function error: c10_npu::SetDevice(device_id_), error code is 107001\n",
              "[ERROR] ERR00100 PTA call acl api failed\n[Error]: Invalid device ID.\n",
              "        Check whether the device ID is valid. (npu:", int(device), " of ", int(device_count()),
              " visible emulated devices)");
}

static thread_local DeviceIndex t_device = 0;

DeviceIndex current_device() { return t_device; }

static void set_current_device(DeviceIndex device) {
  check_index(device);
  t_device = device;
}

DeviceIndex index_of(std::optional<Device> device) {
  const DeviceIndex index = device && device->has_index() ? device->index() : t_device;
  check_index(index);
  return index;
}

CurrentDeviceGuard::CurrentDeviceGuard(DeviceIndex device) : previous_(t_device) { t_device = device; }
CurrentDeviceGuard::~CurrentDeviceGuard() { t_device = previous_; }

// ------------------------------------------------------------------------------------------------ a device that is lost

// NPUEMU_LOSE_DEVICE_AFTER=ID:OPERATORS or ID:FILE: the physical device that stops answering, and when.
struct Loss {
  int physical = -1;
  int64_t operators = -1;
  std::string file;

  static Loss from_env() {
    Loss loss;
    const char* value = std::getenv("NPUEMU_LOSE_DEVICE_AFTER");
    if (!value || !*value) return loss;
    const char* colon = std::strchr(value, ':');
    TORCH_CHECK(colon && colon > value && colon[1], "NPUEMU_LOSE_DEVICE_AFTER=", value,
                ": write ID:OPERATORS or ID:FILE");
    loss.physical = std::atoi(value);
    const std::string when(colon + 1);
    if (when.find_first_not_of("0123456789") == std::string::npos) loss.operators = std::atoll(when.c_str());
    else loss.file = when;
    return loss;
  }
};

void check_usable(DeviceIndex device) {
  static const Loss loss = Loss::from_env();
  static std::atomic<int64_t> calls{0};
  static std::atomic<bool> lost{false};
  check_index(device);
  if (g_visible[device] != loss.physical) return;
  if (loss.operators >= 0 ? ++calls > loss.operators : std::filesystem::exists(loss.file)) lost = true;
  TORCH_CHECK(!lost, "NPU function error: AclrtSynchronizeDeviceWithTimeout, error code is 507010\n",
              "[ERROR] ERR00100 PTA call acl api failed\nEL0001: Device not found or invalid.\n",
              "        Device[", loss.physical, "] lost heartbeat. (emulated)");
}

int physical_id(DeviceIndex device) { return g_visible[device]; }

static void wait_for(DeviceIndex device) {
  check_usable(device);
  count_wait("synchronize");
}

// ------------------------------------------------------------------------------------------------ hooks and guard

struct NpuHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return g_initialized; }
  void init() const override { initialize(); }
  DeviceIndex deviceCount() const override { return device_count(); }
  void setCurrentDevice(DeviceIndex device) const override { set_current_device(device); }
  DeviceIndex getCurrentDevice() const override { return t_device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    const DeviceIndex previous = t_device;
    if (device >= 0) set_current_device(device);
    return previous;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  Device getDeviceFromPtr(void*) const override { return Device(kNPU, t_device); }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return new_generator(device < 0 ? t_device : device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    const CurrentDeviceGuard on(storage.device().index());
    c10::DataPtr grown = device_allocator()->allocate(bytes);
    if (const size_t kept = std::min(bytes, storage.nbytes())) std::memcpy(grown.get(), storage.data(), kept);
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(grown));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

static thread_local std::map<DeviceIndex, c10::StreamId> t_stream;

struct NpuGuard final : c10::impl::DeviceGuardImplInterface {
  using Stream = c10::Stream;
  c10::DeviceType type() const override { return kNPU; }
  Device getDevice() const override { return Device(kNPU, t_device); }
  Device exchangeDevice(Device device) const override {
    const Device previous = getDevice();
    setDevice(device);
    return previous;
  }
  void setDevice(Device device) const override {
    if (device.has_index()) set_current_device(device.index());
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.has_index()) t_device = device.index();
  }
  DeviceIndex deviceCount() const noexcept override { return device_count(); }
  c10::DeviceCapability getDeviceCapability(Device) const override { return c10::DeviceCapability(); }

  static Device with_index(Device device) { return device.has_index() ? device : Device(kNPU, t_device); }
  Stream getStream(Device device) const override {
    device = with_index(device);
    const auto found = t_stream.find(device.index());
    return Stream(Stream::UNSAFE, device, found == t_stream.end() ? 0 : found->second);
  }
  Stream getDefaultStream(Device device) const override { return Stream(Stream::DEFAULT, with_index(device)); }
  Stream getNewStream(Device device, int) const override {
    static std::atomic<c10::StreamId> next{1};
    return Stream(Stream::UNSAFE, with_index(device), next++);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream exchangeStream(Stream stream) const override {
    const Stream previous = getStream(stream.device());
    t_stream[stream.device_index()] = stream.id();
    return previous;
  }
  void* getStreamNativeHandle(const Stream stream) const override { return reinterpret_cast<void*>(stream.id() + 1); }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream& stream) const override { wait_for(stream.device_index()); }
  void synchronizeDevice(const DeviceIndex device) const override { wait_for(device); }

  // An event is the time at which it was recorded, in milliseconds.
  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    check_usable(stream.device_index());
    if (!*event) *event = new double;
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    *static_cast<double*>(*event) = std::chrono::duration<double, std::milli>(now).count();
  }
  double elapsedTime(void* from, void* to, const DeviceIndex) const override {
    return *static_cast<double*>(to) - *static_cast<double*>(from);
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<double*>(event); }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override { count_wait("event"); }
};

static const bool g_registered = [] {
  c10::SetAllocator(kNPU, device_allocator());
  c10::impl::registerDeviceGuard(kNPU, new NpuGuard());
  at::RegisterPrivateUse1HooksInterface(new NpuHooks());
  return true;
}();

// What the Python package torch_npu calls; operators of a library instead of a Python extension spare the build
// Python's headers.
TORCH_LIBRARY(npuemu, m) {
  m.def("device_count() -> int", [] { return int64_t(device_count()); });
  m.def("current_device() -> int", [] {
    check_index(t_device);
    return int64_t(t_device);
  });
  m.def("set_device(int device) -> ()", [](int64_t device) { set_current_device(DeviceIndex(device)); });
  m.def("synchronize(int device) -> ()", [](int64_t device) { wait_for(DeviceIndex(device)); });
  m.def("initialize() -> ()", [] { initialize(); });
  m.def("is_initialized() -> bool", [] { return g_initialized && !g_bad_fork; });
  m.def("is_in_bad_fork() -> bool", [] { return g_bad_fork.load(); });
  m.def("stop_backward_threads() -> ()", [] { torch::autograd::Engine::get_default_engine().stop(); });
  // Operators may return a generator only as an optional; it is always there.
  m.def("default_generator(int device) -> Generator?", [](int64_t device) -> std::optional<at::Generator> {
    TORCH_CHECK_INDEX(device >= 0 && device < device_count(), "no generator for npu:", device);
    return default_generator(DeviceIndex(device));
  });
}

}  // namespace npuemu
