// N neighbouring elements, moved by one load or store of up to 16 bytes.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "dtype.h"

namespace msops {

template <typename T, int N>
struct alignas(sizeof(T) * (N & -N)) Pack {
  T values[N];
};

// The elements of a 16-byte pack.
template <typename T>
constexpr int kPackWidth = 16 / sizeof(T);

template <int N, typename T>
MSOPS_BOTH Pack<T, N> load(const T* from) {
  return *reinterpret_cast<const Pack<T, N>*>(from);
}

template <int N, typename T>
MSOPS_BOTH void store(T* to, const Pack<T, N>& pack) {
  *reinterpret_cast<Pack<T, N>*>(to) = pack;
}

template <int N, typename T>
bool is_aligned(const T* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % (sizeof(T) * N) == 0;
}

// Calls `f(Constant<N>{})` with the widest N for which packs of N elements tile rows of `row` elements that begin at
// each of the pointers; with 1 on the CPU, where compilers form packs of their own.
template <typename T, int N = kPackWidth<T>, typename F>
void with_width(bool on_cpu, int64_t row, std::initializer_list<const T*> pointers, F&& f) {
  if constexpr (N > 1) {
    bool fits = !on_cpu && row % N == 0;
    for (const T* p : pointers) fits &= is_aligned<N>(p);
    if (!fits) return with_width<T, N / 2>(on_cpu, row, pointers, static_cast<F&&>(f));
  }
  f(Constant<N>{});
}

}  // namespace msops
