// Operators. Memory, views and copies are the device's own; all others run the CPU's kernel on the same memory.
#include "runtime.h"
#include <ATen/EmptyTensor.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>
#include <unordered_map>
#include <unordered_set>

namespace sim {
using at::IntArrayRef, at::Tensor, c10::Device, c10::IValue, c10::Stream, std::optional;

static bool is_sim(const Tensor& t) { return t.defined() && t.device().type() == kSim; }
static c10::DispatchKeySet keys() { return c10::DispatchKeySet(c10::DispatchKey::PrivateUse1); }

// ---- memory and views ----

static Tensor empty_strided(IntArrayRef size, IntArrayRef stride, optional<at::ScalarType> dtype,
                            optional<at::Layout>, optional<Device> device, optional<bool>) {
  c10::DeviceGuard guard(device.value_or(Device(kSim, -1)));
  return at::detail::empty_strided_generic(size, stride, c10::GetAllocator(kSim), keys(), c10::dtype_or_default(dtype));
}
static Tensor empty(IntArrayRef size, optional<at::ScalarType> dtype, optional<at::Layout>, optional<Device> device,
                    optional<bool>, optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device.value_or(Device(kSim, -1)));
  return at::detail::empty_generic(size, c10::GetAllocator(kSim), keys(), c10::dtype_or_default(dtype), format);
}
static void set_shape(const Tensor& t, IntArrayRef size, IntArrayRef stride, int64_t offset) {
  size_t bytes = at::detail::computeStorageNbytes(size, stride, t.itemsize(), offset);
  bool is_too_small = c10::multiply_integers(size) && bytes > t.storage().nbytes();
  if (is_too_small) launch(current_stream(t.device().index()), {{t, false}}, "resize_");  // it keeps what there is
  t.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  if (is_too_small) resize_storage(t.storage(), bytes);
}
static std::vector<int64_t> strides_of(IntArrayRef size, optional<at::MemoryFormat> format = {}) {
  auto options = at::TensorOptions(c10::kMeta).memory_format(format.value_or(at::MemoryFormat::Contiguous));
  return at::empty(size, options).strides().vec();
}
static const Tensor& resize_(const Tensor& t, IntArrayRef size, optional<at::MemoryFormat> format) {
  if (t.sizes() != size || format) set_shape(t, size, strides_of(size, format), t.storage_offset());
  return t;
}
static Tensor& set_storage_shape(Tensor& t, at::Storage source, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  t.unsafeGetTensorImpl()->set_storage_keep_dtype(source);
  set_shape(t, size, stride.empty() ? strides_of(size) : stride.vec(), offset);
  return t;
}
static Tensor& set_storage(Tensor& t, at::Storage source) {
  int64_t n = source.nbytes() / t.itemsize();
  return set_storage_shape(t, source, 0, {n}, {1});
}
static Tensor& set_tensor(Tensor& t, const Tensor& source) {
  return set_storage_shape(t, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
static Tensor& set_nothing(Tensor& t) { return set_tensor(t, empty({0}, t.scalar_type(), {}, t.device(), {}, {})); }
static void record_tensor(Tensor& t, Stream stream) { record_stream(t.storage().data_ptr(), stream); }

// For `cpu_tensor.data = sim_tensor`, with which FSDP and Module.to move parameters. Without an own answer torch says
// no for devices other than its own.
static bool can_become(const Tensor& t, const Tensor& other) {
  auto is_plain = [](const Tensor& t) {
    return (t.device().is_cpu() || is_sim(t)) && t.layout() == c10::kStrided && !t.is_nested();
  };
  return is_plain(t) && is_plain(other);
}

// ---- copies ----

static Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  at::assert_no_partial_overlap(to, from);
  const bool is_between = is_sim(from) && is_sim(to);
  bool is_dense = (from.is_contiguous() && to.is_contiguous()) ||
                  (from.strides() == to.strides() && from.is_non_overlapping_and_dense());
  bool same = is_dense && from.dtype() == to.dtype() && from.sizes() == to.sizes() &&
              from.is_conj() == to.is_conj() && from.is_neg() == to.is_neg();
  if (non_blocking && !is_between && !same) {  // as CUDA: it is converted on the device, and copied contiguous
    auto made = is_sim(from) ? from.to(to.dtype()) : from;
    made = made.expand_as(to).resolve_conj().resolve_neg().contiguous();
    bool fits = to.is_contiguous() && to.dtype() == made.dtype() && !to.is_conj() && !to.is_neg();
    auto whole = fits ? to : at::empty(to.sizes(), made.options().device(to.device()));
    copy_from(made, whole, true);
    return fits ? to : to.copy_(whole, true);
  }
  auto stream = current_stream((is_sim(to) ? to : from).device().index());
  auto source = is_sim(from) ? on_cpu(from) : from, target = is_sim(to) ? on_cpu(to) : to;
  if (is_between && from.device() != to.device())  // each device waits for the other, as in CUDA
    wait(stream, record(current_stream(from.device().index())));
  std::vector<Use> uses;
  if (is_sim(from)) uses.push_back({from, false});
  if (is_sim(to)) uses.push_back({to, true});
  auto access = launch(stream, uses, "copy_");
  if (is_between && from.device() != to.device()) wait(current_stream(from.device().index()), record(stream));
  const Tensor* host = is_between ? nullptr : is_sim(to) ? &from : &to;
  if (host && non_blocking && host->numel() && is_pinned(host->storage().data())) {
    auto* device = (char*)(host == &to ? source : target).data_ptr();
    push(stream, copy_pinned(*host, device, host == &to, access));
    return to;
  }
  drain(stream);
  if (host && !non_blocking) host_waits(stream, "copy_");
  if (host == &to) host_learns(clock_of(stream));  // to memory that is not pinned CUDA copies at once
  target.copy_(source);
  return to;
}

// ---- all other operators ----

// CUDA's kernels take tensors of the CPU here, and as indices.
static const std::unordered_set<std::string> takes_cpu = {"aten::_pack_padded_sequence", "aten::tensor_split"};
// Tensors of the CPU without a dimension are numbers, but not in these arguments.
static const std::unordered_set<std::string> indices = {"index", "indices", "target"};
// The host waits in CUDA: for the shape of the result, for bounds, or to look for an error. But not if this argument
// is given.
static const std::unordered_map<std::string, std::string> waits = {
    {"aten::bincount", ""}, {"aten::nonzero", ""}, {"aten::masked_select", ""}, {"aten::_unique2", ""},
    {"aten::unique_dim", ""}, {"aten::unique_consecutive", ""}, {"aten::repeat_interleave", "output_size"},
    {"aten::multinomial", "replacement"}, {"aten::histc", "max"}, {"aten::_ctc_loss", ""},
    {"aten::_linalg_check_errors", ""}, {"aten::_linalg_svd", ""}, {"aten::_linalg_eigh", ""},
    {"aten::linalg_eig", ""}, {"aten::linalg_lstsq", ""}};

// Put f(tensor) in the place of each tensor of `value`.
template <class F> static void replace_tensors(IValue& value, F f) {
  auto replaced = [&](const Tensor& t) { return t.defined() ? f(t) : t; };
  if (value.isTensor()) {
    value = replaced(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& t : value.toTensorVector()) list.push_back(replaced(t));
    value = list;
  } else if (value.isOptionalTensorList()) {
    c10::List<optional<Tensor>> list;
    for (const optional<Tensor>& t : value.toOptionalTensorVector())
      list.push_back(t ? optional<Tensor>(replaced(*t)) : t);
    value = list;
  }
}

// A call of an operator, with its arguments on the stack.
struct Call {
  const c10::OperatorHandle& op;
  torch::jit::Stack& stack;
  const c10::FunctionSchema& schema = op.schema();
  const size_t n = schema.arguments().size();
  const size_t first = stack.size() - n;
  optional<Device> device;
  std::vector<std::pair<Tensor, size_t>> arguments;  // all tensors, and the numbers of the arguments that they are in
  struct Pair {
    Tensor original, alias;  // the same memory, of sim and of the CPU
    const void* data;
    bool is_written;
  };
  std::vector<Pair> pairs;
  at::Generator generator;
  bool is_waited_for = false;

  IValue& argument(size_t i) { return stack[first + i]; }
  bool is_written(size_t i) const {
    auto* info = schema.arguments()[i].alias_info();
    return info && info->isWrite();
  }

  // Raises as CUDA does if its tensors are not all on one device.
  void find_device() {
    const char* line = "Expected all tensors to be on the same device, but found at least two devices, ";
    for (size_t i = 0; i < n; ++i)
      replace_tensors(argument(i), [&](const Tensor& t) {
        arguments.emplace_back(t, i);
        return t;
      });
    for (auto& [t, _] : arguments) {
      if (!is_sim(t)) continue;
      TORCH_CHECK(!device || *device == t.device(), line, *device, " and ", t.device(), "! (", op.operator_name(), ")");
      device = t.device();
    }
    for (size_t i = 0; i < n && !device; ++i) {
      auto& value = argument(i);
      if (value.isDevice() && value.toDevice().type() == kSim) device = value.toDevice();
    }
    if (!device || !device->has_index()) device = Device(kSim, current_device());
    for (auto& value : schema.returns()) {
      auto kind = value.type()->kind();
      is_waited_for |= kind != c10::TypeKind::TensorType && kind != c10::TypeKind::ListType;
    }
    auto found = waits.find(schema.name());
    if (found != waits.end()) {
      auto i = schema.argumentIndexWithName(found->second);
      is_waited_for = !i || argument(*i).isNone() || (argument(*i).isScalar() && !argument(*i).toScalar().toBool());
    }
    auto value = schema.argumentIndexWithName("values");
    bool is_number = value && argument(*value).toTensor().device().is_cpu();  // then a mask needs no shape
    for (auto& [t, i] : arguments) {
      bool is_bytes = t.scalar_type() == at::kBool || t.scalar_type() == at::kByte;
      if (argument(i).isOptionalTensorList()) {
        is_waited_for |= is_sim(t) && is_bytes && !is_number;
        continue;
      }
      bool indexes = t.scalar_type() == at::kLong && indices.count(schema.arguments()[i].name());
      bool is_bad = t.device().is_cpu() && (t.dim() > 0 || is_written(i) || indexes) && !takes_cpu.count(schema.name());
      TORCH_CHECK(!is_bad, line, *device, " and cpu! (", op.operator_name(), ")");
    }
  }
  void launch_on(Stream stream) {
    bool is_view = false;  // it touches no memory
    for (auto& value : schema.returns()) is_view |= value.alias_info() && !value.alias_info()->isWrite();
    std::vector<Use> uses;
    for (auto& [t, i] : arguments)
      if (is_sim(t) && !is_view) uses.push_back({t, is_written(i)});
    launch(stream, uses, schema.name());
    drain(stream);
  }

  Tensor to_alias(const Tensor& t, bool is_written) {
    if (!is_sim(t)) return t;
    for (auto& pair : pairs)
      if (pair.original.is_same(t)) return pair.alias;
    auto made = on_cpu(t);
    for (auto& pair : pairs)
      if (pair.original.storage().is_alias_of(t.storage()))
        made.unsafeGetTensorImpl()->set_storage_keep_dtype(pair.alias.storage());
    pairs.push_back({t, made, made.storage().data(), is_written});
    return made;
  }
  void move_arguments_to_cpu() {
    generator = default_generator(device->index());
    for (size_t i = 0; i < n; ++i) {
      auto& value = argument(i);
      replace_tensors(value, [&](const Tensor& t) { return to_alias(t, is_written(i)); });
      if (value.isDevice()) {
        if (value.toDevice().type() == kSim) value = Device(c10::kCPU);
      } else if (value.isGenerator()) {
        auto generator = value.toGenerator();
        TORCH_CHECK(!generator.defined() || generator.device().type() == kSim,
                    "Expected a 'sim' device type for generator but found 'cpu'");
        if (generator.defined()) this->generator = generator;
        value = IValue();
      }
    }
  }

  // An argument may have been resized.
  void move_shapes_back() {
    for (auto& [t, made, data, is_written] : pairs) {
      if (!is_written) continue;
      bool is_moved = made.storage().data() != data;
      if (is_moved) resize_storage(t.storage(), made.storage().nbytes());
      if (made.sizes() != t.sizes() || made.strides() != t.strides() || made.storage_offset() != t.storage_offset())
        t.unsafeGetTensorImpl()->set_sizes_and_strides(made.sizes(), made.strides(), made.storage_offset());
      if (is_moved) on_cpu(t).copy_(made);
    }
  }
  // The tensor of sim for one that the kernel returns: an argument, a view of one, or new.
  Tensor to_original(const Tensor& made) {
    if (!made.device().is_cpu()) return made;
    for (auto& pair : pairs)
      if (pair.alias.is_same(made)) return pair.original;
    TORCH_CHECK_NOT_IMPLEMENTED(made.has_storage(), schema.name(), ": a sim device has no tensors of ", made.layout());
    for (auto& pair : pairs) {
      bool is_same_memory = pair.data && pair.data == made.storage().data();
      if (!is_same_memory && !pair.alias.storage().is_alias_of(made.storage())) continue;
      return with_storage(made, pair.original.storage(), keys());
    }
    auto result = empty_strided(made.sizes(), made.strides(), made.scalar_type(), {}, device, {});
    on_cpu(result).copy_(made);
    launch(current_stream(device->index()), {{result, true}}, schema.name());
    if (made.unsafeGetTensorImpl()->is_wrapped_number()) result.unsafeGetTensorImpl()->set_wrapped_number(true);
    return result;
  }
  void move_results_back(Stream stream) {
    for (size_t i = stack.size() - schema.returns().size(); i < stack.size(); ++i)
      replace_tensors(stack[i], [&](const Tensor& t) { return to_original(t); });
    if (is_waited_for) host_waits(stream, schema.name());
  }
};

static void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call call{op, *stack};
  call.find_device();
  auto stream = current_stream(call.device->index());
  call.launch_on(stream);
  call.move_arguments_to_cpu();
  optional<Draws> draws;
  if (op.hasTag(at::Tag::nondeterministic_seeded) || call.schema.argumentIndexWithName("generator"))
    draws.emplace(call.generator);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  draws.reset();
  call.move_shapes_back();
  call.move_results_back(stream);
}

// For attention torch asks devices other than its own to choose: the CPU's choice.
static int64_t attention_choice(const Tensor& q, const Tensor& k, const Tensor& v, const optional<Tensor>& mask,
                                double p, bool is_causal, optional<double> scale, bool gqa) {
  auto like = [](const Tensor& t) { return on_cpu(t).detach().requires_grad_(t.requires_grad()); };
  auto mask_like = mask && mask->defined() ? optional<Tensor>(on_cpu(*mask)) : std::nullopt;
  return at::_fused_sdp_choice(like(q), like(k), like(v), mask_like, p, is_causal, scale, gqa);  // it reads no memory
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage_shape);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_nothing);
  m.impl("view", at::native::view);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("record_stream", record_tensor);
  m.impl("_has_compatible_shallow_copy_type", can_become);
  m.impl("_copy_from", copy_from);
  // torch has kernels of these for all devices, but they look for a device's own, or resize an output with a warning.
  for (auto* name : {"convolution", "convolution_backward", "mse_loss"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) { m.impl("_has_compatible_shallow_copy_type", can_become); }
// `_copy_from` itself conjugates and negates.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
}  // namespace sim

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &sim::attention_choice)
}  // namespace at::native

// torch.autocast("sim"): the lists of operators are those of all devices.
namespace at::autocast {
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FLOAT(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define OPTIONAL(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(FLOAT)
  AT_FORALL_FP32_SET_OPT_DTYPE(OPTIONAL)
  AT_FORALL_PROMOTE(PROMOTE)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
}
}  // namespace at::autocast
