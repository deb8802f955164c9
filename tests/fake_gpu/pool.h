// The classes of MindSpore's pool of memory, as far as recorder.cc replaces functions of theirs. Names and virtual
// bases are MindSpore's, and so are the symbols.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

namespace mindspore {
class DeviceEvent {};
namespace device {

class DynamicMemPool {
 public:
  virtual ~DynamicMemPool() = default;
  virtual void* AllocTensorMem(size_t size, bool persistent = false, bool recycle = false, uint32_t stream = 0) = 0;
  virtual std::vector<void*> AllocContinuousTensorMem(const std::vector<size_t>& sizes, uint32_t stream = 0) = 0;
  virtual void FreeTensorMem(void* const& address) = 0;
  virtual void FreePartTensorMems(const std::vector<void*>& free, const std::vector<void*>& keep,
                                  const std::vector<size_t>& sizes) = 0;
  virtual bool RecordEvent(int64_t task, uint32_t stream, const std::vector<std::pair<uint32_t, void*>>& addresses,
                           const std::shared_ptr<DeviceEvent>& event) = 0;

 private:
  int data_ = 0;  // a base with data lies at an address of its own, and has functions of its own in the table
};

class DynamicMemPoolBestFit : virtual public DynamicMemPool {
 public:
  void* AllocTensorMem(size_t size, bool persistent, bool recycle, uint32_t stream) override;
  std::vector<void*> AllocContinuousTensorMem(const std::vector<size_t>& sizes, uint32_t stream) override;
  void FreeTensorMem(void* const& address) override;
  void FreePartTensorMems(const std::vector<void*>& free, const std::vector<void*>& keep,
                          const std::vector<size_t>& sizes) override;
  bool RecordEvent(int64_t task, uint32_t stream, const std::vector<std::pair<uint32_t, void*>>& addresses,
                   const std::shared_ptr<DeviceEvent>& event) override;
  virtual void* Take(size_t size) = 0;
  virtual void Give(void* address) = 0;

 private:
  std::map<void*, void*> base_of_;  // addresses -> what was taken
  std::map<void*, int> parts_of_;   // what was taken -> how many addresses use it
};

}  // namespace device
}  // namespace mindspore
