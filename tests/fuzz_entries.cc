// Calls C entries with valid and with hostile arguments, under AddressSanitizer and UndefinedBehaviorSanitizer.
//
//   make fuzz ARGS="SECONDS [ENTRY|all [SEED]]"
//
// Each call begins as a valid one of random sizes, to which up to three mutations are made, since random arguments
// would all be refused by the first check. All memory is exactly as large as the entry is told. A valid call must be
// accepted; any other may be, or is refused: by a code, with one line on stderr, and without a trace in memory. Equal
// seeds make equal calls; one that fails is printed with its seed, from which 0 seconds make that call alone. Prints
// for each entry how many calls were accepted, and refused with each of the codes.

#include <sanitizer/common_interface_defs.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

using Lengths = std::vector<int64_t>;
using Attributes = std::map<std::string, int64_t>;

constexpr int64_t kMostElements = 1 << 19;  // of a tensor that is allocated
constexpr int kStatuses = 9;                // Status in common/call.h

struct Param {
  Lengths shape;
  enum Kind { kInput, kInt32, kOutput, kScratch } kind = kInput;
  std::string dtype = {};
  bool has_data = true, has_shape = true, has_dtype = true, has_rank = true;
};

struct Arguments {
  std::vector<Param> params;
  Attributes attributes = {};
  size_t bias = 0;            // its place, if the attribute has_bias says that there is one
  std::string mistyped = {};  // the attribute that is no integer
  bool has_extra = true, has_stream = false;
};

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u) {}

  int64_t below(int64_t n) { return static_cast<int64_t>(bits() % static_cast<uint64_t>(n)); }
  bool one_in(int n) { return below(n) == 0; }
  template <typename T>
  const T& of(const std::vector<T>& choices) {
    return choices[static_cast<size_t>(below(static_cast<int64_t>(choices.size())))];
  }
  int64_t length() { return one_in(500) ? below(2000) : one_in(16) ? below(70) : below(8); }
  // What is likely to be wrong in place of a valid number.
  int64_t instead_of(int64_t valid) {
    const uint64_t value = static_cast<uint64_t>(valid), high = uint64_t{1} << (30 + below(34));
    return static_cast<int64_t>(of<uint64_t>({0, 1, value - 1, value + 1, value * 2, static_cast<uint64_t>(length()),
                                              high - 1, high, high + value, ~value, uint64_t{0} - 1}));
  }

  uint64_t bits() { return state_ = state_ * 6364136223846793005u + 1442695040888963407u, state_ >> 33; }

 private:
  uint64_t state_;
};

int64_t product(const Lengths& shape) {
  int64_t size = 1;
  for (const int64_t length : shape) size *= length;
  return size;
}

// ---- Valid calls ----

// A shape that broadcasts to `to`; along the axes in `whole`, it has the length of that.
Lengths broadcast(Random& random, const Lengths& to, const std::vector<bool>& whole) {
  Lengths shape;
  for (size_t axis = 0; axis < to.size(); ++axis) {
    const int64_t length = whole[axis] ? to[axis] : 1;
    if (!shape.empty() || length != 1 || random.one_in(2)) shape.push_back(length);
  }
  return shape;
}

Lengths lengths(Random& random) {
  Lengths shape(static_cast<size_t>(random.below(6)));
  for (int64_t& length : shape) length = random.length();
  return shape;
}

Arguments add_forward(Random& random) {
  const Lengths all = lengths(random);
  std::vector<bool> in_x, in_y;
  for (size_t axis = 0; axis < all.size(); ++axis) {
    in_x.push_back(random.one_in(2)), in_y.push_back(!in_x.back() || random.one_in(2));
  }
  const Lengths x = broadcast(random, all, in_x), y = broadcast(random, all, in_y);
  const Lengths out(all.end() - static_cast<int64_t>(std::max(x.size(), y.size())), all.end());
  return {{{x}, {y}, {out, Param::kOutput}}};
}

Arguments add_backward(Random& random) {
  const Lengths dout = lengths(random);
  std::vector<bool> whole;
  for (size_t axis = 0; axis < dout.size(); ++axis) whole.push_back(random.one_in(2));
  const Lengths x = broadcast(random, dout, whole);
  const int64_t splits = 1 + random.below(5);
  return {{{dout}, {x}, {x, Param::kOutput}, {{splits, splits > 1 ? product(x) : 1}, Param::kScratch}}};
}

// Inputs and outputs of one shape.
std::function<Arguments(Random&)> formula(size_t inputs, size_t outputs) {
  return [=](Random& random) {
    Arguments arguments{std::vector<Param>(inputs, {lengths(random)})};
    arguments.params.resize(inputs + outputs, {arguments.params[0].shape, Param::kOutput});
    return arguments;
  };
}

// The number of outputs along one direction, of `size` inputs, whose attributes are named by an h or a w.
int64_t convolved(Random& random, int64_t size, int64_t kernel, const char* direction, const char* before,
                  const char* after, Attributes& attributes) {
  const auto choose = [&](int64_t most) {
    return random.one_in(20) ? INT32_MAX - random.below(2) : random.below(most);
  };
  const int64_t stride = 1 + choose(4) % INT32_MAX;
  const int64_t dilation = kernel > 8 ? 1 + random.below(3) : 1 + choose(3) % INT32_MAX;  // no kernel reaches 2^34 far
  attributes[std::string("msops_stride_") + direction] = stride;
  attributes[std::string("msops_dilation_") + direction] = dilation;
  const int64_t pad_before = attributes[before] = choose(6), pad_after = attributes[after] = choose(6);
  if (attributes["msops_pad_mode"] == 1) return (size + stride - 1) / stride;
  const int64_t padding = attributes["msops_pad_mode"] == 2 ? pad_before + pad_after : 0;
  const int64_t room = size + padding - dilation * (kernel - 1) - 1;
  return room < 0 ? 0 : room / stride + 1;
}

std::function<Arguments(Random&)> depthwise_conv2d(bool backward) {
  return [=](Random& random) {
    Attributes attributes{{"msops_pad_mode", random.below(3)}, {"msops_has_bias", random.below(2)}};
    const auto kernel = [&] { return 1 + (random.one_in(30) ? random.below(40) : random.below(5)); };
    const Lengths x{random.below(4), random.below(5), random.length(), random.length()};
    const Lengths weight{x[1] * (1 + random.below(3)), 1, kernel(), kernel()}, bias{weight[0]};
    const Lengths out{x[0], weight[0],
                      convolved(random, x[2], weight[2], "h", "msops_pad_top", "msops_pad_bottom", attributes),
                      convolved(random, x[3], weight[3], "w", "msops_pad_left", "msops_pad_right", attributes)};
    Arguments arguments{{{x}, {weight}}, attributes, backward ? size_t{5} : 2};
    const auto add = [&](const Param& param) { arguments.params.push_back(param); };
    const bool has_bias = attributes["msops_has_bias"];
    if (!backward) {
      if (has_bias) add({bias});
      add({out, Param::kOutput});
      return arguments;
    }
    add({out}), add({x, Param::kOutput}), add({weight, Param::kOutput});
    if (has_bias) add({bias, Param::kOutput});
    add({{1 + random.below(5), product(weight) + weight[0]}, Param::kScratch});
    return arguments;
  };
}

std::function<Arguments(Random&)> lltm(bool backward) {
  return [=](Random& random) -> Arguments {
    const int64_t batch = random.length(), hidden = random.length();
    const Lengths product{batch, 3 * hidden}, bias{3 * hidden}, c{batch, hidden};
    if (!backward) return {{{product}, {bias}, {c}, {c, Param::kOutput}, {c, Param::kOutput}}};
    return {{{product},
             {bias},
             {c},
             {c},
             {c},
             {product, Param::kOutput},
             {bias, Param::kOutput},
             {c, Param::kOutput},
             {{1 + random.below(5), 3 * hidden}, Param::kScratch}}};
  };
}

std::function<Arguments(Random&)> lltm_sequence(bool backward) {
  return [=](Random& random) -> Arguments {
    const int64_t steps = random.length(), batch = random.length(), hidden = random.length();
    const Lengths gates{steps, batch, 3 * hidden}, output{steps, batch, hidden}, h{batch, hidden};
    const Param weight{{3 * hidden, hidden}}, lengths{{batch}, Param::kInt32};
    const Param scratch{{8 * ((batch + 7) / 8 * 8) * ((hidden + 31) / 32 * 32) + 1024}, Param::kScratch};
    const auto to = [](const Lengths& shape) { return Param{shape, Param::kOutput}; };
    const Attributes attributes{{"msops_reverse", random.below(2)}, {"msops_allow_tf32", random.below(2)}};
    if (!backward)
      return {{{gates},
               weight,
               {{3 * hidden}},
               {h},
               {h},
               lengths,
               to(output),
               to(h),
               to(h),
               to(gates),
               to(output),
               scratch},
              attributes};
    return {{weight,
             {gates},
             {output},
             {output},
             {h},
             lengths,
             {output},
             {h},
             {h},
             to(gates),
             to(output),
             to(h),
             to(h),
             scratch},
            attributes};
  };
}

std::function<Arguments(Random&)> trilinear(bool backward) {
  return [=](Random& random) -> Arguments {
    const int64_t n = random.length(), features = random.length();
    const Lengths feats{n, 8, features}, points{n, 3}, out{n, features};
    if (!backward) return {{{feats}, {points}, {out, Param::kOutput}}};
    return {{{feats}, {points}, {out}, {feats, Param::kOutput}, {points, Param::kOutput}}};
  };
}

std::function<Arguments(Random&)> logsumexp(bool backward) {
  return [=](Random& random) -> Arguments {
    Lengths x = lengths(random);
    x.push_back(random.length());
    const Lengths y(x.begin(), x.end() - 1);
    if (!backward) return {{{x}, {y, Param::kOutput}}};
    return {{{x}, {y}, {x, Param::kOutput}}};
  };
}

extern "C" {
using Function = int(int, void**, int*, int64_t**, const char**, void*, void*);
Function AddForward, AddBackward, SigmoidForward, SigmoidBackward, SigmoidBackwardBackward, DepthwiseConv2dForward,
    DepthwiseConv2dBackward, LLTMForward, LLTMBackward, LLTMSequenceForward, LLTMSequenceBackward,
    TrilinearInterpolationForward, TrilinearInterpolationBackward, SwishForward, SwishBackward, LogsumexpForward,
    LogsumexpBackward;
}

struct Entry {
  std::string name;
  Function* function;
  std::function<Arguments(Random&)> valid;
};

#define ENTRY(name) #name, name
const std::vector<Entry> kEntries = {
    {ENTRY(AddForward), add_forward},
    {ENTRY(AddBackward), add_backward},
    {ENTRY(SigmoidForward), formula(1, 1)},
    {ENTRY(SigmoidBackward), formula(2, 1)},
    {ENTRY(SigmoidBackwardBackward), formula(3, 2)},
    {ENTRY(DepthwiseConv2dForward), depthwise_conv2d(false)},
    {ENTRY(DepthwiseConv2dBackward), depthwise_conv2d(true)},
    {ENTRY(LLTMForward), lltm(false)},
    {ENTRY(LLTMBackward), lltm(true)},
    {ENTRY(LLTMSequenceForward), lltm_sequence(false)},
    {ENTRY(LLTMSequenceBackward), lltm_sequence(true)},
    {ENTRY(TrilinearInterpolationForward), trilinear(false)},
    {ENTRY(TrilinearInterpolationBackward), trilinear(true)},
    {ENTRY(SwishForward), formula(1, 1)},
    {ENTRY(SwishBackward), formula(2, 1)},
    {ENTRY(LogsumexpForward), logsumexp(false)},
    {ENTRY(LogsumexpBackward), logsumexp(true)},
};

// ---- Mutations ----

const std::vector<std::string> kDtypes = {"float16", "float32", "float64"};
const std::vector<std::string> kNoDtypes = {"", "f", "float", "float322", "Float32", "bfloat16", "int32", "bool"};

void mutate(Random& random, Arguments& arguments) {
  std::vector<Param>& params = arguments.params;
  Attributes& attributes = arguments.attributes;
  Lengths lengths;  // all there are
  for (const Param& param : params) lengths.insert(lengths.end(), param.shape.begin(), param.shape.end());
  if (params.empty() || lengths.empty()) return;
  const auto index = [&](const auto& all) { return random.below(static_cast<int64_t>(all.size())); };
  const auto at = params.begin() + index(params);
  const int64_t length = random.of(lengths), other = random.instead_of(length);
  const std::string dtype = random.of(random.one_in(2) ? kDtypes : kNoDtypes);
  std::vector<std::function<void()>> mutations = {
      [&] { params.clear(); },
      [&] { params.erase(at); },
      [&] { params.insert(at, Param(random.of(params))); },
      [&] { std::swap(*at, params[0]); },
      [&] { at->dtype = dtype; },
      [&] { std::for_each(params.begin(), params.end(), [&](Param& each) { each.dtype = dtype; }); },
      [&] { at->has_dtype = false; },
      [&] { at->has_data = false; },
      [&] { at->has_shape = false; },
      [&] { at->has_rank = false; },
      [&] { at->shape.insert(at->shape.begin() + index(at->shape), random.instead_of(1)); },
      [&] { at->shape.insert(at->shape.begin(), static_cast<size_t>(random.below(40)), 1); },
      [&] { at->shape.pop_back(); },
      [&] { std::swap(at->shape.front(), at->shape.back()); },
      [&] { *(at->shape.begin() + index(at->shape)) = other; },
      [&] { std::replace(at->shape.begin(), at->shape.end(), length, other); },
      [&] {  // so that tensors still match
        for (Param& each : params) std::replace(each.shape.begin(), each.shape.end(), length, other);
      },
      [&] { arguments.has_stream = true; },
      [&] { arguments.has_extra = false; },
  };
  if (at->shape.empty()) mutations = {[&] { at->shape.push_back(other); }};
  if (!attributes.empty() && random.one_in(4)) {
    const auto chosen = std::next(attributes.begin(), index(attributes));
    mutations = {
        [=, &attributes] { attributes.erase(chosen); },
        [=, &arguments] { arguments.mistyped = chosen->first; },
        [=, &random] { chosen->second = random.instead_of(chosen->second); },
    };
  }
  random.of(mutations)();
}

// ---- The call ----

// MindSpore's class of that name, as far as entries use it.
class AotExtra {
 public:
  explicit AotExtra(const Arguments& arguments) : arguments_(arguments) {}
  virtual ~AotExtra() = default;
  virtual bool HasAttr(std::string name) { return arguments_.attributes.count(name) > 0; }
  virtual bool GetAttrBool(std::string) { std::abort(); }
  virtual int64_t GetAttrInt(std::string name) {
    if (name == arguments_.mistyped) throw std::runtime_error("the attribute has another type");
    return arguments_.attributes.at(name);
  }

 private:
  const Arguments& arguments_;
};

// How many elements a shape has; -1 if no tensor can have it.
int64_t size_of(const Lengths& shape) {
  int64_t size = 1, bytes = 8;
  for (const int64_t length : shape) {
    if (length < 0 || __builtin_mul_overflow(bytes, std::max<int64_t>(length, 1), &bytes)) return -1;
    size *= length;
  }
  return size;
}

// What a pointer leads to, of exactly the size that it should have.
template <typename T>
std::unique_ptr<T[]> exactly(const T* from, size_t n) {
  std::unique_ptr<T[]> memory(new T[n]);
  std::copy_n(from, n, memory.get());
  return memory;
}

const char* entry_under_way = "";
uint64_t seed_under_way = 0;
Arguments arguments_under_way;

void print(const std::string& text) {  // on the descriptor: stderr is a string
  if (write(STDERR_FILENO, text.data(), text.size()) < 0) std::abort();
}

void print_call() {
  std::ostringstream text;
  text << "fuzz: " << entry_under_way << " with seed " << seed_under_way << ":\n";
  for (const Param& param : arguments_under_way.params) {
    text << (param.has_dtype ? "  " + param.dtype : "  null") << " [";
    for (const int64_t length : param.shape) text << " " << length;
    text << " ]" << (param.has_data ? "" : ", no data") << (param.has_shape ? "" : ", no shape")
         << (param.has_rank ? "" : ", no rank") << "\n";
  }
  for (const auto& [name, value] : arguments_under_way.attributes) text << "  " << name << " = " << value << "\n";
  print(text.str());
}

void fail(const std::string& why) {
  print("fuzz: " + why + "\n");
  print_call();
  _exit(1);
}

char* said = nullptr;  // by entries, on stderr
size_t said_size = 0;

// Calls the entry, and returns what it does.
int call(Random& random, const Entry& entry, const Arguments& arguments) {
  struct Memory {
    std::unique_ptr<char[]> data, dtype;
    std::unique_ptr<int64_t[]> shape;
    std::string before;
    size_t offset;  // which makes it less aligned
  };
  std::vector<Memory> memory;
  std::vector<void*> data;
  std::vector<int> ranks;
  std::vector<int64_t*> shapes;
  std::vector<const char*> dtypes;
  bool has_stream = arguments.has_stream;
  for (const Param& param : arguments.params) {
    const size_t item = param.dtype == "float16" ? 2 : param.dtype == "float64" ? 8 : 4;
    const size_t offset = item * static_cast<size_t>(random.below(4));
    int64_t size = size_of(param.shape);
    has_stream |= size > kMostElements;  // not allocated: the last check refuses any stream
    if (size > kMostElements || size < 0) size = 0;
    std::string bytes(offset + static_cast<size_t>(size) * item, 0);
    const bool small = param.kind == Param::kInt32 && random.one_in(2);  // of which most are sensible
    for (char& byte : bytes) byte = static_cast<char>(random.bits());
    for (size_t i = 0; small && i < bytes.size(); ++i) bytes[i] = i % 4 == 0 ? bytes[i] & 7 : 0;
    memory.push_back({exactly(bytes.data(), bytes.size()), exactly(param.dtype.c_str(), param.dtype.size() + 1),
                      exactly(param.shape.data(), param.shape.size()), bytes, offset});
    data.push_back(param.has_data ? memory.back().data.get() + offset : nullptr);
    ranks.push_back(param.has_rank ? static_cast<int>(param.shape.size()) : -1);
    shapes.push_back(param.has_shape && !param.shape.empty() ? memory.back().shape.get() : nullptr);
    dtypes.push_back(param.has_dtype ? memory.back().dtype.get() : nullptr);
  }
  const size_t n = arguments.params.size();
  AotExtra extra(arguments);
  rewind(stderr);
  alarm(60);
  const int status = entry.function(static_cast<int>(n), exactly(data.data(), n).get(), exactly(ranks.data(), n).get(),
                                    exactly(shapes.data(), n).get(), exactly(dtypes.data(), n).get(),
                                    has_stream ? &extra : nullptr, arguments.has_extra ? &extra : nullptr);
  alarm(0);
  std::fflush(stderr);
  const std::string line(said, static_cast<size_t>(std::ftell(stderr))), prefix = "msops: " + entry.name + ": ";
  if (status < 0 || status >= kStatuses) fail("it returns " + std::to_string(status));
  if (status == 0 ? !line.empty() : line.find(prefix) != 0 || line.find('\n') + 1 != line.size())
    fail("it returns " + std::to_string(status) + " and says \"" + line + "\"");
  for (size_t i = 0; i < n; ++i) {
    const bool may_change = status == 0 && arguments.params[i].kind != Param::kInput;
    const std::string& before = memory[i].before;
    if (!std::equal(before.begin(), may_change ? before.begin() + memory[i].offset : before.end(),
                    memory[i].data.get()))
      fail("it has written to parameter " + std::to_string(i));
  }
  return status;
}

bool has_bias(const Arguments& arguments) {
  const auto found = arguments.attributes.find("msops_has_bias");
  return found != arguments.attributes.end() && found->second == 1;
}

int call(const Entry& entry, uint64_t seed) {
  Random random(seed);
  Arguments arguments = entry.valid(random);
  const std::string dtype = random.of(kDtypes);
  bool fits = true;
  for (Param& param : arguments.params) {
    param.dtype = param.kind == Param::kScratch && dtype == "float16" ? "float32" : dtype;
    if (param.kind == Param::kInt32) param.dtype = "int32";
    const int64_t size = size_of(param.shape);
    fits &= 0 <= size && size <= kMostElements;
  }
  const Arguments valid = arguments;
  const int64_t mutations = random.below(4);
  for (int64_t i = 0; i < mutations; ++i) mutate(random, arguments);
  // What the entry takes them for.
  std::vector<Param::Kind> kinds;
  for (const Param& param : valid.params) kinds.push_back(param.kind);
  const auto bias = kinds.begin() + static_cast<int64_t>(valid.bias);
  if (has_bias(valid) && !has_bias(arguments)) kinds.erase(bias);
  if (!has_bias(valid) && has_bias(arguments)) kinds.insert(bias, valid.bias > 2 ? Param::kOutput : Param::kInput);
  for (size_t i = 0; i < arguments.params.size(); ++i)
    arguments.params[i].kind = i < kinds.size() ? kinds[i] : Param::kOutput;
  entry_under_way = entry.name.c_str(), seed_under_way = seed, arguments_under_way = arguments;
  const int status = call(random, entry, arguments);
  if (mutations == 0 && fits && status != 0) fail("a valid call is refused");
  return status;
}

}  // namespace

int main(int argc, char** argv) {
  const double seconds = argc > 1 ? std::atof(argv[1]) : 1;
  const std::string chosen = argc > 2 ? argv[2] : "all";
  const uint64_t first_seed = argc > 3 ? std::strtoull(argv[3], nullptr, 10) : 0;
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  stderr = open_memstream(&said, &said_size);  // the sanitizers write to the descriptor
  __sanitizer_set_death_callback(print_call);
  signal(SIGALRM, [](int) { fail("it takes more than a minute"); });
  bool found = false;
  for (const Entry& entry : kEntries) {
    if (chosen != "all" && chosen != entry.name) continue;
    found = true;
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    uint64_t seed = first_seed, counts[kStatuses] = {};
    do {
      ++counts[call(entry, seed++)];
    } while (std::chrono::steady_clock::now() < end);
    std::ostringstream line;
    line << entry.name << ": " << seed - first_seed << " calls:";
    for (const uint64_t count : counts) line << " " << count;
    std::puts(line.str().c_str());
  }
  return found ? 0 : 2;
}
