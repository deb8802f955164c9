// Where a graph leaves sizes open, MindSpore asks the library for the sizes of the outputs, each time before it runs:
// for an entry F, it calls FInferShape. The rule is in Python; msops writes its address to FRule.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <vector>

#include "attributes.h"

namespace msops {

// A Rule takes the inputs' ranks and shapes, writes the rank and the sizes of each output to `sizes`, which has room
// for `room` numbers, and returns the number of outputs. If it fails, it returns 0 and writes a message.
using Rule = int (*)(int64_t operator_number, const int* ranks, const int64_t* const* shapes, int64_t* sizes, int room,
                     char* message);

// FInferShape returns this: a vector of sizes or, for several outputs, a vector of such vectors. The caller destroys
// it.
union OpenSizes {
  std::vector<int64_t> one;
  std::vector<std::vector<int64_t>> several;

  OpenSizes(Rule rule, const int* ranks, const int64_t* const* shapes, void* extra) {
    constexpr int kRoom = 256;
    int64_t number = 0, sizes[kRoom];
    char message[1024] = "its sizes are known to the process alone that made the operator, by msops.custom_op";
    const bool known = rule != nullptr && Attributes(extra).read("msops_operator", &number);
    const int outputs = known ? rule(number, ranks, shapes, sizes, kRoom, message) : 0;
    if (outputs == 0) throw std::invalid_argument(message);
    const int64_t* next = sizes;
    const auto take = [&next] {
      const int64_t rank = *next++;
      next += rank;
      return std::vector<int64_t>(next - rank, next);
    };
    if (outputs == 1) {
      new (&one) std::vector<int64_t>(take());
    } else {
      new (&several) std::vector<std::vector<int64_t>>;
      for (int i = 0; i < outputs; ++i) several.push_back(take());
    }
  }
  ~OpenSizes() {}
};

}  // namespace msops
