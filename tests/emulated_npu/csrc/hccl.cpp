// HCCL over gloo: makes no copies, has the limits of the real library, and finishes each collective within its call.
#include "hccl.h"

#include "npu.h"

#include <torch/csrc/distributed/c10d/Work.hpp>

namespace emulated {
namespace {

using c10d::ReduceOp;
using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// Finished work, or a send or receive that gloo is still doing, with the npu tensors that result.
struct HcclWork final : c10d::Work {
  WorkPtr pending;
  Tensors results, kept;  // kept: aliases that gloo still reads or writes

  HcclWork(WorkPtr pending_work, Tensors given, Tensors aliases = {})
      : c10d::Work(-1, c10d::OpType::UNKNOWN), pending(std::move(pending_work)), results(std::move(given)),
        kept(std::move(aliases)) {}

  bool isCompleted() override {
    return !pending || pending->isCompleted();
  }
  bool isSuccess() const override {
    return !pending || pending->isSuccess();
  }
  bool wait(std::chrono::milliseconds timeout) override {
    return !pending || pending->wait(timeout);
  }
  Tensors result() override {
    return results;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    if (pending) {
      pending->wait();
    }
    std::vector<c10::Device> devices;
    if (!results.empty()) {
      devices.push_back(results[0].device());
    }
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
    future->markCompleted(c10::IValue(results));
    return future;
  }
};

WorkPtr done(Tensors results) {
  return c10::make_intrusive<HcclWork>(nullptr, std::move(results));
}

at::Tensor host_alias(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.is_contiguous(), "Tensors must be contiguous");
  TORCH_CHECK(!tensor.is_complex() && !(tensor.scalar_type() == at::kBFloat16 && settings().refused & bit(at::kBFloat16)),
              "HCCL: Unsupported data type ", tensor.scalar_type(), " on ", settings().chip);
  return cpu_alias(tensor);
}

Tensors host_aliases(const Tensors& tensors) {
  Tensors made;
  for (const auto& tensor : tensors) {
    made.push_back(host_alias(tensor));
  }
  return made;
}

// The reductions of the library and gloo's operation for each. An average is a sum that is divided afterwards.
ReduceOp::RedOpType reduction(const ReduceOp& op, const at::Tensor& tensor) {
  constexpr uint64_t reduced = uint64_t{1} << int(at::kChar) | uint64_t{1} << int(at::kShort) |
      uint64_t{1} << int(at::kInt) | uint64_t{1} << int(at::kLong) | uint64_t{1} << int(at::kHalf) |
      uint64_t{1} << int(at::kFloat) | uint64_t{1} << int(at::kBFloat16);
  TORCH_CHECK(reduced & bit(tensor.scalar_type()), "HCCL AllReduce & Reduce: Unsupported data type ",
              tensor.scalar_type());
  switch (op.op_) {
    case ReduceOp::SUM:
    case ReduceOp::AVG: return ReduceOp::SUM;
    case ReduceOp::PRODUCT: return ReduceOp::PRODUCT;
    case ReduceOp::MIN: return ReduceOp::MIN;
    case ReduceOp::MAX: return ReduceOp::MAX;
    case ReduceOp::BAND: TORCH_CHECK(false, "Cannot use ReduceOp.BAND with HCCL");
    case ReduceOp::BOR: TORCH_CHECK(false, "Cannot use ReduceOp.BOR with HCCL");
    case ReduceOp::BXOR: TORCH_CHECK(false, "Cannot use ReduceOp.BXOR with HCCL");
    case ReduceOp::PREMUL_SUM: TORCH_CHECK(false, "Cannot use ReduceOp.PREMUL_SUM with HCCL");
    default: TORCH_CHECK(false, "Cannot use this ReduceOp with HCCL");
  }
}

void average(const ReduceOp& op, Tensors& tensors, int ranks) {
  if (op.op_ == ReduceOp::AVG) {
    for (auto& tensor : tensors) {
      tensor.is_floating_point() ? tensor.div_(ranks) : tensor.div_(ranks, "trunc");
    }
  }
}

struct Hccl final : c10d::Backend {
  c10::intrusive_ptr<c10d::Backend> gloo;

  explicit Hccl(c10d::Backend& inner)
      : c10d::Backend(inner.getRank(), inner.getSize()),
        gloo(c10::intrusive_ptr<c10d::Backend>::reclaim_copy(&inner)) {}

  const std::string getBackendName() const override {
    return "hccl";
  }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override {
    return gloo->getSequenceNumberForGroup();
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& given) override {
    count("collectives", "allreduce");
    auto options = given;
    options.reduceOp = reduction(given.reduceOp, tensors.at(0));
    for (const auto& tensor : tensors) {
      Tensors one{host_alias(tensor)};
      gloo->allreduce(one, options)->wait();
      average(given.reduceOp, one, size_);
    }
    return done(tensors);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& given) override {
    return allreduce(tensors, given);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& given) override {
    count("collectives", "reduce");
    auto options = given;
    options.reduceOp = reduction(given.reduceOp, tensors.at(0));
    Tensors made = host_aliases(tensors);
    gloo->reduce(made, options)->wait();
    if (rank_ == given.rootRank) {
      average(given.reduceOp, made, size_);
    }
    return done(tensors);
  }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    count("collectives", "broadcast");
    Tensors made = host_aliases(tensors);
    gloo->broadcast(made, options)->wait();
    return done(tensors);
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    count("collectives", "allgather");
    std::vector<Tensors> made{host_aliases(outputs.at(0))};
    Tensors given = host_aliases(inputs);
    gloo->allgather(made, given, options)->wait();
    return done(outputs[0]);
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    count("collectives", "_allgather_base");
    at::Tensor made = host_alias(output), given = host_alias(input);
    gloo->_allgather_base(made, given, options)->wait();
    return done({output});
  }
  WorkPtr allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    for (size_t i = 0; i < outputs.size(); i++) {
      _allgather_base(outputs[i], inputs.at(i), options);
    }
    return done(outputs);
  }
  WorkPtr _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& given) override {
    count("collectives", "_reduce_scatter_base");
    auto options = given;
    options.reduceOp = reduction(given.reduceOp, input);
    Tensors made{host_alias(output)};
    // gloo may use its input as workspace, but the input belongs to the caller
    at::Tensor copy = host_alias(input).clone();
    gloo->_reduce_scatter_base(made[0], copy, options)->wait();
    average(given.reduceOp, made, size_);
    return done({output});
  }
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    for (size_t i = 0; i < outputs.size(); i++) {
      _reduce_scatter_base(outputs[i], inputs.at(i), options);
    }
    return done(outputs);
  }
  WorkPtr reduce_scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& given) override {
    count("collectives", "reduce_scatter");
    auto options = given;
    options.reduceOp = reduction(given.reduceOp, outputs.at(0));
    Tensors made{host_alias(outputs[0]).flatten()}, parts;
    for (const auto& tensor : host_aliases(inputs.at(0))) {
      parts.push_back(tensor.flatten());
    }
    at::Tensor whole = at::cat(parts);
    gloo->_reduce_scatter_base(made[0], whole, options)->wait();
    average(given.reduceOp, made, size_);
    return done(outputs);
  }
  WorkPtr alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& options) override {
    count("collectives", "alltoall_base");
    at::Tensor made = host_alias(output), given = host_alias(input);
    gloo->alltoall_base(made, given, output_sizes, input_sizes, options)->wait();
    return done({output});
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    count("collectives", "alltoall");
    Tensors made = host_aliases(outputs), given = host_aliases(inputs), flat;
    std::vector<int64_t> output_sizes, input_sizes;
    int64_t total = 0;
    for (size_t i = 0; i < made.size(); i++) {
      output_sizes.push_back(made[i].numel());
      input_sizes.push_back(given.at(i).numel());
      flat.push_back(given[i].flatten());
      total += made[i].numel();
    }
    at::Tensor source = at::cat(flat), target = at::empty({total}, source.options());
    auto parts = target.split_with_sizes(output_sizes);  // before gloo empties the list of sizes
    gloo->alltoall_base(target, source, output_sizes, input_sizes, options)->wait();
    for (size_t i = 0; i < made.size(); i++) {
      made[i].copy_(parts[i].view_as(made[i]));
    }
    return done(outputs);
  }
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    count("collectives", "gather");
    std::vector<Tensors> made;
    if (!outputs.empty()) {
      made.push_back(host_aliases(outputs[0]));
    }
    Tensors given = host_aliases(inputs);
    gloo->gather(made, given, options)->wait();
    return done(outputs.empty() ? Tensors{} : outputs[0]);
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    count("collectives", "scatter");
    std::vector<Tensors> given;
    if (!inputs.empty()) {
      given.push_back(host_aliases(inputs[0]));
    }
    Tensors made = host_aliases(outputs);
    gloo->scatter(made, given, options)->wait();
    return done(outputs);
  }
  // Two ranks may both send first, so sends must not wait here.
  WorkPtr send(Tensors& tensors, int rank, int tag) override {
    count("collectives", "send");
    Tensors made = host_aliases(tensors);
    return c10::make_intrusive<HcclWork>(gloo->send(made, rank, tag), Tensors{}, made);
  }
  WorkPtr recv(Tensors& tensors, int rank, int tag) override {
    count("collectives", "recv");
    Tensors made = host_aliases(tensors);
    return c10::make_intrusive<HcclWork>(gloo->recv(made, rank, tag), tensors, made);
  }
  WorkPtr barrier(const c10d::BarrierOptions&) override {
    count("collectives", "barrier");
    c10d::BarrierOptions plain;  // without the device ids, which gloo does not know
    gloo->barrier(plain)->wait();
    return done({});
  }
};

} // namespace

c10::intrusive_ptr<c10d::Backend> make_hccl(c10d::Backend& gloo) {
  return c10::make_intrusive<Hccl>(gloo);
}

} // namespace emulated
