// Streams and events. Work is run as late as possible, so that what does not wait for it sees that it has not run.
#include "runtime.h"
#include <deque>
#include <mutex>

namespace sim {
using c10::Device, c10::DeviceIndex, c10::Stream, c10::StreamId;

struct Queue {
  std::recursive_mutex running;  // one thread runs its work at a time
  std::deque<std::function<void()>> work;
  std::atomic<uint64_t> pushed{0}, done{0};
};
static std::mutex queues_mutex;  // for the table of queues and their `work`
static std::atomic<StreamId> last_stream{kStreams};

static Queue& queue(Key key) {
  static auto& queues = *new std::map<Key, Queue>;  // never destroyed: threads may outlive the end of main
  std::lock_guard lock(queues_mutex);
  return queues[key];
}

Key key_of(Stream stream) { return {stream.device_index(), stream.id()}; }
Stream stream_of(Key key) { return Stream(Stream::UNSAFE, Device(kSim, key.first), key.second); }
std::string name_of(Key stream) { return c10::str("stream ", stream.second, " of sim:", int(stream.first)); }

static StreamId& current_id(DeviceIndex device) {
  static thread_local std::vector<StreamId> ids(device_count(), 0);
  return ids.at(device);
}
Stream current_stream(DeviceIndex device) {
  device = checked(device);
  return stream_of({device, current_id(device)});
}
void set_current_stream(Stream stream) { current_id(stream.device_index()) = stream.id(); }
Stream new_stream(DeviceIndex device) {
  return stream_of({checked(device), ++last_stream});
}

Event record(Stream stream) {
  auto clock = std::make_shared<const Clock>(clock_of(stream));
  return {key_of(stream), queue(key_of(stream)).pushed, clock};
}
bool is_done(const Event& event) { return queue(event.stream).done >= event.position; }

void push(Stream stream, std::function<void()> work) {
  auto& q = queue(key_of(stream));
  std::lock_guard lock(queues_mutex);
  q.work.push_back(std::move(work));
  ++q.pushed;
}
void wait(Stream stream, const Event& event) {
  learn(stream, *event.clock);
  if (!is_done(event) && key_of(stream) != event.stream) push(stream, [event] { drain(event); });
}

// Two threads cannot wait for each other here: a work waits only for events that were recorded before it was pushed.
void drain(const Event& event) {
  auto& q = queue(event.stream);
  if (q.done >= event.position) return;
  WithoutGil others_run;
  while (q.done < event.position) {
    std::lock_guard running(q.running);  // not longer: a later work may wait for a stream that waits for this position
    if (q.done >= event.position) return;
    std::function<void()> work;
    {
      std::lock_guard lock(queues_mutex);
      work = std::move(q.work.front());
      q.work.pop_front();
    }
    struct Done {  // also if the work raises
      Queue& q;
      ~Done() { ++q.done; }
    } done{q};
    work();
  }
}
void drain(Stream stream) {
  auto& q = queue(key_of(stream));
  drain(Event{key_of(stream), q.pushed, nullptr});
}
bool ask(const Event& event) {
  drain(event);
  bool is_known = host_asks(*event.clock);
  if (is_known) host_learns(*event.clock);
  return is_known;
}
void synchronize(const Event& event) {
  drain(event);
  host_learns(*event.clock);
}
void synchronize(DeviceIndex device) {
  for (StreamId id = kCallbacks; id <= last_stream; ++id) synchronize(record(stream_of({device, id})));
}
}  // namespace sim
