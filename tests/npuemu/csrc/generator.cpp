// Random numbers: an npu generator owns a CPU generator, which the CPU kernels draw from.
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/GeneratorImpl.h>

#include "npuemu.h"

namespace npuemu {

struct NpuGenerator final : c10::GeneratorImpl {
  at::Generator cpu;

  NpuGenerator(c10::DeviceIndex device, at::Generator cpu)
      : c10::GeneratorImpl(c10::Device(kNPU, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        cpu(std::move(cpu)) {}

  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { cpu.set_offset(offset); }
  uint64_t get_offset() const override { return cpu.get_offset(); }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return cpu.seed(); }
  void set_state(const c10::TensorImpl& state) override {
    auto* shared = const_cast<c10::TensorImpl*>(&state);
    cpu.set_state(at::Tensor(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(shared)));
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu.get_state().getIntrusivePtr(); }
  NpuGenerator* clone_impl() const override { return new NpuGenerator(device().index(), cpu.clone()); }
};

at::Generator new_generator(c10::DeviceIndex device) {
  return at::make_generator<NpuGenerator>(device, at::detail::createCPUGenerator());
}

// With NPUEMU_CPU_GENERATOR=1 a device's default generator is the host's, so that a program that draws on both draws
// exactly the numbers that it draws on a CPU.
static at::Generator new_default_generator(c10::DeviceIndex device) {
  if (integer_from_env("NPUEMU_CPU_GENERATOR", 0) != 1) return new_generator(device);
  return at::make_generator<NpuGenerator>(device, at::detail::getDefaultCPUGenerator());
}

const at::Generator& default_generator(c10::DeviceIndex device) {
  static auto* generators = [] {
    auto* all = new std::vector<at::Generator>();
    for (int i = 0; i < kMaxDevices; ++i) all->push_back(new_default_generator(static_cast<c10::DeviceIndex>(i)));
    return all;
  }();
  return generators->at(device < 0 ? current_device() : device);
}

at::Generator cpu_generator_of(const at::Generator& generator) {
  if (generator.device().type() != kNPU) return generator;
  return static_cast<NpuGenerator*>(generator.unsafeGetGeneratorImpl())->cpu;
}

}  // namespace npuemu
