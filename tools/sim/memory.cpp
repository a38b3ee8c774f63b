// Memory of the devices and pinned memory of the host.
//
// Nobody may touch an address of a device: the host gets SIGSEGV, and a line says why. The same memory lies at a second
// address, `alias`, which kernels alone use. New memory is full of 0xff, which is NaN, or -1.
#include "runtime.h"
#include <c10/core/CachingDeviceAllocator.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>
#include <algorithm>
#include <cstring>
#include <mutex>

namespace sim {
using c10::Device, c10::DeviceIndex, c10::Stream, c10::StreamId;

int64_t setting(const char* name, int64_t default_value) {
  const char* text = std::getenv(name);
  return text && *text ? std::atoll(text) : default_value;
}

// ---- the caching allocator of each device: memory that a stream has freed is for the same stream ----

struct Block {
  char* data;
  size_t size;
  Key stream;                    // which allocated it
  std::vector<Stream> used_by;   // record_stream
  std::vector<Event> used_until;  // when it was freed, the ends of its own stream and of these
  History history;
};
struct Retired {  // a use by another stream, of memory that was freed
  char *begin, *end;
  Key owner;
  Access use;
};
struct Free {
  size_t size;
  StreamId stream;
};
struct Arena {
  char* base = nullptr;
  size_t top = 0;                // the memory above was never used
  std::map<size_t, Free> free;   // by offset
  std::vector<Block*> waiting;   // freed, but queued work still uses it
  std::vector<Retired> retired;
  c10::CachingDeviceAllocator::DeviceStats stats;
};

struct Allocator final : c10::DeviceAllocator {
  const size_t capacity = setting("SIM_MEMORY_MB", 16384) << 20;
  const size_t distance = capacity * device_count();  // from an address to its alias
  std::vector<Arena> arenas{size_t(device_count())};
  std::mutex mutex;
  char* first;
  pid_t process = 0;

  static Allocator& get() {
    static Allocator& it = *new Allocator;
    return it;
  }
  Allocator() {
    auto flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    first = (char*)mmap(nullptr, 2 * distance, PROT_NONE, flags, -1, 0);
    TORCH_CHECK(first != MAP_FAILED, "sim: no address space: set SIM_MEMORY_MB lower");
    TORCH_CHECK(mprotect(first + distance, distance, PROT_READ | PROT_WRITE) == 0, "sim: mprotect failed");
    for (int i = 0; i < device_count(); ++i) arenas[i].base = first + i * capacity;
  }
  char* alias(const void* data) const { return data ? (char*)data + distance : nullptr; }

  // -- free memory, under `mutex` --

  void give_back(Arena& arena, size_t at, size_t size, StreamId stream) {
    auto next = arena.free.lower_bound(at);
    if (next != arena.free.end() && next->first == at + size && next->second.stream == stream) {
      size += next->second.size;
      next = arena.free.erase(next);
    }
    if (next != arena.free.begin()) {
      auto& [previous, entry] = *std::prev(next);
      if (previous + entry.size == at && entry.stream == stream) {
        entry.size += size;
        return;
      }
    }
    arena.free[at] = {size, stream};
  }
  char* take(Arena& arena, size_t size, StreamId stream) {  // the smallest that fits
    auto best = arena.free.end();
    for (auto it = arena.free.begin(); it != arena.free.end(); ++it) {
      bool fits = it->second.stream == stream && it->second.size >= size;
      if (fits && (best == arena.free.end() || it->second.size < best->second.size)) best = it;
    }
    if (best != arena.free.end()) {
      auto [at, entry] = *best;
      arena.free.erase(best);
      if (entry.size > size) arena.free[at + size] = {entry.size - size, stream};
      return arena.base + at;
    }
    if (arena.top + size > capacity) return nullptr;
    arena.top += size;
    return arena.base + arena.top - size;
  }
  void free_waiting(Arena& arena, bool all) {
    std::vector<Block*> still;
    for (Block* block : arena.waiting) {
      if (all || std::all_of(block->used_until.begin(), block->used_until.end(), is_done)) {
        give_back(arena, block->data - arena.base, block->size, block->stream.second);
        delete block;
      } else {
        still.push_back(block);
      }
    }
    arena.waiting = std::move(still);
  }
  void count(Arena& arena, int64_t bytes) {
    auto& s = arena.stats;
    for (auto* stats : {&s.allocated_bytes, &s.active_bytes, &s.requested_bytes})
      bytes > 0 ? (*stats)[0].increase(bytes) : (*stats)[0].decrease(-bytes);
    for (auto* stats : {&s.allocation, &s.active}) bytes > 0 ? (*stats)[0].increase(1) : (*stats)[0].decrease(1);
    ++(bytes > 0 ? s.num_device_alloc : s.num_device_free);
  }

  // -- what torch calls --

  c10::DataPtr allocate(size_t n) override {
    DeviceIndex device = checked(-1);
    if (process == 0) process = getpid();
    TORCH_CHECK(process == getpid(), "Cannot re-initialize sim in forked subprocess: use the 'spawn' start method");
    if (n == 0) return {nullptr, nullptr, &release, Device(kSim, device)};
    size_t size = (n + 511) / 512 * 512;
    auto& arena = arenas[device];
    Key stream = key_of(current_stream(device));
    std::unique_lock lock(mutex);
    free_waiting(arena, false);
    char* data = take(arena, size, stream.second);
    if (!data) {  // as CUDA's: synchronize, join what all streams have freed, and try again
      lock.unlock();
      synchronize(device);
      lock.lock();
      free_waiting(arena, true);
      auto cached = std::move(arena.free);
      arena.free.clear();
      for (auto& [at, entry] : cached) give_back(arena, at, entry.size, stream.second);
      data = take(arena, size, stream.second);
    }
    if (!data) ++arena.stats.num_ooms;
    TORCH_CHECK_WITH(OutOfMemoryError, data, "sim out of memory. Tried to allocate ", n, " bytes on device ",
                     int(device), ", which has ", capacity, " bytes");
    count(arena, size);
    auto* block = new Block{data, size, stream};
    remember_uses(arena, block);
    lock.unlock();
    // Not where somebody still uses it: the race is reported when its new owner uses it.
    if (block->history.unordered.empty()) std::memset(alias(data), 0xff, size);
    return {data, block, &release, Device(kSim, device)};
  }
  static void release(void* context) {
    auto* block = static_cast<Block*>(context);
    if (!block) return;
    auto& it = get();
    std::lock_guard lock(it.mutex);
    auto& arena = it.arenas[block->stream.first];
    it.count(arena, -int64_t(block->size));
    block->used_by.push_back(Stream(Stream::UNSAFE, Device(kSim, block->stream.first), block->stream.second));
    for (auto stream : block->used_by) block->used_until.push_back(record(stream));
    it.give_pages_back(block);
    it.retire(arena, block);
    arena.waiting.push_back(block);
    it.free_waiting(arena, false);
  }
  void give_pages_back(Block* block) {
    auto begin = (uintptr_t(alias(block->data)) + 4095) & ~uintptr_t(4095);
    auto end = uintptr_t(alias(block->data) + block->size) & ~uintptr_t(4095);
    bool is_over = std::all_of(block->used_until.begin(), block->used_until.end(), is_done);
    if (end > begin + (1 << 20) && is_over) madvise((void*)begin, end - begin, MADV_DONTNEED);
  }
  // Streams other than the owner may still use a freed block. Its next owner must come after them.
  void retire(Arena& arena, Block* block) {
    auto note = [&](const Access& use) {
      bool is_recorded = std::any_of(block->used_by.begin(), block->used_by.end(),
                                     [&](Stream stream) { return key_of(stream) == use.stream; });
      if (!is_recorded && !is_ordered(block->stream, use))
        arena.retired.push_back({block->data, block->data + block->size, block->stream, use});
    };
    for (auto& write : block->history.writes) note(write);
    for (auto& read : block->history.reads) note(read);
  }
  void remember_uses(Arena& arena, Block* block) {
    std::erase_if(arena.retired, [](const Retired& old) { return is_ordered(old.owner, old.use); });
    for (auto& old : arena.retired)
      if (old.begin < block->data + block->size && block->data < old.end) block->history.unordered.push_back(old.use);
  }

  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(alias(to), alias(from), n); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, Stream stream) override {
    if (data.get_deleter() != &release || !data.get_context()) return;
    auto* block = static_cast<Block*>(data.get_context());
    std::lock_guard lock(mutex);
    if (key_of(stream) != block->stream) block->used_by.push_back(stream);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    std::lock_guard lock(mutex);
    auto& arena = arenas[checked(device)];
    auto& reserved = arena.stats.reserved_bytes[0];
    reserved.current = arena.top;
    reserved.peak = std::max<int64_t>(reserved.peak, arena.top);
    return arena.stats;
  }
  template <class F> void each_stat(DeviceIndex device, F f) {
    std::lock_guard lock(mutex);
    auto& s = arenas[checked(device)].stats;
    for (auto* stats : {&s.allocated_bytes, &s.active_bytes, &s.requested_bytes, &s.allocation, &s.active})
      f((*stats)[0]);
    f(s.reserved_bytes[0]);
  }
  void resetAccumulatedStats(DeviceIndex device) override { each_stat(device, [](auto& s) { s.reset_accumulated(); }); }
  void resetPeakStats(DeviceIndex device) override { each_stat(device, [](auto& s) { s.reset_peak(); }); }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    size_t used = getDeviceStats(device).allocated_bytes[0].current;
    return {capacity - used, capacity};
  }
};

History* history_of(const at::Tensor& tensor) {
  auto& data = tensor.storage().data_ptr();
  bool is_own = data.get_deleter() == &Allocator::release && data.get_context();
  return is_own ? &static_cast<Block*>(data.get_context())->history : nullptr;
}
void record_stream(const c10::DataPtr& data, Stream stream) { Allocator::get().recordStream(data, stream); }
bool owns(const void* data) {
  auto& it = Allocator::get();
  return data >= it.first && data < it.first + it.distance;
}
Device device_of(const void* data) {
  TORCH_CHECK(owns(data), "not a pointer to memory of a sim device");
  auto& it = Allocator::get();
  return Device(kSim, ((char*)data - it.first) / it.capacity);
}
// It never waits: FSDP resizes to nothing and back while Python's lock is held.
void resize_storage(const c10::Storage& storage, size_t n) {
  c10::DeviceGuard guard(storage.device());
  auto& it = Allocator::get();
  auto data = it.allocate(n);
  if (size_t kept = std::min(n, storage.nbytes())) {
    drain(current_stream(-1));
    std::memcpy(it.alias(data.get()), it.alias(storage.data()), kept);
  }
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
  storage.unsafeGetStorageImpl()->set_nbytes(n);
}

at::Tensor on_cpu(const at::Tensor& t) {
  auto data = c10::DataPtr(Allocator::get().alias(t.storage().data()), Device(c10::kCPU));
  auto storage = c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), t.storage().nbytes(), std::move(data), c10::GetAllocator(c10::kCPU), true));
  auto result = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
  auto* impl = result.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  if (t.is_conj()) result._set_conj(true);
  if (t.is_neg()) result._set_neg(true);
  return result;
}

// ---- pinned memory: its own pages, which are shut while a copy uses them that the host has not waited for ----

struct Pinned final : c10::Allocator {
  struct Copy {  // of the whole range
    Access access;
    bool is_written;
  };
  struct Range {
    size_t size, pages;
    std::vector<Copy> copies;      // for which the host has not waited
    int n_fills = 0, n_reads = 0;  // queued copies of a part: others may use the rest of its pages
    char line[160] = {};           // for SIGSEGV
  };
  std::map<char*, Range> ranges;
  std::mutex mutex;

  static Pinned& get() {
    static auto& it = *new Pinned;
    return it;
  }
  c10::DataPtr allocate(size_t n) override {
    if (n == 0) return {nullptr, nullptr, &release, Device(c10::kCPU)};
    size_t pages = (n + 4095) / 4096 * 4096;
    auto* data = (char*)mmap(nullptr, pages, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK_WITH(OutOfMemoryError, data != MAP_FAILED, "sim: no pinned memory of ", n, " bytes");
    std::memset(data, 0xff, n);
    std::lock_guard lock(mutex);
    ranges[data] = {n, pages};
    return {data, data, &release, Device(c10::kCPU)};
  }
  static void release(void* data) {
    if (!data) return;
    auto& it = get();
    std::lock_guard lock(it.mutex);
    auto at = it.ranges.find((char*)data);
    munmap(data, at->second.pages);
    it.ranges.erase(at);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }

  // -- under `mutex` --

  std::map<char*, Range>::iterator find(const void* data) {
    auto next = ranges.upper_bound((char*)data);
    if (next == ranges.begin()) return ranges.end();
    --next;
    return data < next->first + next->second.size ? next : ranges.end();
  }
  static bool is_filled(const Range& range) {
    return std::any_of(range.copies.begin(), range.copies.end(), [](const Copy& copy) { return copy.is_written; });
  }
  void shut(char* data, Range& range) {
    int allowed = range.copies.empty() ? PROT_READ | PROT_WRITE : is_filled(range) ? PROT_NONE : PROT_READ;
    mprotect(data, range.pages, allowed);
    if (range.copies.empty()) return;
    auto& [access, is_written] = range.copies.back();
    std::snprintf(range.line, sizeof(range.line), "%s pinned memory that copy_ on %s %s",
                  is_filled(range) ? "touches" : "writes", name_of(access.stream).c_str(), is_written ? "writes" : "reads");
  }
  void open(char* data, Range& range) { mprotect(data, range.pages, PROT_READ | PROT_WRITE); }
};
at::Allocator* pinned_allocator() { return &Pinned::get(); }
bool is_pinned(const void* data) {
  auto& it = Pinned::get();
  std::lock_guard lock(it.mutex);
  return it.find(data) != it.ranges.end();
}
void open_pinned() {
  auto& it = Pinned::get();
  std::lock_guard lock(it.mutex);
  for (auto& [data, range] : it.ranges)
    if (std::erase_if(range.copies, [](const Pinned::Copy& copy) { return host_knows(copy.access); }))
      it.shut(data, range);
}
void while_open(const at::Tensor& host, const std::function<void()>& copy) {
  auto& it = Pinned::get();
  std::lock_guard lock(it.mutex);
  auto at = it.find(host.data_ptr());
  if (at == it.ranges.end()) return copy();
  it.open(at->first, at->second);
  copy();
  it.shut(at->first, at->second);
}

std::function<void()> watch_host(const at::Tensor& host, bool is_written, Stream stream, std::function<void()> copy) {
  auto& it = Pinned::get();
  const Access access{key_of(stream), clock_of(stream)[key_of(stream)]};  // the copy was just launched
  auto* data = (char*)host.data_ptr();
  size_t n = host.numel() * host.itemsize();
  std::lock_guard lock(it.mutex);
  auto at = it.find(data);
  auto& range = at->second;
  if (data == at->first && n == range.size) {
    range.copies.push_back({access, is_written});
    it.shut(data, range);
    return [=] { while_open(host, copy); };
  }
  auto* queued = is_written ? &range.n_fills : &range.n_reads;
  if (is_written && !range.n_reads && range.copies.empty()) std::memset(data, 0xff, n);
  std::shared_ptr<std::string> before;  // unless an earlier copy fills it first
  if (!is_written && !range.n_fills && !Pinned::is_filled(range)) before = std::make_shared<std::string>(data, n);
  ++*queued;
  return [=, name = name_of(key_of(stream))] {
    while_open(host, [&] {
      --*queued;
      TORCH_CHECK(!before || std::memcmp(before->data(), data, n) == 0, "sim race: the host writes pinned memory that ",
                  "copy_ on ", name, " reads, and nothing makes it wait");
      copy();
    });
  };
}

// ---- SIGSEGV: say what the host has touched, and leave the rest to whom it was meant for, such as faulthandler ----

static struct sigaction previous;
static void on_fault(int, siginfo_t* info, void*) {
  auto* at = (char*)info->si_addr;
  char line[256] = "";
  if (owns(at)) {
    std::snprintf(line, sizeof(line), "sim: the host touches memory of sim:%d\n", int(device_of(at).index()));
  } else {
    auto range = Pinned::get().find(at);
    if (range != Pinned::get().ranges.end())
      std::snprintf(line, sizeof(line), "sim race: the host %s, and nothing makes it wait\n", range->second.line);
  }
  [[maybe_unused]] auto written = write(STDERR_FILENO, line, std::strlen(line));
  sigaction(SIGSEGV, &previous, nullptr);  // the instruction is tried again, and its fault is handled there
}

static int registered = [] {
  c10::SetAllocator(kSim, &Allocator::get());
  struct sigaction action = {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, &previous);
  return 0;
}();
}  // namespace sim
