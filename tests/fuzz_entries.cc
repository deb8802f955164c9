// Calls C entries with valid and with hostile arguments, under AddressSanitizer and UndefinedBehaviorSanitizer.
//
//   make fuzz ARGS="SECONDS [ENTRY|all [SEED]]"
//
// Each call starts as a valid call from a file of write_calls.py and gets up to three mutations, since the first check
// would refuse all random arguments. All memory is exactly as large as the entry is told. A valid call must be
// accepted. Any other call may be accepted; if it is refused, the entry returns a code, writes one line on stderr, and
// changes no memory. Equal seeds give equal calls. A call that fails is printed with its seed; that seed and 0 seconds
// repeat the call alone. The program prints for each entry how many calls were accepted, and how many were refused with
// each code.

#include <dlfcn.h>
#include <sanitizer/common_interface_defs.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/call.h"

namespace {

using Lengths = std::vector<int64_t>;
using Attributes = std::map<std::string, int64_t>;

constexpr int64_t kMostElements = 1 << 19;  // elements of a tensor that is allocated
constexpr int kStatuses = msops::kBadValue + 1;

struct Param {
  Lengths shape;
  enum Kind { kInput, kOutput } kind = kInput;
  std::string dtype = {};
  bool has_data = true, has_shape = true, has_dtype = true, has_rank = true;
};

struct Arguments {
  std::vector<Param> params;
  Attributes attributes = {};
  std::string mistyped = {};  // the attribute that is not an integer
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
  // Returns a number that is likely to be wrong in place of a valid one.
  int64_t instead_of(int64_t valid) {
    const uint64_t value = static_cast<uint64_t>(valid), high = uint64_t{1} << (30 + below(34));
    return static_cast<int64_t>(of<uint64_t>({0, 1, value - 1, value + 1, value * 2, static_cast<uint64_t>(length()),
                                              high - 1, high, high + value, ~value, uint64_t{0} - 1}));
  }

  uint64_t bits() { return state_ = state_ * 6364136223846793005u + 1442695040888963407u, state_ >> 33; }

 private:
  uint64_t state_;
};

// ---- Valid calls ----

extern "C" {
using Function = int(int, void**, int*, int64_t**, const char**, void*, void*);
}

struct Entry {
  std::string name;
  Function* function = nullptr;
  std::vector<Arguments> calls;
};

// Reads the chosen entry of a file, or all in its order, with their valid calls. write_calls.py describes the format.
std::vector<Entry> read_entries(const char* path, const std::string& chosen) {
  std::ifstream file(path);
  std::vector<Entry> entries;
  std::string name, kind;
  size_t params = 0, attributes = 0, rank = 0;
  while (file >> name >> params >> attributes) {
    Arguments arguments;
    arguments.params.resize(params);
    for (Param& param : arguments.params) {
      file >> kind >> param.dtype >> rank;
      param.kind = kind == "input" ? Param::kInput : Param::kOutput;
      param.shape.resize(rank);
      for (int64_t& length : param.shape) file >> length;
    }
    for (size_t i = 0; i < attributes; ++i) file >> kind >> arguments.attributes[kind];
    if (chosen != "all" && chosen != name) continue;
    const auto is_this = [&](const Entry& entry) { return entry.name == name; };
    auto entry = std::find_if(entries.begin(), entries.end(), is_this);
    if (entry == entries.end()) {
      void* const function = dlsym(RTLD_DEFAULT, name.c_str());
      if (function == nullptr) throw std::runtime_error("there is no entry " + name);
      entry = entries.insert(entry, {name, reinterpret_cast<Function*>(function), {}});
    }
    entry->calls.push_back(arguments);
  }
  if (!file.eof()) throw std::runtime_error(std::string("cannot read calls from ") + path);
  if (entries.empty()) throw std::runtime_error(std::string(path) + " has no call of " + chosen);
  return entries;
}

// ---- Mutations ----

const std::vector<std::string> kDtypes = {"float16", "float32", "float64"};
const std::vector<std::string> kNoDtypes = {"", "f", "float", "float322", "Float32", "bfloat16", "int32", "bool"};

void mutate(Random& random, Arguments& arguments) {
  std::vector<Param>& params = arguments.params;
  Attributes& attributes = arguments.attributes;
  Lengths lengths;  // the lengths of all tensors
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
      [&] {  // changes all tensors, so that they still match
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

// AotExtra has the methods of MindSpore's class of that name that entries use.
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

// Returns how many elements a shape has, or -1 if no tensor can have that shape.
int64_t size_of(const Lengths& shape) {
  int64_t size = 1, bytes = 8;
  for (const int64_t length : shape) {
    if (length < 0 || __builtin_mul_overflow(bytes, std::max<int64_t>(length, 1), &bytes)) return -1;
    size *= length;
  }
  return size;
}

// Returns how many bytes an element has.
size_t item_size(const std::string& dtype) {
  if (dtype == "bool" || dtype == "int8" || dtype == "uint8") return 1;
  if (dtype == "float16" || dtype == "bfloat16" || dtype == "int16" || dtype == "uint16") return 2;
  return dtype == "float64" || dtype == "int64" || dtype == "uint64" ? 8 : 4;
}

// Copies n elements into memory of exactly that size.
template <typename T>
std::unique_ptr<T[]> exactly(const T* from, size_t n) {
  std::unique_ptr<T[]> memory(new T[n]);
  std::copy_n(from, n, memory.get());
  return memory;
}

const char* entry_under_way = "";
uint64_t seed_under_way = 0;
Arguments arguments_under_way;

void print(const std::string& text) {  // writes to the descriptor, since stderr is a string
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

char* said = nullptr;  // what entries write on stderr
size_t said_size = 0;

// Calls the entry, and returns its status.
int call(Random& random, const Entry& entry, const Arguments& arguments) {
  struct Memory {
    std::unique_ptr<char[]> data, dtype;
    std::unique_ptr<int64_t[]> shape;
    std::string before;
    size_t offset;  // makes the data less aligned
  };
  std::vector<Memory> memory;
  std::vector<void*> data;
  std::vector<int> ranks;
  std::vector<int64_t*> shapes;
  std::vector<const char*> dtypes;
  bool has_stream = arguments.has_stream;
  for (const Param& param : arguments.params) {
    const size_t item = item_size(param.dtype);
    const size_t offset = item * static_cast<size_t>(random.below(4));
    int64_t size = size_of(param.shape);
    has_stream |= size > kMostElements;  // is not allocated: the last check refuses any stream
    if (size > kMostElements || size < 0) size = 0;
    std::string bytes(offset + static_cast<size_t>(size) * item, 0);
    const bool small = param.dtype.find("int") == 0 && random.one_in(2);  // most of these numbers are sensible
    for (char& byte : bytes) byte = static_cast<char>(random.bits());
    for (size_t i = 0; small && i < bytes.size(); ++i) bytes[i] = i % item == 0 ? bytes[i] & 7 : 0;
    for (size_t i = 0; param.dtype == "bool" && i < bytes.size(); ++i) bytes[i] &= 1;
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
  const auto writes = arguments.attributes.find("msops_writes");  // how many of the first inputs the entry writes
  const size_t written = writes == arguments.attributes.end() ? 0 : static_cast<size_t>(writes->second);
  for (size_t i = 0; i < n; ++i) {
    const bool may_change = status == 0 && (arguments.params[i].kind != Param::kInput || i < written);
    const std::string& before = memory[i].before;
    if (!std::equal(before.begin(), may_change ? before.begin() + memory[i].offset : before.end(),
                    memory[i].data.get()))
      fail("it has written to parameter " + std::to_string(i));
  }
  return status;
}

int call(const Entry& entry, uint64_t seed) {
  Random random(seed);
  const Arguments& valid = random.of(entry.calls);
  Arguments arguments = valid;
  const int64_t mutations = random.below(4);
  for (int64_t i = 0; i < mutations; ++i) mutate(random, arguments);
  // Sets which parameters the entry takes for inputs. With other attributes it may expect other parameters.
  const bool same_attributes = arguments.attributes == valid.attributes;
  for (size_t i = 0; i < arguments.params.size(); ++i) {
    const bool is_input = same_attributes && i < valid.params.size() && valid.params[i].kind == Param::kInput;
    arguments.params[i].kind = is_input ? Param::kInput : Param::kOutput;
  }
  entry_under_way = entry.name.c_str(), seed_under_way = seed, arguments_under_way = arguments;
  const int status = call(random, entry, arguments);
  // Values are random, so a label may be out of range.
  if (mutations == 0 && status != 0 && status != msops::kBadValue) fail("a valid call is refused");
  return status;
}

}  // namespace

int main(int argc, char** argv) {
  const double seconds = argc > 2 ? std::atof(argv[2]) : 1;
  const std::vector<Entry> entries = read_entries(argc > 1 ? argv[1] : "", argc > 3 ? argv[3] : "all");
  const uint64_t first_seed = argc > 4 ? std::strtoull(argv[4], nullptr, 10) : 0;
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  stderr = open_memstream(&said, &said_size);  // the sanitizers write to the descriptor
  __sanitizer_set_death_callback(print_call);
  signal(SIGALRM, [](int) { fail("it takes more than a minute"); });
  for (const Entry& entry : entries) {
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
  return 0;
}
