// Layout says how slabs tile a tensor on the GPU, and how the threads of a block share one (see gpu.h).
#pragma once

#include "../common/pack.h"
#include "../common/rows.h"
#include "problem.h"

namespace msops::group_norm {

// With the channels first, the groups of all samples follow each other, and are one batch; with the channels last, each
// sample is a batch. An item is a channel or, with the channels last, a pack of them. The lanes of an item are the
// threads that share it; `neighbours` of them are in one warp and add up by shuffles.
struct Layout {
  int64_t together;                      // groups of a slab; 1 if a group has several parts
  int64_t bundles, slabs;                // slabs of a batch, and of all
  int64_t steps;                         // of all positions: packs of neighbours or, with the channels last, positions
  int64_t records;                       // that the teams of a block write
  int chunks, cuts;                      // of a group's channels, and of the steps
  int width;                             // channels of the largest part of a slab
  int lanes, neighbours, threads, held;  // held: packs of one tensor that a thread has in a stage
  int stages;                            // if one launch has all phases

  MSOPS_BOTH int parts() const { return chunks * cuts; }
  MSOPS_BOTH int teams() const { return lanes / neighbours; }
};

// A block has up to so many threads, and `kResident` blocks share a multiprocessor where their shared memory lets them.
// More threads wait longer for each other: with two blocks of 512, float16 takes 1.3 times as long (on an H200).
// With the channels last, a thread takes up to 128 registers; numbers of float64 take two each.
constexpr int kMostThreads = 256;
template <typename T, bool kLast>
constexpr int kResident = sizeof(T) == 8 ? 1
                          : kLast        ? 2
                                         : 3;
// So many blocks share it where phases have launches of their own.
template <typename T, bool kLast>
constexpr int kResidentOfPhases = sizeof(T) == 8 || kLast ? 2 : 4;
constexpr int64_t kMostBlocks = 16;  // of a cluster
static_assert(kMostChannels <= kMostThreads, "each thread has one item at most");

// Returns how many lanes add up a sum of a channel, of so many numbers.
MSOPS_BOTH int lanes_of_sum(int64_t numbers) { return numbers > 64 ? 32 : 4; }

}  // namespace msops::group_norm
