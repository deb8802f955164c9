// A Divisor divides by a number known before the launch, by a multiplication and a shift.
#pragma once

#include <cstdint>

namespace msops {

class Divisor {
 public:
  explicit Divisor(int64_t divisor = 1) : divisor_(static_cast<int>(divisor)) {
    while ((int64_t{1} << shift_) < divisor) ++shift_;
    factor_ = static_cast<unsigned>((((uint64_t{1} << shift_) - divisor) << 32) / divisor + 1);
  }
  __host__ __device__ int value() const { return divisor_; }
  // Returns n / divisor, and sets *rest = n % divisor, for 0 <= n < 2^31.
  __device__ int divide(int n, int* rest) const {
    const int quotient = static_cast<int>((__umulhi(n, factor_) + n) >> shift_);
    *rest = n - quotient * divisor_;
    return quotient;
  }

 private:
  int divisor_, shift_ = 0;
  unsigned factor_;
};

}  // namespace msops
