// Vector clocks. Each launch is a step of its stream. A stream knows of every stream which step it comes after: it
// learns that from the events that it waits for, and from what the host has waited for.
#include "runtime.h"
#include <mutex>
#include <torch/csrc/profiler/combined_traceback.h>

namespace sim {
using c10::Stream;

static std::mutex mutex;
static Clock host;                    // what the host has waited for, whichever of its threads
static Clock asked;                   // the same, and what it has asked for
static std::map<Key, Clock> streams;

static void merge(Clock& clock, const Clock& other) {
  for (auto& [stream, step] : other) clock[stream] = std::max(clock[stream], step);
}
static bool knows(const Clock& clock, const Access& access) {
  auto at = clock.find(access.stream);
  return at != clock.end() && at->second >= access.step;
}

// Whether they share a byte.
static bool overlap(const Access& a, const Access& b) {
  if (a.end <= b.begin || b.end <= a.begin) return false;
  if (a.sizes.empty() && b.sizes.empty()) return true;
  auto* begin = std::min(a.begin, b.begin);
  auto bytes = at::zeros({std::max(a.end, b.end) - begin}, at::kBool);
  auto part = [&](const Access& of) {
    if (of.sizes.empty()) return bytes.slice(0, of.begin - begin, of.end - begin);
    return bytes.as_strided(of.sizes, of.strides, of.begin - begin);
  };
  part(a).fill_(true);
  return part(b).any().item<bool>();
}
// Whether `a` has all bytes of `b`, if that is easy to say.
static bool covers(const Access& a, const Access& b) {
  bool is_same = a.begin == b.begin && a.sizes == b.sizes && a.strides == b.strides;
  return a.begin <= b.begin && b.end <= a.end && (a.sizes.empty() || is_same);
}

Clock clock_of(Stream stream) {
  std::lock_guard lock(mutex);
  return streams[key_of(stream)];
}
void learn(Stream stream, const Clock& clock) {
  std::lock_guard lock(mutex);
  merge(streams[key_of(stream)], clock);
}
void host_learns(const Clock& clock) {
  {
    std::lock_guard lock(mutex);
    merge(host, clock);
    merge(asked, clock);
  }
  open_pinned();
}
bool host_asks(const Clock& clock) {
  std::lock_guard lock(mutex);
  bool is_old = std::all_of(clock.begin(), clock.end(), [](auto& of) { return asked[of.first] >= of.second; });
  merge(asked, clock);
  return is_old;
}
bool host_knows(const Access& access) {
  std::lock_guard lock(mutex);
  return knows(host, access);
}
std::atomic<int> sync_debug_mode{0};
void host_waits(Stream stream, const std::string& name) {
  if (sync_debug_mode == 1) TORCH_WARN("called a synchronizing sim operation: ", name);
  TORCH_CHECK(sync_debug_mode != 2, "called a synchronizing sim operation: ", name);
  host_learns(clock_of(stream));
}
bool is_ordered(Key owner, const Access& access) {
  std::lock_guard lock(mutex);
  return access.stream == owner || knows(streams[owner], access) || knows(host, access);
}

// The innermost frame that is not torch's.
std::string place_of(const Access& access) {
  auto found = torch::symbolize({access.stack.get()});
  for (auto i : found.tracebacks.at(0)) {
    auto& frame = found.all_frames[i];
    bool is_own = frame.filename.find("/torch/") == std::string::npos && frame.filename[0] != '<';
    if (is_own) return c10::str("\n  ", access.name, ": ", frame.filename, ":", frame.lineno, " in ", frame.funcname);
  }
  return "";
}

Access launch(Stream stream, const std::vector<Use>& uses, const std::string& name) {
  use();
  const Key own = key_of(stream);
  Access access{own, 0, name, torch::CapturedTraceback::gather(true, false, false)};  // may wait for Python's lock
  Access other;
  const char* other_did = nullptr;
  bool writes = false;
  std::unique_lock lock(mutex);
  auto& clock = streams[own];
  merge(clock, host);
  access.step = ++clock[own];
  for (auto& [tensor, is_written] : uses) {
    auto* history = history_of(tensor);
    if (!history) continue;
    const size_t offset = tensor.storage_offset() * tensor.itemsize();
    const size_t n = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize());
    if (n == 0) continue;
    access.begin = (const char*)tensor.storage().data() + offset;
    access.end = access.begin + n;
    access.sizes.clear();
    access.strides.clear();
    if (!tensor.is_non_overlapping_and_dense()) {
      for (auto size : tensor.sizes()) access.sizes.push_back(size);
      for (auto stride : tensor.strides()) access.strides.push_back(stride * tensor.itemsize());
      access.sizes.push_back(tensor.itemsize());
      access.strides.push_back(1);
    }
    auto check = [&](const std::vector<Access>& accesses, const char* did) {
      for (auto& of : accesses) {
        if (other_did || knows(clock, of) || !overlap(access, of)) continue;
        other = of;
        other_did = of.is_of_freed ? "used before its memory was freed (without record_stream)" : did;
        writes = is_written;
      }
    };
    check(history->writes, "writes");
    if (is_written) check(history->reads, "reads");
    if (other_did) break;
    // All that comes after this access comes after the accesses that this one comes after.
    auto is_replaced = [&](const Access& of) {
      return knows(host, of) || (covers(access, of) && (is_written || of.stream == own));
    };
    if (is_written) std::erase_if(history->writes, is_replaced);
    std::erase_if(history->reads, is_replaced);
    (is_written ? history->writes : history->reads).push_back(access);
  }
  lock.unlock();
  TORCH_CHECK(!other_did, "sim race: ", name, " on ", name_of(own), writes ? " writes" : " reads", " a tensor that ",
              other.name, " on ", name_of(other.stream), " ", other_did, ", and nothing makes it wait",
              place_of(access), place_of(other));
  return access;
}
}  // namespace sim
