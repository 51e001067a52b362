// What the parts of the emulated device share. Namespaces, files and environment variables: see ../README.md.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <string>

namespace npuemu {

constexpr auto kNPU = c10::DeviceType::PrivateUse1;
constexpr int kMaxDevices = 64;

int64_t integer_from_env(const char* name, int64_t otherwise);

// ---- device.cpp: which devices there are, which is current, and whether it still answers
c10::DeviceIndex device_count();
c10::DeviceIndex current_device();
c10::DeviceIndex index_of(std::optional<c10::Device> device);  // the current one where none is named; checked
void check_usable(c10::DeviceIndex device);                    // throws where the device is lost or the process forked
int physical_id(c10::DeviceIndex device);                      // the machine's number of a visible device

struct CurrentDeviceGuard {
  explicit CurrentDeviceGuard(c10::DeviceIndex device);
  ~CurrentDeviceGuard();
  CurrentDeviceGuard(const CurrentDeviceGuard&) = delete;
  CurrentDeviceGuard& operator=(const CurrentDeviceGuard&) = delete;

 private:
  c10::DeviceIndex previous_;
};

// ---- generator.cpp: every npu generator owns a CPU generator, which the CPU kernels draw from
const at::Generator& default_generator(c10::DeviceIndex device);
at::Generator new_generator(c10::DeviceIndex device);
at::Generator cpu_generator_of(const at::Generator& generator);

// ---- memory.cpp: device memory is host memory that is charged to a device until it is freed
c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* pointer);
// Takes over host memory of `bytes` bytes as memory of `device`; throws torch.OutOfMemoryError where it does not fit.
c10::DataPtr charge_to_device(c10::DataPtr host, size_t bytes, c10::DeviceIndex device);

// ---- observation.cpp: every operator that does work on a device passes here first
void enter_operator(const std::string& name, c10::DeviceIndex device);
void warn_once(const std::string& text);  // on stderr, as the real plugin warns
// The host waits for a device here: counted by kind, and an error where the device would wait for ever.
void count_wait(const std::string& kind);
void check_not_stuck();

// ---- operators.cpp
// CPU tensor over the same bytes (identity for tensors that are not on an npu).
at::Tensor cpu_alias(const at::Tensor& tensor);

}  // namespace npuemu
