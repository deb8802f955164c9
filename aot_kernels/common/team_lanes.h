// The lanes of a Team (see team.h), and how they exchange values: in a warp, a block and a cluster.
#pragma once

#include "parallel.h"
#include "team_state.h"
#ifdef __CUDACC__
#include "gpu/cluster.h"
#include "gpu/mbarrier.h"
#endif

namespace msops {

template <typename Shape>
class TeamLanes : public TeamState<Shape> {
  using State = TeamState<Shape>;

 public:
  using State::State;

#ifdef __CUDACC__
  // Returns the bits of the team's lanes in their warp, since the teams of a warp may have different numbers of rows.
  static __device__ unsigned mask() {
    if constexpr (Shape::kLanes < 32) {
      return ((1u << Shape::kLanes) - 1) << threadIdx.x % 32 / Shape::kLanes * Shape::kLanes;
    } else {
      return ~0u;
    }
  }

  // Combines one value of each lane, as reduce combines those of a row's elements. All lanes get the result.
  template <typename R, typename Combine>
  __device__ R over_lanes(R value, const R& identity, const Combine& combine) const {
    return over_parts(value, identity,
                      [&](const R& part, int parts, int, int) { return over_warp(part, combine, parts); });
  }
#endif

 protected:
  using State::lane_;

#ifdef __CUDACC__
  // Reduces over `lanes` neighbouring lanes of a warp, a power of 2. Structs are combined in the lanes' order, so that
  // all lanes have the same bits even where combine(a, b) is rounded differently from combine(b, a).
  template <typename R, typename Combine>
  static __device__ R over_warp(R value, const Combine& combine, int lanes) {
    constexpr int kWords = (sizeof(R) + 3) / 4;
    for (int distance = lanes / 2; distance > 0; distance /= 2) {
      uint32_t words[kWords] = {};
      memcpy(words, &value, sizeof value);
      for (uint32_t& word : words) word = __shfl_xor_sync(mask(), word, distance);
      R other;
      memcpy(&other, words, sizeof other);
      if (std::is_class<R>::value && threadIdx.x & distance) {
        value = combine(other, value);
      } else {
        value = combine(value, other);
      }
    }
    return value;
  }

  // Merges one value of each lane to those of warps, these to those of blocks, and these to one of the team.
  // merge(value, parts, first, lanes) merges the values of `parts` neighbouring lanes of a warp. The value that it gets
  // is that of so many of the team's lanes, from `first`, or `identity` where `first` is no lane.
  template <typename R, typename Merge>
  __device__ R over_parts(R value, [[maybe_unused]] const R& identity, const Merge& merge) const {
    if constexpr (Shape::kLanes <= 32) {
      return merge(value, Shape::kLanes, lane_, 1);
    } else {
      // Reductions take two places in turn, so that one barrier each is enough.
      constexpr int kWarps = Shape::kLanes / 32;
      SharedOfWarp* const shared = shared_ + turn_ * (kWarps + 1);
      turn_ ^= 1;
      R* const of_warps = reinterpret_cast<R*>(shared);
      const int lane = static_cast<int>(threadIdx.x) % 32, threads = static_cast<int>(blockDim.x);
      value = merge(value, 32, lane_, 1);
      if (lane == 0) of_warps[threadIdx.x / 32] = value;
      __syncthreads();
      const bool is_warp = lane % kWarps < threads / 32;
      value = is_warp ? of_warps[lane % kWarps] : identity;
      const int of_block = lane_ - static_cast<int>(threadIdx.x);  // the block's first lane
      value = merge(value, kWarps, is_warp ? of_block + lane % kWarps * 32 : kNoLane, 32);
      if constexpr (Shape::kClustered) {
        const int blocks = static_cast<int>(cluster_nctarank());
        if constexpr (Shape::kSends) {
          value = sent_by_blocks(value, blocks);
        } else {
          value = of_blocks(value, blocks, shared + kWarps);
        }
        value = merge(value, blocks, lane % blocks * threads, threads);
      }
      return value;
    }
  }
#endif

 private:
  using State::sending_;
  using State::shared_;
  using State::turn_;
  static constexpr int kNoLane = 1 << 30;

#ifdef __CUDACC__
  // Exchanges a value of each block of a cluster, whose number is a power of 2: a lane gets that of block lane %
  // blocks. `shared` is the same place in each of them.
  template <typename R>
  static __device__ R of_blocks(R value, int blocks, SharedOfWarp* shared) {
    if (threadIdx.x == 0) memcpy(shared, &value, sizeof value);
    __syncwarp();
    cluster_arrive_wait();
    const float* const from = reinterpret_cast<const float*>(shared);
    constexpr int kLoads = (sizeof(R) + 15) / 16;
    Pack<float, 4> words[kLoads];
    for (int i = 0; i < kLoads; ++i) words[i] = ld_shared_cluster(from + 4 * i, static_cast<int>(threadIdx.x) % blocks);
    memcpy(&value, words, sizeof value);
    return value;
  }

  // Does the same where each block sends its value to all blocks, and waits for theirs. A block that is one reduction
  // ahead writes to the places of the other turn; it cannot be two ahead, since it waits for this block's value.
  template <typename R>
  __device__ R sent_by_blocks(R value, int blocks) const {
    constexpr int kWords = (sizeof(R) + 3) / 4;
    SentResults& results = *sending_.results;
    const int turn = sending_.reductions % 2;
    const unsigned arrived = shared_address(&results.arrived[turn]);
    if (sending_.reductions == 0) cluster_wait();  // until the mbarriers of all blocks are initialized
    if (threadIdx.x == 0) mbarrier_arrive_expect_tx(arrived, 4 * kWords * blocks);
    if (threadIdx.x < blocks) {
      float words[kWords] = {};
      memcpy(words, &value, sizeof value);
      for (int w = 0; w < kWords; ++w)
        st_async(words[w], &results.words[turn][cluster_ctarank()][w], arrived, threadIdx.x);
    }
    mbarrier_wait(arrived, sending_.reductions / 2 % 4096);
    ++sending_.reductions;
    memcpy(&value, results.words[turn][threadIdx.x % blocks], sizeof value);
    return value;
  }
#endif
};

}  // namespace msops
