// On GPUs from sm_80 on, the walks take float16 with 64 features in chunks of steps, so that tensor cores multiply. Let
// c_t be the product of the decays from the chunk's first step to step t, S the state before it, and
//
//   A_t = c_(t-1) a_t,  R_t = c_t r_t,  B_t = b_t / c_t,  K_t = k_t / c_t                     (c_(-1) = 1)
//   s_t = S A_t + sum over j < t  of (A_t . B_j) s_j + (A_t . K_j) v_j
//   y_t = S R_t + sum over j <= t of (R_t . B_j) s_j + (R_t . K_j) v_j
//   the next S = (S + sum over all j of s_j B_j' + v_j K_j') diag(c of the last step)
//
// With N = (A_t . B_j), j < t, the s_t are X (I - N)^-T, where X has the other terms. RowsBack is the same for steps in
// reverse order. It has g, dv and dy in place of s, y and v, and b, k, a and r in place of a, r, b and k. Then it is A
// whose c includes the step's own decay, and R, B and K whose c does not.
//
// A block has one matrix. Four of its warps make a chunk's operands, which are the left ones, A and R, the right ones,
// B and K, and their products, while the other four take the state through the chunk before. Each of these has 16 rows
// of the state, which need no others.
//
// Operands are TF32, but the state has two parts, so that no rounding of it adds up from chunk to chunk. A chunk whose
// decays take c beyond what TF32 can hold, or that is not whole, goes step by step, as does one of the rows whose
// inputs are not finite: a product with 0 would spread these to the steps before.
#pragma once

#include "programs.h"
#ifdef __CUDACC__
#include "../common/gpu/barrier.h"
#include "../common/gpu/ldmatrix.h"
#include "../common/gpu/mma.h"
#include "../common/gpu/unrolled.h"
#include "../common/launch.h"

namespace msops::wkv7::chunks {

constexpr int kFeatures = 64, kSteps = 16, kGroup = 128, kThreads = 2 * kGroup;  // kGroup: threads of four warps
constexpr float kRange = 80;                                                     // c of a chunk is at least 2^-kRange
// Rows in shared memory are padded so that a warp's accesses meet no bank twice.
constexpr int kGivenRow = kFeatures + 8, kOperandRow = kFeatures + 4, kProductRow = kSteps + 8;

enum Operand { kOfA, kOfR, kOfB, kOfK, kOperands };
enum Products { kAB, kAK, kRB, kRK, kProducts };  // of rows, kAB is (I - N)^-1 - I

struct alignas(16) Operands {
  uint32_t vectors[kOperands][kSteps][kOperandRow], products[kProducts][kSteps][kProductRow];  // TF32
  float decays[kFeatures];                                                                     // c of the last step
  bool are_whole;  // or else the chunk goes step by step
};

// Waits for the first four warps.
__device__ __forceinline__ void sync_group() { bar_sync(1, kGroup); }

// The first four warps hand chunks to the other four, which give the room back. Two chunks have room, and each of them
// has its barriers.
__device__ __forceinline__ void hand_on(int64_t chunk) { bar_arrive(2 + static_cast<int>(chunk % 2), kThreads); }
__device__ __forceinline__ void wait_for_operands(int64_t chunk) {
  bar_sync(2 + static_cast<int>(chunk % 2), kThreads);
}
__device__ __forceinline__ void give_back(int64_t chunk, int64_t chunks) {
  if (chunk + 2 < chunks) bar_arrive(4 + static_cast<int>(chunk % 2), kThreads);  // for the chunk after the next
}
__device__ __forceinline__ void wait_for_room(int64_t chunk) {
  chunk < 2 ? sync_group() : bar_sync(4 + static_cast<int>(chunk % 2), kThreads);
}

// Roles says which vectors a program takes, and where its results go.
template <typename Program>
struct Roles {
  static constexpr bool kBack = Program::kBack;
  static constexpr Vector kAdded = kBack ? kDy : kV, kHidden = kBack ? kG : kS, kResult = kBack ? kV : kDy;

  // Returns which vector becomes an operand.
  static constexpr __device__ int vector_of(int operand) {
    constexpr Vector kForward[kOperands] = {kA, kR, kB, kK}, kBackward[kOperands] = {kB, kK, kA, kR};
    return kBack ? kBackward[operand] : kForward[operand];
  }
  // Returns whether the operand's product of decays includes the step's own.
  static constexpr __device__ bool includes(int operand) { return (vector_of(operand) == kA) == kBack; }
  // Returns whether a step's left operand meets its own right one.
  static __device__ bool has_own(int left, int right) { return kBack ? right == kOfK : left == kOfR; }
};

// Steps says where the vectors of a matrix are, in the order in which a program takes the steps.
struct Steps {
  int64_t first, stride;

  __device__ int64_t at(int64_t i) const { return first + i * stride; }
};

__device__ __forceinline__ Pack<float, 2> pair_at(const Half* from) {
  const Pack<Half, 2> pair = load<2>(from);
  return {pair.values[0], pair.values[1]};
}

// Returns a rate times log2 e.
__device__ __forceinline__ float rate_of(float raw) {
  const float log = kLog2E<float>;
  return ex2_approx_ftz(raw * log) * log;
}

// Adds up the rates of a chunk, of which each of the first four warps has those of its steps in shared.totals: to
// `before` those of the steps before this warp's. Returns whether the chunk is taken as a whole, and says so in `to`.
template <typename Memory>
__device__ __forceinline__ bool add_up_rates(const Memory& shared, int feature, bool is_full, float (&before)[2],
                                             Operands& to) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  sync_group();
  float total[2] = {};
  unrolled<4>([&](int w) {
    const Pack<float, 2> part = load<2>(&shared.totals[w][feature]);
    unrolled<2>([&](int e) {
      total[e] += part.values[e];
      if (w < warp) before[e] += part.values[e];
    });
  });
  const bool are_whole = is_full && __all_sync(~0u, total[0] <= kRange && total[1] <= kRange);
  if (threadIdx.x == 0) to.are_whole = are_whole;
  return are_whole;
}

// Rounds a number that is not NaN to TF32 in one instruction, where cvt_rna_tf32 takes three: tensor cores leave out
// the lower 13 bits.
__device__ __forceinline__ uint32_t rounded(float value) { return __float_as_uint(value) + 0x1000; }

// Makes two TF32 numbers of one. Some NaN become 0 in the upper part; the lower is NaN then.
__device__ __forceinline__ void split(float value, uint32_t& upper, uint32_t& lower) {
  upper = rounded(value) & 0xffffe000;
  lower = __float_as_uint(value - __uint_as_float(upper));
}

// d += a b, for the numbers `a` of a warp's accumulators: their columns 2q and 2q + 1 are the rows q and q + 4 of b.
__device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  mma_m16n8k8(d, {a[0], a[2], a[1], a[3]}, {b0, b1});
}

// multiply_vectors() gives a warp the products of two operands' vectors: f(t, j, sums) gets those of step t's vector of
// the left operand with the vectors j and j + 1 of the right one.
template <typename F>
__device__ __forceinline__ void multiply_vectors(const Operands& of, int of_left, int of_right, const F& f) {
  // The matrices of ldmatrix: for the left operand, its rows 0 and 8 at column 0, then both at column 4; for the right
  // one, columns 0 and 4 of row 0, then both of row 8.
  const int lane = static_cast<int>(threadIdx.x) % 32, row = lane % 8, second = lane / 8 % 2, third = lane / 16;
  const unsigned left = shared_address(&of.vectors[of_left][row + 8 * second][4 * third]);
  const unsigned right = shared_address(&of.vectors[of_right][row + 8 * third][4 * second]);
  float sums_of[2][2][4] = {};  // the tiles of 8 columns, in two parts each
  unrolled<kFeatures / 8>([&](int k) {
    uint32_t a[4], b[4];
    ldmatrix_x4(a, left + 32 * k);
    ldmatrix_x4(b, right + 32 * k);
    unrolled<2>([&](int n) { mma_m16n8k8(sums_of[n][k % 2], a, {b[2 * n], b[2 * n + 1]}); });
  });
  unrolled<2, 2>([&](int n, int half) {
    const int t = lane / 4 + 8 * half, j = 8 * n + 2 * (lane % 4);
    float sums[2];
    unrolled<2>([&](int e) { sums[e] = sums_of[n][0][2 * half + e] + sums_of[n][1][2 * half + e]; });
    f(t, j, sums);
  });
}

// Takes the elements of a Tile through one step of a program, and adds up its sums for both rows of a lane.
// with_vectors(f) calls f(element, row, x, own) for each element, with what the program reads.
template <typename Program, typename WithVectors>
__device__ __forceinline__ void take_step(const WithVectors& with_vectors, float (&sums)[3][2]) {
  const auto add_up = [](float (&of_rows)[2]) {
    unrolled<2>([&](int row) { of_rows[row] = team_sum<4>(of_rows[row]); });
  };
  with_vectors([&](float& element, int row, const auto& x, const auto& own) {
    element = Program::begin(element, x, own);
    Program::add(element, x, sums[0][row], sums[1][row]);
  });
  add_up(sums[0]), add_up(sums[1]);
  with_vectors([&](float& element, int row, const auto& x, const auto& own) {
    element = Program::update(element, x, own, sums[0][row], sums[1][row]);
    Program::add_after(element, x, sums[2][row]);
  });
  add_up(sums[2]);
}

// Tile has 16 rows of a state in a warp, as accumulators of mma. A lane has `row` and the next one, at the columns
// 8 n + quad and 8 n + quad + 4 for each n. So columns are in the order in which ldmatrix loads them. Of a chunk's
// steps, it has 8 n + 2 quad and the next one for both n, as d[n][2 i + e] for row i and step e.
struct Tile {
  float m[kFeatures / 8][4];
  int quad, group, row;

  __device__ Tile() {
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = (static_cast<int>(threadIdx.x) - kGroup) / 32;
    quad = lane % 4, group = lane / 4, row = 16 * warp + 2 * group;
  }

  // Calls f(element, row, column) for each, with rows 0 and 1.
  template <typename F>
  __device__ __forceinline__ void for_all(const F& f) {
    unrolled<kFeatures / 8, 4>([&](int n, int i) { f(m[n][i], i / 2, 8 * n + quad + 4 * (i % 2)); });
  }

  // Adds the state's products with the vectors of the two left operands.
  __device__ __forceinline__ void read(const Operands& of, float (&first)[2][4], float (&second)[2][4]) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int step = lane % 8 + 8 * (lane / 16), column = 4 * (lane / 8 % 2);
    const unsigned a = shared_address(&of.vectors[kOfA][step][column]);
    const unsigned r = shared_address(&of.vectors[kOfR][step][column]);
    unrolled<kFeatures / 8>([&](int k) {
      uint32_t upper[4], lower[4], of_a[4], of_r[4];
      unrolled<4>([&](int i) { split(m[k][i], upper[i], lower[i]); });
      ldmatrix_x4(of_a, a + 32 * k);
      ldmatrix_x4(of_r, r + 32 * k);
      const auto add = [&](const uint32_t (&part)[4]) {
        unrolled<2>([&](int n) {
          multiply(first[n], part, of_a[2 * n], of_a[2 * n + 1]);
          multiply(second[n], part, of_r[2 * n], of_r[2 * n + 1]);
        });
      };
      add(upper), add(lower);
    });
  }

  // Adds, for each step, the sum of what `from` has for the steps up to it times their products.
  __device__ __forceinline__ void add(const Operands& of, float (&to)[2][4], const uint32_t (&from)[2][4],
                                      Products product) const {
    unrolled<2, 2>([&](int k, int n) {
      const Pack<uint32_t, 2> b = load<2>(&of.products[product][8 * n + group][8 * k + 2 * quad]);
      if (k <= n) multiply(to[n], from[k], b.values[0], b.values[1]);
    });
  }

  // Adds to the state what `first` and `second` have for each step, times the vectors of the right operands.
  __device__ __forceinline__ void extend(const Operands& of, const uint32_t (&first)[2][4],
                                         const uint32_t (&second)[2][4]) {
    const int column = group / 2 + 4 * (group % 2);
    unrolled<kFeatures / 8, 2>([&](int n, int k) {
      const int step = 8 * k + 2 * quad, at = 8 * n + column;
      multiply(m[n], first[k], of.vectors[kOfB][step][at], of.vectors[kOfB][step + 1][at]);
      multiply(m[n], second[k], of.vectors[kOfK][step][at], of.vectors[kOfK][step + 1][at]);
    });
  }
};

// Launches a program's kernel if the GPU has room for it, and returns whether it has.
template <typename Program, typename T>
bool launch_walk(Call& call, void (*kernel)(Task<T>), int bytes, const Task<T>& task) {
  [[maybe_unused]] static FactOfGpu<> fact;
  const auto fits = [=] { return is_compiled_for(80, kernel) && blocks_at_once(Gpu(), kernel, kThreads, bytes) > 0; };
  if (!fact.get(fits)) return false;
  launch(call, kernel, task.s.matrices(), kThreads, bytes, task);
  return true;
}

}  // namespace msops::wkv7::chunks
#endif
