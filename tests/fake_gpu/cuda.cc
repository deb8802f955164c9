// A driver and a runtime of CUDA that do on the CPU what recorder.cc needs: streams run at once, or capture.
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

struct Node {
  int type;  // 0 kernel, 1 copy, 2 memset, 3 function of the host
  std::function<void()> run;
  const void* from;
  const void* to;  // of a copy
};

struct End {
  size_t x, y, z, level;
  int type;
  const void* host;
  const void* device;
  void *array, *unused;
  size_t pitch, height;
};
struct Graph {
  std::vector<Node*> nodes;
};
struct Stream {
  Graph* captured = nullptr;
  bool broken = false;
  const void* last = nullptr;
};

Stream main_stream;
std::map<const char*, size_t> device_memory;
int live_graphs = 0, launches = 0, context = 1;

int submit(void* stream, int type, std::function<void()> run, const void* from = nullptr, const void* to = nullptr) {
  auto* s = static_cast<Stream*>(stream);
  if (s == nullptr || s->captured == nullptr) {
    run();
    return 0;
  }
  s->captured->nodes.push_back(new Node{type, std::move(run), from, to});
  s->last = s->captured->nodes.back();
  return 0;
}

// Waiting while a stream captures is an error, which ends the capture, as CUDA has it.
int wait() {
  if (main_stream.captured == nullptr) return 0;
  main_stream.broken = true;
  return 900;
}

}  // namespace

EXPORT void* fake_stream() { return &main_stream; }
EXPORT int fake_live_graphs() { return live_graphs; }
EXPORT int fake_launches() { return launches; }
EXPORT size_t fake_memory() {
  size_t total = 0;
  for (const auto& [base, size] : device_memory) total += size;
  return total;
}
// An operator of a library of its own, which copies from the host's memory.
EXPORT void fake_copy_from_host(void* to) {
  static int number = 0;
  submit(&main_stream, 1, [=] { std::memcpy(to, &number, sizeof number); }, &number, to);
}
EXPORT void fake_launch_host_function() {
  submit(&main_stream, 3, [] {});
}

EXPORT int cuCtxGetCurrent(void** found) { return *found = &context, 0; }
EXPORT int cuCtxPushCurrent_v2(void*) { return 0; }
EXPORT int cuCtxPopCurrent_v2(void** found) { return *found = &context, 0; }
EXPORT int cuStreamCreate(void** stream, unsigned) { return *stream = new Stream, 0; }
EXPORT int cuStreamSynchronize(void*) { return 0; }
EXPORT int cuStreamBeginCapture_v2(void* stream, int) {
  auto* s = static_cast<Stream*>(stream);
  if (s->captured != nullptr) return 901;
  s->captured = new Graph;
  s->broken = false;
  s->last = nullptr;
  ++live_graphs;
  return 0;
}
EXPORT int cuGraphDestroy(void* graph) { return --live_graphs, 0; }
EXPORT int cuStreamEndCapture(void* stream, void** graph) {
  auto* s = static_cast<Stream*>(stream);
  *graph = s->captured;
  s->captured = nullptr;
  if (!s->broken) return *graph == nullptr ? 901 : 0;
  cuGraphDestroy(*graph);
  *graph = nullptr;
  return 901;
}
EXPORT int cuStreamGetCaptureInfo_v2(void* stream, int* status, uint64_t*, void** graph, const void** last,
                                     size_t* count) {
  auto* s = static_cast<Stream*>(stream);
  *status = s->captured != nullptr;
  *graph = s->captured;
  *last = &s->last;
  *count = s->last != nullptr;
  return 0;
}
EXPORT int cuGraphInstantiateWithFlags(void** executable, void* graph, unsigned long long) {
  *executable = new Graph(*static_cast<Graph*>(graph));
  ++live_graphs;
  return 0;
}
EXPORT int cuGraphLaunch(void* executable, void*) {
  for (Node* node : static_cast<Graph*>(executable)->nodes) node->run();
  return ++launches, 0;
}
EXPORT int cuGraphExecDestroy(void*) { return --live_graphs, 0; }
EXPORT int cuGraphGetNodes(void* graph, void** nodes, size_t* count) {
  const auto& found = static_cast<Graph*>(graph)->nodes;
  if (nodes != nullptr) std::memcpy(nodes, found.data(), found.size() * sizeof(void*));
  *count = found.size();
  return 0;
}
EXPORT int cuGraphNodeGetType(void* node, int* type) { return *type = static_cast<Node*>(node)->type, 0; }
EXPORT int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, void* stream) {
  auto *target = reinterpret_cast<void*>(to), *source = reinterpret_cast<void*>(from);
  return submit(stream, 1, [=] { std::memmove(target, source, bytes); }, source, target);
}
EXPORT int cuGraphMemcpyNodeGetParams(void* node, End* ends) {
  const auto* found = static_cast<Node*>(node);
  ends[0].type = ends[1].type = 2;
  ends[0].device = found->from;
  ends[1].device = found->to;
  return 0;
}
EXPORT int cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, void* stream) {
  return submit(stream, 1, [=] { std::memcpy(reinterpret_cast<void*>(to), from, bytes); });
}
EXPORT int cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, void* stream) {
  return submit(stream, 1, [=] { std::memcpy(to, reinterpret_cast<void*>(from), bytes); });
}
EXPORT int cuMemsetD8Async(uint64_t to, unsigned char value, size_t bytes, void* stream) {
  return submit(stream, 2, [=] { std::memset(reinterpret_cast<void*>(to), value, bytes); });
}
EXPORT int cuPointerGetAttributes(unsigned, int*, void** values, uint64_t pointer) {
  const auto* at = reinterpret_cast<const char*>(pointer);
  const auto next = device_memory.upper_bound(at);
  const bool is_known = next != device_memory.begin() && at < std::prev(next)->first + std::prev(next)->second;
  *static_cast<unsigned*>(values[0]) = is_known ? 2 : 0;
  return 0;
}
EXPORT int cuMemAllocHost_v2(void** memory, size_t bytes) { return *memory = new char[bytes], 0; }
EXPORT int cuMemFreeHost(void* memory) { return delete[] static_cast<char*>(memory), 0; }
EXPORT int cuEventCreate(void** event, unsigned) { return *event = new char, 0; }
EXPORT int cuEventRecord(void*, void*) { return 0; }
EXPORT int cuEventSynchronize(void*) { return 0; }
EXPORT int cuEventDestroy_v2(void*) { return 0; }
EXPORT int cuGetErrorName(int error, const char** name) { return *name = error == 901 ? "BROKEN" : "ERROR", 0; }

EXPORT int cudaMalloc(void** found, size_t bytes) {
  auto* base = new char[bytes];
  std::memset(base, 0x7f, bytes);
  device_memory[base] = bytes;
  return *found = base, 0;
}
EXPORT int cudaFree(void* base) {
  device_memory.erase(static_cast<char*>(base));
  delete[] static_cast<char*>(base);
  return 0;
}
EXPORT int cudaMemcpyAsync(void* to, const void* from, size_t bytes, int, void* stream) {
  return submit(stream, 1, [=] { std::memmove(to, from, bytes); }, from, to);
}
EXPORT int cudaMemcpy(void* to, const void* from, size_t bytes, int) {
  if (int error = wait()) return error;
  std::memmove(to, from, bytes);
  return 0;
}
EXPORT int cudaMemset(void* to, int value, size_t bytes) {
  if (int error = wait()) return error;
  std::memset(to, value, bytes);
  return 0;
}
EXPORT int cudaStreamSynchronize(void*) { return wait(); }
EXPORT int cudaDeviceSynchronize() { return wait(); }
EXPORT int curandGenerateUniform(void*, float* to, size_t n) {
  return submit(&main_stream, 0, [=] { std::memset(to, 0, n * sizeof(float)); });
}
// y = x * *number
EXPORT int fake_scale(const float* x, const float* number, float* y, int n, void* stream) {
  return submit(stream, 0, [=] {
    for (int i = 0; i < n; ++i) y[i] = x[i] * *number;
  });
}
