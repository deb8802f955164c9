// A Pack holds N neighbouring elements, which one load or store of up to 16 bytes moves.
#pragma once

#include <cstdint>
#include <cstring>
#include <initializer_list>

#include "dtype.h"
#ifdef __CUDACC__
#include "gpu/ld_st.h"
#endif

namespace msops {

// A longer pack is moved by several: with more than this alignment, nvcc would move 32 bytes at once since sm_100.
template <typename T, int N>
struct alignas(sizeof(T) * (N & -N) < 16 ? sizeof(T) * (N & -N) : 16) Pack {
  T values[N];
};

// A Unit has the size of an element, or of several that are always neighbours, for code that only moves elements.
template <int kBytes>
struct UnitOf : Type<std::conditional_t<kBytes == 1, uint8_t, std::conditional_t<kBytes == 2, uint16_t, uint32_t>>> {};
template <>
struct UnitOf<8> : Type<uint64_t> {};
template <>
struct UnitOf<16> : Type<Pack<uint32_t, 4>> {};
template <int kBytes>
using Unit = typename UnitOf<kBytes>::type;

// kPackWidth<T> is the number of elements in a pack of 16 bytes.
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

// Forces store() to one instruction, for packs that nvcc would store element by element: where a pack comes from
// several branches, nvcc does not see that its elements are neighbours.
template <int N, typename T>
MSOPS_BOTH void store_at_once(T* to, const Pack<T, N>& pack) {
#ifdef __CUDA_ARCH__
  constexpr int kWords = sizeof pack / 4;
  uint32_t words[kWords > 0 ? kWords : 1];
  memcpy(words, &pack, 4 * kWords);
  if constexpr (kWords == 4) return st_global_v4(to, words);
  if constexpr (kWords == 2) return st_global_v2(to, words);
  if constexpr (kWords == 1 && N > 1) return st_global_b32(to, words[0]);
#endif
  store(to, pack);
}

// Rounds numbers to a pack. Halves are rounded in pairs, since nvcc would take each pair apart and put it together
// again.
template <typename T, int N>
MSOPS_BOTH Pack<T, N> rounded_pack(const Compute<T> (&numbers)[N]) {
  Pack<T, N> pack;
#ifdef __CUDA_ARCH__
  if constexpr (std::is_same<T, Half>::value && N % 2 == 0) {
    for (int k = 0; k < N; k += 2) {
      const __half2 pair = __floats2half2_rn(numbers[k], numbers[k + 1]);
      memcpy(pack.values + k, &pair, sizeof pair);
    }
  } else
#endif
    for (int k = 0; k < N; ++k) pack.values[k] = T(numbers[k]);
  return pack;
}

// Loads N elements at a stride of kApart, as far as their offsets are below `room`. This is for rows that begin at any
// element, which packs do not tile: neighbouring threads take neighbouring elements, so that each of the N loads of a
// warp reads one run. With kApart = 1, it loads a whole pack.
template <int N, int kApart, typename T>
MSOPS_BOTH Pack<T, N> load(const T* from, [[maybe_unused]] int room) {
  if constexpr (kApart == 1) {
    return load<N>(from);
  } else {
    Pack<T, N> pack = {};
    for (int j = 0; j < N; ++j)
      if (j * kApart < room) pack.values[j] = from[j * kApart];
    return pack;
  }
}

template <int N, int kApart, typename T>
MSOPS_BOTH void store(T* to, const Pack<T, N>& pack, [[maybe_unused]] int room) {
  if constexpr (kApart == 1) {
    store(to, pack);
  } else {
    for (int j = 0; j < N; ++j)
      if (j * kApart < room) to[j * kApart] = pack.values[j];
  }
}

template <int N, typename T>
MSOPS_BOTH bool is_aligned(const T* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % (sizeof(T) * N) == 0;
}

// Returns whether the packs of N around the N elements at `from` are within the array.
template <int N, typename T>
MSOPS_BOTH bool packs_around(const T* from, const T* array, int64_t size) {
  const T* first = from - reinterpret_cast<uintptr_t>(from) / sizeof(T) % N;
  return first >= array && array + size - first >= (first == from ? N : 2 * N);
}

// Returns the pack that begins `shift` bytes after the first word of two aligned packs, which it changes.
template <typename T, int N, int kTwice>
MSOPS_BOTH Pack<T, N> pack_within(uint32_t (&words)[kTwice], unsigned shift) {
  static_assert(kTwice * 4 == 2 * sizeof(T) * N, "these are the words of two packs");
  constexpr int kWords = kTwice / 2;
  for (int step = kWords / 2; step > 0; step /= 2)
    for (int k = 0; k + step < kTwice; ++k) words[k] = shift & 4 * step ? words[k + step] : words[k];
  for (int k = 0; k < kWords; ++k)
    words[k] = static_cast<uint32_t>((uint64_t{words[k + 1]} << 32 | words[k]) >> shift % 4 * 8);
  Pack<T, N> result;
  memcpy(&result, words, sizeof result);
  return result;
}

// Loads N elements from any address, out of the aligned packs around them.
template <int N, typename T>
MSOPS_BOTH Pack<T, N> load_shifted(const T* from) {
  const unsigned shift = reinterpret_cast<uintptr_t>(from) % sizeof(Pack<T, N>);  // bytes
  const T* first = from - shift / sizeof(T);
  const Pack<T, N> packs[2] = {load<N>(first), load<N>(shift ? first + N : first)};
  uint32_t words[2 * N * sizeof(T) / 4];
  memcpy(words, packs, sizeof words);
  return pack_within<T, N>(words, shift);
}

// Returns how many elements after the pointer the next aligned pack of N begins.
template <int N, typename T>
MSOPS_BOTH unsigned elements_to_pack(const T* pointer) {
  return -static_cast<unsigned>(reinterpret_cast<uintptr_t>(pointer) / sizeof(T)) % N;
}

// Calls `f(Constant<N>{})` with the widest N for which packs of N elements tile rows of `row` elements that begin at
// each of the pointers. On the CPU N is 1, since compilers form packs of their own there.
template <typename T, int N = kPackWidth<T>, typename F>
void with_width([[maybe_unused]] bool is_on_cpu, [[maybe_unused]] int64_t row,
                [[maybe_unused]] std::initializer_list<const T*> pointers, F&& f) {
  if constexpr (N > 1) {
    bool fits = !is_on_cpu && row % N == 0;
    for (const T* p : pointers) fits &= is_aligned<N>(p);
    if (!fits) return with_width<T, N / 2>(is_on_cpu, row, pointers, static_cast<F&&>(f));
  }
  f(Constant<N>{});
}

}  // namespace msops
