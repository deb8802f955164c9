// The part of CUDA's driver API that recording needs, from whatever driver the process has loaded.
//
// No CUDA header is needed, so that g++ alone compiles this. A stream of the runtime API is one of the driver's.
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace graphs {

using Result = int;        // 0 is success
using Address = uint64_t;  // of device memory
using Handle = void*;      // a stream, a graph, a node, a context

constexpr Result kOutOfMemory = 2;

// CUDA_MEMCPY3D, which describes a recorded copy.
struct CopyNode {
  struct End {
    size_t x, y, z, level;
    int type;  // 1: the host's memory
    const void* host;
    Address device;
    Handle array, unused;
    size_t pitch, height;
  } from, to;
  size_t width, height, depth;
};

class Driver {
 public:
  Result (*get_context)(Handle* context);
  Result (*push_context)(Handle context);
  Result (*pop_context)(Handle* context);
  Result (*create_stream)(Handle* stream, unsigned flags);
  Result (*synchronize)(Handle stream);
  Result (*begin_capture)(Handle stream, int mode);
  Result (*end_capture)(Handle stream, Handle* graph);
  Result (*capture_info)(Handle stream, int* status, uint64_t* id, Handle* graph, const Handle** last, size_t* count);
  Result (*instantiate)(Handle* executable, Handle graph, unsigned long long flags);
  Result (*launch)(Handle executable, Handle stream);
  Result (*destroy_executable)(Handle executable);
  Result (*destroy_graph)(Handle graph);
  Result (*nodes)(Handle graph, Handle* nodes, size_t* count);
  Result (*node_type)(Handle node, int* type);
  Result (*copy_of_node)(Handle node, CopyNode* copy);
  Result (*to_device)(Address to, const void* from, size_t bytes, Handle stream);
  Result (*to_host)(void* to, Address from, size_t bytes, Handle stream);
  Result (*within_device)(Address to, Address from, size_t bytes, Handle stream);
  Result (*fill)(Address to, unsigned char value, size_t bytes, Handle stream);
  Result (*pointer_attributes)(unsigned count, int* attributes, void** values, Address pointer);
  Result (*allocate_on_host)(void** memory, size_t bytes);
  Result (*free_on_host)(void* memory);
  Result (*create_event)(Handle* event, unsigned flags);
  Result (*record_event)(Handle event, Handle stream);
  Result (*wait_for_event)(Handle event);
  Result (*destroy_event)(Handle event);
  Result (*error_name)(Result error, const char** name);

  explicit Driver(const char* library) {
    void* handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) throw std::runtime_error(dlerror());
    const auto load = [&](auto& function, const char* name) {
      void* symbol = dlsym(handle, name);
      if (symbol == nullptr) throw std::runtime_error(std::string(library) + " has no " + name);
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(symbol);
    };
    load(get_context, "cuCtxGetCurrent");
    load(push_context, "cuCtxPushCurrent_v2");
    load(pop_context, "cuCtxPopCurrent_v2");
    load(create_stream, "cuStreamCreate");
    load(synchronize, "cuStreamSynchronize");
    load(begin_capture, "cuStreamBeginCapture_v2");
    load(end_capture, "cuStreamEndCapture");
    load(capture_info, "cuStreamGetCaptureInfo_v2");
    load(instantiate, "cuGraphInstantiateWithFlags");
    load(launch, "cuGraphLaunch");
    load(destroy_executable, "cuGraphExecDestroy");
    load(destroy_graph, "cuGraphDestroy");
    load(nodes, "cuGraphGetNodes");
    load(node_type, "cuGraphNodeGetType");
    load(copy_of_node, "cuGraphMemcpyNodeGetParams");
    load(to_device, "cuMemcpyHtoDAsync_v2");
    load(to_host, "cuMemcpyDtoHAsync_v2");
    load(within_device, "cuMemcpyDtoDAsync_v2");
    load(fill, "cuMemsetD8Async");
    load(pointer_attributes, "cuPointerGetAttributes");
    load(allocate_on_host, "cuMemAllocHost_v2");
    load(free_on_host, "cuMemFreeHost");
    load(create_event, "cuEventCreate");
    load(record_event, "cuEventRecord");
    load(wait_for_event, "cuEventSynchronize");
    load(destroy_event, "cuEventDestroy_v2");
    load(error_name, "cuGetErrorName");
  }

  // Requires success of a call that the words name.
  void require(Result result, const char* words) const {
    if (result == 0) return;
    const char* name = nullptr;
    if (error_name(result, &name) != 0 || name == nullptr) name = "unknown error";
    throw std::runtime_error(std::string(words) + " failed: " + name);
  }

  bool is_device_memory(const void* pointer) const {
    constexpr unsigned kDevice = 2;
    int memory_type = 2;  // which attribute to ask for. Asked for one alone, the driver fails for the host's memory
    unsigned type = 0;
    void* found = &type;
    return pointer_attributes(1, &memory_type, &found, reinterpret_cast<Address>(pointer)) == 0 && type == kDevice;
  }

  // Tells where in a recording a stream is: the last node that was recorded, or null if there is none.
  Handle last_node(Handle stream) const {
    int status = 0;
    uint64_t id = 0;
    Handle graph = nullptr;
    const Handle* last = nullptr;
    size_t count = 0;
    const Result result = capture_info(stream, &status, &id, &graph, &last, &count);
    return result == 0 && count > 0 ? last[count - 1] : nullptr;
  }
};

}  // namespace graphs
