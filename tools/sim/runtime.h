// What the files of the simulated accelerator share. README.md says how they fit together.
#pragma once
#include <ATen/ATen.h>
#include <Python.h>
#include <c10/core/Stream.h>
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace torch {
struct CapturedTraceback;
}
namespace sim {
constexpr auto kSim = c10::DeviceType::PrivateUse1;

int64_t setting(const char* name, int64_t default_value);

// ---- device.cpp ----

c10::DeviceIndex device_count();
c10::DeviceIndex& current_device();                        // of this thread
c10::DeviceIndex checked(c10::DeviceIndex device);         // -1 is the current one; raises if it does not exist
void use();      // of a device, in this process. Raises in a process that was forked from one that has used devices
bool is_used();  // in this process
const at::Generator& default_generator(c10::DeviceIndex device);
struct Draws {  // Meanwhile a kernel that draws from the CPU's default generator draws from this one.
  at::Generator generator;
  at::Tensor state_of_cpu;
  explicit Draws(const at::Generator& generator);
  ~Draws();
};

// ---- streams.cpp: a stream is a queue of work, which runs when somebody needs its results ----

using Key = std::pair<c10::DeviceIndex, c10::StreamId>;  // of a stream
using Clock = std::map<Key, uint64_t>;                   // by stream, the last of its launches that has surely ended
Key key_of(c10::Stream stream);
std::string name_of(Key stream);

// A position in a stream: everything that was pushed before it.
struct Event {
  Key stream;
  uint64_t position = 0;
  std::shared_ptr<const Clock> clock;
};

c10::Stream current_stream(c10::DeviceIndex device);  // of this thread
void set_current_stream(c10::Stream stream);
c10::Stream new_stream(c10::DeviceIndex device);
constexpr c10::StreamId kCallbacks = -1;  // the number of the stream of all callbacks of futures
constexpr c10::StreamId kStreams = 32;    // a script has the streams up to this number, and groups have those above
c10::Stream stream_of(Key key);
Event record(c10::Stream stream);
bool is_done(const Event& event);
bool ask(const Event& event);  // whether the host knows that it is done. It runs now, and the next answer is yes
void push(c10::Stream stream, std::function<void()> work);  // queue it
void wait(c10::Stream stream, const Event& event);          // what comes later in `stream` comes after `event`
void drain(const Event& event);                             // run now what is queued before it
void drain(c10::Stream stream);
void synchronize(const Event& event);  // the same, and the host knows that it is done
void synchronize(c10::DeviceIndex device);

// A work may need Python's lock, or wait for a process whose partner is another thread of Python.
struct WithoutGil {
  PyThreadState* state = Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr;
  ~WithoutGil() {
    if (state) PyEval_RestoreThread(state);
  }
};

// ---- races.cpp: who used which memory, and what is ordered after it ----

struct Access {
  Key stream;
  uint64_t step = 0;  // which launch of that stream
  std::string name;   // of the operator
  std::shared_ptr<torch::CapturedTraceback> stack;
  const char *begin = nullptr, *end = nullptr;
  std::vector<int64_t> sizes, strides;  // of its bytes, if there are gaps from `begin` to `end`
  bool is_of_freed = false;  // of the same memory before it was freed and given out again
};
struct History {  // of one block of memory, as long as the host does not know that they are over
  std::vector<Access> writes, reads;
};
struct Use {
  at::Tensor tensor;
  bool is_written;
};
// An operator is launched. Raises if another stream uses its memory and nothing makes this one wait.
Access launch(c10::Stream stream, const std::vector<Use>& uses, const std::string& name);
std::string place_of(const Access& access);  // in the script: file and line, or nothing
Clock clock_of(c10::Stream stream);
void learn(c10::Stream stream, const Clock& clock);  // it waits for all in `clock`
void host_learns(const Clock& clock);
bool host_asks(const Clock& clock);                // the answer: it has asked before, or has waited for all of it
bool host_knows(const Access& access);             // the host has waited for it
bool is_ordered(Key owner, const Access& access);  // new launches of `owner` come after it
// `name` makes the host wait for `stream`. In sync_debug_mode 1 that is a warning, and in 2 an error.
void host_waits(c10::Stream stream, const std::string& name);
extern std::atomic<int> sync_debug_mode;

// ---- memory.cpp ----

History* history_of(const at::Tensor& tensor);    // nullptr for memory that is not this device's
at::Tensor on_cpu(const at::Tensor& tensor);      // the same memory as a tensor of the CPU, for kernels only
at::Tensor with_storage(const at::Tensor& tensor, c10::Storage storage, c10::DispatchKeySet keys);  // a view of it
void record_stream(const c10::DataPtr& data, c10::Stream stream);
void resize_storage(const c10::Storage& storage, size_t n_bytes);
at::Allocator* pinned_allocator();
bool is_pinned(const void* data);
// A copy from or to pinned memory, launched as `access`, and what to queue for it. `device` is its other side, of the
// same strides. The host may not write its source, nor touch its target, until it has waited for the copy.
std::function<void()> copy_pinned(const at::Tensor& host, char* device, bool is_written, Access access);
void open_pinned();  // what the host has waited for
void register_memory();
}  // namespace sim
