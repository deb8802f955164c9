// PyNative mode copies each input of an operator that is a view of a tensor, also where the view has the tensor's
// elements in their order, as most results of reshape have. take_views() lets operators read such inputs where they
// are.
#pragma once

#include "include/pynative/utils/pyboost/auto_generate/contiguous.h"

namespace msops {

// Stands in place of the operator that MindSpore calls for each view.
class Contiguous : public mindspore::kernel::pyboost::Contiguous {
 public:
  using Own = mindspore::kernel::pyboost::Contiguous;
  using Make = std::function<std::shared_ptr<Own>()>;

  explicit Contiguous(std::shared_ptr<Own> own) : Own(own->primitive(), own->device_context()), own_(std::move(own)) {}

  mindspore::tensor::TensorPtr Call(const mindspore::tensor::TensorPtr& x) override {
    const auto view = x->storage_info();
    const auto memory = x->device_address();
    // What the host has yet to copy to the device stays MindSpore's own work.
    const bool is_here = memory != nullptr && memory->GetDeviceType() == device_context_->GetDeviceType() &&
                         x->implicit_copy_address() == nullptr;
    const bool is_whole = is_here && memory->GetSize() == x->Size();
    if (is_whole && view != nullptr && view->is_contiguous && view->storage_offset == 0) {
      InferOutput(x);
      outputs_[0]->set_device_address(memory);
      outputs_[0]->set_version(x->version());  // a gradient then notices if the memory was written meanwhile
      return outputs_[0];
    }
    own_->set_stream_id(stream_id_);
    const auto y = own_->Call(x);
    outputs_ = own_->outputs();
    output_abs_ = own_->output_abs();
    output_value_simple_info_ = own_->output_value_simple_info();
    device_sync_promises_ = own_->device_sync_promises();
    return y;
  }

 private:
  std::shared_ptr<Own> own_;
};

// Takes effect for the devices that MindSpore has loaded until now.
inline void take_views() {
  static std::map<mindspore::device::DeviceType, Contiguous::Make> own;
  for (auto& [device, make] : mindspore::kernel::pyboost::OpFactory<Contiguous::Own>::Get().op_creator()) {
    if (device == mindspore::device::DeviceType::kAscend || own.count(device)) continue;
    own[device] = make;
    make = [device = device] { return std::make_shared<Contiguous>(own.at(device)()); };
  }
}

}  // namespace msops
