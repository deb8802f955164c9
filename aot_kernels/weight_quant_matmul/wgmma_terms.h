// Products of float16 by wgmma on sm_90a, for weights whose terms lie close together: codes are widened in the
// registers of the warps that multiply them.
//
// The weights are the left operand, so that a token is a column. One thread copies codes and x by TMA into a ring of
// stages. A warp has 16 kM neighbouring outputs, and a lane the kEach of them from number kEach row on, where row is
// lane / 4: they are rows `row` and row + 8 of its wgmmas, so that a lane stores neighbours. Where there are few tiles,
// the blocks of a cluster share the terms of one, and then add their sums in order.
#pragma once

#include "../common/gpu/cluster.h"
#include "../common/gpu/divisor.h"
#include "../shared/product/mma_sides.h"
#include "../shared/product/wgmma_tiles.h"
#include "widen_pairs.h"

#ifdef __CUDACC__

namespace msops::weight_quant_matmul {

#if CUDART_VERSION >= 12000

// Tiles of kWide have 128 outputs and 256 tokens, so that codes are widened for many. Those of kTall have 256 outputs
// and 128 tokens. Those of kShared have 128 outputs and 64 tokens, whose terms the blocks of a cluster share.
enum class Tiling { kWide, kTall, kShared };

// kIsExact is for whole zero points and scales of float16: code - zero point is exact in float16, and its product with
// the scale is rounded once. Each of two warpgroups has half of a tile's outputs, and another warp copies: the last one
// or, where registers move between warpgroups, the first one.
template <int kBits_, bool kIsExact_, Tiling kTiling>
struct TermsShape {
  static constexpr bool kIsExact = kIsExact_, kIsShared = kTiling == Tiling::kShared;
  static constexpr int kBits = kBits_, kM = kTiling == Tiling::kTall ? 2 : 1, kConsumers = 2;
  static constexpr int kFirst = kIsShared ? 0 : 4, kThreads = 128 * kConsumers + (kIsShared ? 32 : 128);
  static constexpr int kOutputs = 64 * kM * kConsumers, kEach = 2 * kM;     // of a tile, and of a lane
  static constexpr int kTokens = kTiling == Tiling::kWide ? 256 : 64 * kM;  // of a tile
  static constexpr int kDeep = kBits == 4 && kTiling != Tiling::kWide ? 128 : 64, kRowBytes = kDeep * kBits / 8;
  static constexpr int kPiece = 32, kPieces = kDeep / kPiece;  // terms that always share a scale
  static constexpr int kStages = 192 * 1024 / (kTokens * kDeep * 2 + kOutputs * kRowBytes) / (kIsShared ? 2 : 1);
  static constexpr int kProducerRegisters = 40, kRegisters = 232, kBlocks = kIsShared ? 2 : 1;

  // Codes are (kEach, kOutputs / kEach, kRowBytes): the first axis is an output's number modulo kEach.
  struct Stage {
    using Element = unsigned char;
    using X = product::SharedTile<kTokens, kDeep>;
    static constexpr int kBytes = X::kBytes + kOutputs * kRowBytes;
    unsigned address;

    __device__ __forceinline__ X x() const { return {address}; }
    __device__ __forceinline__ unsigned codes() const { return address + X::kBytes; }
  };
  using Factors = product::Ring<kStages, Stage>;
  using Memory = product::SharedMemory<Factors>;
  static constexpr int kTableBytes = 1024, kBytes = Memory::kBytes + kTableBytes;

  // In the end, the sums of a block of a cluster (kTokens, kOutputs) take the stages' place.
  static constexpr int kStride = kOutputs + 4, kMostParts = 4;  // kMostParts: blocks of a cluster
  static_assert(!kIsShared || kTokens * kStride * 4 <= Factors::kBytes, "the sums take the stages' place");
};

// Tiles of neighbouring blocks, or clusters, have the same outputs, so that they share codes. A block computes the
// products of a tile with terms from `first` to `end`, which are whole stages.
template <typename S>
struct TermsTiles {
  const Products<Half>& p;
  int64_t tile, apart, first = 0, end = p.deep;

  __device__ __forceinline__ explicit TermsTiles(const Products<Half>& products) : p(products) {
    const unsigned parts = S::kIsShared ? cluster_nctarank() : 1;
    tile = blockIdx.x / parts, apart = gridDim.x / parts;
    if (!S::kIsShared) return;
    const int64_t stages = (p.deep + S::kDeep - 1) / S::kDeep, part = cluster_ctarank();
    first = stages * part / parts * S::kDeep;
    if (part + 1 < parts) end = stages * (part + 1) / parts * S::kDeep;
  }
  static MSOPS_BOTH int64_t down(const Products<Half>& p) { return (p.tokens + S::kTokens - 1) / S::kTokens; }
  static MSOPS_BOTH int64_t count(const Products<Half>& p) {
    return down(p) * ((p.outputs + S::kOutputs - 1) / S::kOutputs);
  }
  __device__ __forceinline__ bool has_more() const { return tile < count(p); }
  __device__ __forceinline__ void advance() { tile += apart; }
  __device__ __forceinline__ int64_t token() const { return tile % down(p) * S::kTokens; }
  __device__ __forceinline__ int64_t output() const { return tile / down(p) * S::kOutputs; }
};

// Fills stages. One thread calls this.
template <typename S>
__device__ __forceinline__ void copy_stages(const Products<Half>& p, const TensorMap& x, const TensorMap& codes,
                                            const typename S::Factors& factors) {
  unsigned copy = 0;
  for (TermsTiles<S> tiles(p); tiles.has_more(); tiles.advance()) {
    const int token = static_cast<int>(tiles.token()), output = static_cast<int>(tiles.output());
    for (int k = static_cast<int>(tiles.first); k < static_cast<int>(tiles.end); k += S::kDeep, ++copy) {
      const typename S::Stage stage = factors.tile(copy);
      const unsigned full = factors.full(copy);
      factors.wait_for_room(copy);
      mbarrier_arrive_expect_tx(full, S::Stage::kBytes);
      for (int box = 0; box < S::Stage::X::kBoxes; ++box)
        tma_load_5d(stage.x().box(box).address, full, x, k + 64 * box, token, 0, 0, 0);
      tma_load_5d(stage.codes(), full, codes, k * S::kBits / 8, output / S::kEach, 0, 0, 0);
    }
  }
}

// TermsWarp computes a warp's outputs of the block's tiles.
template <typename S>
class TermsWarp {
 public:
  // `pairs` has what the two codes of a byte stand for, if there is a table. `groups` divides numbers of pieces.
  __device__ __forceinline__ TermsWarp(const Products<Half>& p, const Divisor& groups, const uint32_t* pairs,
                                       const typename S::Memory& memory, const typename S::Factors& factors, int warp)
      : p_(p), groups_(groups), pairs_(pairs), memory_(memory), factors_(factors), warp_(warp) {}

  __device__ __forceinline__ void compute() {
    unsigned copy = 0;
    for (TermsTiles<S> tiles(p_); tiles.has_more(); tiles.advance()) {
      const int64_t output = tiles.output() + 16 * S::kM * warp_ + S::kEach * row_;
      int rest, adds = 0;
      load_scales(output, groups_.divide(static_cast<int>(tiles.first) / S::kPiece, &rest));
      const unsigned first = copy;
      for (int k = static_cast<int>(tiles.first); k < static_cast<int>(tiles.end); k += S::kDeep, ++copy) {
        factors_.wait(copy);
        const typename S::Stage stage = factors_.tile(copy);
        const unsigned char* const codes = memory_[stage] + S::Stage::X::kBytes + (8 * warp_ + row_) * S::kRowBytes;
        Codewords words;
        read(words, codes, 0);
        unrolled<S::kPieces>([&](int piece) {
          find_scales(output, k / S::kPiece + piece, copy == first && piece == 0);
          widen(a_[piece % 2], words);
          if (piece + 1 < S::kPieces) read(words, codes, piece + 1);
          wgmma_fence();
          unrolled<2, S::kM>([&](int step, int m) {
            wgmma_k16<0>(sums_[m], a_[piece % 2][m][step], stage.x().columns(2 * piece + step), step > 0 ? 1 : adds);
          });
          wgmma_commit_group();
          adds = 1;
          wgmma_wait_group<1>();  // the registers of the piece before are free
          if (piece == 0 && copy != first) factors_.release(copy - 1);
        });
      }
      wgmma_wait_group<0>();
      unrolled<S::kM>([&](int m) { wgmma_fence_operand(sums_[m]); });
      if constexpr (S::kIsShared) return;
      factors_.release(copy - 1);
      store(output, tiles.token());
    }
  }

  // Leaves the sums in shared memory: (kTokens, kStride).
  __device__ __forceinline__ void put(float* to) const {
    unrolled<S::kTokens / 8, 2>([&](int n, int i) {
      Pack<float, S::kEach> pack;
      unrolled<S::kEach>([&](int j) { pack.values[j] = sums_[j / 2][n][2 * (j % 2) + i]; });
      msops::store(to + (8 * n + 2 * quad_ + i) * S::kStride + 16 * S::kM * warp_ + S::kEach * row_, pack);
    });
  }

 private:
  // What the lane's outputs have of a piece: words of 16 bytes, which all lanes of a quad read.
  struct Codewords {
    uint4 of[S::kEach][S::kBits / 4];
  };
  __device__ __forceinline__ void read(Codewords& words, const unsigned char* codes, int piece) const {
    unrolled<S::kEach, S::kBits / 4>([&](int j, int i) {
      const unsigned char* const from = codes + j * (S::kOutputs / S::kEach * S::kRowBytes) + piece * 4 * S::kBits;
      words.of[j][i] = reinterpret_cast<const uint4*>(from)[i];
    });
  }

  // Begins to load the scales and zero points of a group, for the lane's outputs. They are converted when they are
  // used, so that nothing waits for them before.
  __device__ __forceinline__ void load_scales(int64_t output, int group) {
    const Codes<Half>& w = p_.weights;
    const void* const zeros = w.zero.numbers.data;
    if (output >= p_.outputs || group >= static_cast<int>(w.groups)) return;
    unrolled<S::kEach>([&](int j) {
      const int64_t i = (output + j) * w.groups + group;
      next_scale_[j] = w.scale.are_float ? static_cast<const uint32_t*>(w.scale.data)[i]
                                         : static_cast<const uint16_t*>(w.scale.data)[i];
      if (w.zero.kind == ZeroPoints<Half>::kFloating) {
        next_zero_[j] =
            w.zero.numbers.are_float ? static_cast<const uint32_t*>(zeros)[i] : static_cast<const uint16_t*>(zeros)[i];
      } else if (zeros) {
        next_zero_[j] = static_cast<const uint8_t*>(zeros)[i];
      }
    });
  }

  // Sets the scales for a piece, if it is the first one or a group begins with it, and begins to load the next ones.
  __device__ __forceinline__ void find_scales(int64_t output, int piece, bool is_first) {
    int rest;
    const int group = groups_.divide(piece, &rest);
    if (rest != 0 && !is_first) return;
    const auto kind = p_.weights.zero.kind;
    const int most = p_.weights.are_signed ? 1 << (S::kBits - 1) : 0;
    unrolled<S::kEach>([&](int j) {
      const int whole = kind == ZeroPoints<Half>::kNone     ? 0
                        : kind == ZeroPoints<Half>::kSigned ? static_cast<int8_t>(next_zero_[j])
                                                            : static_cast<int>(next_zero_[j]);
      if constexpr (S::kIsExact) {
        scale_[j] = next_scale_[j] * 0x10001u;
        less_[j] = sub_f16x2(S::kBits == 4 ? 0x63800000 : 0, PairZero(whole + most).pair);  // 960 and 0
      } else {
        const float zero = kind == ZeroPoints<Half>::kFloating
                               ? number_of(next_zero_[j], p_.weights.zero.numbers.are_float)
                               : static_cast<float>(whole);
        scale_[j] = __float_as_uint(number_of(next_scale_[j], p_.weights.scale.are_float));
        less_[j] = __float_as_uint(zero + (pairs_ ? 0 : most));
      }
    });
    load_scales(output, group + 1);
  }
  static __device__ __forceinline__ float number_of(uint32_t bits, bool is_float) {
    Half half;
    half.bits = static_cast<uint16_t>(bits);
    return is_float ? __uint_as_float(bits) : static_cast<float>(half);
  }

  // Widens the lane's codes of a piece to the left operands of its two steps.
  __device__ __forceinline__ void widen(uint32_t (&a)[S::kM][2][4], const Codewords& words) const {
    unrolled<S::kEach, 2, 2>([&](int j, int step, int upper) {
      const uint4 four = words.of[j][S::kBits == 4 ? 0 : step % (S::kBits / 4)];  // 4 bits: a word has eight terms
      if constexpr (S::kBits == 4) {
        const uint32_t word = step ? (upper ? four.w : four.z) : (upper ? four.y : four.x);
        a[j / 2][step][j % 2 + 2 * upper] = widened(prmt(word, word, 0x1111u * quad_), j);
      } else {
        const uint32_t two = prmt(upper ? four.z : four.x, upper ? four.w : four.y, 0x2222u * quad_ + 0x1100u);
        a[j / 2][step][j % 2 + 2 * upper] = widened(two, j);
      }
    });
  }

  // Returns the weights of two codes: those of a byte, which all four bytes have, or bytes 0 and 2.
  __device__ __forceinline__ uint32_t widened(uint32_t bytes, int j) const {
    constexpr uint32_t kMask = S::kBits == 4 ? 0xf0000f : 0xff00ff, kSigns = S::kBits == 4 ? 0x800008 : 0x800080;
    constexpr uint32_t kFactors = S::kBits == 4 ? 0x2c003c00 : 0x3c003c00;  // 1 / 16 or 1, and 1
    const uint32_t pair = (bytes & kMask) ^ (p_.weights.are_signed ? kPairBase | kSigns : kPairBase);
    if constexpr (S::kIsExact) return mul_f16x2(fma_f16x2(pair, kFactors, less_[j]), scale_[j]);
    const uint32_t whole = pairs_ ? pairs_[bytes & 255] : fma_f16x2(pair, kFactors, product::pair_of(-1024, -kUpper));
    const float scale = __uint_as_float(scale_[j]), zero = __uint_as_float(less_[j]);
    return product::pair_of((number_of(whole, false) - zero) * scale, (number_of(whole >> 16, false) - zero) * scale);
  }

  // Stores the lane's sums.
  __device__ __forceinline__ void store(int64_t output, int64_t token) const {
    if (output >= p_.outputs) return;
    float bias[S::kEach];
    unrolled<S::kEach>([&](int j) { bias[j] = p_.bias[output + j]; });
    unrolled<S::kTokens / 8, 2>([&](int n, int i) {
      const int64_t at = token + 8 * n + 2 * quad_ + i;
      if (at >= p_.tokens) return;
      Pack<Half, S::kEach> pack;
      unrolled<S::kEach>([&](int j) { pack.values[j] = Half(sums_[j / 2][n][2 * (j % 2) + i] + bias[j]); });
      msops::store(p_.out + at * p_.outputs + output, pack);
    });
  }

  static constexpr float kUpper = S::kBits == 4 ? 64 : 1024;  // what the second code of a pair is added to
  const Products<Half>& p_;
  const Divisor& groups_;
  const uint32_t* const pairs_;
  const typename S::Memory& memory_;
  const typename S::Factors& factors_;
  const int warp_, quad_ = threadIdx.x % 4, row_ = threadIdx.x % 32 / 4;
  uint32_t next_scale_[S::kEach] = {}, next_zero_[S::kEach] = {}, scale_[S::kEach] = {}, less_[S::kEach] = {};
  uint32_t a_[2][S::kM][2][4];
  float sums_[S::kM][S::kTokens / 8][4];
};

// Adds the sums of a cluster's blocks, and stores them: a warp those of a token, four outputs a lane.
template <typename S>
__device__ __forceinline__ void store_shared(const Products<Half>& p, const float* sums) {
  const TermsTiles<S> tiles(p);
  const int part = static_cast<int>(cluster_ctarank()), parts = static_cast<int>(cluster_nctarank());
  const int column = threadIdx.x % 32 * 4;
  static_assert(S::kOutputs == 128, "a warp has the outputs of a token");
  for (int i = threadIdx.x / 32 * parts + part; i < S::kTokens; i += S::kThreads / 32 * parts) {
    const int64_t token = tiles.token() + i, output = tiles.output() + column;
    if (token >= p.tokens) break;
    Pack<float, 4> packs[S::kMostParts];  // all are on their way at once
    float total[4] = {};
    unrolled<S::kMostParts>([&](int of) {
      if (of < parts) packs[of] = ld_shared_cluster(sums + i * S::kStride + column, of);
    });
    unrolled<S::kMostParts, 4>([&](int of, int j) {
      if (of < parts) total[j] += packs[of].values[j];
    });
    if (output >= p.outputs) continue;
    unrolled<4>([&](int j) { total[j] += p.bias[output + j]; });
    store_at_once(p.out + token * p.outputs + output, rounded_pack<Half>(total));
  }
}

template <typename S>
__device__ __forceinline__ void multiply_terms(const Products<Half>& p, const Divisor& groups, const TensorMap& x,
                                               const TensorMap& codes) {
  extern __shared__ __align__(1024) unsigned char shared[];
  typename S::Memory memory{shared};
  typename S::Factors factors;
  memory.take(factors);
  uint32_t* const pairs = reinterpret_cast<uint32_t*>(shared + S::Memory::kBytes);
  if (threadIdx.x == 0) {
    factors.init(4 * S::kConsumers);
    fence_mbarrier_init();
  }
  if (p.weights.table)
    for (int i = threadIdx.x; i < 256; i += S::kThreads)
      pairs[i] = product::pair_of(p.weights.table[i & 15], p.weights.table[i >> 4]);
  __syncthreads();
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0) - S::kFirst;  // is known to be the same in a warp
  TermsWarp<S> of_warp(p, groups, p.weights.table ? pairs : nullptr, memory, factors, warp);
  if (0 <= warp && warp < 4 * S::kConsumers) {
    if constexpr (!S::kIsShared) setmaxnreg_inc<S::kThreads, S::kProducerRegisters, S::kRegisters>();
    of_warp.compute();
  } else {
    if constexpr (!S::kIsShared) setmaxnreg_dec<S::kProducerRegisters>();
    if (threadIdx.x == (S::kIsShared ? 128 * S::kConsumers : 0)) copy_stages<S>(p, x, codes, factors);
    __syncwarp();
  }
  if constexpr (S::kIsShared) {
    float* const sums = reinterpret_cast<float*>(shared);
    __syncthreads();  // all stages have been read
    if (warp < 4 * S::kConsumers) of_warp.put(sums);
    cluster_arrive_wait();
    store_shared<S>(p, sums);
    cluster_arrive_wait();  // other blocks may still read this one's sums
  }
}

// Where the instructions are missing, the kernel has no code, and is compiled for one thread only.
template <typename S>
__global__ void __launch_bounds__(kHasSm90a ? S::kThreads : 1, S::kBlocks)
    terms_kernel(const __grid_constant__ Products<Half> p, const __grid_constant__ Divisor groups,
                 const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap codes) {
  if constexpr (kHasSm90a) multiply_terms<S>(p, groups, x, codes);
}

template <typename S>
bool launch_terms(Call& call, const Products<Half>& p) {
  const auto kernel = terms_kernel<S>;
  const Codes<Half>& w = p.weights;
  const int64_t tiles = TermsTiles<S>::count(p), stages = (p.deep + S::kDeep - 1) / S::kDeep;
  const int64_t blocks = product::wgmma_blocks<S>(kernel, tiles);
  TensorMap x, codes;
  const TensorMap::Dimension of_x[] = {{p.deep, 1, 64}, {p.tokens, p.deep, S::kTokens}};
  const TensorMap::Dimension of_codes[] = {{w.pitch(), 1, S::kRowBytes},
                                           {p.outputs / S::kEach, S::kEach * w.pitch(), S::kOutputs / S::kEach},
                                           {S::kEach, w.pitch(), S::kEach}};
  if (blocks == 0 || !x.encode(p.x, of_x) || !codes.encode(w.data, of_codes, 0)) return false;
  constexpr int64_t kEndless = 1 << 30;  // pieces, of a single group
  const Divisor groups(w.groups == 1 ? kEndless : w.group / S::kPiece);
  unsigned parts = 1;
  if (S::kIsShared)
    while (parts < S::kMostParts && 2 * parts * tiles <= Gpu().multiprocessors && 2 * parts <= stages) parts *= 2;
  const Grid grid = S::kIsShared ? Grid(parts * tiles).in_clusters(parts) : Grid(blocks);
  return launch(call, kernel, grid, S::kThreads, S::kBytes, p, groups, x, codes), true;
}

// Results that have no tiles for half of the multiprocessors are shared.
template <int kBits, bool kIsExact>
bool launch_terms(Call& call, const Products<Half>& p) {
  using Wide = TermsShape<kBits, kIsExact, Tiling::kWide>;
  using Tall = TermsShape<kBits, kIsExact, Tiling::kTall>;
  const auto are_enough = [](int64_t tiles) { return 2 * tiles > Gpu().multiprocessors; };
  if (p.tokens > 256 && are_enough(TermsTiles<Wide>::count(p))) return launch_terms<Wide>(call, p);
  if (p.tokens > 64 && are_enough(TermsTiles<Tall>::count(p))) return launch_terms<Tall>(call, p);
  return launch_terms<TermsShape<kBits, kIsExact, Tiling::kShared>>(call, p);
}

// Returns false, and launches nothing, if the GPU lacks the instructions, or rows are not whole packs.
inline bool multiply_terms(Call& call, const Products<Half>& p) {
  const Codes<Half>& w = p.weights;
  if (!p.by_terms || w.groups_rows || p.deep == 0 || (w.groups > 1 && w.group % 32 != 0) || (w.table && w.bits == 8) ||
      std::max({p.tokens, p.deep, p.outputs}) > INT32_MAX / 2 || !w.have_rows_at(16) ||
      !product::has_packs(p.x, p.deep) || !product::has_packs(p.out, p.outputs))
    return false;
  const bool is_exact = !w.scale.are_float && w.zero.kind != ZeroPoints<Half>::kFloating && !w.table;
  if (w.bits == 4) return is_exact ? launch_terms<4, true>(call, p) : launch_terms<4, false>(call, p);
  return is_exact ? launch_terms<8, true>(call, p) : launch_terms<8, false>(call, p);
}

#else
inline bool multiply_terms(Call&, const Products<Half>&) { return false; }
#endif

}  // namespace msops::weight_quant_matmul

#endif
