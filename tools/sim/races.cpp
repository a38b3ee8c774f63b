// Vector clocks. Each launch is a step of its stream. A stream knows of every stream which step it comes after: it
// learns that from the events that it waits for, and from what the host has waited for.
#include "runtime.h"
#include <atomic>
#include <mutex>

namespace sim {
using c10::Stream;

static std::mutex mutex;
static Clock host;                    // what the host has waited for, whichever of its threads
static std::map<Key, Clock> streams;

static void merge(Clock& clock, const Clock& other) {
  for (auto& [stream, step] : other) clock[stream] = std::max(clock[stream], step);
}
static bool knows(const Clock& clock, const Access& access) {
  auto at = clock.find(access.stream);
  return at != clock.end() && at->second >= access.step;
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
  }
  open_pinned();
}
bool host_knows(const Access& access) {
  std::lock_guard lock(mutex);
  return knows(host, access);
}
static std::atomic<bool> waits_are_errors{false};
void raise_on_wait(bool is_error) { waits_are_errors = is_error; }
void host_waits(Stream stream, const std::string& name) {
  TORCH_CHECK(!waits_are_errors, "called a synchronizing sim operation: ", name);
  host_learns(clock_of(stream));
}
bool is_ordered(Key owner, const Access& access) {
  std::lock_guard lock(mutex);
  return access.stream == owner || knows(streams[owner], access) || knows(host, access);
}

void launch(Stream stream, const std::vector<Use>& uses, const std::string& name) {
  const Key own = key_of(stream);
  std::lock_guard lock(mutex);
  auto& clock = streams[own];
  merge(clock, host);
  const uint64_t step = ++clock[own];
  auto check = [&](const Access& other, const char* did, const char* does) {
    TORCH_CHECK(knows(clock, other), "sim race: ", name, " on ", name_of(own), " ", does,
                " a tensor that ", other.name, " on ", name_of(other.stream), " ", did,
                ", and nothing makes it wait");
  };
  for (auto& [tensor, is_written] : uses) {
    auto* history = history_of(tensor);
    if (!history) continue;
    for (auto& use : history->unordered)
      check(use, "used before its memory was freed (without record_stream)", "uses");
    history->unordered.clear();
    const size_t begin = tensor.storage_offset() * tensor.itemsize();
    const size_t end = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize(),
                                                        tensor.storage_offset());
    if (begin >= end) continue;  // no element
    auto overlaps = [&](const Access& other) { return other.begin < end && begin < other.end; };
    // All that comes after this access comes after the accesses that this one comes after.
    auto is_replaced = [&](const Access& other) {
      bool is_inside = begin <= other.begin && other.end <= end;
      return knows(host, other) || (is_inside && (is_written || other.stream == own));
    };
    for (auto& write : history->writes)
      if (overlaps(write)) check(write, "writes", is_written ? "writes" : "reads");
    if (is_written) {
      for (auto& read : history->reads)
        if (overlaps(read)) check(read, "reads", "writes");
      std::erase_if(history->writes, is_replaced);
    }
    std::erase_if(history->reads, is_replaced);
    (is_written ? history->writes : history->reads).push_back({own, step, name, begin, end});
  }
}
}  // namespace sim
