// This is the pointwise part of one step of the LLTM (see lltm_cell/cell.h). Gates are product + bias; i, o, g lie
// along a row.

#include <algorithm>

#include "common/pack.h"
#include "common/scratch.h"
#include "common/sum.h"
#include "lltm_cell/cell.h"

using namespace msops;
using namespace msops::lltm;

namespace {

// GatePacks are the gates of N hidden units at a stride of kApart.
template <int N, int kApart, typename T>
struct GatePacks {
  Pack<T, N> values[kGates];

  template <typename Index>
  MSOPS_BOTH GatePacks(const T* row, Index hidden, int room) {
    for (int gate = 0; gate < kGates; ++gate) values[gate] = load<N, kApart>(row + gate * hidden, room);
  }
  MSOPS_BOTH Compute<T> operator()(int gate, int j) const { return Compute<T>(values[gate].values[j]); }
};

// The units of a row are dealt to threads in packs of N neighbours, or in runs of 32 N, of which each lane of a warp
// takes every 32nd.
template <int N, int kApart>
struct Deal {
  static constexpr int kRun = N * kApart;

  // Returns how many threads a row takes.
  template <typename Index>
  static MSOPS_BOTH Index threads(Index units) {
    return (units + kRun - 1) / kRun * kApart;
  }
  // Returns the first unit of a row's thread.
  template <typename Index>
  static MSOPS_BOTH Index first(Index thread) {
    return thread / kApart * kRun + thread % kApart;
  }
};

// Index i is a thread's N hidden units of one group; the samples are dealt to the groups in turns.
template <int N, int kApart, typename T>
struct Forward {
  // The loads of the bias slow large batches in float16 down by 5 %: there, a thread keeps it for several samples.
  static constexpr bool kKeepsBias = sizeof(T) == 2 && (kApart > 1 || N == kPackWidth<T>);
  int64_t batch, hidden, groups;
  const T *product, *bias, *c;
  T *new_h, *new_c;

  template <typename Index>
  MSOPS_BOTH void operator()(Index i) const {
    using Deal = Deal<N, kApart>;
    const Index units = static_cast<Index>(hidden), threads = Deal::threads(units), group = i / threads;
    const Index unit = Deal::first(i - group * threads);
    const int room = kApart == 1 ? N : static_cast<int>(units) - static_cast<int>(unit);
    Index sample = group;
    const GatePacks<N, kApart, T> b(bias + unit, units, room);
    do {
      const GatePacks<N, kApart, T> p(product + sample * kGates * units + unit, units, room);
      const Pack<T, N> old_c = load<N, kApart>(c + sample * units + unit, room);
      Pack<T, N> h_pack, c_pack;
      for (int j = 0; j < N; ++j) {
        const Cell<T> cell(p(kI, j) + b(kI, j), p(kO, j) + b(kO, j), p(kG, j) + b(kG, j), Compute<T>(old_c.values[j]));
        h_pack.values[j] = T(cell.tanh_c * cell.o);
        c_pack.values[j] = T(cell.new_c);
      }
      store<N, kApart>(new_h + sample * units + unit, h_pack, room);
      store<N, kApart>(new_c + sample * units + unit, c_pack, room);
      sample += static_cast<Index>(groups);
    } while (kKeepsBias && sample < static_cast<Index>(batch));
  }
};

// The samples are dealt to groups in turns. Each group has a row of `partial`: the bias gradient's sum over its
// samples.
template <int N, int kApart, typename T>
struct Backward {
  using C = Compute<T>;
  int64_t batch, hidden, groups;
  const T *product, *bias, *c, *dnew_h, *dnew_c;
  T *dproduct, *dc;
  C* partial;

  // Inputs is what is read for a thread's hidden units of one sample.
  template <typename Index>
  struct Inputs {
    GatePacks<N, kApart, T> product;
    Pack<T, N> c, dnew_h, dnew_c;

    MSOPS_BOTH Inputs(const Backward& from, Index sample, Index unit, Index units, int room)
        : product(from.product + sample * kGates * units + unit, units, room),
          c(load<N, kApart>(from.c + sample * units + unit, room)),
          dnew_h(load<N, kApart>(from.dnew_h + sample * units + unit, room)),
          dnew_c(load<N, kApart>(from.dnew_c + sample * units + unit, room)) {}
  };

  // Writes dc and the product's gradient of every `step`-th sample from `first` on, and sums the product's gradients.
  // The loads of two samples are in flight at once. Where there is no second one, the first is loaded twice, unless
  // kBranch avoids that.
  template <bool kBranch, typename Index, typename Sum>
  MSOPS_BOTH void samples(Index unit, Index first, Index step, Sum (&sums)[kGates][N]) const {
    const Index units = static_cast<Index>(hidden), end = static_cast<Index>(batch);
    const int room = kApart == 1 ? N : static_cast<int>(units) - static_cast<int>(unit);
    const GatePacks<N, kApart, T> b(bias + unit, units, room);
    for (Index sample = first; sample < end; sample += 2 * step) {
      const bool both = sample + step < end;
      const Index second = both ? sample + step : sample;
      const Inputs<Index> now(*this, sample, unit, units, room);
      const Inputs<Index> next = kBranch && !both ? now : Inputs<Index>(*this, second, unit, units, room);
      differentiate(now, b, sample, unit, units, room, sums);
      if (both) differentiate(next, b, second, unit, units, room, sums);
    }
  }

  template <typename Index, typename Sum>
  MSOPS_BOTH void differentiate(const Inputs<Index>& in, const GatePacks<N, kApart, T>& b, Index sample, Index unit,
                                Index units, int room, Sum (&sums)[kGates][N]) const {
    const GatePacks<N, kApart, T>& p = in.product;
    Pack<T, N> dgates[kGates], dc_pack;
    for (int j = 0; j < N; ++j) {
      const Cell<T> cell(p(kI, j) + b(kI, j), p(kO, j) + b(kO, j), p(kG, j) + b(kG, j), C(in.c.values[j]));
      const Gradient<T> d(cell, C(in.dnew_h.values[j]), C(in.dnew_c.values[j]));
      for (int gate = 0; gate < kGates; ++gate) {
        dgates[gate].values[j] = T(d.gates[gate]);
        sums[gate][j] += d.gates[gate];
      }
      dc_pack.values[j] = T(d.c);
    }
    for (int gate = 0; gate < kGates; ++gate)
      store<N, kApart>(dproduct + (sample * kGates + gate) * units + unit, dgates[gate], room);
    store<N, kApart>(dc + sample * units + unit, dc_pack, room);
  }
};

constexpr int64_t kFew = 1 << 18;  // elements, up to which a thread for each is faster than packs

#ifdef __CUDACC__
// On the GPU, each block takes the units of blockDim.x threads, at most a warp. Its blockDim.y rows of threads take
// turns along the samples with the rows of the other groups. The sums of a single group are complete.
template <int N, int kApart, bool kBranch, typename Index, typename T>
__global__ void __launch_bounds__(kThreads, 2) backward_kernel(Backward<N, kApart, T> body, T* dbias) {
  constexpr unsigned kWarps = kThreads / 32;
  using C = Compute<T>;
  // `width` is the block's; `unit` is counted within it.
  const unsigned width = blockDim.x * N, unit = Deal<N, kApart>::first(threadIdx.x);
  const unsigned thread = threadIdx.y * blockDim.x + threadIdx.x, warp = thread / 32;
  const Index units = static_cast<Index>(body.hidden), begin = static_cast<Index>(blockIdx.x) * width;
  const Index group = blockIdx.y, groups = gridDim.y;
  C sums[kGates][N] = {};
  if (begin + unit < units)
    body.template samples<kBranch, Index>(begin + unit, group * blockDim.y + threadIdx.y, groups * blockDim.y, sums);
  for (unsigned distance = blockDim.x; distance < 32; distance *= 2)
    for (int gate = 0; gate < kGates; ++gate)
      for (int j = 0; j < N; ++j) sums[gate][j] += __shfl_xor_sync(~0u, sums[gate][j], distance);
  __shared__ C shared[kWarps][kGates * 32 * N];
  if (thread % 32 < blockDim.x)
    for (int gate = 0; gate < kGates; ++gate)
      for (int j = 0; j < N; ++j) shared[warp][gate * width + unit + j * kApart] = sums[gate][j];
  __syncthreads();
#pragma unroll 1
  for (unsigned at = thread; at < kGates * width; at += kThreads) {
    const unsigned gate = (at >= width) + (at >= 2 * width);
    const Index column = begin + at - gate * width;
    if (column >= units) continue;
    C sum = 0;
    for (unsigned w = 0; w < kWarps; ++w) sum += shared[w][at];
    if (groups == 1) {
      dbias[gate * units + column] = T(sum);
    } else {
      body.partial[(group * kGates + gate) * units + column] = sum;
    }
  }
}

template <int N, int kApart, bool kBranch, typename T>
void launch_backward(Call& call, const Backward<N, kApart, T>& body, T* dbias, [[maybe_unused]] bool huge) {
  const int64_t across = Deal<N, kApart>::threads(body.hidden), groups = body.groups;
  if (across == 0) return;
  // 256 bytes of a row were best, and 512 where rows share cache lines. Blocks are narrower where they are few.
  int columns = body.hidden * sizeof(T) % 128 == 0 ? 16 : 32;
  if (kApart == 1) {
    if (((across - 1) / columns + 1) * groups < 256) columns = 8;
    while (columns / 2 >= across) columns /= 2;
  }
  const dim3 threads(columns, kThreads / columns);
  const Grid grid((across - 1) / columns + 1, groups);
  if constexpr (N == 1 && kBranch)
    if (huge) return launch(call, backward_kernel<N, kApart, kBranch, int64_t, T>, grid, threads, 0, body, dbias);
  launch(call, backward_kernel<N, kApart, kBranch, uint32_t, T>, grid, threads, 0, body, dbias);
}
#endif

// ---- On the CPU, loops along neighbouring hidden units of one sample vectorize: index i is a run of them. ----

constexpr int64_t kRun = 256;

template <typename T>
struct ForwardOfRun {
  int64_t hidden, runs;
  const T *product, *bias, *c;
  T *new_h, *new_c;

  MSOPS_CPU void operator()(int64_t i) const {
    const int64_t sample = i / runs, first = (i - sample * runs) * kRun, end = std::min(first + kRun, hidden);
    const T* p = product + sample * kGates * hidden;
#pragma omp simd
    for (int64_t unit = first; unit < end; ++unit) {
      Compute<T> gates[kGates];
      for (int g = 0; g < kGates; ++g)
        gates[g] = Compute<T>(p[g * hidden + unit]) + Compute<T>(bias[g * hidden + unit]);
      const int64_t at = sample * hidden + unit;
      const Cell<T> cell(gates[kI], gates[kO], gates[kG], Compute<T>(c[at]));
      assign(new_h[at], cell.tanh_c * cell.o);
      assign(new_c[at], cell.new_c);
    }
  }
};

// Computes one row of `partial`, over a group of samples.
template <typename T>
struct BackwardOfRun {
  int64_t batch, hidden, groups, runs;
  const T *product, *bias, *c, *dnew_h, *dnew_c;
  T *dproduct, *dc;
  Compute<T>* partial;

  MSOPS_CPU void operator()(int64_t i) const {
    using C = Compute<T>;
    const int64_t group = i / runs, first = (i - group * runs) * kRun, length = std::min(kRun, hidden - first);
    const int64_t end = part_begin(batch, group + 1, groups);
    Sum<T> sums[kGates][kRun];
    for (int64_t sample = part_begin(batch, group, groups); sample < end; ++sample) {
      const int64_t at = sample * hidden + first, gates_at = sample * kGates * hidden + first;
#pragma omp simd
      for (int64_t j = 0; j < length; ++j) {
        C gates[kGates];
        for (int g = 0; g < kGates; ++g)
          gates[g] = C(product[gates_at + g * hidden + j]) + C(bias[first + g * hidden + j]);
        const Cell<T> cell(gates[kI], gates[kO], gates[kG], C(c[at + j]));
        const Gradient<T> d(cell, C(dnew_h[at + j]), C(dnew_c[at + j]));
        for (int g = 0; g < kGates; ++g) {
          assign(dproduct[gates_at + g * hidden + j], d.gates[g]);
          sums[g][j] += d.gates[g];
        }
        assign(dc[at + j], d.c);
      }
    }
    for (int g = 0; g < kGates; ++g)
      for (int64_t j = 0; j < length; ++j) partial[(group * kGates + g) * hidden + first + j] = sums[g][j].total();
  }
};

// Calls `f(Constant<N>{}, Constant<kApart>{})` for the best way to deal the units of rows that begin at the pointers.
// If `huge`, a thread takes one unit, since kernels for 64-bit indices exist only for that.
template <typename T, typename F>
void with_deal(bool huge, int64_t size, int64_t hidden, std::initializer_list<const T*> pointers, F&& f) {
  constexpr Constant<std::min(4, kPackWidth<T>)> each;
  with_width<T>(huge || size <= kFew, hidden, pointers, [&](auto width) {
    if constexpr (width == 1)
      if (!huge && size > 16 * kFew && hidden >= 32 * each) return f(each, Constant<32>{});
    f(width, Constant<1>{});
  });
}

constexpr double kCost = 16;  // of one element's exponentials

}  // namespace

// (product, bias, c) -> (new_h, new_c)
MSOPS_ENTRY(LLTMCellForward) {
  const Tensor product = call.tensor("product", 2), bias = call.tensor("bias", 1), c = call.tensor("c", 2);
  const Tensor new_h = call.tensor("new_h", 2), new_c = call.tensor("new_c", 2);
  const int64_t batch = c.dim(0), hidden = c.dim(1);
  call.require_shape(product, {batch, kGates * hidden});
  call.require_shape(bias, {kGates * hidden});
  call.require_same_shape(new_h, c);
  call.require_same_shape(new_c, c);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    const auto pointers = {product.as<const T>(), bias.as<const T>(), c.as<const T>(), new_h.as<const T>(),
                           new_c.as<const T>()};
    if (call.is_on_cpu()) {
      const int64_t runs = (hidden + kRun - 1) / kRun;
      const ForwardOfRun<T> body{hidden, runs, product.as<T>(), bias.as<T>(), c.as<T>(), new_h.as<T>(), new_c.as<T>()};
      return on_cpu(call, batch * runs, body, kCost * static_cast<double>(std::min(kRun, hidden)));
    }
    const bool huge = kGates * hidden > kLargest32;
    with_deal<T>(huge, c.size, hidden, pointers, [&](auto width, auto apart) {
      constexpr int N = width, kApart = apart;
      const int64_t threads = Deal<N, kApart>::threads(hidden);
      in_runs(batch, kGates * hidden, [&](int64_t first, int64_t samples) {
        int64_t groups = samples;
        if (Forward<N, kApart, T>::kKeepsBias && hidden > 0)  // 8 samples, but enough threads
          groups = std::min(samples, std::max<int64_t>({1, samples / 8, (1 << 20) / threads}));
        const int64_t at = first * hidden;
        const Forward<N, kApart, T> body{samples,
                                         hidden,
                                         groups,
                                         product.as<T>() + kGates * at,
                                         bias.as<T>(),
                                         c.as<T>() + at,
                                         new_h.as<T>() + at,
                                         new_c.as<T>() + at};
        on_gpu_if_huge<N == 1>(huge, call, groups * threads, body);
      });
    });
  });
}

// (product, bias, c, dnew_h, dnew_c) -> (dproduct, dbias, dc, partial). `partial` is scratch: it has a row of 3H sums
// for each of the groups that the batch is split into.
MSOPS_ENTRY(LLTMCellBackward) {
  const Tensor product = call.tensor("product", 2), bias = call.tensor("bias", 1), c = call.tensor("c", 2);
  const Tensor dnew_h = call.tensor("dnew_h", 2), dnew_c = call.tensor("dnew_c", 2);
  const Tensor dproduct = call.tensor("dproduct", 2), dbias = call.tensor("dbias", 1), dc = call.tensor("dc", 2);
  const Tensor partial = call.scratch("partial", 2);
  const int64_t batch = c.dim(0), hidden = c.dim(1), groups = partial.dim(0);
  call.require_shape(product, {batch, kGates * hidden});
  call.require_shape(bias, {kGates * hidden});
  for (const Tensor& tensor : {dnew_h, dnew_c, dc}) call.require_same_shape(tensor, c);
  call.require_same_shape(dproduct, product);
  call.require_same_shape(dbias, bias);
  call.require(groups >= 1, kBadShape, "partial has no rows");
  call.require_shape(partial, {groups, kGates * hidden});
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    using C = Compute<T>;
    if (call.is_on_cpu()) {
      const int64_t runs = (hidden + kRun - 1) / kRun;
      const BackwardOfRun<T> body{batch,           hidden,           groups,     runs,
                                  product.as<T>(), bias.as<T>(),     c.as<T>(),  dnew_h.as<T>(),
                                  dnew_c.as<T>(),  dproduct.as<T>(), dc.as<T>(), partial.as<C>()};
      const double samples = static_cast<double>(batch) / static_cast<double>(groups);
      on_cpu(call, groups * runs, body, kCost * samples * static_cast<double>(std::min(kRun, hidden)));
    }
#ifdef __CUDACC__
    if (!call.is_on_cpu()) {
      const auto pointers = {product.as<const T>(), bias.as<const T>(),     c.as<const T>(), dnew_h.as<const T>(),
                             dnew_c.as<const T>(),  dproduct.as<const T>(), dc.as<const T>()};
      const bool huge = std::max({product.size, partial.size, batch + 2 * groups * kThreads}) > kLargest32;
      with_deal<T>(huge, c.size, hidden, pointers, [&](auto width, auto apart) {
        constexpr int N = width, kApart = apart;
        const Backward<N, kApart, T> body{
            batch,          hidden,         groups,           product.as<T>(), bias.as<T>(),   c.as<T>(),
            dnew_h.as<T>(), dnew_c.as<T>(), dproduct.as<T>(), dc.as<T>(),      partial.as<C>()};
        // The branch saves a fifth in large batches with few units, if their number is odd; elsewhere it costs some
        // percent.
        if constexpr (N == 1) {
          if (c.size > kFew) return launch_backward<N, kApart, true>(call, body, dbias.as<T>(), huge);
        }
        launch_backward<N, kApart, false>(call, body, dbias.as<T>(), false);
      });
    }
#endif
    if (groups > 1 || call.is_on_cpu())
      sum_rows(call, groups, kGates * hidden, kGates * hidden, partial.as<const C>(), dbias.as<T>());
  });
}

MSOPS_SCRATCH(LLTMCellBackward) {
  const Tensor product = call.tensor("product", 2);
  const int64_t sums = product.dim(1), hidden = std::max<int64_t>(1, sums / kGates);
  return {{std::max<int64_t>(1, std::min<int64_t>({product.dim(0) / 64, 65536 / hidden, 4096})), sums}};
}
