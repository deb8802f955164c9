// wgmma.mma_async computes a warpgroup's product of two matrices on the tensor cores, which read the second from shared
// memory; for sm_90a only. Between wgmma_fence and the end of the wait, no thread touches the registers of the sums.
#pragma once

#include <type_traits>

#include "instructions.h"

namespace msops {

// Must come before the first product, and again where registers of its operands were written since.
__device__ __forceinline__ void wgmma_fence() { MSOPS_SM90A("wgmma.fence.sync.aligned;" : : : "memory"); }

// Makes one group of all products that were begun since the last commit.
__device__ __forceinline__ void wgmma_commit_group() { MSOPS_SM90A("wgmma.commit_group.sync.aligned;" : : : "memory"); }

// Waits until at most the kGroups latest groups are in flight.
template <int kGroups>
__device__ __forceinline__ void wgmma_wait_group() {
  MSOPS_SM90A("wgmma.wait_group.sync.aligned %0;" : : "n"(kGroups) : "memory");
}

// Describes a matrix in shared memory that is to be transposed, in tiles of 64 columns whose rows, of 128 bytes, are
// stored as TMA does with its swizzle of 128 bytes. The tiles are at a distance of `bytes`. In a cluster, addresses
// have the block's number above their lower 18 bits, which would change the distance.
__device__ __forceinline__ uint64_t wgmma_transposed(unsigned address, unsigned bytes) {
  constexpr uint64_t kSwizzle128 = 1, kBytesOf8Rows = 1024;
  const unsigned packs = address % (1 << 18) / 16;
  return kSwizzle128 << 62 | kBytesOf8Rows / 16 << 32 | static_cast<uint64_t>(bytes / 16) << 16 | packs;
}

// Describes a matrix of one such tile that is not to be transposed.
__device__ __forceinline__ uint64_t wgmma_matrix(unsigned address) { return wgmma_transposed(address, 16); }

// The numbers of the sums among an instruction's operands.
#define MSOPS_NUMBERS_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define MSOPS_NUMBERS_32 \
  MSOPS_NUMBERS_16       \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define MSOPS_NUMBERS_64                                                             \
  MSOPS_NUMBERS_32                                                                   \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define MSOPS_NUMBERS_128                                                                        \
  MSOPS_NUMBERS_64                                                                               \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"             \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"             \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// Begins d += a b of TF32, where b is 64 rows of 8 numbers. A thread holds a as for mma_m16n8k8, of its warp's 16 rows,
// and d[i] is at row lane / 4 (+ 8 where i / 2 % 2) and column i / 4 * 8 + 2 (lane % 4) + i % 2.
__device__ __forceinline__ void wgmma_m64n64k8(float (&d)[32], const uint32_t (&a)[4], [[maybe_unused]] uint64_t b) {
#define MSOPS_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
  MSOPS_SM90A(
      "{.reg .pred adds; setp.eq.u32 adds, 0, 0;"
      "wgmma.mma_async.sync.aligned.m64n64k8.f32.tf32.tf32 {" MSOPS_NUMBERS_32
      "}, {%32, %33, %34, %35}, %36, adds, 1, 1;}" : MSOPS_4(0),
      MSOPS_4(4), MSOPS_4(8), MSOPS_4(12), MSOPS_4(16), MSOPS_4(20), MSOPS_4(24), MSOPS_4(28) : "r"(a[0]), "r"(a[1]),
      "r"(a[2]), "r"(a[3]), "l"(b));
#undef MSOPS_4
}

// Keeps the compiler from moving uses of sums, float or int32, before the wait that comes before this.
template <typename T, int kN>
__device__ __forceinline__ void wgmma_fence_operand(T (&d)[kN][4]) {
#pragma unroll
  for (int n = 0; n < kN; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if constexpr (std::is_same<T, float>::value) {
        asm volatile("" : "+f"(d[n][i]) : : "memory");
      } else {
        asm volatile("" : "+r"(d[n][i]) : : "memory");
      }
}

// The functions below begin d += a b of float16 for 64 rows, 8 kN columns and 16 terms; or d = a b, where adds is 0. A
// thread holds d as for mma_m16n8k16, of its warp's 16 rows. They take b as rows of its columns, as wgmma_matrix
// describes it, or as rows of its terms, as wgmma_transposed does, if kTransposed is 1.

#define MSOPS_4(kind, i) kind(d[i][0]), kind(d[i][1]), kind(d[i][2]), kind(d[i][3])
#define MSOPS_16(kind, i) MSOPS_4(kind, i), MSOPS_4(kind, i + 1), MSOPS_4(kind, i + 2), MSOPS_4(kind, i + 3)
#define MSOPS_32(kind, i) MSOPS_16(kind, i), MSOPS_16(kind, i + 4)
#define MSOPS_64(kind, i) MSOPS_32(kind, i), MSOPS_32(kind, i + 8)
#define MSOPS_128(kind, i) MSOPS_64(kind, i), MSOPS_64(kind, i + 16)

// Defines the functions for some columns, whose sums have these numbers and are these operands. Other operands have the
// numbers from i to o. a is in shared memory: 64 rows of its terms, or rows of its terms transposed, if kTransposedA is
// 1; or a thread holds it as for mma_m16n8k16, of its warp's 16 rows.
#define MSOPS_WGMMA(columns, numbers, sums, i, j, k, l, m, n, o)                                                      \
  template <int kTransposed, int kTransposedA = 0>                                                                    \
  __device__ __forceinline__ void wgmma_m64n##columns##k16(float (&d)[columns / 8][4], uint64_t a, uint64_t b,        \
                                                           [[maybe_unused]] int adds) {                               \
    MSOPS_SM90A("{.reg .pred adds; setp.ne.b32 adds, %" #k                                                            \
                ", 0;"                                                                                                \
                "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32.f16.f16 {" numbers "}, %" #i ", %" #j           \
                ", adds, 1, 1, %" #m ", %" #l ";}" : sums : "l"(a),                                                   \
                "l"(b), "r"(adds), "n"(kTransposed), "n"(kTransposedA));                                              \
  }                                                                                                                   \
  template <int kTransposed>                                                                                          \
  __device__ __forceinline__ void wgmma_m64n##columns##k16(float (&d)[columns / 8][4], const uint32_t (&a)[4],        \
                                                           uint64_t b, [[maybe_unused]] int adds) {                   \
    MSOPS_SM90A("{.reg .pred adds; setp.ne.b32 adds, %" #n                                                            \
                ", 0;"                                                                                                \
                "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32.f16.f16 {" numbers "}, {%" #i ", %" #j ", %" #k \
                ", %" #l "}, %" #m ", adds, 1, 1, %" #o ";}" : sums : "r"(a[0]),                                      \
                "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds), "n"(kTransposed));                                \
  }
MSOPS_WGMMA(64, MSOPS_NUMBERS_32, MSOPS_32("+f", 0), 32, 33, 34, 35, 36, 37, 38)
MSOPS_WGMMA(128, MSOPS_NUMBERS_64, MSOPS_64("+f", 0), 64, 65, 66, 67, 68, 69, 70)
MSOPS_WGMMA(256, MSOPS_NUMBERS_128, MSOPS_128("+f", 0), 128, 129, 130, 131, 132, 133, 134)

// Defines a function that begins d += a b of int8, or d = a b, for 64 rows and 32 terms. Both factors are in shared
// memory, as rows of their terms.
#define MSOPS_WGMMA_S8(columns, numbers, sums, i, j, k)                                                          \
  __device__ __forceinline__ void wgmma_m64n##columns##k32(int32_t (&d)[columns / 8][4], uint64_t a, uint64_t b, \
                                                           [[maybe_unused]] int adds) {                          \
    MSOPS_SM90A("{.reg .pred adds; setp.ne.b32 adds, %" #k                                                       \
                ", 0;"                                                                                           \
                "wgmma.mma_async.sync.aligned.m64n" #columns "k32.s32.s8.s8 {" numbers "}, %" #i ", %" #j        \
                ", adds;}" : sums : "l"(a),                                                                      \
                "l"(b), "r"(adds));                                                                              \
  }
MSOPS_WGMMA_S8(32, MSOPS_NUMBERS_16, MSOPS_16("+r", 0), 16, 17, 18)
MSOPS_WGMMA_S8(64, MSOPS_NUMBERS_32, MSOPS_32("+r", 0), 32, 33, 34)
MSOPS_WGMMA_S8(128, MSOPS_NUMBERS_64, MSOPS_64("+r", 0), 64, 65, 66)
MSOPS_WGMMA_S8(256, MSOPS_NUMBERS_128, MSOPS_128("+r", 0), 128, 129, 130)

#undef MSOPS_WGMMA
#undef MSOPS_WGMMA_S8
#undef MSOPS_4
#undef MSOPS_16
#undef MSOPS_32
#undef MSOPS_64
#undef MSOPS_128
#undef MSOPS_NUMBERS_16
#undef MSOPS_NUMBERS_32
#undef MSOPS_NUMBERS_64
#undef MSOPS_NUMBERS_128

// Call the function for 8 kN columns.
template <int kTransposed, int kN, typename A>
__device__ __forceinline__ void wgmma_k16(float (&d)[kN][4], const A& a, uint64_t b, int adds) {
  static_assert(kN == 8 || kN == 16 || kN == 32, "there are functions for 64, 128 and 256 columns");
  if constexpr (kN == 8) wgmma_m64n64k16<kTransposed>(d, a, b, adds);
  if constexpr (kN == 16) wgmma_m64n128k16<kTransposed>(d, a, b, adds);
  if constexpr (kN == 32) wgmma_m64n256k16<kTransposed>(d, a, b, adds);
}

template <int kN>
__device__ __forceinline__ void wgmma_k32(int32_t (&d)[kN][4], uint64_t a, uint64_t b, int adds) {
  static_assert(kN == 4 || kN == 8 || kN == 16 || kN == 32, "there are functions for 32, 64, 128 and 256 columns");
  if constexpr (kN == 4) wgmma_m64n32k32(d, a, b, adds);
  if constexpr (kN == 8) wgmma_m64n64k32(d, a, b, adds);
  if constexpr (kN == 16) wgmma_m64n128k32(d, a, b, adds);
  if constexpr (kN == 32) wgmma_m64n256k32(d, a, b, adds);
}

}  // namespace msops
