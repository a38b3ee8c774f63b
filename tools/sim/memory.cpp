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
  std::vector<Key> users;   // its own stream, which allocated it, and those of record_stream
  std::vector<Event> ends;  // where these were when it was freed
  History history;
};
struct Free {
  size_t size;
  StreamId stream;
};
struct Arena {
  char* base = nullptr;
  size_t top = 0;               // the memory above was never used
  std::map<size_t, Free> free;  // by offset
  std::vector<Block*> waiting;  // freed, but queued work still uses it
  std::vector<std::pair<Key, Access>> left;  // other streams' uses of freed memory of a stream
  c10::CachingDeviceAllocator::DeviceStats stats;
};

struct Allocator final : c10::DeviceAllocator {
  const size_t capacity = setting("SIM_MEMORY_MB", 16384) << 20;
  const size_t distance = capacity * device_count();  // from an address to its alias
  std::vector<Arena> arenas{size_t(device_count())};
  std::mutex mutex;
  char* first;

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

  char* take(Arena& arena, size_t size, StreamId stream) {  // the smallest that fits
    auto best = arena.free.end();
    for (auto it = arena.free.begin(); it != arena.free.end(); ++it) {
      auto& [at, entry] = *it;
      auto next = std::next(it);
      while (next != arena.free.end() && next->first == at + entry.size && next->second.stream == entry.stream) {
        entry.size += next->second.size;
        next = arena.free.erase(next);
      }
      bool fits = entry.stream == stream && entry.size >= size;
      if (fits && (best == arena.free.end() || entry.size < best->second.size)) best = it;
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
      if (all || std::all_of(block->ends.begin(), block->ends.end(), is_done)) {
        arena.free[block->data - arena.base] = {block->size, block->users[0].second};
        delete block;
      } else {
        still.push_back(block);
      }
    }
    arena.waiting = std::move(still);
  }
  void count(Arena& arena, int64_t bytes) {
    auto& s = arena.stats;
    for (auto* stats : {&s.allocated_bytes, &s.active_bytes})
      bytes > 0 ? (*stats)[0].increase(bytes) : (*stats)[0].decrease(-bytes);
  }

  // -- what torch calls --

  c10::DataPtr allocate(size_t n) override {
    DeviceIndex device = checked(-1);
    use();
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
      for (auto& [_, entry] : arena.free) entry.stream = stream.second;
      data = take(arena, size, stream.second);
    }
    TORCH_CHECK_WITH(OutOfMemoryError, data, "sim out of memory. Tried to allocate ", n, " bytes on device ",
                     int(device), ", which has ", capacity, " bytes");
    count(arena, size);
    auto* block = new Block{data, size, {stream}};
    // The next owner must come after streams that may still use the memory. It raises when the new memory is used.
    std::erase_if(arena.left, [](const auto& use) { return is_ordered(use.first, use.second); });
    for (auto& [_, use] : arena.left)
      if (use.begin < data + size && data < use.end) block->history.writes.push_back(use);
    lock.unlock();
    if (block->history.writes.empty()) std::memset(alias(data), 0xff, size);
    return {data, block, &release, Device(kSim, device)};
  }
  static void release(void* context) {
    auto* block = static_cast<Block*>(context);
    if (!block) return;
    auto& it = get();
    std::lock_guard lock(it.mutex);
    auto& arena = it.arenas[block->users[0].first];
    it.count(arena, -int64_t(block->size));
    for (auto user : block->users) block->ends.push_back(record(stream_of(user)));
    for (auto* accesses : {&block->history.writes, &block->history.reads}) {
      for (auto& use : *accesses) {
        bool is_recorded = std::count(block->users.begin(), block->users.end(), use.stream);
        bool is_left = !is_recorded && !use.is_of_freed && !is_ordered(block->users[0], use);
        use.is_of_freed = true;
        if (is_left) arena.left.push_back({block->users[0], use});
      }
    }
    arena.waiting.push_back(block);
    it.free_waiting(arena, false);
  }

  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(alias(to), alias(from), n); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, Stream stream) override {
    if (data.get_deleter() != &release || !data.get_context()) return;
    auto* block = static_cast<Block*>(data.get_context());
    std::lock_guard lock(mutex);
    if (!std::count(block->users.begin(), block->users.end(), key_of(stream))) block->users.push_back(key_of(stream));
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
    for (auto* stats : {&s.allocated_bytes, &s.active_bytes, &s.reserved_bytes}) f((*stats)[0]);
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

at::Tensor with_storage(const at::Tensor& t, c10::Storage storage, c10::DispatchKeySet keys) {
  auto result = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, t.dtype());
  auto* impl = result.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  if (t.is_conj()) result._set_conj(true);
  if (t.is_neg()) result._set_neg(true);
  return result;
}
at::Tensor on_cpu(const at::Tensor& t) {
  auto data = c10::DataPtr(Allocator::get().alias(t.storage().data()), Device(c10::kCPU));
  auto storage = c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), t.storage().nbytes(), std::move(data), c10::GetAllocator(c10::kCPU), true));
  return with_storage(t, std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU));
}

// ---- pinned memory ----
//
// A copy has its own bytes: what it reads was read when it was launched, and what it writes gets to the host when the
// host has waited for it. Until then its pages are shut. Where others share them, what it reads must not change, and
// what it writes is 0xff.

struct Pinned final : c10::Allocator {
  struct Copy {
    Access access;  // its bytes on the host
    bool is_written;
    std::string line;  // what the host does wrong if it does not wait
    std::string bytes;
    bool is_watched = false;                   // as long as nobody else may change what it reads
    std::vector<std::shared_ptr<Copy>> fills;  // earlier ones, of what it reads
    bool is_unchanged() const { return !is_watched || !std::memcmp(bytes.data(), access.begin, bytes.size()); }
  };
  struct Range {
    size_t size, pages;
    std::vector<std::shared_ptr<Copy>> copies;  // for which the host has not waited
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
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }

  // -- under `mutex` --

  std::map<char*, Range>::iterator find(const void* data) {
    auto next = ranges.upper_bound((char*)data);
    if (next == ranges.begin()) return ranges.end();
    --next;
    return data < next->first + next->second.size ? next : ranges.end();
  }
  void open(char* data, Range& range) { mprotect(data, range.pages, PROT_READ | PROT_WRITE); }
  void shut(char* data, Range& range) {  // the pages that hold nothing but a copy's bytes
    open(data, range);
    for (bool is_written : {false, true}) {
      for (auto& copy : range.copies) {
        auto begin = (uintptr_t(copy->access.begin) + 4095) & ~uintptr_t(4095);
        bool is_last = copy->access.end == data + range.size;
        auto end = is_last ? uintptr_t(data + range.pages) : uintptr_t(copy->access.end) & ~uintptr_t(4095);
        if (copy->is_written != is_written || begin >= end) continue;
        mprotect((void*)begin, end - begin, is_written ? PROT_NONE : PROT_READ);
      }
    }
  }
  // Returns what the host has done wrong.
  std::string check(Range& range) {
    for (auto& copy : range.copies) {
      if (copy->is_unchanged()) continue;
      copy->is_watched = false;
      return "sim race: the host writes " + copy->line;
    }
    return "";
  }
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
  auto is_known = [](const std::shared_ptr<Pinned::Copy>& copy) { return host_knows(copy->access); };
  std::string wrong;
  for (auto& [data, range] : it.ranges) {
    if (std::none_of(range.copies.begin(), range.copies.end(), is_known)) continue;
    if (wrong.empty()) wrong = it.check(range);
    it.open(data, range);
    for (auto& copy : range.copies) {
      bool is_filled = copy->is_written && is_known(copy);
      if (is_filled) std::memcpy((char*)copy->access.begin, copy->bytes.data(), copy->bytes.size());
    }
    std::erase_if(range.copies, is_known);
    it.shut(data, range);
  }
  TORCH_CHECK(wrong.empty(), wrong);
}

std::function<void()> copy_pinned(const at::Tensor& host, char* device, bool is_written, Access access) {
  auto* data = (char*)host.data_ptr();
  const size_t n = host.nbytes();
  auto copy = std::make_shared<Pinned::Copy>(Pinned::Copy{access, is_written});
  copy->access.begin = data;
  copy->access.end = data + n;
  copy->line = c10::str("pinned memory that copy_ on ", name_of(access.stream), is_written ? " writes" : " reads",
                        ", and nothing makes it wait", place_of(access));
  auto& it = Pinned::get();
  std::lock_guard lock(it.mutex);
  auto& [begin, range] = *it.find(data);
  auto wrong = it.check(range);
  TORCH_CHECK(wrong.empty(), wrong);
  it.open(begin, range);
  copy->bytes.assign(data, n);
  copy->is_watched = !is_written;
  for (auto& other : range.copies) {
    if (other->access.end <= data || data + n <= other->access.begin) continue;
    if (is_written) other->is_watched = false;
    if (!is_written && other->is_written) copy->fills.push_back(other);
  }
  if (is_written) std::memset(data, 0xff, n);
  copy->is_watched &= copy->fills.empty();
  range.copies.push_back(copy);
  it.shut(begin, range);
  return [=, keep = host] {  // pinned memory is not used again before its copy is done
    if (is_written) {
      copy->bytes.assign(device, n);
      return;
    }
    TORCH_CHECK(copy->is_unchanged(), "sim race: the host writes ", copy->line);
    for (auto& fill : copy->fills) {
      auto *from = std::max(fill->access.begin, copy->access.begin), *to = std::min(fill->access.end, copy->access.end);
      copy->bytes.replace(from - copy->access.begin, to - from, fill->bytes, from - fill->access.begin, to - from);
    }
    std::memcpy(device, copy->bytes.data(), n);
  };
}

// ---- SIGSEGV: say what the host has touched, and leave the rest to whom it was meant for, such as faulthandler ----

static struct sigaction previous;
static void on_fault(int, siginfo_t* info, void*) {
  auto* at = (char*)info->si_addr;
  char line[1024] = "";
  auto& devices = Allocator::get();
  if (devices.first <= at && at < devices.first + devices.distance) {
    int device = (at - devices.first) / devices.capacity;
    std::snprintf(line, sizeof(line), "sim: the host touches memory of sim:%d\n", device);
  } else {
    auto range = Pinned::get().find(at);
    if (range != Pinned::get().ranges.end()) {
      for (auto& copy : range->second.copies) {
        if (at < copy->access.begin || copy->access.end <= at) continue;
        const char* does = copy->is_written ? "touches" : "writes";
        std::snprintf(line, sizeof(line), "sim race: the host %s %s\n", does, copy->line.c_str());
      }
    }
  }
  [[maybe_unused]] auto written = write(STDERR_FILENO, line, std::strlen(line));
  sigaction(SIGSEGV, &previous, nullptr);  // the instruction is tried again, and its fault is handled there
}

void register_memory() {
  c10::SetAllocator(kSim, &Allocator::get());
  struct sigaction action = {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, &previous);
}
}  // namespace sim
