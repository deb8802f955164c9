// Up to 8 rows of float16 by a large matrix of 4 bits, by tensor cores (mma.sync), for sm_80 and later. Groups are of
// 128 n terms. Codes are read once, as a stream that goes on from tile to tile.
//
// A block has tiles of kOutputs outputs for all tokens. It has two teams of warps, each with half of a tile's outputs,
// and the warps of a team, its mates, share the terms. Each warp copies the codes of its chunks to a ring of its own in
// shared memory, where x lies in the order in which codes are widened. The weights are the left operand, so that a
// token is a column. Codes are widened by masks alone: as the lowest bits of a float16 number, a code c is 2^-24 c, and
// 4 bits higher 16 times that, which has sums of its own. So a group's sum is
//   scale * (sum of code * x - zero * sum of x)
// which is NaN for infinite x. The mates' sums are added in order.
#pragma once

#include "widen_pairs.h"

#ifdef __CUDACC__

#include "../common/gpu/cp_async.h"
#include "../common/gpu/divisor.h"
#include "../common/gpu/griddepcontrol.h"
#include "../common/gpu/mbarrier.h"
#include "../common/gpu/mma.h"
#include "../common/launch.h"
#include "../common/pack.h"

namespace msops::weight_quant_matmul {

// kTokens is 1 or 8, the most tokens. A chunk has kBytes of each of kRows rows: two runs of kRun terms, all codes of
// which have the same scale. In a run, a lane has 16 bytes of a row: kUnits times eight terms.
template <int kTokens_>
struct StreamShape {
  static constexpr int kTokens = kTokens_, kTeams = 2, kMostMates = 8, kRows = 16, kOutputs = kTeams * kRows;
  static constexpr int kBytes = 128, kChunk = 2 * kBytes, kRun = 128, kUnits = 4;
  static constexpr int kRunPitch = kRows * 64 + 64;  // bytes of a run; the runs of a row are in different banks
  static constexpr int kStages = 3, kStageBytes = 2 * kRunPitch;
  static constexpr int kSumPitch = kTokens == 1 ? kRows : kRows + 4, kSums = kTokens * kSumPitch;  // of a warp
  static constexpr int kSlots = 3;                                                                 // for factors
  static constexpr int kBarrierBytes = 64;
};

// How a launch divides its work, and where parts of shared memory begin. It is the host that divides, since copies
// begin sooner then.
struct StreamPlan {
  int mates, chunks, tiles;
  int x_pitch;           // bytes of a token's x
  int parts;             // sums of x: (runs, kTokens)
  int raw, zeros;        // kSlots times a tile's scales and zero points, as they are; bytes of the former
  int raw_pitch;         // bytes of both
  int factors;           // of a chunk, for each warp: (kRows, 2) pairs of a scale and a zero point
  int sums, sums_pitch;  // two times all warps' kSums; numbers of one time
  int rings;             // (warps, kStages, kStageBytes)
  int bytes;
};

// StreamWarp is a warp at work.
template <typename S>
class StreamWarp {
 public:
  // `groups` divides the number of a run by the runs of a group.
  __device__ __forceinline__ StreamWarp(const Products<Half>& p, const Divisor& groups, const StreamPlan& plan,
                                        unsigned char* shared)
      : p_(p), groups_(groups), plan_(plan), shared_(shared) {
    ring_ = shared + plan.rings + warp_ * (S::kStages * S::kStageBytes);
    copy_to_ = ring_ + lane_ % 8 / 4 * S::kRunPitch + lane_ / 8 * 64 + lane_ % 4 * 16;
    own_factors_ = reinterpret_cast<float2*>(shared + plan.factors) + warp_ * 32;
    zero_flip_ = p.weights.zero.kind == ZeroPoints<Half>::kSigned ? 128 : 0;
    zero_most_ = (p.weights.are_signed ? 8 : 0) - zero_flip_;
  }

  __device__ __forceinline__ void compute() {
    griddepcontrol_launch_dependents();
    const int apart = static_cast<int>(gridDim.x);
    int tile = static_cast<int>(blockIdx.x), number = 0, stage = 0;
    copy_factors(tile, 0);
    cp_async_commit();
    Place copied = first_place(tile);
    for (int i = 0; i < S::kStages - 1; ++i) begin_copy(i, copied, apart);
    griddepcontrol_wait();
    take_x();
    if (threadIdx.x == 0) {
      mbarrier_init(sums_barrier(), S::kTeams * plan_.mates);
      for (int slot = 0; slot < S::kSlots; ++slot) mbarrier_init(slot_barrier(slot), blockDim.x);
    }
    cp_async_wait<S::kStages - 1>();  // for the first factors
    __syncthreads();
    copy_factors(tile + apart, 1);
    cp_async_mbarrier_arrive_noinc(slot_barrier(1));
    for (; tile < plan_.tiles; tile += apart, ++number) {
      const int slot = number % S::kSlots, later = (number + 2) % S::kSlots;
      if (number > 0) mbarrier_wait(slot_barrier(slot), (number - 1) / S::kSlots);
      unrolled<4>([&](int i) { sums_[i] = 0; });
      for (int chunk = mate_; chunk < plan_.chunks; chunk += plan_.mates) {
        cp_async_wait<S::kStages - 2>();
        __syncwarp();
        begin_copy(stage == 0 ? S::kStages - 1 : stage - 1, copied, apart);
        multiply(ring_ + stage * S::kStageBytes, shared_ + plan_.raw + slot * plan_.raw_pitch, chunk);
        stage = stage == S::kStages - 1 ? 0 : stage + 1;
      }
      if (number > 0) store_tile(number - 1, tile - apart);
      put_sums(number);
      copy_factors(tile + 2 * apart, later);
      cp_async_mbarrier_arrive_noinc(slot_barrier(later));
    }
    store_tile(number - 1, tile - apart);
    cp_async_wait<0>();
  }

 private:
  static constexpr float kUnit = 1.f / (1 << 24);  // what a code is widened to so many of

  // A Place is a chunk of a tile, and where the lane's codes of it begin.
  struct Place {
    int tile, chunk;
    const uint8_t* codes;
  };

  __device__ __forceinline__ int deep() const { return plan_.chunks * S::kChunk; }
  __device__ __forceinline__ int pitch() const { return plan_.chunks * S::kBytes; }
  __device__ __forceinline__ int tokens() const { return static_cast<int>(p_.tokens); }
  __device__ __forceinline__ int groups() const { return static_cast<int>(p_.weights.groups); }
  __device__ __forceinline__ unsigned sums_barrier() const { return shared_address(shared_); }
  __device__ __forceinline__ unsigned slot_barrier(int slot) const { return shared_address(shared_) + 8 + 8 * slot; }
  __device__ __forceinline__ unsigned char* x() const { return shared_ + S::kBarrierBytes; }
  __device__ __forceinline__ float* sums(int number) const {
    return reinterpret_cast<float*>(shared_ + plan_.sums) + number % 2 * plan_.sums_pitch;
  }

  __device__ __forceinline__ Place first_place(int tile) const {
    const int64_t row = int64_t{tile} * S::kOutputs + team_ * S::kRows + lane_ / 8;
    return {tile, mate_, p_.weights.data + (row * pitch() + mate_ * S::kBytes + lane_ % 8 * 16)};
  }
  // Begins to copy a chunk's codes, and advances.
  __device__ __forceinline__ void begin_copy(int stage, Place& place, int apart) const {
    if (place.tile < plan_.tiles) {
      unsigned char* const to = copy_to_ + stage * S::kStageBytes;
      unrolled<S::kRows / 4>([&](int i) { cp_async<16>(to + i * 256, place.codes + int64_t{4 * i} * pitch()); });
      place.chunk += plan_.mates, place.codes += plan_.mates * S::kBytes;
      if (place.chunk >= plan_.chunks) place = first_place(place.tile + apart);
    }
    cp_async_commit();
  }

  // Begins to copy the scales and zero points of a tile. All warps call this.
  __device__ __forceinline__ void copy_factors(int tile, int slot) const {
    if (tile >= plan_.tiles) return;
    unsigned char* const to = shared_ + plan_.raw + slot * plan_.raw_pitch;
    copy_bytes(to, p_.weights.scale.data, tile, plan_.zeros);
    copy_bytes(to + plan_.zeros, p_.weights.zero.numbers.data, tile, plan_.raw_pitch - plan_.zeros);
  }
  // Copies a tile's part of an array that has so many bytes for each tile.
  __device__ __forceinline__ void copy_bytes(unsigned char* to, const void* array, int tile, int bytes) const {
    const uint8_t* const from = static_cast<const uint8_t*>(array) + int64_t{tile} * bytes;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x) * 16; i < bytes; i += static_cast<int>(blockDim.x) * 16)
      cp_async<16>(to + i, from + i);
  }

  // Brings x to shared memory in the order of widened codes, and adds up its runs. All warps call this. A warp has a
  // chunk of a token at a time, and a lane a unit of eight terms.
  __device__ __forceinline__ void take_x() const {
    constexpr int kLoads = 4, kUnitsOfRun = S::kRun / 8;  // kLoads: at once
    const int warps = S::kTeams * plan_.mates;
    float* const parts = reinterpret_cast<float*>(shared_ + plan_.parts);
    for (int round = warp_; round < plan_.chunks * tokens(); round += kLoads * warps) {
      uint4 words[kLoads];
      int at[kLoads], token[kLoads];
      unrolled<kLoads>([&](int i) {
        const int own = round + i * warps;
        token[i] = S::kTokens == 1 ? own >= plan_.chunks : own / plan_.chunks;
        at[i] = (own - token[i] * plan_.chunks) * 32 + lane_;
        if (token[i] < tokens())
          words[i] = *reinterpret_cast<const uint4*>(p_.x + (int64_t{token[i]} * deep() + 8 * at[i]));
      });
      unrolled<kLoads>([&](int i) {
        if (token[i] >= tokens()) return;
        const uint4 w = words[i];
        float sum = number_of(w.x, false) + number_of(w.x >> 16, false) + number_of(w.y, false) +
                    number_of(w.y >> 16, false) + number_of(w.z, false) + number_of(w.z >> 16, false) +
                    number_of(w.w, false) + number_of(w.w >> 16, false);
#pragma unroll
        for (int apart = 1; apart < kUnitsOfRun; apart *= 2) sum += __shfl_xor_sync(~0u, sum, apart);
        const int run = at[i] / kUnitsOfRun, unit = at[i] % kUnitsOfRun;
        const int place = run * kUnitsOfRun + unit % S::kUnits * 4 + unit / S::kUnits;
        *reinterpret_cast<uint4*>(x() + token[i] * plan_.x_pitch + place * 16) = {
            prmt<0x5410>(w.x, w.z), prmt<0x5410>(w.y, w.w), prmt<0x7632>(w.x, w.z), prmt<0x7632>(w.y, w.w)};
        if (unit == 0) parts[run * S::kTokens + token[i]] = sum * kUnit;
      });
    }
  }

  // Returns a chunk's scale and zero point: a lane has those of a row and a run.
  __device__ __forceinline__ float2 factors_of(const unsigned char* raw, int chunk) const {
    int rest;
    const int i = (team_ * S::kRows + lane_ / 2) * groups() + groups_.divide(2 * chunk + lane_ % 2, &rest);
    const uint32_t scale = reinterpret_cast<const uint16_t*>(raw)[i];
    const int zero = p_.weights.zero.kind == ZeroPoints<Half>::kNone ? 0 : raw[plan_.zeros + i] ^ zero_flip_;
    return make_float2(number_of(scale, false), static_cast<float>(zero + zero_most_));
  }

  // Widens eight codes: two pairs for even sums, and two for odd ones.
  static __device__ __forceinline__ void widen(uint32_t (&pairs)[4], uint32_t word, uint32_t flip) {
    const uint32_t next = word >> 8;
    pairs[0] = (word & 0x000f000fu) ^ flip, pairs[1] = (next & 0x000f000fu) ^ flip;
    pairs[2] = (word & 0x00f000f0u) ^ flip << 4, pairs[3] = (next & 0x00f000f0u) ^ flip << 4;
  }

  // Multiplies a chunk.
  __device__ __forceinline__ void multiply(const unsigned char* stage, const unsigned char* raw, int chunk) {
    constexpr int kColumns = S::kTokens == 1 ? 1 : 2;  // of the lane
    const uint32_t flip = p_.weights.are_signed ? 0x80008u : 0;
    const int token = S::kTokens == 1 || row_ >= tokens() ? 0 : row_;  // columns that are no tokens may be anything
    const unsigned char* const of_x = x() + token * plan_.x_pitch + chunk * (2 * S::kChunk) + quad_ * 16;
    const unsigned char* const codes = stage + row_ * 64 + quad_ * 16;
    const float2 own_factors = factors_of(raw, chunk);
    float even[2][4] = {}, odd[2][4] = {};
    unrolled<2>([&](int run) {
      const uint4 upper = *reinterpret_cast<const uint4*>(codes + run * S::kRunPitch);
      const uint4 lower = *reinterpret_cast<const uint4*>(codes + run * S::kRunPitch + 512);
      const uint32_t uppers[] = {upper.x, upper.y, upper.z, upper.w}, lowers[] = {lower.x, lower.y, lower.z, lower.w};
      unrolled<S::kUnits>([&](int unit) {
        uint32_t a[4], b[4];
        widen(a, uppers[unit], flip), widen(b, lowers[unit], flip);
        const uint4 w = *reinterpret_cast<const uint4*>(of_x + run * (2 * S::kRun) + unit * 64);
        mma_m16n8k16(even[run], {a[0], b[0], a[1], b[1]}, {w.x, w.y});
        mma_m16n8k16(odd[run], {a[2], b[2], a[3], b[3]}, {w.z, w.w});
      });
      if (run == 0) own_factors_[lane_] = own_factors;
    });
    __syncwarp();
    const float* const parts = reinterpret_cast<const float*>(shared_ + plan_.parts) + chunk * (2 * S::kTokens);
    unrolled<2>([&](int half) {
      const auto factors = load<4>(reinterpret_cast<const float*>(own_factors_ + 2 * row_ + 16 * half));
      unrolled<2, kColumns>([&](int run, int column) {
        const int i = 2 * half + column;
        const float part = parts[run * S::kTokens + (S::kTokens == 1 ? 0 : 2 * quad_ + column)];
        const float sum = even[run][i] + odd[run][i] * (1.f / 16) - factors.values[2 * run + 1] * part;
        sums_[i] += factors.values[2 * run] * sum;
      });
    });
  }

  // Leaves the warp's sums of a tile in shared memory: (kTokens, kSumPitch). The sums of two tiles are in different
  // memory.
  __device__ __forceinline__ void put_sums(int number) const {
    float* const own = sums(number) + warp_ * S::kSums + row_;
    if (S::kTokens > 1 || quad_ == 0)
      unrolled<2, S::kTokens == 1 ? 1 : 2>([&](int half, int column) {
        own[(2 * quad_ + column) * S::kSumPitch + 8 * half] = sums_[2 * half + column];
      });
    __syncwarp();
    if (lane_ == 0) mbarrier_arrive(sums_barrier());
  }

  // Adds the sums that all warps have put, and stores the tile. No warp waits for others before it has computed the
  // next tile. A thread has four outputs of a token. The warps take turns to be the first.
  __device__ __forceinline__ void store_tile(int number, int tile) {
    constexpr int kPacks = S::kOutputs / 4;
    static_assert(S::kTokens * kPacks <= 32 * S::kTeams, "the fewest threads store all");
    mbarrier_wait(sums_barrier(), number);
    turn_ = turn_ == 0 ? S::kTeams * plan_.mates - 1 : turn_ - 1;
    const int i = turn_ * 32 + lane_, token = i / kPacks, output = i % kPacks * 4;
    if (token >= tokens()) return;
    const float* const from = sums(number) + output / S::kRows * S::kSums + token * S::kSumPitch + output % S::kRows;
    float total[4] = {};
#pragma unroll 8
    for (int mate = 0; mate < plan_.mates; ++mate) {
      const auto pack = load<4>(from + mate * (S::kTeams * S::kSums));
      unrolled<4>([&](int j) { total[j] += pack.values[j]; });
    }
    unrolled<4>([&](int j) { p_.store(token, tile * S::kOutputs + output + j, total[j] * (1 / kUnit)); });
  }

  const int lane_ = threadIdx.x % 32, quad_ = threadIdx.x % 4, row_ = threadIdx.x % 32 / 4, warp_ = threadIdx.x / 32;
  const int team_ = warp_ % S::kTeams, mate_ = warp_ / S::kTeams;
  const Products<Half>& p_;
  const Divisor& groups_;
  const StreamPlan& plan_;
  unsigned char* const shared_;
  int turn_ = warp_, zero_flip_, zero_most_;
  unsigned char *ring_, *copy_to_;
  float2* own_factors_;
  float sums_[4];
};

template <typename S>
__global__ void __launch_bounds__(32 * S::kTeams * S::kMostMates, 1)
    stream_kernel(const __grid_constant__ Products<Half> p, const __grid_constant__ Divisor groups,
                  const __grid_constant__ StreamPlan plan) {
  extern __shared__ __align__(1024) unsigned char shared[];
  if (has_instructions_of(80)) StreamWarp<S>(p, groups, plan, shared).compute();
}

template <typename S>
StreamPlan plan_stream(const Products<Half>& p) {
  const int groups = static_cast<int>(p.weights.groups);
  StreamPlan plan;
  plan.chunks = static_cast<int>(p.deep / S::kChunk), plan.tiles = static_cast<int>(p.outputs / S::kOutputs);
  const int turns = (plan.chunks + S::kMostMates - 1) / S::kMostMates;
  plan.mates = (plan.chunks + turns - 1) / turns;
  const int warps = S::kTeams * plan.mates;
  plan.x_pitch = plan.chunks * S::kChunk * 2 + 64;  // two tokens are in different banks
  plan.parts = S::kBarrierBytes + plan.x_pitch * static_cast<int>(p.tokens);
  plan.raw = plan.parts + (plan.chunks * 2 * S::kTokens * 4 + 15) / 16 * 16;
  plan.zeros = S::kOutputs * groups * 2;
  plan.raw_pitch = plan.zeros + (p.weights.zero.kind == ZeroPoints<Half>::kNone ? 0 : S::kOutputs * groups);
  plan.factors = plan.raw + S::kSlots * plan.raw_pitch;
  plan.sums = plan.factors + warps * 256, plan.sums_pitch = warps * S::kSums;
  plan.rings = (plan.sums + 2 * plan.sums_pitch * 4 + 127) / 128 * 128;
  plan.bytes = plan.rings + warps * S::kStages * S::kStageBytes;
  return plan;
}

template <int kTokens>
bool launch_stream(Call& call, const Products<Half>& p, const Gpu& gpu, bool is_programmatic) {
  using S = StreamShape<kTokens>;
  const StreamPlan plan = plan_stream<S>(p);
  if (!is_compiled_for(80, stream_kernel<S>) || plan.bytes > gpu.dynamic_bytes()) return false;
  constexpr int64_t kEndless = 1 << 30;  // runs, of a single group
  const Divisor groups(p.weights.groups == 1 ? kEndless : p.weights.group / S::kRun);
  const Grid grid = Grid(std::min(gpu.multiprocessors, plan.tiles)).programmatic(is_programmatic);
  launch(call, stream_kernel<S>, grid, 32 * S::kTeams * plan.mates, plan.bytes, p, groups, plan);
  return true;
}

// Smaller matrices are for few.h, since it takes long to bring x to shared memory. This is for each multiprocessor:
// about 2^25 codes for an H200. There, 4096 x 28672 take 20.7 us in place of 27.7 for one row, and 23.1 in place
// of 29.8 for eight; 14336 x 4096 take 12.6 in place of 15.6 for one. But 4096 x 6144 take 11.7 in place of 10.1.
constexpr int64_t kFewestCodesOfStream = 1 << 18;

// Returns false, and launches nothing, for what launch_few has to take.
inline bool multiply_in_stream(Call& call, const Products<Half>& p, bool is_programmatic) {
  using S = StreamShape<8>;
  const Codes<Half>& w = p.weights;
  const auto begins_at_pack = [](const void* array) { return reinterpret_cast<uintptr_t>(array) % 16 == 0; };
  if (p.tokens > S::kTokens || w.bits != 4 || w.table || w.scale.are_float ||
      w.zero.kind == ZeroPoints<Half>::kFloating || (w.groups > 1 && w.group % S::kRun != 0) ||
      p.deep % S::kChunk != 0 || p.deep > 1 << 20 || p.outputs % S::kOutputs != 0 || p.outputs > INT32_MAX / 2 ||
      !begins_at_pack(w.scale.data) || !begins_at_pack(w.zero.numbers.data))
    return false;
  const Gpu gpu;
  if (p.deep * p.outputs < kFewestCodesOfStream * gpu.multiprocessors) return false;
  return p.tokens == 1 ? launch_stream<1>(call, p, gpu, is_programmatic)
                       : launch_stream<8>(call, p, gpu, is_programmatic);
}

}  // namespace msops::weight_quant_matmul

#endif
