// What torch asks of an accelerator: its guard (devices, streams, events), its hooks and its generators of numbers.
#include "runtime.h"
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <chrono>
#include <unistd.h>

namespace sim {
using c10::Device, c10::DeviceIndex, c10::Stream, c10::StreamId;

DeviceIndex device_count() {
  static DeviceIndex count = setting("SIM_DEVICES", 0);
  return count;
}
DeviceIndex& current_device() {
  static thread_local DeviceIndex device = 0;
  return device;
}
DeviceIndex checked(DeviceIndex device) {
  if (device == -1) device = current_device();
  TORCH_CHECK(device >= 0 && device < device_count(), "sim error: invalid device ordinal ", int(device));
  return device;
}

static std::atomic<pid_t> process{0};
bool is_used() { return process == getpid(); }
void use() {
  pid_t none = 0, now = getpid();
  bool is_first_or_same = process.compare_exchange_strong(none, now) || none == now;
  TORCH_CHECK(is_first_or_same, "Cannot re-initialize sim in forked subprocess: use the 'spawn' start method");
}

// ---- generators: a seed and an offset, as CUDA's. The numbers are the CPU's, and the offset counts its engine's ----

struct Generator final : c10::GeneratorImpl {
  at::mt19937 engine{c10::default_rng_seed_val};
  uint64_t offset = 0;  // the engine has made as many numbers

  explicit Generator(DeviceIndex device)
      : c10::GeneratorImpl(Device(kSim, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override {
    engine = at::mt19937(seed);
    offset = 0;
  }
  void set_offset(uint64_t n) override {
    if (n < offset) set_current_seed(current_seed());
    for (; offset < n; ++offset) engine();
  }
  uint64_t get_offset() const override { return offset; }
  uint64_t current_seed() const override { return engine.seed(); }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return current_seed();
  }
  void set_state(const c10::TensorImpl& state) override {
    at::detail::check_rng_state(state);
    TORCH_CHECK(state.numel() == 16, "RNG state is wrong size");
    auto* numbers = state.data_ptr_impl<uint8_t>();
    uint64_t seed_and_offset[2];
    std::memcpy(seed_and_offset, numbers, 16);
    if (seed_and_offset[0] != current_seed()) set_current_seed(seed_and_offset[0]);
    set_offset(seed_and_offset[1]);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::empty({16}, at::kByte);
    const uint64_t seed_and_offset[2] = {current_seed(), offset};
    std::memcpy(state.data_ptr(), seed_and_offset, 16);
    return state.getIntrusivePtr();
  }
  Generator* clone_impl() const override {
    auto* made = new Generator(device().index());
    made->engine = engine;
    made->offset = offset;
    return made;
  }
};
const at::Generator& default_generator(DeviceIndex device) {
  static auto& all = *[] {
    auto* made = new std::vector<at::Generator>;
    for (int i = 0; i < device_count(); ++i) made->push_back(at::make_generator<Generator>(i));
    return made;
  }();
  return all.at(checked(device));
}
static at::CPUGeneratorImpl& of_cpu() { return *at::detail::getDefaultCPUGenerator().get<at::CPUGeneratorImpl>(); }
Draws::Draws(const at::Generator& generator)
    : generator(generator), state_of_cpu(at::detail::getDefaultCPUGenerator().get_state()) {
  of_cpu().set_engine(generator.get<Generator>()->engine);
  of_cpu().set_next_float_normal_sample({});
  of_cpu().set_next_double_normal_sample({});
}
Draws::~Draws() {
  auto& own = *generator.get<Generator>();
  auto end = of_cpu().engine().data();  // where `own` will be after some full turns more
  constexpr int kTurn = at::MERSENNE_STATE_N;
  own.set_offset(own.offset + (own.engine.data().left_ - end.left_ + kTurn) % kTurn);
  while (own.engine.data().state_ != end.state_) own.set_offset(own.offset + kTurn);
  of_cpu().set_state(*state_of_cpu.unsafeGetTensorImpl());
}

// ---- the guard ----

struct Guard final : c10::impl::DeviceGuardImplInterface {
  struct TimedEvent {
    Event event;
    std::chrono::steady_clock::time_point at;
  };
  static Event& of(void* event) { return static_cast<TimedEvent*>(event)->event; }

  c10::DeviceType type() const override { return kSim; }
  DeviceIndex deviceCount() const noexcept override { return device_count(); }
  Device getDevice() const override { return Device(kSim, current_device()); }
  void setDevice(Device device) const override { current_device() = checked(device.index()); }
  void uncheckedSetDevice(Device device) const noexcept override { current_device() = device.index(); }
  Device exchangeDevice(Device device) const override {
    Device old = getDevice();
    setDevice(device);
    return old;
  }

  Stream getStream(Device device) const override { return current_stream(device.index()); }
  Stream getDefaultStream(Device device) const override {
    return Stream(Stream::DEFAULT, Device(kSim, checked(device.index())));
  }
  Stream getNewStream(Device device, int) const override {  // in turn, as CUDA's
    static std::atomic<StreamId> n{0};
    return stream_of({checked(device.index()), n++ % kStreams + 1});
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override {
    return stream_of({checked(device.index()), kCallbacks});
  }
  Stream exchangeStream(Stream stream) const override {
    Stream old = current_stream(stream.device_index());
    set_current_stream(stream);
    return old;
  }
  bool queryStream(const Stream& stream) const override { return ask(sim::record(stream)); }
  void synchronizeStream(const Stream& stream) const override { synchronize(sim::record(stream)); }
  void synchronizeDevice(DeviceIndex device) const override { synchronize(checked(device)); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    record_stream(data, stream);
  }

  // An event that was never recorded is done.
  void record(void** event, const Stream& stream, DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new TimedEvent;
    *static_cast<TimedEvent*>(*event) = {sim::record(stream), std::chrono::steady_clock::now()};
  }
  void block(void* event, const Stream& stream) const override {
    if (event) wait(stream, of(event));
  }
  bool queryEvent(void* event) const override { return !event || ask(of(event)); }
  void synchronizeEvent(void* event) const override {
    if (event) synchronize(of(event));
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete static_cast<TimedEvent*>(event); }
  double elapsedTime(void* from, void* to, DeviceIndex) const override {
    auto time = static_cast<TimedEvent*>(to)->at - static_cast<TimedEvent*>(from)->at;
    return std::chrono::duration<double, std::milli>(time).count();
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// ---- the hooks ----

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return device_count(); }
  DeviceIndex getCurrentDevice() const override { return current_device(); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t n) const override { resize_storage(storage, n); }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return at::make_generator<Generator>(checked(device));
  }
};
static int registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return 0;
}();
}  // namespace sim
