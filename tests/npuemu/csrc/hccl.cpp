// The process-group backend "hccl": every collective runs on a gloo backend over CPU aliases of the npu tensors (the
// same bytes, so nothing is copied back), while Work and Future speak of the npu tensors.
#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/library.h>

#include <functional>
#include <mutex>

#include "npuemu.h"

namespace npuemu {

using namespace c10d;
using at::Tensor;
using Tensors = std::vector<Tensor>;
using WorkPtr = c10::intrusive_ptr<Work>;

// ------------------------------------------------------------------------------------------------ arguments

static Tensor checked_alias(const Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  TORCH_CHECK(tensor.device().is_privateuseone(), "hccl: expected npu tensors, got one on ", tensor.device());
  check_usable(tensor.device().index());
  return cpu_alias(tensor);
}
// Collectives of a device compare numbers of elements, gloo compares shapes: gloo gets flat views.
static Tensor flat_alias(const Tensor& tensor) {
  const Tensor cpu = checked_alias(tensor);
  return cpu.defined() ? cpu.view({-1}) : cpu;
}
static Tensors aliases(const Tensors& tensors) {
  Tensors result;
  for (const auto& tensor : tensors) result.push_back(checked_alias(tensor));
  return result;
}
static Tensors flat_aliases(const Tensors& tensors) {
  Tensors result;
  for (const auto& tensor : tensors) result.push_back(flat_alias(tensor));
  return result;
}
static std::vector<Tensors> flat_aliases(const std::vector<Tensors>& lists) {
  std::vector<Tensors> result;
  for (const auto& tensors : lists) result.push_back(flat_aliases(tensors));
  return result;
}
static Tensors concatenated(const std::vector<Tensors>& lists) {
  Tensors result;
  for (const auto& tensors : lists) result.insert(result.end(), tensors.begin(), tensors.end());
  return result;
}

// HCCL reduces no float64; torch_npu widens bool and uint8 to int32 for it and refuses the rest.
static void check_reducible(const Tensors& tensors) {
  for (const auto& tensor : tensors) {
    const auto type = tensor.scalar_type();
    TORCH_CHECK(c10::isIntegralType(type, true) || type == at::kHalf || type == at::kBFloat16 || type == at::kFloat,
                "HCCL AllReduce & Reduce: Unsupported data type at::k", c10::toString(type));
  }
}

// ------------------------------------------------------------------------------------------------ work

struct HcclWork final : Work {
  WorkPtr gloo;
  Tensors outputs;
  std::function<void()> finish;  // such as the division of ReduceOp::AVG; may be empty
  std::once_flag finished;
  c10::intrusive_ptr<c10::ivalue::Future> future;

  HcclWork(int rank, OpType op, WorkPtr gloo, Tensors outputs, std::function<void()> finish)
      : Work(rank, op), gloo(std::move(gloo)), outputs(std::move(outputs)), finish(std::move(finish)) {}

  void finish_once() {
    std::call_once(finished, [this] {
      if (finish) finish();
    });
  }
  bool isCompleted() override {
    const bool completed = gloo->isCompleted();
    if (completed) finish_once();
    return completed;
  }
  bool wait(std::chrono::milliseconds timeout) override {
    const bool done = gloo->wait(timeout);
    finish_once();
    return done;
  }
  void synchronize() override { wait(kNoTimeout); }
  Tensors result() override {
    wait(kNoTimeout);
    return outputs;
  }
  bool isSuccess() const override { return gloo->isSuccess(); }
  std::exception_ptr exception() const override { return gloo->exception(); }
  int sourceRank() const override { return gloo->sourceRank(); }
  void abort() override { gloo->abort(); }
  uint64_t getSequencenumber() const override { return 0; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    if (!future) {
      auto self = c10::intrusive_ptr<HcclWork>::reclaim_copy(this);
      future = gloo->getFuture()->then(
          [self](c10::ivalue::Future& done) {
            done.value();  // rethrows
            self->finish_once();
            return c10::IValue(self->outputs);
          },
          c10::ListType::ofTensors());
    }
    return future;
  }
};

// ------------------------------------------------------------------------------------------------ backend

class HcclBackend final : public Backend {
 public:
  explicit HcclBackend(c10::intrusive_ptr<Backend> gloo)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}

  const std::string getBackendName() const override { return "hccl"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return c10::make_intrusive<Options>("hccl"); }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }

  WorkPtr broadcast(Tensors& tensors, const BroadcastOptions& options) override {
    auto cpu = aliases(tensors);
    return work(OpType::BROADCAST, gloo_->broadcast(cpu, options), tensors);
  }
  WorkPtr allreduce(Tensors& tensors, const AllreduceOptions& given) override {
    auto options = given;
    auto cpu = aliases(tensors);
    auto finish = prepare_reduction(options, cpu);
    return work(OpType::ALLREDUCE, gloo_->allreduce(cpu, options), tensors, finish);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const AllreduceCoalescedOptions& given) override {
    auto options = given;
    auto cpu = aliases(tensors);
    auto finish = prepare_reduction(options, cpu);
    return work(OpType::ALLREDUCE_COALESCED, gloo_->allreduce_coalesced(cpu, options), tensors, finish);
  }
  WorkPtr reduce(Tensors& tensors, const ReduceOptions& given) override {
    auto options = given;
    auto cpu = aliases(tensors);
    auto finish = prepare_reduction(options, cpu);
    if (options.rootRank != getRank()) finish = nullptr;
    return work(OpType::REDUCE, gloo_->reduce(cpu, options), tensors, finish);
  }
  WorkPtr allgather(std::vector<Tensors>& out, Tensors& in, const AllgatherOptions& options) override {
    auto cpu_out = flat_aliases(out);
    auto cpu_in = flat_aliases(in);
    return work(OpType::ALLGATHER, gloo_->allgather(cpu_out, cpu_in, options), concatenated(out));
  }
  WorkPtr _allgather_base(Tensor& out, Tensor& in, const AllgatherOptions& options) override {
    auto cpu_out = flat_alias(out), cpu_in = flat_alias(in);
    return work(OpType::_ALLGATHER_BASE, gloo_->_allgather_base(cpu_out, cpu_in, options), {out});
  }
  WorkPtr allgather_coalesced(std::vector<Tensors>& out, Tensors& in, const AllgatherOptions& options) override {
    auto cpu_out = flat_aliases(out);
    auto cpu_in = flat_aliases(in);
    return work(OpType::ALLGATHER_COALESCED, gloo_->allgather_coalesced(cpu_out, cpu_in, options), concatenated(out));
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const AllgatherOptions& options) override {
    auto cpu_out = flat_aliases(out), cpu_in = flat_aliases(in);
    return work(OpType::ALLGATHER_COALESCED, gloo_->allgather_into_tensor_coalesced(cpu_out, cpu_in, options), out);
  }
  WorkPtr gather(std::vector<Tensors>& out, Tensors& in, const GatherOptions& options) override {
    auto cpu_out = flat_aliases(out);
    auto cpu_in = flat_aliases(in);
    return work(OpType::GATHER, gloo_->gather(cpu_out, cpu_in, options), concatenated(out));
  }
  WorkPtr scatter(Tensors& out, std::vector<Tensors>& in, const ScatterOptions& options) override {
    auto cpu_out = flat_aliases(out);
    auto cpu_in = flat_aliases(in);
    return work(OpType::SCATTER, gloo_->scatter(cpu_out, cpu_in, options), out);
  }
  WorkPtr reduce_scatter(Tensors& out, std::vector<Tensors>& in, const ReduceScatterOptions& given) override {
    auto options = given;
    auto cpu_out = flat_aliases(out);
    auto cpu_in = flat_aliases(in);
    auto finish = prepare_reduction(options, cpu_out);
    return work(OpType::REDUCE_SCATTER, gloo_->reduce_scatter(cpu_out, cpu_in, options), out, finish);
  }
  WorkPtr _reduce_scatter_base(Tensor& out, Tensor& in, const ReduceScatterOptions& given) override {
    auto options = given;
    auto cpu_out = flat_alias(out), cpu_in = flat_alias(in);
    auto finish = prepare_reduction(options, {cpu_out});
    return work(OpType::_REDUCE_SCATTER_BASE, gloo_->_reduce_scatter_base(cpu_out, cpu_in, options), {out}, finish);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in, const ReduceScatterOptions& given) override {
    auto options = given;
    auto cpu_out = flat_aliases(out), cpu_in = flat_aliases(in);
    auto finish = prepare_reduction(options, cpu_out);
    return work(OpType::REDUCE_SCATTER, gloo_->reduce_scatter_tensor_coalesced(cpu_out, cpu_in, options), out, finish);
  }
  WorkPtr alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& out_splits, std::vector<int64_t>& in_splits,
                        const AllToAllOptions& options) override {
    auto cpu_out = checked_alias(out), cpu_in = checked_alias(in);
    return work(OpType::ALLTOALL_BASE, gloo_->alltoall_base(cpu_out, cpu_in, out_splits, in_splits, options), {out});
  }
  WorkPtr alltoall(Tensors& out, Tensors& in, const AllToAllOptions& options) override {
    auto cpu_out = aliases(out), cpu_in = aliases(in);
    return work(OpType::ALLTOALL, gloo_->alltoall(cpu_out, cpu_in, options), out);
  }
  WorkPtr send(Tensors& tensors, int to, int tag) override {
    auto cpu = aliases(tensors);
    return work(OpType::SEND, gloo_->send(cpu, to, tag), tensors);
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    auto cpu = aliases(tensors);
    return work(OpType::RECV, gloo_->recv(cpu, from, tag), tensors);
  }
  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    auto cpu = aliases(tensors);
    return work(OpType::RECVANYSOURCE, gloo_->recvAnysource(cpu, tag), tensors);
  }
  WorkPtr barrier(const BarrierOptions& given) override {
    auto options = given;
    options.device_ids.clear();
    options.device.reset();
    return work(OpType::BARRIER, gloo_->barrier(options), {});
  }

 private:
  c10::intrusive_ptr<Backend> gloo_;
  uint64_t sequence_ = 0;

  WorkPtr work(OpType op, WorkPtr gloo, Tensors outputs, std::function<void()> finish = nullptr) {
    ++sequence_;
    return c10::make_intrusive<HcclWork>(getRank(), op, std::move(gloo), std::move(outputs), std::move(finish));
  }

  // Gloo has no AVG: sum, and return what divides afterwards.
  template <class Options>
  std::function<void()> prepare_reduction(Options& options, Tensors outputs) {
    check_reducible(outputs);
    if (static_cast<ReduceOp::RedOpType>(options.reduceOp.op_) != ReduceOp::AVG) return nullptr;
    options.reduceOp = ReduceOp::SUM;
    return [outputs, ranks = getSize()]() mutable {
      for (auto& tensor : outputs) tensor.div_(ranks);
    };
  }
};

// Gives a process group that has a gloo backend for the CPU an hccl backend for npu that wraps it. Python reads it back
// with group._get_backend(torch.device("npu")), so that no binding of our own is needed.
TORCH_LIBRARY_FRAGMENT(npuemu, m) {
  m.def("add_hccl_over_gloo(__torch__.torch.classes.c10d.ProcessGroup group) -> ()",
        [](const c10::intrusive_ptr<ProcessGroup>& group) {
          group->setBackend(kNPU, ProcessGroup::BackendType::CUSTOM,
                            c10::make_intrusive<HcclBackend>(group->getBackend(c10::DeviceType::CPU)));
        });
}

}  // namespace npuemu
