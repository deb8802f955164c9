// A warp's part of products of float16 by wgmma on sm_90a: codes are widened in the registers of the warps that
// multiply them.
//
// The weights are the left operand, so that a token is a column. One thread copies codes and x by TMA into a ring of
// stages. A warp has 16 kM neighbouring outputs, and a lane the kEach of them from number kEach row on, where row is
// lane / 4: they are rows `row` and row + 8 of its wgmmas, so that a lane stores neighbours. Where there are few tiles,
// the blocks of a cluster share the terms of one, and then add their sums in order.
#pragma once

#include "../shared/product/mma_sides.h"
#include "../shared/product/wgmma_tiles.h"
#include "widen_pairs.h"

#ifdef __CUDACC__

#include "../common/gpu/cluster.h"
#include "../common/gpu/divisor.h"

namespace msops::weight_quant_matmul {

#if CUDART_VERSION >= 12000

// Tiles of kWide have 128 outputs and 256 tokens, so that codes are widened for many. Those of kTall have 256 outputs
// and 128 tokens. Those of kShared and kLowShared have 128 outputs and 128 or 64 tokens, whose terms the blocks of a
// cluster share.
enum class Tiling { kWide, kTall, kShared, kLowShared };

// A Layout says which axis of the weights comes first, and what has a scale. kTerms are (outputs, terms), and kOutputs
// (terms, outputs), both with groups of terms. kScaledTerms are (terms, outputs) with groups of outputs, so that each
// term has a scale of its own.
enum class Layout { kTerms, kOutputs, kScaledTerms };

// kIsExact is for whole zero points and scales of float16: code - zero point is exact in float16, and its product with
// the scale is rounded once. Each of two warpgroups has half of a tile's outputs, and another warp copies: the last one
// or, where registers move between warpgroups, the first one.
template <int kBits_, bool kIsExact_, Tiling kTiling, Layout kLayout_>
struct WgmmaShape {
  static constexpr Layout kLayout = kLayout_;
  static constexpr bool kByTerms = kLayout == Layout::kTerms, kScalesTerms = kLayout == Layout::kScaledTerms;
  static constexpr bool kIsExact = kIsExact_, kIsLow = kTiling == Tiling::kLowShared,
                        kIsShared = kTiling == Tiling::kShared || kIsLow;
  static constexpr int kBits = kBits_, kM = kTiling == Tiling::kTall ? 2 : 1, kConsumers = 2;
  static constexpr int kFirst = kIsShared ? 0 : 4, kThreads = 128 * kConsumers + (kIsShared ? 32 : 128);
  static constexpr int kOutputs = 64 * kM * kConsumers, kEach = 2 * kM;  // of a tile, and of a lane
  static constexpr int kTokens = kTiling == Tiling::kWide ? 256 : kIsLow ? 64 : 128;
  static constexpr int kDeep = kByTerms && kBits == 4 && kTiling != Tiling::kWide ? 128 : 64;
  static constexpr int kRowBytes = (kByTerms ? kDeep : kOutputs) * kBits / 8, kCodeBytes = kOutputs * kDeep * kBits / 8;
  static constexpr int kPiece = 32, kPieces = kDeep / kPiece;  // terms that always share a scale
  static constexpr int kStages = 192 * 1024 / (kTokens * kDeep * 2 + kCodeBytes) / (kIsLow ? 2 : 1);
  static constexpr int kProducerRegisters = 40, kRegisters = 232, kBlocks = kIsLow ? 2 : 1;

  // By terms, codes are (kEach, kOutputs / kEach, kRowBytes), where the first axis is an output's number modulo kEach.
  // Else they are (kDeep / 8, 2, 4, kRowBytes), where the second axis is a term's number modulo 2. So lanes of a
  // quad read rows that follow one another.
  struct Stage {
    using Element = unsigned char;
    using X = product::SharedTile<kTokens, kDeep>;
    static constexpr int kBytes = X::kBytes + kCodeBytes;
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
struct WgmmaTiles {
  const Products<Half>& p;
  int64_t tile, apart, first = 0, end = p.deep;

  __device__ __forceinline__ explicit WgmmaTiles(const Products<Half>& products) : p(products) {
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

// WgmmaWarp computes a warp's outputs of the block's tiles.
template <typename S>
class WgmmaWarp {
 public:
  // `pairs` has what the two codes of a byte stand for, if there is a table. `groups` divides numbers of pieces.
  __device__ __forceinline__ WgmmaWarp(const Products<Half>& p, const Divisor& groups, const uint32_t* pairs,
                                       const typename S::Memory& memory, const typename S::Factors& factors, int warp)
      : p_(p), groups_(groups), pairs_(pairs), memory_(memory), factors_(factors), warp_(warp) {}

  __device__ __forceinline__ void compute() {
    unsigned copy = 0;
    for (WgmmaTiles<S> tiles(p_); tiles.has_more(); tiles.advance()) {
      const int64_t output = tiles.output() + 16 * S::kM * warp_ + S::kEach * row_;
      int rest, adds = 0;
      group_ = S::kScalesTerms ? groups_.divide(static_cast<int>(output / 16), &rest) : 0;
      const int first_piece = static_cast<int>(tiles.first) / S::kPiece;
      load_scales(output, S::kScalesTerms ? first_piece : groups_.divide(first_piece, &rest));
      const unsigned first = copy;
      for (int k = static_cast<int>(tiles.first); k < static_cast<int>(tiles.end); k += S::kDeep, ++copy) {
        factors_.wait(copy);
        const typename S::Stage stage = factors_.tile(copy);
        const unsigned char* const codes = memory_[stage] + S::Stage::X::kBytes;
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
  // Codewords are the codes of a piece for the lane's outputs. By terms, they are packs of 16 bytes, which all lanes of
  // a quad read. Else they are pairs of terms: each half of a word has the codes of one term, for both outputs.
  struct Codewords {
    uint4 of[S::kEach][S::kBits / 4];
    uint32_t pairs[2][2];  // (step, upper)
  };
  __device__ __forceinline__ void read(Codewords& words, const unsigned char* codes, int piece) const {
    if constexpr (S::kByTerms) {
      unrolled<S::kEach, S::kBits / 4>([&](int j, int i) {
        const unsigned char* const from = codes + (j * (S::kOutputs / S::kEach) + 8 * warp_ + row_) * S::kRowBytes;
        words.of[j][i] = reinterpret_cast<const uint4*>(from + piece * 4 * S::kBits)[i];
      });
    } else {
      unrolled<2, 2>([&](int step, int upper) {
        uint32_t of_term[2];
        unrolled<2>([&](int i) {
          const int row = ((4 * piece + 2 * step + upper) * 2 + i) * 4 + quad_;
          if constexpr (S::kBits == 4) {
            of_term[i] = codes[row * S::kRowBytes + 8 * warp_ + row_];
          } else {
            const unsigned char* const from = codes + row * S::kRowBytes + (warp_ ^ row % 8) * 16 + 2 * row_;
            of_term[i] = *reinterpret_cast<const uint16_t*>(from);
          }
        });
        words.pairs[step][upper] = prmt<0x5410>(of_term[0], of_term[1]);
      });
    }
  }

  // Begins to load the scales and zero points of a group for the lane's outputs or, if terms have scales, of a piece
  // for the lane's terms.
  __device__ __forceinline__ void load_scales(int64_t output, int number) {
    const Codes<Half>& w = p_.weights;
    if (output >= p_.outputs) return;
    if constexpr (S::kScalesTerms) {
      unrolled<kSlots, 2>([&](int slot, int i) {
        const int64_t term = int64_t{number} * S::kPiece + 8 * slot + 2 * quad_ + i;
        if (term >= p_.deep) return;
        load_scale<S::kIsExact>(w, term * w.groups + group_, next_scale_[slot][i], next_zero_[slot][i]);
      });
    } else {
      if (number >= static_cast<int>(w.groups)) return;
      unrolled<kSlots>([&](int slot) {
        const int64_t i = S::kByTerms ? (output + slot) * w.groups + number : number * p_.outputs + output + slot;
        load_scale<S::kIsExact>(w, i, next_scale_[slot][0], next_zero_[slot][0]);
      });
    }
  }

  // Sets the scales for a piece, if they differ from those of the piece before, and begins to load the next ones.
  __device__ __forceinline__ void find_scales(int64_t output, int piece, bool is_first) {
    int rest;
    const int group = groups_.divide(piece, &rest);
    if (!S::kScalesTerms && rest != 0 && !is_first) return;
    const auto kind = p_.weights.zero.kind;
    const int most = p_.weights.are_signed ? 1 << (S::kBits - 1) : 0;
    unrolled<kSlots>([&](int slot) {
      uint32_t pairs[2], scales[2];
      unrolled<kHalves>([&](int i) {
        const uint32_t zero_bits = next_zero_[slot][i];
        const int whole = whole_zero_of(kind, zero_bits);
        if constexpr (S::kIsExact) {
          scales[i] = next_scale_[slot][i] * 0x10001u, pairs[i] = PairZero(whole + most).pair;
        } else {
          const float zero = kind == ZeroPoints<Half>::kFloating
                                 ? number_of(zero_bits, p_.weights.zero.numbers.are_float)
                                 : static_cast<float>(whole);
          scale_[slot][i] = __float_as_uint(number_of(next_scale_[slot][i], p_.weights.scale.are_float));
          less_[slot][i] = __float_as_uint(zero + (pairs_ ? 0 : most));
        }
      });
      if constexpr (S::kIsExact) {  // a pair has two terms: of one output, or with scales of their own
        constexpr bool kHasTwo = S::kScalesTerms;
        scale_[slot][0] = kHasTwo ? prmt<0x7610>(scales[0], scales[kHalves - 1]) : scales[0];
        less_[slot][0] = kHasTwo ? prmt<0x7610>(pairs[0], pairs[kHalves - 1]) : pairs[0];
      }
    });
    load_scales(output, S::kScalesTerms ? piece + 1 : group + 1);
  }

  // Widens the lane's codes of a piece to the left operands of its two steps.
  __device__ __forceinline__ void widen(uint32_t (&a)[S::kM][2][4], const Codewords& words) const {
    unrolled<S::kEach, 2, 2>([&](int j, int step, int upper) {
      uint32_t& to = a[j / 2][step][j % 2 + 2 * upper];
      const int slot = S::kScalesTerms ? 2 * step + upper : j;
      if constexpr (!S::kByTerms) {
        // The lower half of a byte is the output of an even number.
        const uint32_t pair = words.pairs[step][upper];
        to = S::kBits == 4 ? widened(pair, slot, j == 1, j == 1)
                           : widened(j == 0 ? prmt<0x4240>(pair, 0) : prmt<0x4341>(pair, 0), slot, false, false);
      } else if constexpr (S::kBits == 4) {
        const uint4 four = words.of[j][0];  // a word has eight terms, and a byte a pair of them
        const uint32_t word = step ? (upper ? four.w : four.z) : (upper ? four.y : four.x);
        to = widened(prmt(word, word, 0x1111u * quad_), slot, false, true);
      } else {
        const uint4 four = words.of[j][step % (S::kBits / 4)];
        to = widened(prmt(upper ? four.z : four.x, upper ? four.w : four.y, 0x2222u * quad_ + 0x1100u), slot, false,
                     false);
      }
    });
  }

  // Returns the weights of a pair of codes, which are the lower bits of each half, or those 4 higher.
  __device__ __forceinline__ uint32_t widened(uint32_t codes, int slot, bool is_first_higher,
                                              bool is_second_higher) const {
    const uint32_t lower = S::kBits == 4 ? 0xf : 0xff;
    const uint32_t mask = (is_first_higher ? 0xf0 : lower) | (is_second_higher ? 0xf0 : lower) << 16;
    const uint32_t signs = mask & (mask >> 1 ^ mask);  // the upper bit of each code
    const uint32_t pair = (codes & mask) ^ (p_.weights.are_signed ? kPairBase | signs : kPairBase);
    const uint32_t factors = (is_first_higher ? 0x2c00 : 0x3c00) | (is_second_higher ? 0x2c00 : 0x3c00) << 16;
    // A code that is 4 bits higher was added to 1024 / 16, which is 1024 - 960.
    const uint32_t more = (is_first_higher ? 0x6380 : 0) | (is_second_higher ? 0x6380 : 0) << 16;
    if constexpr (S::kIsExact)
      return mul_f16x2(fma_f16x2(pair, factors, sub_f16x2(more, less_[slot][0])), scale_[slot][0]);
    const uint32_t whole = pairs_ && S::kByTerms ? pairs_[codes & 255]
                           : pairs_              ? table_pair(codes, is_first_higher)
                                                 : fma_f16x2(pair, factors, sub_f16x2(more, kPairBase));
    float numbers[2] = {number_of(whole, false), number_of(whole >> 16, false)};
    unrolled<2>([&](int i) {
      constexpr int kLast = kHalves - 1;
      numbers[i] = (numbers[i] - __uint_as_float(less_[slot][i * kLast])) * __uint_as_float(scale_[slot][i * kLast]);
    });
    return product::pair_of(numbers[0], numbers[1]);
  }
  // Returns what the lower or the upper halves of bytes 0 and 2 stand for.
  __device__ __forceinline__ uint32_t table_pair(uint32_t codes, bool is_higher) const {
    const uint32_t first = pairs_[codes & 255], second = pairs_[codes >> 16 & 255];
    return is_higher ? prmt<0x7632>(first, second) : prmt<0x5410>(first, second);
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

  // Scales are of the lane's outputs, or of its pairs of terms in a piece.
  static constexpr int kSlots = S::kScalesTerms ? 4 : S::kEach, kHalves = S::kScalesTerms ? 2 : 1;
  const Products<Half>& p_;
  const Divisor& groups_;
  const uint32_t* const pairs_;
  const typename S::Memory& memory_;
  const typename S::Factors& factors_;
  const int warp_, quad_ = threadIdx.x % 4, row_ = threadIdx.x % 32 / 4;
  int group_ = 0;  // of the outputs, if terms have scales
  uint32_t next_scale_[kSlots][kHalves] = {}, next_zero_[kSlots][kHalves] = {};
  uint32_t scale_[kSlots][kHalves] = {}, less_[kSlots][kHalves] = {};
  uint32_t a_[2][S::kM][2][4];
  float sums_[S::kM][S::kTokens / 8][4];
};

#endif

}  // namespace msops::weight_quant_matmul

#endif
