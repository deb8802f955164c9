// A module for Python that calls C entries in PyNative mode as MindSpore calls operators of its own (see
// fast_calls.py).
//
// It is compiled with MindSpore's headers and MindSpore's layout of std::string. It names no device: MindSpore's
// context of the device gives memory and the stream.
#include <unordered_map>

#include "include/pynative/backward/function.h"
#include "include/pynative/utils/pyboost/custom/pyboost_extension.h"
#include "pybind11/stl.h"
#include "views.h"

namespace {

namespace autograd = mindspore::pynative::autograd;
using mindspore::ValuePtrList;
using mindspore::tensor::TensorPtr;
using Pointers = std::vector<TensorPtr>;

using Entry = int (*)(int nparam, void** params, int* ndims, int64_t** shapes, const char** dtypes, void* stream,
                      void* extra);

// Has the virtual functions of MindSpore's AotExtra, as far as entries use them, in the same order.
class Extra {
 public:
  explicit Extra(std::unordered_map<std::string, int64_t> attributes) : attributes_(std::move(attributes)) {}
  virtual ~Extra() = default;
  virtual bool HasAttr(std::string name) { return attributes_.count(name) != 0; }
  virtual bool GetAttrBool(std::string name) { return GetAttrInt(name) != 0; }
  virtual int64_t GetAttrInt(std::string name) { return attributes_.at(name); }

 private:
  std::unordered_map<std::string, int64_t> attributes_;
};

const std::unordered_map<std::string, mindspore::TypeId> kTypes = {{"bool", mindspore::kNumberTypeBool},
                                                                   {"int8", mindspore::kNumberTypeInt8},
                                                                   {"int16", mindspore::kNumberTypeInt16},
                                                                   {"int32", mindspore::kNumberTypeInt32},
                                                                   {"int64", mindspore::kNumberTypeInt64},
                                                                   {"uint8", mindspore::kNumberTypeUInt8},
                                                                   {"uint16", mindspore::kNumberTypeUInt16},
                                                                   {"uint32", mindspore::kNumberTypeUInt32},
                                                                   {"uint64", mindspore::kNumberTypeUInt64},
                                                                   {"float16", mindspore::kNumberTypeFloat16},
                                                                   {"float32", mindspore::kNumberTypeFloat32},
                                                                   {"float64", mindspore::kNumberTypeFloat64},
                                                                   {"bfloat16", mindspore::kNumberTypeBFloat16},
                                                                   {"complex64", mindspore::kNumberTypeComplex64},
                                                                   {"complex128", mindspore::kNumberTypeComplex128}};

// How many gradients run in this thread. Their calls run in it, too: another thread would make it wait.
thread_local int gradients = 0;

struct Inside {
  Inside() { ++gradients; }
  ~Inside() { --gradients; }
};

struct Gradient {  // MindSpore's template asks for this function, which Record never calls
  static Pointers Backward(autograd::AutogradContext*, const Pointers&) { return {}; }
};

// What MindSpore keeps of a call that it records, to run the gradient: a Python function of the inputs, the outputs and
// the gradients of these.
class Record : public autograd::CppFunctionNode<Gradient> {
 public:
  Record(const std::string& name, py::function gradient, mindspore::abstract::AbstractBasePtrList outputs)
      : CppFunctionNode<Gradient>(name, outputs.size()), gradient_(std::move(gradient)) {
    outputs_abstract_ = std::move(outputs);
  }
  ~Record() override { Forget(); }

  ValuePtrList CallBackward(const ValuePtrList& grads) override {
    autograd::PrepareForForward();
    const Pointers douts = autograd::GradPreProcess(grads, outputs_abstract_, true, name_);
    const Pointers saved = context_.GetSavedTensors();
    const size_t inputs = saved.size() - douts.size();
    Pointers results;
    {
      py::gil_scoped_acquire gil;
      py::tuple arguments(inputs + 2);
      for (size_t i = 0; i < inputs; ++i) arguments[i] = wrap(saved[i]);
      arguments[inputs] = join({saved.begin() + inputs, saved.end()});
      arguments[inputs + 1] = join(douts);
      const Inside inside;
      for (auto each : gradient_(*arguments).cast<py::tuple>()) {
        py::object tensor = py::reinterpret_borrow<py::object>(each);
        if (!each.is_none() && !mindspore::tensor::IsTensorPy(each)) {  // a number
          tensor = py::module_::import("mindspore").attr("Tensor")(tensor);
        }
        results.push_back(each.is_none() ? nullptr : mindspore::tensor::ConvertToTensor(tensor));
      }
    }
    autograd::PrepareForForward();
    return autograd::GradPostProcess(results, std::vector<bool>(inputs, true), name_);
  }

  void Release() override {
    CppFunctionNode<Gradient>::Release();
    Forget();
  }

  static py::object wrap(const TensorPtr& tensor) {
    return py::reinterpret_steal<py::object>(mindspore::tensor::Wrap(tensor));
  }

  static py::object join(const Pointers& tensors) {
    return tensors.size() == 1 ? wrap(tensors[0]) : py::reinterpret_steal<py::object>(mindspore::tensor::Wrap(tensors));
  }

 private:
  void Forget() {
    if (!gradient_) return;
    if (!Py_IsInitialized()) return void(gradient_.release());
    py::gil_scoped_acquire gil;
    gradient_ = py::function();
  }

  py::function gradient_;
};

// Calls of one entry with tensors of the same shapes and dtypes. It outlives the Python object until the last has run.
class Plan : public std::enable_shared_from_this<Plan> {
 public:
  using Tensors = std::vector<ms::Tensor>;

  // `shapes` and `dtypes` are those of the inputs, then of the outputs.
  Plan(std::string function, size_t entry, std::unordered_map<std::string, int64_t> attributes,
       std::vector<ShapeVector> shapes, std::vector<std::string> dtypes, size_t inputs)
      : function_(std::move(function)),
        entry_(reinterpret_cast<Entry>(entry)),
        extra_(std::move(attributes)),
        shapes_(std::move(shapes)),
        dtypes_(std::move(dtypes)),
        inputs_(inputs) {
    for (size_t i = 0; i < shapes_.size(); ++i) {
      ranks_.push_back(static_cast<int>(shapes_[i].size()));
      shape_pointers_.push_back(shapes_[i].empty() ? nullptr : shapes_[i].data());
      names_.push_back(dtypes_[i].c_str());
      types_.push_back(kTypes.at(dtypes_[i]));
    }
  }

  // Returns the output, or a tuple of the outputs; NotImplemented where something intercepts MindSpore's calls.
  py::object call(const py::args& args) {
    if (mindspore::pynative::HasActiveDispatchGuard()) return py::reinterpret_borrow<py::object>(Py_NotImplemented);
    auto inputs = args.cast<Tensors>();
    if (gradients > 0) {
      Pointers results;
      {
        py::gil_scoped_release no_gil;
        autograd::PrepareForForward();
        ms::inner::ConvertStubNodeToTensor(inputs);
        results = run(inputs);
      }
      return Record::join(results);
    }
    const auto outputs = mindspore::tensor::MakeVector<false>(shapes_.size() - inputs_);
    const auto promises = mindspore::tensor::TransformVectorPromise(outputs);
    const auto run = [self = shared_from_this(), inputs, promises]() mutable {
      ms::inner::ConvertStubNodeToTensor(inputs);
      mindspore::tensor::SetPromise(promises, self->run(inputs));
    };
    const auto fail = [promises] { mindspore::tensor::SetException(promises); };
    mindspore::pynative::DispatchOp(std::make_shared<mindspore::pynative::PassthroughFrontendTask>(run, fail));
    if (outputs.size() == 1) return py::reinterpret_steal<py::object>(outputs[0].value());
    return py::reinterpret_steal<py::object>(mindspore::tensor::TransformVectorOutput(outputs));
  }

  // Returns what `call` returns, and lets MindSpore record the call.
  py::object record(const py::function& gradient, const py::args& args) {
    if (mindspore::pynative::HasActiveDispatchGuard()) return py::reinterpret_borrow<py::object>(Py_NotImplemented);
    auto inputs = args.cast<Tensors>();
    Pointers results;
    {
      py::gil_scoped_release no_gil;
      autograd::PrepareForForward();
      ms::inner::ConvertStubNodeToTensor(inputs);
      Pointers given;
      for (const auto& each : inputs) {
        given.push_back(each.tensor());
        given.back()->set_need_pipeline_sync(true);
      }
      results = run(inputs);
      std::shared_ptr<Record> node;
      {
        py::gil_scoped_acquire gil;
        if (abstracts_.empty()) {
          for (const auto& each : results) {
            abstracts_.push_back(each->ToAbstract());
            abstracts_.back()->set_value(mindspore::kValueAny);
          }
        }
        node = std::make_shared<Record>(function_, gradient, abstracts_);
      }
      node->SetContextBackwardNode(node);
      Pointers saved = given;
      saved.insert(saved.end(), results.begin(), results.end());
      node->context_.SaveForBackward(saved);
      CppFunctionDoGrad(&node->context_, given, &results);
    }
    return Record::join(results);
  }

 private:
  class Launch : public ms::pynative::PyboostRunner {
   public:
    explicit Launch(std::shared_ptr<Plan> plan) : PyboostRunner("Custom"), plan_(std::move(plan)) {}
    void LaunchKernel() override {
      std::vector<void*> data;
      for (const auto& each : inputs()) data.push_back(each.GetDataPtr());
      for (const auto& each : outputs()) data.push_back(each.GetDataPtr());
      plan_->launch(&data, stream());
    }
    // MindSpore's own version launches from another thread than that of its kernels for the CPU and the GPU, so that a
    // kernel could run before one whose result it reads.
    void _DispatchLaunchTask() override {
      LaunchKernel();
      ProcessCrossStreamAddress();
    }

   private:
    std::shared_ptr<Plan> plan_;
  };

  Pointers run(Tensors inputs) {
    const mindspore::kernel::pyboost::RequireGradGuard guard(false);
    for (auto& each : inputs) {
      if (!each.is_contiguous()) each = each.contiguous();
    }
    Tensors outputs;
    for (size_t i = inputs_; i < shapes_.size(); ++i) outputs.emplace_back(types_[i], shapes_[i]);
    std::make_shared<Launch>(shared_from_this())->Run(inputs, outputs);
    Pointers results;
    for (const auto& each : outputs) results.push_back(each.tensor());
    return results;
  }

  void launch(std::vector<void*>* data, void* stream) {
    const int status = entry_(static_cast<int>(data->size()), data->data(), ranks_.data(), shape_pointers_.data(),
                              names_.data(), stream, &extra_);
    if (status != 0) MS_LOG(EXCEPTION) << "Return value from AOT kernel " << function_ << " is " << status << ".";
  }

  std::string function_;
  Entry entry_;
  Extra extra_;
  std::vector<ShapeVector> shapes_;
  std::vector<std::string> dtypes_;
  size_t inputs_;
  std::vector<int> ranks_;
  std::vector<int64_t*> shape_pointers_;
  std::vector<const char*> names_;
  std::vector<mindspore::TypeId> types_;
  mindspore::abstract::AbstractBasePtrList abstracts_;  // of the outputs, once a call was recorded
};

}  // namespace

PYBIND11_MODULE(fast_calls, module) {
  module.def("take_views", &msops::take_views);
  py::class_<Plan, std::shared_ptr<Plan>>(module, "Plan")
      .def(py::init<std::string, size_t, std::unordered_map<std::string, int64_t>, std::vector<ShapeVector>,
                    std::vector<std::string>, size_t>())
      .def("__call__", &Plan::call)
      .def("record", &Plan::record);
}
