// Rows of blocks become rows of numbers: all rows, or those that indices name.
#pragma once

#include "../../common/numbers.h"
#include "../../common/pack.h"
#include "../../common/parallel.h"
#include "formats.h"

namespace msops::gguf {

// Eight numbers of a group, on the CPU. GCC makes vectors of two numbers of a loop over bytes.
#if defined(__AVX2__) && defined(__F16C__) && !defined(__CUDA_ARCH__)
using Floats = EightFloats;
MSOPS_BOTH Floats eight_of(uint64_t codes, const Scale& s) {
  using Bytes __attribute__((vector_size(16))) = char;
  using Words __attribute__((vector_size(16))) = long long;
  const Words words = {static_cast<long long>(codes), 0};
  Bytes bytes;
  memcpy(&bytes, &words, sizeof bytes);
  return __builtin_ia32_cvtdq2ps256(__builtin_ia32_pmovzxbd256(bytes)) * s.scale + s.offset;
}
#else
struct Floats {
  float numbers[8];
};
MSOPS_BOTH Floats eight_of(uint64_t codes, const Scale& s) {
  Floats result;
  for (int i = 0; i < 8; ++i) result.numbers[i] = number_of(s, codes >> 8 * i & 0xff);
  return result;
}
#endif

// Unpacks a group, whose numbers share a scale, on the CPU.
template <typename F, typename C>
MSOPS_CPU void unpack_group(const uint8_t* block, int e, C* to) {
  const Scale s = F::scale(block, e);
  MSOPS_UNROLL
  for (int first = 0; first < F::kGroup; first += 8) {
    const Floats eight = eight_of(F::template codes<uint64_t>(block, e + first), s);
    float numbers[8];
    memcpy(numbers, &eight, sizeof numbers);
    for (int i = 0; i < 8; ++i) to[first + i] = numbers[i];
  }
}

// Unpacks n numbers, which are whole blocks, on the CPU.
template <typename F, typename C>
MSOPS_CPU void unpack(const uint8_t* block, C* to, int64_t n) {
  for (; n > 0; n -= F::kNumbers, block += F::kBytes, to += F::kNumbers)
    for (int e = 0; e < F::kNumbers; e += F::kGroup) unpack_group<F>(block, e, to + e);
}

// Rows says which row of blocks each row of the result is. Indices that no row has give zeros.
struct Rows {
  int64_t count;
  Integers indices;  // without data, result and blocks have the same rows

  MSOPS_BOTH int64_t operator[](int64_t i) const { return indices.data ? indices[i] : i; }
};

template <typename F, typename T>
struct Unpack {
  int64_t columns, row_bytes;
  Rows rows;
  const uint8_t* blocks;
  T* out;
  bool has_packs;  // whether four neighbours of a result can be stored at once

  // Index i is four neighbours.
  template <typename I>
  MSOPS_BOTH void operator()(I i) const {
    const I fours = static_cast<I>(columns / 4);
    const int64_t place = i / fours, row = rows[place];
    const int column = static_cast<int>(i - static_cast<I>(place) * fours) * 4;
    float numbers[4] = {};
    if (0 <= row && row < rows.count)
      unpack_four<F>(blocks + row * row_bytes + int64_t{column} / F::kNumbers * F::kBytes, column % F::kNumbers,
                     numbers);
    T* const to = out + place * columns + column;
    Compute<T> wide[4];
    for (int k = 0; k < 4; ++k) wide[k] = numbers[k];
    const Pack<T, 4> pack = rounded_pack<T>(wide);
    if (has_packs) return store_at_once(to, pack);
    for (int k = 0; k < 4; ++k) to[k] = pack.values[k];
  }
};

// A row is unpacked by one thread of the CPU, where all indices were found to be right.
template <typename F, typename T>
struct UnpackRow {
  Unpack<F, T> all;

  MSOPS_CPU void operator()(int64_t place) const {
    constexpr int64_t kRun = 256;
    const uint8_t* block = all.blocks + all.rows[place] * all.row_bytes;
    T* const to = all.out + place * all.columns;
    Compute<T> numbers[kRun];
    for (int64_t k = 0; k < all.columns; k += kRun, block += kRun / F::kNumbers * F::kBytes) {
      const int64_t n = std::min(kRun, all.columns - k);
      unpack<F>(block, numbers, n);
      narrow(numbers, to + k, n);
    }
  }
};

// Unpacks `places` rows. Columns are whole blocks.
template <typename T>
void unpack_rows(Call& call, int64_t kind, int64_t places, int64_t columns, const Rows& rows, const Tensor& blocks,
                 const Tensor& out) {
  if (out.size == 0) return;
  with_format(kind, [&](auto format) {
    using F = typename decltype(format)::type;
    const Unpack<F, T> body{columns,     columns / F::kNumbers * F::kBytes,
                            rows,        blocks.as<const uint8_t>(),
                            out.as<T>(), reinterpret_cast<uintptr_t>(out.data) % alignof(Pack<T, 4>) == 0};
    if (call.is_on_cpu()) return on_cpu(call, places, UnpackRow<F, T>{body}, static_cast<double>(columns));
    on_gpu(call, out.size / 4, out.size, body);
  });
}

// Returns the next parameter, the result, whose dtype the attribute `dtype` says.
inline Tensor result_of(Call& call) {
  constexpr const char* kNames[] = {dtype_name<Half>(), dtype_name<float>(), dtype_name<double>()};
  const char* const dtype = kNames[call.attribute("dtype", 0, 2)];
  const Tensor out = call.tensor("out");
  call.require(!out.dtype || std::strcmp(out.dtype, dtype) == 0, kBadDtype, "out is %s, expected %s",
               out.dtype ? out.dtype : "none", dtype);
  return out;
}

// Returns how many numbers a row of so many bytes has, which must be whole blocks.
inline int64_t numbers_of(Call& call, const Tensor& blocks, int64_t kind) {
  int64_t numbers = 0;
  with_format(kind, [&](auto format) {
    using F = typename decltype(format)::type;
    const int64_t bytes = blocks.dim(-1);
    call.require(bytes % F::kBytes == 0, kBadShape, "blocks has rows of %lld bytes, expected a multiple of %d",
                 static_cast<long long>(bytes), F::kBytes);
    numbers = bytes / F::kBytes * F::kNumbers;
  });
  return numbers;
}

}  // namespace msops::gguf
