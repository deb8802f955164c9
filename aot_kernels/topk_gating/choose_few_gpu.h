// On a GPU, finds up to 8 experts of a row at once. A lane has up to 32 neighbouring experts, and a power of 2 of lanes
// has a row, so that a warp has several; where groups are selected, each of them has lanes of its own.
//
//   load_rows    copies the warp's rows, which are neighbours, to shared memory, whatever the length of a row
//   find_keys    replaces logits by scores, where these decide
//   find_best    finds the best keys of each row, without their experts, by sorting networks
//   mark         marks the experts whose keys are these: of those that equal the last, the first ones
//   list         lists the marked experts of each row in the order of their indices
//   write        writes each listed expert, and its weight, to its rank
#pragma once

#include "best.h"
#include "few_lanes_gpu.h"

namespace msops::gating {

template <int kMost, bool kByLogits, typename T>
class FewOfRows {
 public:
  using C = float;
  static constexpr int kWidth = kPackWidth<T>;
  static constexpr C kLowest = -C(HUGE_VAL);

  static __host__ __device__ int bytes(const Lanes& lanes) {
    return bytes_of_list(lanes) + Swizzled<T>::bytes(lanes.numbers()) +
           (kByLogits ? 0 : Swizzled<C>::bytes(lanes.numbers()));
  }

  // `memory` has room for so many bytes; `bias` has a number for each expert.
  __device__ FewOfRows(const Choice<T>& choice, const Lanes& lanes, int64_t warp, char* memory, const Swizzled<C>& bias)
      : choice_(choice),
        lanes_(lanes),
        lane_(static_cast<int>(threadIdx.x) % 32),
        first_row_(warp * lanes.rows()),
        rows_(static_cast<int>(max(int64_t{0}, min(choice.rows - first_row_, int64_t{lanes.rows()})))),
        row_(lane_ >> lanes.log_of_row),
        group_((lane_ & ((1 << lanes.log_of_row) - 1)) >> lanes.log_of_group),
        listed_(reinterpret_cast<Candidate<C>*>(memory)),
        logits_(memory + bytes_of_list(lanes)),
        scores_(memory + bytes_of_list(lanes) + Swizzled<T>::bytes(lanes.numbers())),
        bias_(bias) {
    const int of_group = (lane_ & ((1 << lanes.log_of_group) - 1)) * lanes.of_lane;
    const bool has_group = row_ < rows_ && group_ < lanes.groups;
    count_ = has_group ? max(0, min(lanes.of_group - of_group, lanes.of_lane)) : 0;
    expert_ = count_ > 0 ? group_ * lanes.of_group + of_group : 0;
    first_ = count_ > 0 ? row_ * lanes.experts + expert_ : 0;
  }

  __device__ void load_rows() {
    const T* const from = choice_.all.logits + first_row_ * lanes_.experts;
    const int number = rows_ * lanes_.experts, packs = lanes_.whole_packs ? number / kWidth : 0;
    constexpr int kAtOnce = kMostOfLane / kWidth;
    for (int first = lane_; first < packs; first += 32 * kAtOnce) {
      Pack<T, kWidth> loaded[kAtOnce];
      const T* const own = from + first * kWidth;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        if (first + i * 32 < packs) loaded[i] = load<kWidth>(own + i * 32 * kWidth);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        if (first + i * 32 < packs) store(logits_.pack((first + i * 32) * kWidth), loaded[i]);
    }
#pragma unroll 8
    for (int i = packs * kWidth + lane_; i < number; i += 32) logits_[i] = from[i];
    __syncwarp();
  }

  __device__ void find_keys() {
    if constexpr (!kByLogits) {
      const Row<T>& all = choice_.all;
      const int lanes = 1 << lanes_.log_of_row;
      if (!all.s.is_sigmoid) {
        C largest = kLowest, total = 0;
        each_block([&](int, const C(&x)[kSorted]) {
          for (int j = 0; j < kSorted; ++j) largest = std::fmax(largest, x[j]);
        });
        shares_.shift = Shares<C>::shift_of(largest_over(largest, lanes));
        each_block([&](int, const C(&x)[kSorted]) {
          for (int j = 0; j < kSorted; ++j) total += shares_.term(x[j]);
        });
        shares_.total = sum_over(total, lanes);
      }
      each_block([&](int b, C(&x)[kSorted]) {
        if (all.s.is_sigmoid) {
          for (int j = 0; j < kSorted; ++j) x[j] = Activations<T>::sigmoid(x[j]);
        } else {
          for (int j = 0; j < kSorted; ++j) x[j] = shares_.share(shares_.term(x[j]));
        }
        C bias[kSorted] = {};
        if (all.bias.data) load_block(bias_, expert_ + b * kSorted, kSorted, bias);
        for (int j = 0; j < kSorted; ++j) x[j] = std::fmax(x[j] + bias[j], kLowest);  // as `ordered` does
        store_scores(b, x);
      });
      __syncwarp();
    }
  }

  __device__ void find_best() {
    for (int i = 0; i < kMost; ++i) best_[i] = kLowest;
    for (int b = 0; b < blocks(); ++b) {
      C keys[kSorted];
      load_keys(b, keys);
      sort(keys);
      if (b > 0) {
        merge(best_, keys);
      } else {
        for (int i = 0; i < kMost; ++i) best_[i] = keys[i];
      }
    }
    merge_lanes(0, lanes_.log_of_group);
    if (lanes_.groups > 1) {
      stays_ = group_stays();
      for (int i = 0; i < kMost; ++i) best_[i] = stays_ ? best_[i] : kLowest;
    }
    merge_lanes(lanes_.log_of_group, lanes_.log_of_row);
    if (kByLogits) shares_.shift = Shares<C>::shift_of(best_[0]);
  }

  __device__ void mark() {
    const bool sums = kByLogits && choice_.all.s.is_share_of_all();
    C last = best_[0], total = 0;  // the key of the last expert
    for (int i = 1; i < kMost; ++i) last = i < lanes_.k ? best_[i] : last;
    marks_ = 0;
    for (int b = 0; b < blocks(); ++b) {
      C keys[kSorted];
      if constexpr (kByLogits) {
        load_logits(b, keys);
        if (sums)
          for (int j = 0; j < kSorted; ++j) total += Activations<Half>::exp(keys[j] - shares_.shift);
      } else {
        load_keys(b, keys);
      }
      unsigned marks = 0;
      for (int j = 0; j < kSorted; ++j) marks |= keys[j] >= last ? 1u << j : 0u;
      marks_ |= marks << b * kSorted;
    }
    if (sums) shares_.total = sum_over(total, 1 << lanes_.log_of_row);
    if (last == kLowest) marks_ = ~0u;  // and NaN
    if (!stays_) marks_ = 0;
    if (count_ < kMostOfLane) marks_ &= (1u << count_) - 1;
    if (__any_sync(~0u, count_before(__popc(marks_)).total > lanes_.k)) unmark_some(last);
  }

  __device__ void list() {
    int place = row_ * lanes_.k + count_before(__popc(marks_)).before;
    for (unsigned left = marks_; left; left &= left - 1, ++place) {
      const int j = __ffs(static_cast<int>(left)) - 1;
      listed_[place] = {key(j), expert_ + j};
    }
    __syncwarp();
    if (!choice_.all.s.renormalize) return;
    const int lanes = 1 << lanes_.log_of_row;
    const auto each = [&](const auto& f) {
      for (int i = lane_ % lanes; row_ < rows_ && i < lanes_.k; i += lanes)
        f(logit(row_, listed_[row_ * lanes_.k + i].index));
    };
    C largest = kLowest, total = 0;
    each([&](C x) { largest = std::fmax(largest, x); });
    shares_.shift = Shares<C>::shift_of(largest_over(largest, lanes));
    each([&](C x) { total += choice_.all.term(x, shares_); });
    shares_.total = sum_over(total, lanes);
  }

  __device__ void write() const {
    const Row<T>& all = choice_.all;
    int32_t* const experts = choice_.experts + first_row_ * lanes_.k;
    T* const weights = choice_.weights + first_row_ * lanes_.k;
    for (int first = 0; first < rows_ * lanes_.k; first += 32) {
      int place_of_row;
      const int place = first + lane_, row = lanes_.by_k.divide(place, &place_of_row);
      Shares<C> shares;
      shares.shift = __shfl_sync(~0u, shares_.shift, row << lanes_.log_of_row);
      shares.total = __shfl_sync(~0u, shares_.total, row << lanes_.log_of_row);
      if (row >= rows_) continue;
      const Candidate<C>* const of_row = listed_ + (place - place_of_row);
      const Candidate<C> own = listed_[place];
      unsigned to = place - place_of_row;
#pragma unroll
      for (int j = 0; j < kMost; ++j)
        if ((kByLogits && j + 1 < kMost) || j < lanes_.k) to += of_row[j].precedes(own);
      experts[to] = own.index;
      assign(weights[to], C(all.s.scale) * shares.share(all.term(logit(row, own.index), shares)));
    }
  }

 private:
  struct Before {
    int before, total;
  };

  static __host__ __device__ int bytes_of_list(const Lanes& lanes) {
    return (lanes.rows() * lanes.k * static_cast<int>(sizeof(Candidate<C>)) + 127) / 128 * 128;
  }
  __device__ int blocks() const { return (count_ + kSorted - 1) / kSorted; }
  // Orders logits that are NaN as -infinity, as `ordered` does.
  static __device__ C key_of(C x) { return kByLogits ? std::fmax(x, kLowest) : x; }
  __device__ C key(int j) const { return kByLogits ? key_of(C(logits_[first_ + j])) : scores_[first_ + j]; }
  __device__ C logit(int row, int expert) const { return C(logits_[row * lanes_.experts + expert]); }

  // Loads a block of this lane's numbers, with -infinity where it has none.
  template <typename S>
  __device__ void load_block(const Swizzled<S>& from, int first, int count, C (&numbers)[kSorted]) const {
    if (lanes_.tiled_by_packs) {
      constexpr int kPack = kPackWidth<S>;
#pragma unroll
      for (int j = 0; j < kSorted; j += kPack) {
        const Pack<S, kPack> pack = load<kPack>(from.pack(first + j));
        for (int c = 0; c < kPack; ++c) numbers[j + c] = C(pack.values[c]);
      }
    } else {
#pragma unroll
      for (int j = 0; j < kSorted; ++j) numbers[j] = C(from[first + j]);
    }
    if (count < kSorted) {
#pragma unroll
      for (int j = 0; j < kSorted; ++j) numbers[j] = j < count ? numbers[j] : kLowest;
    }
  }
  __device__ void load_logits(int b, C (&x)[kSorted]) const {
    load_block(logits_, first_ + b * kSorted, count_ - b * kSorted, x);
  }
  __device__ void load_keys(int b, C (&keys)[kSorted]) const {
    if constexpr (kByLogits) {
      load_logits(b, keys);
      for (int j = 0; j < kSorted; ++j) keys[j] = key_of(keys[j]);
    } else {
      load_block(scores_, first_ + b * kSorted, count_ - b * kSorted, keys);
    }
  }
  __device__ void store_scores(int b, const C (&scores)[kSorted]) const {
    constexpr int kPack = kPackWidth<C>;
#pragma unroll
    for (int j = 0; j < kSorted; ++j) {
      const int i = b * kSorted + j;
      if (i >= count_) return;
      if (!lanes_.tiled_by_packs) {
        scores_[first_ + i] = scores[j];
      } else if (j % kPack == 0) {
        store(scores_.pack(first_ + i), Pack<C, kPack>{{scores[j], scores[j + 1], scores[j + 2], scores[j + 3]}});
      }
    }
  }
  template <typename F>
  __device__ void each_block(const F& f) const {
    for (int b = 0; b < blocks(); ++b) {
      C x[kSorted];
      load_logits(b, x);
      f(b, x);
    }
  }

  __device__ void merge_lanes(int first, int end) {
#pragma unroll 1
    for (int log = first; log < end; ++log) {
      C others[kMost];
      for (int i = 0; i < kMost; ++i) others[i] = __shfl_xor_sync(~0u, best_[i], 1 << log);
      merge(best_, others);
    }
  }

  // Tells whether this lane's group is one of the best.
  __device__ bool group_stays() const {
    const Settings& s = choice_.all.s;
    C worth = 0;
    for (int i = 0; i < kMost; ++i)
      if (i < s.group_top) worth += best_[i];
    const Candidate<C> own{ordered(worth), group_};
    int rank = 0;
    for (int g = 0; g < lanes_.groups; ++g) {
      const int lane = row_ << lanes_.log_of_row | g << lanes_.log_of_group;
      rank += Candidate<C>{__shfl_sync(~0u, own.key, lane), g}.precedes(own);
    }
    return rank < s.top_groups;
  }

  // Adds up the counts of the lanes that have this row, and of those before this one.
  __device__ Before count_before(int count) const {
    Before counts{0, count};
#pragma unroll 1
    for (int log = 0; log < lanes_.log_of_row; ++log) {
      const int other = __shfl_xor_sync(~0u, counts.total, 1 << log);
      if (lane_ >> log & 1) counts.before += other;
      counts.total += other;
    }
    return counts;
  }

  // Several marked experts may have the last key. The first of them stay marked, so that a row has k marks.
  __device__ void unmark_some(C last) {
    unsigned equal = 0;
    for (unsigned left = marks_; left; left &= left - 1) {
      const int j = __ffs(static_cast<int>(left)) - 1;
      if (key(j) == last) equal |= 1u << j;
    }
    int stay = lanes_.k - count_before(__popc(equal)).before;
    for (int i = 0; i < kMost; ++i) stay -= i < lanes_.k && best_[i] > last;
    for (; equal && stay > 0; --stay) equal &= equal - 1;
    marks_ &= ~equal;
  }

  const Choice<T>& choice_;
  const Lanes& lanes_;
  int lane_;
  int64_t first_row_;     // of the warp
  int rows_;              // of the warp
  int row_, group_;       // of this lane: a row of the warp, and a group of that
  int count_, expert_;    // how many experts this lane has, and the first of them
  int first_;             // this lane's first number among the warp's
  Candidate<C>* listed_;  // (rows, k)
  Swizzled<T> logits_;
  Swizzled<C> scores_;  // without kByLogits: where they decide
  Swizzled<C> bias_;
  C best_[kMost];
  bool stays_ = true;
  unsigned marks_;  // a bit for each of this lane's experts
  Shares<C> shares_;
};

template <int kMost, bool kByLogits, typename T>
__global__ void __launch_bounds__(kGatingThreads) choose_few_kernel(Choice<T> choice, Lanes lanes) {
  using Few = FewOfRows<kMost, kByLogits, T>;
  extern __shared__ uint4 shared[];
  char* const memory = reinterpret_cast<char*>(shared);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const Swizzled<float> bias(memory + kWarpsOfBlock * Few::bytes(lanes));
  Few few(choice, lanes, blockIdx.x * int64_t{kWarpsOfBlock} + warp, memory + warp * Few::bytes(lanes), bias);
  few.load_rows();
  if constexpr (!kByLogits) {
    if (choice.all.bias.data)
      for (int e = static_cast<int>(threadIdx.x); e < lanes.experts; e += kGatingThreads) bias[e] = choice.all.bias[e];
    __syncthreads();
  }
  few.find_keys();
  few.find_best();
  few.mark();
  few.list();
  few.write();
}

template <int kMost, bool kByLogits, typename T>
void launch_few(Call& call, const Choice<T>& choice, const Lanes& lanes) {
  const int64_t rows = kWarpsOfBlock * lanes.rows();
  const int64_t bias = kByLogits ? 0 : Swizzled<float>::bytes(lanes.experts + kSorted);
  launch(call, choose_few_kernel<kMost, kByLogits, T>, (choice.rows + rows - 1) / rows, kGatingThreads,
         kWarpsOfBlock * FewOfRows<kMost, kByLogits, T>::bytes(lanes) + bias, choice, lanes);
}

// Returns whether there is a kernel for this choice, which it then launches.
template <typename T>
bool choose_few(Call& call, const Choice<T>& choice) {
  if constexpr (std::is_same<Compute<T>, float>::value) {
    const Settings& s = choice.all.s;
    const int64_t most = s.selects_groups() ? std::max(s.k, s.group_top) : s.k;
    if (most > kMostFew || choice.all.experts > kMostHeld) return false;
    const Lanes lanes(choice.all);
    if (!lanes.fit()) return false;
    if (!choice.all.is_by_logits()) {
      launch_few<8, false>(call, choice, lanes);
    } else if (most > 6) {
      launch_few<8, true>(call, choice, lanes);
    } else if (most > 4) {
      launch_few<6, true>(call, choice, lanes);
    } else if (most > 2) {
      launch_few<4, true>(call, choice, lanes);
    } else {
      launch_few<2, true>(call, choice, lanes);
    }
    return true;
  }
  return false;
}

}  // namespace msops::gating
