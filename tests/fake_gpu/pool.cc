#include "pool.h"

namespace mindspore {
namespace device {

void* DynamicMemPoolBestFit::AllocTensorMem(size_t size, bool, bool, uint32_t) {
  void* address = Take((size + 511) / 512 * 512);
  base_of_[address] = address;
  parts_of_[address] = 1;
  return address;
}

std::vector<void*> DynamicMemPoolBestFit::AllocContinuousTensorMem(const std::vector<size_t>& sizes, uint32_t stream) {
  size_t total = 0;
  for (const size_t size : sizes) total += size;
  char* base = static_cast<char*>(AllocTensorMem(total, false, false, stream));
  std::vector<void*> found;
  char* next = base;
  for (const size_t size : sizes) {
    base_of_[next] = base;
    found.push_back(next);
    next += size;
  }
  parts_of_[base] = static_cast<int>(sizes.size());
  return found;
}

void DynamicMemPoolBestFit::FreeTensorMem(void* const& address) {
  const auto found = base_of_.find(address);
  if (found == base_of_.end()) return;
  void* base = found->second;
  base_of_.erase(found);
  if (--parts_of_[base] > 0) return;
  parts_of_.erase(base);
  Give(base);
}

void DynamicMemPoolBestFit::FreePartTensorMems(const std::vector<void*>& free, const std::vector<void*>&,
                                               const std::vector<size_t>&) {
  for (void* address : free) FreeTensorMem(address);
}

bool DynamicMemPoolBestFit::RecordEvent(int64_t, uint32_t, const std::vector<std::pair<uint32_t, void*>>&,
                                        const std::shared_ptr<DeviceEvent>&) {
  return true;
}

}  // namespace device
}  // namespace mindspore
