// Records what MindSpore does on a GPU into CUDA graphs, and launches them (see recorder.py).
//
// While a graph is recorded, MindSpore's stream captures its kernels. What MindSpore does beside that is replaced, at
// the places where its plugin for GPUs has the functions' addresses (core/relocations.h):
// - Memory comes from the graph's own pool (pool.h), so that nothing else uses it between replays. That includes what
//   operators take by cudaMalloc.
// - Numbers that come from the host are constants. Each is written once, and a copy of all is kept, from which a replay
//   restores them by one copy, in case that the recorded work writes into them.
// - Waiting for the device does nothing, since nothing runs.
// - A copy to the host gives a constant, or what the call before has read there; see checks.h.
// - Operators whose results have as many elements as the data says fail, and so do random numbers whose state is on the
//   host: each replay would have those of the recording.
// In the calls before a recording, copies to the host are noted. Otherwise only what frees memory is replaced, since it
// may free memory of a graph.
#include "common/open_sizes.h"
#include "copies.h"
#include "memory.h"
#include "state.h"

namespace graphs {
namespace {

template <typename Function>
void* with_original(Function*& original, void* found, Function* replacement) {
  original = reinterpret_cast<Function*>(found);
  return reinterpret_cast<void*>(replacement);
}

template <int kBase>
void* choose_of_pool(const char* symbol, void* found, bool free) {
  using Original = Originals<kBase>;
  const auto is = [&](const char* name) { return std::strstr(symbol, name) != nullptr; };
  if (free)
    return is("13FreeTensorMemE")        ? with_original(Original::free, found, &free_address<kBase>)
           : is("18FreePartTensorMemsE") ? with_original(Original::free_parts, found, &free_parts<kBase>)
                                         : nullptr;
  if (is("14AllocTensorMemE")) return with_original(Original::allocate, found, &allocate<kBase>);
  if (is("24AllocContinuousTensorMemE"))
    return with_original(Original::allocate_several, found, &allocate_several<kBase>);
  if (is("11RecordEventE")) return with_original(Original::record_event, found, &record_event<kBase>);
  return nullptr;
}

enum When { kAlways, kWhileRecording, kWhileNoting };

void* choose(const char* symbol, void* found, When when) {
  const auto is = [&](const char* name) { return std::strcmp(symbol, name) == 0; };
  if (when == kWhileNoting) {
    if (is("cudaMemcpyAsync")) return with_original(original_memcpy_async, found, &memcpy_async_noted);
    if (is("cudaMemcpy")) return with_original(original_memcpy, found, &memcpy_now_noted);
    return nullptr;
  }
  if (std::strstr(symbol, "21DynamicMemPoolBestFit") != nullptr) {
    const bool of_base = std::strncmp(symbol, "_ZTv", 4) == 0;
    if (!of_base && std::strncmp(symbol, "_ZN9mindspore", 13) != 0) return nullptr;
    return of_base ? choose_of_pool<1>(symbol, found, when == kAlways)
                   : choose_of_pool<0>(symbol, found, when == kAlways);
  }
  if (when == kAlways) return is("cudaFree") ? with_original(original_free, found, &free_of_operator) : nullptr;
  if (is("cudaMalloc")) return with_original(original_malloc, found, &malloc_of_operator);
  if (is("cudaMemcpyAsync")) return with_original(original_memcpy_async, found, &memcpy_async);
  if (is("cudaMemcpy")) return with_original(original_memcpy, found, &memcpy_now);
  if (is("cudaMemset")) return with_original(original_memset, found, &memset_now);
  for (const char* name : {"cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaStreamQuery",
                           "cudaEventQuery", "cuStreamSynchronize"}) {
    if (is(name)) return reinterpret_cast<void*>(&wait);
  }
  const bool is_function = std::strncmp(symbol, "_ZN9mindspore", 13) != 0 && std::strncmp(symbol, "_ZG", 3) != 0 &&
                           std::strncmp(symbol, "_ZT", 3) != 0;
  constexpr size_t kCount = sizeof kRefused / sizeof *kRefused;
  for (size_t i = 0; is_function && i < kCount; ++i) {
    if (std::strstr(symbol, kRefused[i].symbol) != nullptr) return refusing(i, std::make_index_sequence<kCount>());
  }
  return nullptr;
}

// Runs f, whose exception becomes the text of graphs_error, and the result -1.
template <typename F>
int64_t guarded(F&& f) {
  State& s = state();
  try {
    return f(s);
  } catch (const std::exception& error) {
    s.error = error.what();
    return -1;
  }
}

std::unique_ptr<Graph> end_recording(State& s) {
  s.recording_only.restore();
  const std::lock_guard<std::recursive_mutex> guard(s.lock);
  s.recording = false;
  for (char* block : s.late) {
    if (Pool* pool = s.pool_of(block)) pool->free(block);
  }
  s.late.clear();
  s.shared.clear();
  return std::move(s.current);
}

void destroy(State& s, std::unique_ptr<Graph> graph) {
  if (graph->executable != nullptr) s.driver->destroy_executable(graph->executable);
  for (const Freed& each : graph->freed) each.free(each.pool, each.address);
  graph->checks.give_back(*s.driver);
  const std::lock_guard<std::recursive_mutex> guard(s.lock);
  for (char* image : graph->images) graph->memory->kept.free(image);
  if (graph->constants.used() == 0) return graph->constants.give_back();
  s.orphans.push_back(std::make_unique<Banks>(std::move(graph->constants)));
}

// Returns whether the memory of a recorded copy is the device's, and still there. The driver crashes where it is not.
bool lasts(const Driver& driver, Handle node) {
  CopyNode copy{};
  if (driver.copy_of_node(node, &copy) != 0) return false;
  for (const CopyNode::End* end : {&copy.from, &copy.to}) {
    constexpr int kOnHost = 1;
    if (end->type == kOnHost || !driver.is_device_memory(reinterpret_cast<const void*>(end->device))) return false;
  }
  return true;
}

// Ends the capture and makes what can be launched. Throws if the recorded work is no graph that replays can repeat.
void finish(State& s, Graph* graph) {
  const Driver& driver = *s.driver;
  Handle recorded = nullptr;
  driver.require(driver.end_capture(s.stream, &recorded), "the end of the recording");
  const auto made = [&] {
    size_t count = 0;
    driver.require(driver.nodes(recorded, nullptr, &count), "cuGraphGetNodes");
    std::vector<Handle> nodes(count);
    if (count > 0) driver.require(driver.nodes(recorded, nodes.data(), &count), "cuGraphGetNodes");
    for (Handle node : nodes) {
      constexpr int kCopy = 1, kHost = 3;
      int type = 0;
      driver.require(driver.node_type(node, &type), "cuGraphNodeGetType");
      if (type == kHost) s.fail("the work calls a function of the host, which a replay cannot call");
      if (type == kCopy && !lasts(driver, node))
        s.fail("an operator copies from memory that it frees at once, so that a replay would copy something else");
    }
    if (s.failure.empty()) driver.require(driver.instantiate(&graph->executable, recorded, 0), "cuGraphInstantiate");
  };
  try {
    made();
  } catch (...) {
    driver.destroy_graph(recorded);
    throw;
  }
  driver.destroy_graph(recorded);
}

size_t element_size(const char* dtype) {
  const auto is = [&](const char* name) { return std::strcmp(dtype, name) == 0; };
  if (is("complex128")) return 16;
  if (std::strstr(dtype, "64") != nullptr) return 8;  // complex64 has 8 bytes, too
  if (std::strstr(dtype, "32") != nullptr) return 4;
  if (std::strstr(dtype, "16") != nullptr) return 2;
  return 1;
}

size_t bytes_of(int rank, const int64_t* shape, const char* dtype) {
  size_t bytes = element_size(dtype);
  for (int i = 0; i < rank; ++i) bytes *= static_cast<size_t>(shape[i]);
  return bytes;
}

constexpr int kFailed = 1;

int copy_tensor(int nparam, void** params, int* ndims, int64_t** shapes, const char** dtypes, void* stream) {
  State& s = state();
  if (nparam != 2 || !s.driver) return kFailed;
  s.stream = stream;
  s.driver->get_context(&s.context);
  const size_t bytes = bytes_of(ndims[0], shapes[0], dtypes[0]);
  if (bytes == 0) return 0;
  return s.driver->within_device(reinterpret_cast<Address>(params[1]), reinterpret_cast<Address>(params[0]), bytes,
                                 stream);
}

// Adds the step of a replay that failed to the driver's error, since MindSpore tells the user the sum alone.
enum Step { kRestoring = 1000, kCopyingIn = 2000, kLaunching = 3000, kCopyingOut = 4000 };

int replay(int64_t number, int nparam, void** params, void* stream) {
  State& s = state();
  Graph* graph = s.graph_of(number);
  if (graph == nullptr) return kFailed;
  const size_t inputs = graph->inputs.size(), outputs = graph->outputs.size();
  constexpr size_t kOthers = 2;  // an input and an output that keep the operator from having none
  if (static_cast<size_t>(nparam) != inputs + outputs + kOthers) return kFailed;
  const Driver& driver = *s.driver;
  for (size_t i = 0; i < inputs; ++i) {
    const Copy& input = graph->inputs[i];
    const auto given = reinterpret_cast<Address>(params[i]);
    if (input.bytes == 0 || given == input.at) continue;
    if (int error = driver.within_device(input.at, given, input.bytes, stream)) return kCopyingIn + error;
  }
  // After the inputs, which may be the graph's own results, and these may lie beside constants.
  if (int error = graph->constants.restore(driver, stream)) return kRestoring + error;
  if (int error = driver.launch(graph->executable, stream)) return kLaunching + error;
  for (size_t i = 0; i < outputs; ++i) {
    const Copy& output = graph->outputs[i];
    if (output.bytes == 0) continue;
    const auto result = reinterpret_cast<Address>(params[static_cast<size_t>(nparam) - outputs + i]);
    if (int error = driver.within_device(result, output.at, output.bytes, stream)) return kCopyingOut + error;
  }
  if (!graph->checks.compare(driver, stream)) graph->differs = true;
  return 0;
}

}  // namespace
}  // namespace graphs

using namespace graphs;

#define EXPORT extern "C" __attribute__((visibility("default")))

#define RULES(name)                                                                     \
  EXPORT msops::Rule name##Rule;                                                        \
  msops::Rule name##Rule = nullptr;                                                     \
  EXPORT msops::OpenSizes name##InferShape(int* ndims, int64_t** shapes, void* extra) { \
    return msops::OpenSizes(name##Rule, ndims, shapes, extra);                          \
  }

EXPORT int CopyTensor(int nparam, void** params, int* ndims, int64_t** shapes, const char** dtypes, void* stream,
                      void*) {
  return copy_tensor(nparam, params, ndims, shapes, dtypes, stream);
}
RULES(CopyTensor)

EXPORT int ReplayGraph(int nparam, void** params, int*, int64_t**, const char**, void* stream, void* extra) {
  int64_t number = 0;
  msops::Attributes(extra).read("msops_graph", &number);
  return replay(number, nparam, params, stream);
}
RULES(ReplayGraph)

// Does what ReplayGraph does, for tests, which have no attributes of MindSpore's.
EXPORT int graphs_replay(int64_t graph, int nparam, void** params, void* stream) {
  return replay(graph, nparam, params, stream);
}

EXPORT const char* graphs_error() { return state().error.c_str(); }
EXPORT const char* graphs_failure() { return state().failure.c_str(); }
EXPORT int graphs_recording() { return state().recording; }

// Loads the driver, and finds the places in the library. Each call after the first does nothing.
EXPORT int64_t graphs_open(const char* driver, const char* library) {
  return guarded([&](State& s) {
    if (s.driver) return 0;
    auto opened = std::make_unique<Driver>(driver);
    s.always.find(library, [](const char* symbol, void* found) { return choose(symbol, found, kAlways); });
    s.recording_only.find(library,
                          [](const char* symbol, void* found) { return choose(symbol, found, kWhileRecording); });
    s.noting_only.find(library, [](const char* symbol, void* found) { return choose(symbol, found, kWhileNoting); });
    if (Originals<0>::free == nullptr || Originals<1>::free == nullptr || Originals<0>::allocate == nullptr ||
        Originals<1>::allocate == nullptr || original_memcpy_async == nullptr || original_memcpy == nullptr)
      throw std::runtime_error("MindSpore's plugin for GPUs lacks functions that recording replaces");
    s.driver = std::move(opened);
    s.always.replace();
    return 0;
  });
}

// Returns the number of new memory, which is empty.
EXPORT int64_t graphs_new_memory() {
  return guarded([](State& s) {
    const std::lock_guard<std::recursive_mutex> guard(s.lock);
    s.memories[s.next].reset(new Memory{{take_segment, give_segment}, {take_segment, give_segment}});
    return s.next++;
  });
}

// Gives free segments back to MindSpore. What MindSpore still uses stays until a later call.
EXPORT int64_t graphs_release(int64_t memory) {
  return guarded([&](State& s) {
    const std::lock_guard<std::recursive_mutex> guard(s.lock);
    s.memories.at(memory)->work.release();
    s.memories.at(memory)->kept.release();
    return 0;
  });
}

EXPORT int64_t graphs_held(int64_t memory) {
  return guarded([&](State& s) {
    const std::lock_guard<std::recursive_mutex> guard(s.lock);
    return static_cast<int64_t>(s.memories.at(memory)->work.held() + s.memories.at(memory)->kept.held());
  });
}

// Records a copy, at the end of what has been recorded so far.
EXPORT int64_t graphs_copy(Address to, Address from, size_t bytes) {
  return guarded([&](State& s) {
    const Context context;
    s.driver->require(s.driver->within_device(to, from, bytes, s.stream), "cuMemcpyDtoDAsync");
    return 0;
  });
}

EXPORT int graphs_is_on_device(const void* pointer) { return state().driver->is_device_memory(pointer); }

// Begins to note what operators read back, for a recording of the same work.
EXPORT void graphs_begin_notes() {
  State& s = state();
  s.reads.clear();
  s.noting_only.replace();
}

// Returns the number of the notes.
EXPORT int64_t graphs_end_notes() {
  return guarded([](State& s) {
    s.noting_only.restore();
    const std::lock_guard<std::recursive_mutex> guard(s.lock);
    s.notes[s.next] = std::move(s.reads);
    return s.next++;
  });
}

EXPORT void graphs_forget_notes(int64_t number) {
  State& s = state();
  const std::lock_guard<std::recursive_mutex> guard(s.lock);
  s.notes.erase(number);
}

// `variables` are tensors whose values may differ at each replay: inputs and Parameters.
EXPORT int64_t graphs_begin(int64_t memory, int64_t notes, int64_t variables, const Address* addresses,
                            const size_t* bytes) {
  return guarded([&](State& s) {
    const Context context;
    const Driver& driver = *s.driver;
    if (s.stream == nullptr) throw std::runtime_error("MindSpore's stream is not known");
    constexpr unsigned kNonBlocking = 1;
    if (s.side == nullptr) driver.require(driver.create_stream(&s.side, kNonBlocking), "cuStreamCreate");
    {
      const std::lock_guard<std::recursive_mutex> guard(s.lock);
      s.failure.clear();
      const auto noted = s.notes.find(notes);
      s.reads = noted != s.notes.end() ? noted->second : std::deque<std::string>();
      s.current = std::make_unique<Graph>(s.memories.at(memory).get());
      for (int64_t i = 0; i < variables; ++i) s.current->variables.emplace_back(addresses[i], addresses[i] + bytes[i]);
    }
    s.recording_only.replace();
    constexpr int kRelaxed = 2;
    const Result result = driver.begin_capture(s.stream, kRelaxed);
    if (result != 0) {
      s.recording_only.restore();
      s.current.reset();
      driver.require(result, "cuStreamBeginCapture");
    }
    s.recording = true;
    return 0;
  });
}

// Ends the recording, and returns the number of the graph. Where it failed, graphs_failure or graphs_error has words.
EXPORT int64_t graphs_end(int64_t inputs, const Address* input_addresses, const size_t* input_bytes, int64_t outputs,
                          const Address* output_addresses, const size_t* output_bytes) {
  return guarded([&](State& s) {
    const Context context;
    std::unique_ptr<Graph> graph = end_recording(s);
    for (int64_t i = 0; i < inputs; ++i) graph->inputs.push_back({input_addresses[i], input_bytes[i]});
    for (int64_t i = 0; i < outputs; ++i) graph->outputs.push_back({output_addresses[i], output_bytes[i]});
    try {
      finish(s, graph.get());
      if (!s.failure.empty()) throw std::runtime_error(s.failure);
    } catch (...) {
      destroy(s, std::move(graph));
      throw;
    }
    const std::lock_guard<std::recursive_mutex> guard(s.lock);
    s.graphs[s.next] = std::move(graph);
    return s.next++;
  });
}

// Ends a recording whose work failed.
EXPORT int64_t graphs_abandon() {
  return guarded([](State& s) {
    const Context context;
    Handle recorded = nullptr;
    std::unique_ptr<Graph> graph = end_recording(s);
    s.driver->end_capture(s.stream, &recorded);
    if (recorded != nullptr) s.driver->destroy_graph(recorded);
    destroy(s, std::move(graph));
    return 0;
  });
}

// Tells whether a replay computed another value where an operator had read one. If `all`, replays must be done.
EXPORT int graphs_differs(int64_t number, int all) {
  Graph* graph = state().graph_of(number);
  if (graph == nullptr) return 0;
  if (all != 0 && !graph->checks.finish(*state().driver)) graph->differs = true;
  return graph->differs;
}

// The work that uses the graph must be done.
EXPORT int64_t graphs_destroy(int64_t number) {
  return guarded([&](State& s) {
    const Context context;
    std::unique_ptr<Graph> graph;
    {
      const std::lock_guard<std::recursive_mutex> guard(s.lock);
      graph = std::move(s.graphs.at(number));
      s.graphs.erase(number);
    }
    destroy(s, std::move(graph));
    return 0;
  });
}
