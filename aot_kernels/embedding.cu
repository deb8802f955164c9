// out = weight[ids], rows of a table, and the table's gradient: for each row, the sum of dout at the places that took
// it. On the GPU it is computed without atomics, and no row takes long because many places took it.
//
//   TakeRows     copies rows.
//   invert       sorts the places by the row that they took (common/scatter.h).
//   SumTiles     adds up dout over kTile of the sorted places: it writes the sum of a row whose places are all in the
//                tile, and parts of the sums of the first and the last row.
//   JoinTiles    adds up the parts of other rows' sums, and writes zeros for rows that no place took.

#include "common/pack.h"
#include "common/scatter.h"
#include "shared/gather/indices.h"

using namespace msops;

namespace {

constexpr int kRun = 64;            // columns that a CPU thread takes at once
constexpr int kTile = 16;           // sorted places whose sums one thread adds up
constexpr int64_t kNoPadding = -1;  // where no row is padding

struct Inputs {
  Tensor ids, dout, weight;
  int64_t padding;  // a row, or kNoPadding

  explicit Inputs(Call& call, bool has_dout = false) : ids(call.tensor_of("index", "ids")) {
    if (has_dout) dout = call.tensor("dout");
    weight = call.tensor("weight", 2);
    padding = call.attribute("padding", kNoPadding, INT64_MAX);
    call.require(padding < rows() || padding == kNoPadding, kBadAttribute, "padding is %lld, but weight has %lld rows",
                 static_cast<long long>(padding), static_cast<long long>(rows()));
  }

  int64_t places() const { return ids.size; }
  int64_t rows() const { return weight.dim(0); }
  int64_t columns() const { return weight.dim(1); }
  int64_t tiles() const { return (places() + kTile - 1) / kTile; }

  template <typename Index>
  void require_indices(Call& call) const {
    if (call.is_on_cpu()) gather::require_indices<Index>(call, ids, weight, rows(), "rows");
  }
  void require_taken(Call& call, const Tensor& out) const {
    if (!call.ok()) return;
    std::vector<int64_t> shape(ids.shape, ids.shape + ids.rank);
    shape.push_back(columns());
    call.require_shape(out, shape);
  }
};

// Run is up to W neighbouring columns of the row that index i of a loop over rows and runs belongs to.
template <int W>
struct Run {
  int64_t row, column;
  int count;

  static MSOPS_BOTH int64_t of_row(int64_t columns) { return (columns + W - 1) / W; }

  template <typename I>
  MSOPS_BOTH Run(I i, int64_t columns) {
    const I runs = static_cast<I>(of_row(columns));
    row = i / runs, column = (i - static_cast<I>(row) * runs) * int64_t{W};
    count = W == kRun && columns - column < W ? static_cast<int>(columns - column) : W;
  }
};

// A run of a row is copied, or is zeros if the row is the padding or does not exist.
template <int W, typename T, typename Index>
struct TakeRows {
  int64_t rows, columns, padding;
  const Index* ids;
  const T* weight;
  T* out;

  template <typename I>
  MSOPS_BOTH void operator()(I i) const {
    const Run<W> run(i, columns);
    const int64_t row = ids[run.row];
    const bool is_taken = 0 <= row && row < rows && row != padding;
    T* const to = out + run.row * columns + run.column;
    if constexpr (W == kRun) {
      if (is_taken) {
        const T* const from = weight + row * columns + run.column;
        for (int k = 0; k < run.count; ++k) to[k] = from[k];
      } else {
        for (int k = 0; k < run.count; ++k) to[k] = T(0);
      }
    } else {
      store(to, is_taken ? load<W>(weight + row * columns + run.column) : Pack<T, W>{});
    }
  }
};

template <typename T, typename Index>
struct Gradient {
  using C = Compute<T>;
  Inverse inverse;
  int64_t columns, padding;
  const Index* ids;
  const T* dout;
  C* parts;  // (tiles, 2, columns): the sums of a row of the tile before, and of one that goes on in the next tile
  T* dweight;

  MSOPS_BOTH C* part(int64_t tile, int which, int64_t column) const {
    return parts + (2 * tile + which) * columns + column;
  }
  template <int W>
  MSOPS_BOTH void write(const Run<W>& run, int64_t row, const C (&sums)[W]) const {
    T* const to = dweight + row * columns + run.column;
    if constexpr (W == kRun) {
      for (int k = 0; k < run.count; ++k) assign(to[k], sums[k]);
    } else {
      store_at_once(to, rounded_pack<T>(sums));
    }
  }
};

// Index i is a run of columns of a tile of the sorted places.
template <int W, typename T, typename Index>
struct SumTiles {
  using C = Compute<T>;
  static constexpr int kAtOnce = W == kRun ? 1 : 8;  // rows of dout that are loaded before they are added
  Gradient<T, Index> all;

  template <typename I>
  MSOPS_BOTH void operator()(I i) const {
    const Run<W> run(i, all.columns);
    const int32_t* const order = all.inverse.order;
    const int64_t tile = run.row, begin = tile * kTile, placed = all.inverse.end(0, all.inverse.targets - 1) - order;
    if (begin >= placed) return;
    const int64_t end = begin + kTile < placed ? begin + kTile : placed;
    C sums[W] = {};
    Index row = all.ids[order[begin]];
    bool is_first = begin > 0 && all.ids[order[begin - 1]] == row;  // whether the tile before has this row, too
    for (int64_t first = begin; first < end; first += kAtOnce) {
      Index rows[kAtOnce];
      C terms[kAtOnce][W];
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
      for (int j = 0; j < kAtOnce; ++j) {
        const int64_t place = order[first + j < end ? first + j : end - 1];
        rows[j] = all.ids[place];
        read(run, place, terms[j]);
      }
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
      for (int j = 0; j < kAtOnce; ++j) {
        if (first + j >= end) break;
        if (rows[j] != row) {
          is_first ? keep(run, 0, sums) : write(run, row, sums);
          for (C& sum : sums) sum = 0;
          row = rows[j], is_first = false;
        }
        for (int k = 0; k < W; ++k) sums[k] += terms[j][k];
      }
    }
    const bool goes_on = end < placed && all.ids[order[end]] == row;
    if (is_first) {
      keep(run, 0, sums);
    } else if (goes_on) {
      keep(run, 1, sums);
    } else {
      write(run, row, sums);
    }
  }

 private:
  MSOPS_BOTH void read(const Run<W>& run, int64_t place, C (&terms)[W]) const {
    const T* const from = all.dout + place * all.columns + run.column;
    if constexpr (W == kRun) {
      for (int k = 0; k < W; ++k) terms[k] = k < run.count ? C(from[k]) : C(0);
    } else {
      const Pack<T, W> pack = load<W>(from);
      for (int k = 0; k < W; ++k) terms[k] = C(pack.values[k]);
    }
  }
  MSOPS_BOTH void keep(const Run<W>& run, int which, const C (&sums)[W]) const {
    C* const to = all.part(run.row, which, run.column);
    for (int k = 0; k < run.count; ++k) to[k] = sums[k];
  }
  MSOPS_BOTH void write(const Run<W>& run, int64_t row, const C (&sums)[W]) const {
    if (row != all.padding) all.write(run, row, sums);
  }
};

// Index i is a run of columns of a row of the table.
template <int W, typename T, typename Index>
struct JoinTiles {
  using C = Compute<T>;
  Gradient<T, Index> all;

  template <typename I>
  MSOPS_BOTH void operator()(I i) const {
    const Run<W> run(i, all.columns);
    const int32_t* const order = all.inverse.order;
    const int64_t begin = all.inverse.begin(0, run.row) - order, end = all.inverse.end(0, run.row) - order;
    C sums[W] = {};
    if (begin < end && run.row != all.padding) {
      const int64_t first = begin / kTile, last = (end - 1) / kTile;
      if (first == last) return;  // SumTiles wrote it
      for (int64_t tile = first; tile <= last; ++tile) {
        const C* const part = all.part(tile, tile == first ? 1 : 0, run.column);
        for (int k = 0; k < run.count; ++k) sums[k] += part[k];
      }
    }
    all.write(run, run.row, sums);
  }
};

// Calls f(Constant<W>{}) with the number of columns that one call of a body takes.
template <typename T, typename F>
void with_run(const Call& call, int64_t columns, std::initializer_list<const T*> pointers, const F& f) {
  if (call.is_on_cpu()) return f(Constant<kRun>{});
  with_width<T>(false, columns, pointers, f);
}

Shapes scratch_of(const Call& call, const Inputs& in) {
  if (!call.ok()) return Shapes(2);
  return {{scatter_scratch(in.rows(), in.places())}, {in.tiles(), 2, in.columns()}};
}

}  // namespace

// (ids, weight) -> (out). Places with the index `padding` get zeros.
MSOPS_ENTRY(EmbeddingForward) {
  const Inputs in(call);
  const Tensor out = call.tensor("out");
  in.require_taken(call, out);
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    with_type<int32_t, int64_t>(in.ids, [&](auto index) {
      using Index = typename decltype(index)::type;
      in.require_indices<Index>(call);
      if (!call.ok() || out.size == 0) return;
      with_run<T>(call, in.columns(), {in.weight.as<T>(), out.as<T>()}, [&](auto width) {
        constexpr int W = width;
        const TakeRows<W, T, Index> body{
            in.rows(), in.columns(), in.padding, in.ids.as<const Index>(), in.weight.as<const T>(), out.as<T>()};
        parallel_for(call, in.places() * Run<W>::of_row(in.columns()), out.size, body, W);
      });
    });
  });
}

// (ids, dout, weight) -> (dweight, places, parts): `weight` gives its shape alone. From `places` on, this is scratch.
MSOPS_ENTRY(EmbeddingBackward) {
  const Inputs in(call, true);
  const Tensor dweight = call.tensor("dweight", 2);
  const Tensor places = call.tensor_of("int32", "places", 1), parts = call.scratch("parts", 3);
  in.require_taken(call, in.dout);
  call.require_same_shape(dweight, in.weight);
  if (call.ok()) require_shapes(call, {places, parts}, scratch_of(call, in));
  return call.run([&](auto type) {
    using T = typename decltype(type)::type;
    using C = Compute<T>;
    with_type<int32_t, int64_t>(in.ids, [&](auto index) {
      using Index = typename decltype(index)::type;
      in.require_indices<Index>(call);
      if (!call.ok() || dweight.size == 0) return;
      const Index* const ids = in.ids.as<const Index>();
      const Inverse inverse = invert(call, 1, in.rows(), in.places(), ids, places.as<int32_t>());
      const Gradient<T, Index> all{inverse,       in.columns(),   in.padding, ids, in.dout.as<const T>(),
                                   parts.as<C>(), dweight.as<T>()};
      with_run<T>(call, in.columns(), {in.dout.as<T>(), dweight.as<T>()}, [&](auto width) {
        constexpr int W = width;
        const int64_t runs = Run<W>::of_row(in.columns()), largest = std::max(in.dout.size, dweight.size);
        parallel_for(call, in.tiles() * runs, largest, SumTiles<W, T, Index>{all}, kTile * W);
        parallel_for(call, in.rows() * runs, largest, JoinTiles<W, T, Index>{all}, W);
      });
    });
  });
}

MSOPS_SCRATCH(EmbeddingBackward) { return scratch_of(call, Inputs(call, true)); }
