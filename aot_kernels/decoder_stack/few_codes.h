// CodesWorker multiplies float16 by codes, which it widens in registers. Tensor cores multiply whole numbers, code -
// zero point, which float16 holds; the sums of a group are multiplied by its scale afterwards, in float. What a zero
// point is off a whole number is multiplied by the sum of the group's x.
#pragma once

#include "../weight_quant_matmul/widen_pairs.h"
#include "few_worker.h"

namespace msops::decoder_stack {

// A warp multiplies by runs of a tile, of which it takes every kWarps-th. A run has four pieces of 32 columns, of which
// a lane has 8. Where groups are long, a run has one scale for each row, else each piece has.
constexpr int kPieceColumns = 32, kRunPieces = 4;
static_assert(kRunColumns == kRunPieces * kPieceColumns, "a run has whole pieces");

template <int kMost>
struct CodesWorker : Worker<Half, kMost> {
  using Base = Worker<Half, kMost>;
  using PairZero = weight_quant_matmul::PairZero;

  // Puts a vector's unit, four numbers, where multiply() reads it. As codes of 4 bits are widened, a word has numbers j
  // and j + 4 of eight.
  __device__ __forceinline__ void put_operand(int token, int unit, uint2 words) const {
    if (this->s.matrices[0].codes.bits != 4) return Base::put_operand(token, unit, words);
    auto* const to =
        reinterpret_cast<uint16_t*>(this->work() + token * this->s.work_stride + 16 * (unit / 2)) + unit % 2;
    to[0] = static_cast<uint16_t>(words.x), to[4] = static_cast<uint16_t>(words.x >> 16);
    to[2] = static_cast<uint16_t>(words.y), to[6] = static_cast<uint16_t>(words.y >> 16);
  }

  __device__ void multiply(Step step, unsigned tag) {
    const Matrix<Half>& m = this->s.matrices[step];
    Base::multiply(
        step, tag,
        [&](int begin, int bytes, const unsigned char* operand, const unsigned char* operand8, float (&sums)[2][2][4]) {
          // Columns before the tile, and in it.
          const int first = begin * 8 / m.codes.bits, columns = bytes * 8 / m.codes.bits;
          int rest;
          const int first_group = m.codes.by_group.divide(first, &rest);
          for (int column = kRunColumns * this->warp; column < columns; column += kRunColumns * Base::kWarps)
            multiply_run(m.codes, m.stride, first, first_group, column, columns, operand + 2 * first,
                         operand8 + 2 * first, sums[0]);
          fence_proxy_async();  // cp.async has written the slot, and a bulk copy may be next
        });
  }

 private:
  // Multiplies by the run from a column of the tile on. Operands are the lane's, at the tile's first column.
  __device__ __forceinline__ void multiply_run(const FewCodes& codes, int stride, int first, int first_group,
                                               int column, int columns, const unsigned char* operand,
                                               const unsigned char* operand8, float (&sums)[2][4]) const {
    const unsigned char* const of_row = this->slot() + this->lane / 4 * stride + this->lane % 4 * codes.bits;
    const bool has_rest = codes.zeros.data && codes.zeros.are_float;
    const float most = codes.are_signed ? 1 << (codes.bits - 1) : 0;
    // All loads come first, also those of pieces that there are not, in whose place is the last one.
    int places[kRunPieces], groups[kRunPieces];
    uint32_t zeros[kRunPieces], pairs[kRunPieces][4];
    uint4 tokens[kRunPieces], tokens8[kRunPieces];
#pragma unroll
    for (int piece = 0; piece < kRunPieces; ++piece) {
      const int at = places[piece] = min(column + kPieceColumns * piece, columns - kPieceColumns);
      tokens[piece] = tokens8[piece] = *reinterpret_cast<const uint4*>(operand + 2 * at);
      if (Base::kHasMany) tokens8[piece] = *reinterpret_cast<const uint4*>(operand8 + 2 * at);
      if (piece > 0 && codes.have_long_groups) {
        groups[piece] = groups[0], zeros[piece] = zeros[0];
        continue;
      }
      int rest;
      groups[piece] = codes.by_group.divide(first + at, &rest) - first_group;
      zeros[piece] = PairZero(number(codes, codes.zeros, this->lane / 4, first_group, groups[piece]), most).pair;
    }
    const auto widen = [&](auto bits) {
#pragma unroll
      for (int piece = 0; piece < kRunPieces; ++piece)
        weight_quant_matmul::widen_pairs<bits>(pairs[piece], of_row + places[piece] / 8 * bits, codes.are_signed,
                                               zeros[piece]);
    };
    codes.bits == 4 ? widen(Constant<4>{}) : widen(Constant<8>{});
    float products[2][4] = {}, ones[2][4] = {};
#pragma unroll
    for (int piece = 0; piece < kRunPieces; ++piece) {
      const int at = column + kPieceColumns * piece;
      if (at >= columns) break;
      constexpr uint32_t kOnes = 0x3c003c00;
      const uint4 all_ones = {kOnes, kOnes, kOnes, kOnes};
      const uint32_t (&words)[4] = pairs[piece];
      Base::add_products(products, tokens[piece], tokens8[piece], {words[0], words[1], words[2], words[3]});
      if (has_rest) Base::add_products(ones, tokens[piece], tokens8[piece], all_ones);
      if (codes.have_long_groups && piece + 1 < kRunPieces && at + kPieceColumns < columns) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {  // of the two rows whose sums the lane has
        const int row = this->lane % 4 * 2 + half;
        const float scale = number(codes, codes.scales, row, first_group, groups[piece]);
        const float rest =
            has_rest ? PairZero(number(codes, codes.zeros, row, first_group, groups[piece]), most).rest : 0;
#pragma unroll
        for (int of = 0; of < 2; ++of)
#pragma unroll
          for (int i = half; i < 4; i += 2) {
            sums[of][i] += scale * (has_rest ? products[of][i] - rest * ones[of][i] : products[of][i]);
            products[of][i] = ones[of][i] = 0;
          }
      }
    }
  }

  // Returns a scale or zero point of a row of the tile in the slot, of the group so many after its first one.
  __device__ __forceinline__ float number(const FewCodes& codes, const RowNumbers& numbers, int row, int first_group,
                                          int group) const {
    if (!numbers.data) return 0;
    return numbers.number(this->slot() + numbers.at + row * numbers.stride +
                          numbers.offset(row, codes.groups, first_group) + group * numbers.size);
  }
};

}  // namespace msops::decoder_stack
