// What a thread keeps of its Team (see team.h), and how kernels set it up.
#pragma once

#include "team_rows.h"
#ifdef __CUDACC__
#include "gpu/cluster.h"
#include "gpu/mbarrier.h"
#endif

namespace msops {

template <typename Shape>
class TeamState {
 public:
  MSOPS_BOTH TeamState(int lane, SharedOfWarp* shared) : lane_(lane), lanes_(Shape::kLanes), shared_(shared) {
#ifdef __CUDA_ARCH__
    if (Shape::kLanes > 32) lanes_ = static_cast<int>(blockDim.x);
    if (Shape::kClustered) {
      lane_ += static_cast<int>(cluster_ctarank()) * lanes_;
      lanes_ *= static_cast<int>(cluster_nctarank());
    }
#endif
  }

#ifdef __CUDACC__
  // If kHasEdges, this comes first: rows have `head` elements before their first aligned pack.
  __device__ void set_head(int head) { edges_.head = head, edges_.to_next = 0; }

  // If kKeepsParameters, this comes first: `places` are in shared memory, of which parameters take bytes_of_place()
  // each.
  __device__ void keep_parameters(void* places) {
    kept_.places = static_cast<Pack<float, 4>*>(places);
    for (const void*& each : kept_.data) each = places;
  }

  // Tells how many elements later than each row that is loaded now the next row of the team begins, or 0.
  __device__ void set_next(int64_t elements) { edges_.to_next = elements; }

  // If kSends, this comes first, and end_sending() last.
  __device__ void begin_sending(SentResults* results) {
    sending_.results = results, sending_.reductions = 0;
    if (threadIdx.x == 0) {
      for (uint64_t& each : results->arrived) mbarrier_init(shared_address(&each), 1);
      fence_mbarrier_init();
    }
    cluster_arrive_relaxed();
  }
  __device__ void end_sending() const {
    if (sending_.reductions == 0) cluster_wait();
  }
#endif

 protected:
  struct None {};
  struct Edges {
    int head;
    int64_t to_next;
  };
  struct Kept {
    Pack<float, 4>* places;
    mutable const void* data[kMostPlaces];  // of the parameters, or `places` where there are none yet
  };
  struct Sending {
    SentResults* results;
    mutable unsigned reductions;
  };

  int lane_, lanes_;      // lanes of the whole team
  SharedOfWarp* shared_;  // kSharedOfTeam<Shape> of them, if the team is larger than a warp
  mutable int turn_ = 0;  // which of the two places the next reduction takes
  std::conditional_t<Shape::kHasEdges, Edges, None> edges_;
  std::conditional_t<Shape::kKeepsParameters, Kept, None> kept_;
  std::conditional_t<Shape::kSends, Sending, None> sending_;
};

// The number of SharedOfWarp that a team needs: twice, one for each warp and one for the block.
template <typename Shape>
constexpr int kSharedOfTeam = Shape::kLanes > 32 ? 2 * (Shape::kLanes / 32 + 1) : 1;

}  // namespace msops
