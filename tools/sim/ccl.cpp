// The process group "simccl": collectives happen on a stream of the group, and gloo carries them between the CPUs.
#include "runtime.h"
#include <set>
#include <unistd.h>
#include <ATen/core/ivalue.h>
#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/csrc/utils/pybind.h>

namespace sim {
using at::Tensor, c10d::Work, c10d::OpType;
using Tensors = std::vector<Tensor>;
using WorkPtr = c10::intrusive_ptr<Work>;
using Sizes = std::vector<int64_t>;
using Finish = std::function<void()>;  // waits for gloo and completes the outputs
using Milliseconds = std::chrono::milliseconds;

struct NoTimer final : c10d::Timer {  // DDP asks for one, and warns without it
  explicit NoTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};
static bool has_timer = [] {
  c10d::TimerRegistry()->Register(kSim, [](c10::Device d) { return std::unique_ptr<c10d::Timer>(new NoTimer(d)); });
  return true;
}();

// As NCCL's: `wait` lets the current stream wait, and not the host. After a barrier the host waits too.
struct SimWork final : Work {
  Event end;
  bool is_barrier, is_waited_for = false;
  Tensors inputs, outputs;  // as of NCCL's: kept until somebody waits, or until they were used
  c10::intrusive_ptr<c10::ivalue::Future> future;

  SimWork(int rank, OpType type, c10::Stream stream, Tensors inputs, Tensors outputs)
      : Work(rank, type), end(record(stream)), is_barrier(type == OpType::BARRIER), inputs(std::move(inputs)),
        outputs(std::move(outputs)) {
    future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                      std::vector<c10::Device>{stream.device()});
    c10::StreamGuard guard(stream);
    future->markCompleted(c10::IValue(this->outputs));
  }
  ~SimWork() override {
    for (auto* kept : {&inputs, &outputs})
      for (auto& t : *kept)
        if (!is_waited_for) record_stream(t.storage().data_ptr(), stream_of(end.stream));
  }
  bool isCompleted() override { return ask(end); }
  void synchronize() override {
    sim::wait(current_stream(end.stream.first), end);
    is_waited_for = true;
    inputs.clear();
    if (is_barrier) sim::synchronize(end);
  }
  bool wait(Milliseconds timeout) override {
    synchronize();
    if (timeout != kNoTimeout) sim::synchronize(end);
    return true;
  }
  void blockCurrentStream() override { synchronize(); }
  Tensors result() override { return outputs; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }
};

struct Group final : c10d::Backend {
  static constexpr int kAll = -1;
  c10::intrusive_ptr<Backend> gloo;
  pybind11::function make_gloo;  // of store, rank, size and timeout
  c10::intrusive_ptr<Options> options;
  std::map<std::pair<c10::DeviceIndex, int>, c10::Stream> streams;  // by device and peer, or kAll
  std::set<c10::DeviceIndex> met;  // of this rank, known to the others
  uint64_t sequence = 0;
  bool coalesces = false;
  Tensors coalesced;  // the tensors since startCoalescing

  Group(c10::intrusive_ptr<Backend> gloo, int rank, int size, pybind11::function make_gloo, Milliseconds timeout)
      : Backend(rank, size), gloo(gloo), make_gloo(make_gloo),
        options(c10::make_intrusive<Options>("simccl", timeout)) {}
  ~Group() override {
    pybind11::gil_scoped_acquire gil;
    make_gloo = {};
  }
  const std::string getBackendName() const override { return "simccl"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options; }
  uint64_t getSequenceNumberForGroup() override { return sequence; }
  void setSequenceNumberForGroup() override {}
  void setTimeout(Milliseconds timeout) override {
    options->timeout = timeout;
    gloo->setTimeout(timeout);
  }
  void shutdown() override {
    for (auto& [_, stream] : streams) drain(stream);
    gloo->shutdown();
  }
  void abort() override { gloo->abort(); }

  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<Backend> split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                                    const c10::intrusive_ptr<Options>& opts) override {
    auto at = std::find(ranks.begin(), ranks.end(), rank_);
    if (at == ranks.end()) return nullptr;
    auto timeout = opts ? opts->timeout : options->timeout;
    int rank = at - ranks.begin(), size = ranks.size();
    pybind11::gil_scoped_acquire gil;
    auto inner = make_gloo(store, rank, size, timeout).cast<c10::intrusive_ptr<Backend>>();
    auto group = c10::make_intrusive<Group>(inner, rank, size, make_gloo, timeout);
    group->setBoundDeviceId(bound_device_id_);
    group->options->global_ranks_in_group = opts ? opts->global_ranks_in_group : std::vector<uint64_t>();
    return group;
  }

  // Several collectives with one work. They start one by one here, which nobody can tell.
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override {
    coalesces = true;
    coalesced.clear();
  }
  WorkPtr endCoalescing() override {
    coalesces = false;
    auto device = coalesced.empty() ? c10::Device(kSim, current_device()) : coalesced[0].device();
    auto kept = std::exchange(coalesced, {});
    return c10::make_intrusive<SimWork>(rank_, OpType::COALESCED, stream_on(device), kept, Tensors{});
  }
  // n collectives with one work, also as a part of a longer list.
  template <class Start> WorkPtr coalesce(size_t n, Start start) {
    bool is_part = coalesces;
    if (!is_part) startCoalescing();
    WorkPtr last;
    for (size_t i = 0; i < n; ++i) last = start(i);
    return is_part ? last : endCoalescing();
  }

  // ---- what all collectives do ----

  // Refuse what NCCL refuses. `op` is nullptr where nothing is reduced.
  c10::Device check(const Tensors& inputs, const Tensors& outputs, const c10d::ReduceOp* op, bool is_p2p) {
    // NCCL's, in torch's NCCLUtils.hpp
    static const std::set<at::ScalarType> types{
        at::kChar, at::kByte, at::kFloat, at::kDouble, at::kInt, at::kLong, at::kHalf, at::kBool, at::kBFloat16,
        at::kFloat8_e5m2, at::kFloat8_e4m3fn, at::kFloat8_e4m3fnuz, at::kFloat8_e5m2fnuz};
    Tensors all = inputs;
    all.insert(all.end(), outputs.begin(), outputs.end());
    TORCH_CHECK(!all.empty(), "simccl: no tensor");
    auto device = all[0].device();
    for (auto& t : all) {
      TORCH_CHECK(t.device().type() == kSim, "simccl: Tensors must be on a sim device and dense, not on ", t.device());
      TORCH_CHECK(t.device() == device, "simccl: tensors of several devices");
      bool is_packed = is_p2p ? t.is_non_overlapping_and_dense() : t.is_contiguous(t.suggest_memory_format());
      TORCH_CHECK_VALUE(is_packed, "simccl: Tensors must be contiguous");
      TORCH_CHECK_TYPE(t.dtype() == all[0].dtype(), "simccl: Tensors must have one type, not ", all[0].dtype(), " and ",
                       t.dtype());
      bool is_bad = !types.count(t.scalar_type()) || (op && at::isFloat8Type(t.scalar_type()));
      TORCH_CHECK(!is_bad, "simccl: no support for ", t.scalar_type());
    }
    bool is_bitwise = op && (*op == c10d::ReduceOp::BAND || *op == c10d::ReduceOp::BOR || *op == c10d::ReduceOp::BXOR);
    TORCH_CHECK_VALUE(!is_bitwise, "simccl: NCCL has no bitwise ReduceOp");
    bool is_average_of_bools = op && *op == c10d::ReduceOp::AVG && all[0].scalar_type() == at::kBool;
    TORCH_CHECK_TYPE(!is_average_of_bools, "simccl: Cannot use ReduceOp.AVG with boolean inputs");
    TORCH_CHECK(!bound_device_id_ || *bound_device_id_ == device, "Attempt to perform collective on tensor not on ",
                "device passed to init_process_group: ", device, " is not ", *bound_device_id_);
    return device;
  }
  // As NCCL, before the first collective of all ranks. A node of torchrun has devices of its own.
  void meet(c10::DeviceIndex device) {
    if (!met.insert(device).second) return;
    char host[256] = "";
    gethostname(host, sizeof(host) - 1);
    int64_t node = std::hash<std::string>()(c10::str(host, setting("GROUP_RANK", 0)));
    auto own = at::tensor({node, int64_t(device)}, at::kLong), all = at::empty({2 * size_}, at::kLong);
    c10d::AllgatherOptions o;
    o.timeout = options->timeout;
    gloo->_allgather_base(all, own, o)->wait();
    for (int i = 0; i < size_; ++i)
      TORCH_CHECK_WITH(DistBackendError, i == rank_ || !at::equal(all.narrow(0, 2 * i, 2), own),
                       "simccl: Duplicate GPU detected : rank ", rank_, " and rank ", i, " both on sim:", int(device),
                       ": is set_device missing?");
  }
  // As NCCL's: pairs of ranks have streams of their own, but not in a batch.
  c10::Stream stream_on(c10::Device device, int peer = kAll) {
    std::pair key{device.index(), coalesces ? kAll : peer};
    auto at = streams.find(key);
    if (at == streams.end()) at = streams.emplace(key, new_stream(device.index())).first;
    return at->second;
  }
  // Read `inputs` now, start the exchange between the CPUs, and write `outputs` when the group's stream gets there.
  // `start(in, out)` has copies of both.
  template <class Start>
  WorkPtr run(OpType type, Tensors inputs, Tensors outputs, Start start, const c10d::ReduceOp* op = nullptr,
              int peer = kAll) {
    c10::InferenceMode normal(false);
    at::NoGradGuard no_grad;
    for (auto* tensors : {&inputs, &outputs})
      for (auto& t : *tensors)
        if (t.is_complex()) t = at::view_as_real(t);
    auto device = check(inputs, outputs, op, peer != kAll);
    if (peer == kAll) meet(device.index());
    auto stream = stream_on(device, peer), current = current_stream(device.index());
    wait(stream, record(current));
    std::vector<Use> uses;
    for (auto& t : inputs) uses.push_back({t, false});
    for (auto& t : outputs) uses.push_back({t, true});
    auto name = c10d::opTypeToString(type);
    launch(stream, uses, name);
    drain(current);  // what the inputs depend on
    Tensors in, out, targets;
    for (auto& t : inputs) in.push_back(on_cpu(t).detach().clone());  // clone keeps dense strides
    for (auto& t : outputs) targets.push_back(on_cpu(t));  // now: its storage may be another one later
    for (auto& t : targets) out.push_back(at::empty_like(t));
    ++sequence;
    Finish finish = start(in, out);
    push(stream, [finish, name, out, targets, outputs]() mutable {
      c10::InferenceMode normal(false);
      at::NoGradGuard no_grad;
      try {
        finish();
      } catch (const c10::Error& error) {
        C10_THROW_ERROR(DistBackendError, c10::str("simccl: ", name, ": ", error.what_without_backtrace()));
      } catch (const std::exception& error) {
        C10_THROW_ERROR(DistBackendError, c10::str("simccl: ", name, ": ", error.what()));
      }
      for (size_t i = 0; i < out.size(); ++i) targets[i].copy_(out[i]);
    });
    if (coalesces)
      for (auto* tensors : {&inputs, &outputs}) coalesced.insert(coalesced.end(), tensors->begin(), tensors->end());
    return c10::make_intrusive<SimWork>(rank_, type, stream, inputs, outputs);
  }
  // The memory of a dense tensor, in the order of its addresses.
  static Tensor flat(const Tensor& t) { return t.as_strided({t.numel()}, {1}); }
  static Tensor bytes(const Tensor& t) { return flat(t).view(at::kByte); }
  static Tensors bytes(const Tensors& ts) { Tensors all; for (auto& t : ts) all.push_back(bytes(t)); return all; }

  // gloo has neither AVG nor PREMUL_SUM.
  c10d::ReduceOp before(const c10d::ReduceOp& op, Tensors& in) {
    if (op.op_ == c10d::ReduceOp::PREMUL_SUM) {
      auto* factor = static_cast<c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
      for (auto& t : in)
        if (factor->tensor_factor.defined()) t.mul_(factor->tensor_factor.cpu()); else t.mul_(factor->double_factor);
    }
    bool is_sum = op.op_ == c10d::ReduceOp::AVG || op.op_ == c10d::ReduceOp::PREMUL_SUM;
    return is_sum ? c10d::ReduceOp(c10d::ReduceOp::SUM) : op;
  }
  void after(const c10d::ReduceOp& op, Tensor t) {
    if (op.op_ != c10d::ReduceOp::AVG) return;
    if (t.is_floating_point()) t.div_(size_); else t.div_(size_, "trunc");
  }

  // ---- the collectives ----

  static Finish until(WorkPtr work) { return [work] { work->wait(); }; }
  static Finish until(std::vector<WorkPtr> works) { return [works] { for (auto& w : works) w->wait(); }; }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& o) override {
    return run(OpType::ALLREDUCE, tensors, tensors, [&](Tensors in, Tensors out) {
      auto opts = o;
      opts.reduceOp = before(o.reduceOp, in);
      Tensors one{flat(out[0]).copy_(flat(in[0]))};
      return [this, op = o.reduceOp, out, wait = until(gloo->allreduce(one, opts))] { wait(); after(op, out[0]); };
    }, &o.reduceOp);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& o) override {
    return coalesce(tensors.size(), [&](size_t i) {
      Tensors one{tensors[i]};
      return allreduce(one, o);
    });
  }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& o) override {
    return run(OpType::BROADCAST, tensors, tensors, [&](Tensors in, Tensors out) {
      Tensors one{bytes(out[0]).copy_(bytes(in[0]))};
      return until(gloo->broadcast(one, o));
    });
  }
  // Of each rank's ith `in` on rank `root` + i, whose `out` it is.
  Finish reduce_to(int root, Tensors in, Tensors out, const c10d::ReduceOp& op, Milliseconds timeout) {
    c10d::ReduceOptions o;
    o.reduceOp = before(op, in);
    o.timeout = timeout;
    std::vector<WorkPtr> works;
    for (auto& t : in) {
      o.rootRank = root + works.size();
      Tensors one{flat(t)};
      works.push_back(gloo->reduce(one, o));
    }
    return [this, op, wait = until(works), out, own = in[in.size() > 1 ? rank_ : 0]] {
      wait();
      for (auto& t : out) after(op, t.copy_(own));
    };
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& o) override {
    return run(OpType::REDUCE, tensors, rank_ == o.rootRank ? tensors : Tensors{}, [&](Tensors in, Tensors out) {
      return reduce_to(o.rootRank, in, out, o.reduceOp, o.timeout);
    }, &o.reduceOp);
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& o) override {
    return run(OpType::ALLGATHER, inputs, outputs.at(0), [&](Tensors in, Tensors out) {
      c10d::BroadcastOptions opts;
      opts.timeout = o.timeout;
      bytes(out.at(rank_)).copy_(bytes(in[0]));
      std::vector<WorkPtr> works;
      for (auto& t : out) {  // their sizes may differ
        opts.rootRank = works.size();
        Tensors one{bytes(t)};
        works.push_back(gloo->broadcast(one, opts));
      }
      return until(works);
    });
  }
  WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& o) override {
    TORCH_CHECK(output.numel() == input.numel() * size_, "simccl: output must hold world size times the input");
    return run(OpType::_ALLGATHER_BASE, {input}, {output}, [&](Tensors in, Tensors out) {
      auto from = bytes(in[0]), to = bytes(out[0]);
      return until(gloo->_allgather_base(to, from, o));
    });
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& o) override {
    return coalesce(inputs.size(), [&](size_t i) { return _allgather_base(outputs[i], inputs[i], o); });
  }
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& o) override {
    TORCH_CHECK(outputs.at(0).numel() == inputs.at(0).at(rank_).numel(), "simccl: output must hold this rank's input");
    return run(OpType::REDUCE_SCATTER, inputs.at(0), outputs, [&](Tensors in, Tensors out) {
      return reduce_to(0, in, out, o.reduceOp, o.timeout);
    }, &o.reduceOp);
  }
  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& o) override {
    TORCH_CHECK(input.numel() == output.numel() * size_, "simccl: input must hold world size times the output");
    return run(OpType::_REDUCE_SCATTER_BASE, {input}, {output}, [&](Tensors in, Tensors out) {
      return reduce_to(0, flat(in[0]).chunk(size_), {flat(out[0])}, o.reduceOp, o.timeout);
    }, &o.reduceOp);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& o) override {
    return coalesce(inputs.size(), [&](size_t i) { return _reduce_scatter_base(outputs[i], inputs[i], o); });
  }
  WorkPtr alltoall_base(Tensor& output, Tensor& input, Sizes& to_sizes, Sizes& from_sizes,
                        const c10d::AllToAllOptions& o) override {
    return run(OpType::ALLTOALL_BASE, {input}, {output}, [&](Tensors in, Tensors out) {
      auto in_bytes = [&](const Tensor& t, const Sizes& rows) {
        int64_t all = t.numel() * t.itemsize(), row = t.dim() && t.size(0) ? all / t.size(0) : 0;
        Sizes sizes;
        for (int i = 0; i < size_; ++i) sizes.push_back(rows.empty() ? all / size_ : rows[i] * row);
        return sizes;
      };
      auto from = bytes(in[0]), to = bytes(out[0]);
      auto from_bytes = in_bytes(in[0], from_sizes), to_bytes = in_bytes(out[0], to_sizes);
      return until(gloo->alltoall_base(to, from, to_bytes, from_bytes, o));
    });
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& o) override {
    return run(OpType::ALLTOALL, inputs, outputs, [&](Tensors in, Tensors out) {
      Sizes from_sizes, to_sizes;
      for (auto& t : in) from_sizes.push_back(bytes(t).numel());
      for (auto& t : out) to_sizes.push_back(bytes(t).numel());
      auto from = at::cat(bytes(in)), to = at::empty_like(at::cat(bytes(out)));
      auto wait = until(gloo->alltoall_base(to, from, to_sizes, from_sizes, o));
      return [wait, to, out] {
        wait();
        int64_t done = 0;
        for (auto& part : bytes(out)) {
          part.copy_(to.narrow(0, done, part.numel()));
          done += part.numel();
        }
      };
    });
  }
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& o) override {
    bool is_root = rank_ == o.rootRank;
    return run(OpType::GATHER, inputs, is_root ? outputs.at(0) : Tensors{}, [&](Tensors in, Tensors out) {
      auto from = bytes(in);
      std::vector<Tensors> to;
      if (is_root) to.push_back(bytes(out));
      return until(gloo->gather(to, from, o));
    });
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& o) override {
    return run(OpType::SCATTER, rank_ == o.rootRank ? inputs.at(0) : Tensors{}, outputs, [&](Tensors in, Tensors out) {
      auto to = bytes(out);
      std::vector<Tensors> from;
      if (rank_ == o.rootRank) from.push_back(bytes(in));
      return until(gloo->scatter(to, from, o));
    });
  }
  WorkPtr send(Tensors& tensors, int to, int tag) override {
    return run(OpType::SEND, tensors, {}, [&](Tensors in, Tensors) {
      auto from = bytes(in);
      auto wait = until(gloo->send(from, to, tag));
      return [from, wait] { wait(); };
    }, nullptr, to);
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    return run(OpType::RECV, {}, tensors, [&](Tensors, Tensors out) {
      auto to = bytes(out);
      return until(gloo->recv(to, from, tag));
    }, nullptr, from);
  }
  WorkPtr barrier(const c10d::BarrierOptions& o) override {
    auto index = !o.device_ids.empty() ? o.device_ids[0]
                 : bound_device_id_    ? bound_device_id_->index()
                 : !met.empty()        ? *met.begin()
                                       : rank_ % device_count();  // a guess, as NCCL's
    auto one = at::empty({1}, at::TensorOptions(c10::Device(kSim, index)));
    return run(OpType::BARRIER, {}, {one}, [&](Tensors, Tensors) { return until(gloo->barrier(o)); });
  }
};
}  // namespace sim

PYBIND11_MODULE(_C, m) {
  namespace py = pybind11;
  using sim::Group;
  sim::register_memory();
  auto make_group = [](c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size, py::function make_gloo,
                       std::chrono::milliseconds timeout) {
    return c10::make_intrusive<Group>(gloo, rank, size, make_gloo, timeout);
  };
  py::class_<Group, c10d::Backend, c10::intrusive_ptr<Group>>(m, "Group").def(py::init(make_group));
  m.def("default_generator", [](int device) { return sim::default_generator(device); });
  m.def("use", sim::use);
  m.def("is_used", sim::is_used);
  m.def("get_sync_debug_mode", [] { return int(sim::sync_debug_mode); });
  m.def("set_sync_debug_mode", [](int mode) { sim::sync_debug_mode = mode; });
  m.def("current_device", [] { return int(sim::current_device()); });
  m.def("device_count", [] { return int(sim::device_count()); });
}
