// Random numbers: an npu generator owns a CPU generator, which the CPU kernels draw from.
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/GeneratorImpl.h>

#include "npuemu.h"

namespace npuemu {

struct NpuGenerator final : c10::GeneratorImpl {
  at::Generator cpu;

  explicit NpuGenerator(c10::DeviceIndex device)
      : c10::GeneratorImpl(c10::Device(kNPU, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        cpu(at::detail::createCPUGenerator()) {}

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
  NpuGenerator* clone_impl() const override {
    auto* copy = new NpuGenerator(device().index());
    copy->cpu = cpu.clone();
    return copy;
  }
};

at::Generator new_generator(c10::DeviceIndex device) { return at::make_generator<NpuGenerator>(device); }

const at::Generator& default_generator(c10::DeviceIndex device) {
  static auto* generators = [] {
    auto* all = new std::vector<at::Generator>();
    for (int i = 0; i < kMaxDevices; ++i) all->push_back(new_generator(static_cast<c10::DeviceIndex>(i)));
    return all;
  }();
  return generators->at(device < 0 ? current_device() : device);
}

at::Generator cpu_generator_of(const at::Generator& generator) {
  if (generator.device().type() != kNPU) return generator;
  return static_cast<NpuGenerator*>(generator.unsafeGetGeneratorImpl())->cpu;
}

}  // namespace npuemu
