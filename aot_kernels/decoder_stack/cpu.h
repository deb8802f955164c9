// decoder_stack on the CPU: threads that go through all layers together, so that weights are read once a call.
// shared/product/cpu.h says how panels hold the tokens that are to be multiplied.
#pragma once

#include <memory>

#include "../common/parallel.h"
#include "../common/scratch.h"
#include "../flash_attention/cpu.h"
#include "cpu_attention.h"
#include "cpu_team.h"
#include "cpu_weights.h"
#include "tiles.h"

namespace msops::decoder_stack::cpu {

using flash_attention::least;
using flash_attention::most;
using flash_attention::parts_of;

// A pass of this many or more tokens of each text attends by tiles of queries (flash_attention/cpu.h).
constexpr int64_t kTileLength = 8;

// Space is the scratch of a call, in numbers of type C.
template <typename T>
struct Space {
  using C = Compute<T>;
  Lanes<C> lanes;
  C *h, *panels, *rows, *hidden;  // panels of C, of what is multiplied, of qkv_rows, and of F features
  T *q, *o;                       // (tokens, heads D)
  T *keys, *values;               // the rows that count, one after another: (B, S + T, kv_heads D)
  C* lse;                         // (B, heads, T)
  int32_t* lengths;               // (B)

  // Lays the scratch out from `data` on, which may be null. Returns how many numbers it takes.
  int64_t place(const Stack<T>& s, C* data) {
    constexpr int64_t kMost = INT64_C(1) << 60;
    int64_t at = 0;
    lanes.tokens = s.tokens();
    const int64_t tokens = s.tokens(), places = lanes.places();
    const auto take = [&](std::initializer_list<int64_t> sizes) {
      C* const begin = data ? data + at : nullptr;
      at = least(kMost, at + least(kMost, size_of(sizes)));
      return begin;
    };
    h = take({places, s.width}), panels = take({places, most(s.width, s.of_heads())});
    rows = take({places, s.qkv_rows()}), hidden = take({places, s.hidden});
    q = reinterpret_cast<T*>(take({tokens, s.of_heads()})), o = reinterpret_cast<T*>(take({tokens, s.of_heads()}));
    const bool gathers = s.has_cache && s.length >= kTileLength;
    const int64_t kept = gathers ? size_of({s.batch, s.room + s.length, s.of_kv_heads()}) : 0;
    keys = reinterpret_cast<T*>(take({kept})), values = reinterpret_cast<T*>(take({kept}));
    lse = take({tokens, s.heads}), lengths = reinterpret_cast<int32_t*>(take({s.batch}));
    return at;
  }
};

template <typename T>
struct Forward {
  using C = Compute<T>;
  static constexpr int64_t kPhases = 10;  // of a layer, at most
  const Stack<T>& s;
  const Space<T>& space;
  Barrier& barrier;
  Shares& shares;

  struct Workspace {
    std::unique_ptr<C[]> weights, sums, scores, widened;

    explicit Workspace(const Forward& f, int64_t deep)
        : weights(new C[kBlock * deep]),
          sums(new C[most(kBlock * kMostLanes<C>, f.s.head_size)]),
          scores(new C[f.s.room + f.s.length]),
          widened(new C[f.s.has_codes ? kBlock * deep : 0]) {}
  };

  MSOPS_CPU void operator()(int64_t part, int64_t parts) const {
    const Workspace w(*this, most(most(s.width, s.hidden), s.of_heads()));
    Team team{barrier, shares, part, parts};
    if (s.tokens() == 1) return read_one(w, team);
    const int64_t tokens = s.tokens(), panels = space.lanes.panels();
    for (int64_t p; team.take(panels, p);) read(p);
    team.end();
    for (int64_t i = 0; i < s.layers; ++i) {
      const Layer<T> layer = s.layer(i);
      for (int64_t p; team.take(panels, p);) put_normed(p, layer.norm1);
      team.end();
      multiply(w, team, s.weights(layer, kQkv), space.panels, Project{*this, layer});
      for (int64_t item; team.take(tokens * s.all_heads(), item);) turn(w, layer, item);
      team.end();
      attend(w, layer, team);
      for (int64_t t; team.take(space.lanes.places(), t);) put(t, space.o, s.of_heads());
      team.end();
      multiply(w, team, s.weights(layer, kOut), space.panels, Add{*this});
      for (int64_t p; team.take(panels, p);) put_normed(p, layer.norm2);
      team.end();
      multiply_gates(w, team, s.weights(layer, kGates), space.panels);
      multiply(w, team, s.weights(layer, kDown), space.hidden, Add{*this});
    }
    for (int64_t t; team.take(tokens, t);) finish(t);
  }

 private:
  // Reads a single token. Each thread norms it for itself, so that fewer phases end.
  MSOPS_CPU void read_one(const Workspace& w, Team& team) const {
    C* const vector = w.weights.get();  // attend() overwrites it
    for (int64_t p; team.take(1, p);) read(p);
    team.end();
    for (int64_t i = 0; i < s.layers; ++i) {
      const Layer<T> layer = s.layer(i);
      put_normed(space.h, layer.norm1, vector);
      multiply(w, team, s.weights(layer, kQkv), vector, Project{*this, layer});
      for (int64_t item; team.take(s.all_heads(), item);) turn(w, layer, item);
      team.end();
      attend(w, layer, team);
      for (int64_t k = 0; k < s.of_heads(); ++k) vector[k] = C(space.o[k]);
      multiply(w, team, s.weights(layer, kOut), vector, Add{*this});
      put_normed(space.h, layer.norm2, vector);
      multiply_gates(w, team, s.weights(layer, kGates), vector);
      multiply(w, team, s.weights(layer, kDown), space.hidden, Add{*this});
    }
    for (int64_t t; team.take(1, t);) finish(t);
  }

  // These take what rows of a matrix make of a panel, whose last lanes may have no token.
  struct Project {
    const Forward& f;
    const Layer<T>& layer;

    MSOPS_CPU void operator()(const Tile<C>& tile) const {
      C* const to = f.rows_of(f.space.rows, tile, f.s.qkv_rows());
      const int64_t pitch = tile.pitch;
      const bool has_bias = layer.qkv_bias;
      for (int64_t r = 0; r < tile.rows; ++r) {
        const C bias = has_bias ? C(layer.qkv_bias[tile.row + r]) : C(0);
#pragma omp simd
        for (int64_t i = r * pitch; i < (r + 1) * pitch; ++i) {
          const C number = rounded<T>(tile.sums[i]);
          to[i] = has_bias ? rounded<T>(number + bias) : number;
        }
      }
    }
  };
  struct Add {
    const Forward& f;

    MSOPS_CPU void operator()(const Tile<C>& tile) const {
      C* const h = f.rows_of(f.space.h, tile, f.s.width);
#pragma omp simd
      for (int64_t i = 0; i < tile.rows * tile.pitch; ++i) h[i] = rounded<T>(h[i] + rounded<T>(tile.sums[i]));
    }
  };
  struct PutGates {
    const Forward& f;

    MSOPS_CPU void operator()(const Tile<C>& tile) const {
      std::copy_n(tile.sums, tile.rows * tile.pitch, f.rows_of(f.space.hidden, tile, f.s.hidden));
    }
  };
  struct Gate {
    const Forward& f;

    MSOPS_CPU void operator()(const Tile<C>& tile) const {
      C* const to = f.rows_of(f.space.hidden, tile, f.s.hidden);
#pragma omp simd
      for (int64_t i = 0; i < tile.rows * tile.pitch; ++i)
        to[i] = gated<T>(rounded<T>(to[i]), rounded<T>(tile.sums[i]));
    }
  };

  // Returns the rows of the panels that a tile stands for.
  MSOPS_CPU C* rows_of(C* panels, const Tile<C>& tile, int64_t deep) const {
    return panels + tile.token * deep + tile.row * tile.pitch;
  }
  MSOPS_CPU C* lane(C* panels, int64_t t, int64_t deep) const { return space.lanes.at(panels, t, deep); }

  // Copies the tokens of panel p to h, with zeros after the last one.
  MSOPS_CPU void read(int64_t p) const {
    const int64_t first = p * kMostLanes<C>, pitch = space.lanes.pitch(first);
    for (int64_t t = first; t < first + pitch; ++t) {
      C* const to = lane(space.h, t, s.width);
      for (int64_t i = 0; i < s.width; ++i) to[i * pitch] = t < s.tokens() ? C(s.x[t * s.width + i]) : C(0);
    }
  }

  MSOPS_CPU C reciprocal(C sum, int64_t n) const { return 1 / std::sqrt(sum / C(most(n, 1)) + s.eps); }
  MSOPS_CPU C reciprocal(const C* numbers, int64_t n) const {
    C sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; ++i) sum += numbers[i] * numbers[i];
    return reciprocal(sum, n);
  }

  // Norms one token.
  MSOPS_CPU void put_normed(const C* h, const Numbers<T>& factors, C* to) const {
    const C r = reciprocal(h, s.width);
    for (int64_t i = 0; i < s.width; ++i) to[i] = normed<T>(h[i], r, factors[i]);
  }

  // Norms the tokens of panel p of h. Sums of some features each keep digits.
  MSOPS_CPU void put_normed(int64_t p, const Numbers<T>& factors) const {
    constexpr int64_t kFeatures = 32;
    const int64_t first = p * kMostLanes<C>, pitch = space.lanes.pitch(first);
    const C* const h = lane(space.h, first, s.width);
    C* const to = lane(space.panels, first, s.width);
    C totals[kMostLanes<C>] = {};
    for (int64_t begin = 0; begin < s.width; begin += kFeatures) {
      C sums[kMostLanes<C>] = {};
      for (int64_t i = begin; i < least(begin + kFeatures, s.width); ++i)
#pragma omp simd
        for (int64_t l = 0; l < pitch; ++l) sums[l] += h[i * pitch + l] * h[i * pitch + l];
#pragma omp simd
      for (int64_t l = 0; l < pitch; ++l) totals[l] += sums[l];
    }
    for (int64_t l = 0; l < pitch; ++l) totals[l] = reciprocal(totals[l], s.width);
    for (int64_t i = 0; i < s.width; ++i) {
      const C factor = factors[i];
#pragma omp simd
      for (int64_t l = 0; l < pitch; ++l) to[i * pitch + l] = normed<T>(h[i * pitch + l], totals[l], factor);
    }
  }
  MSOPS_CPU void put(int64_t t, const T* from, int64_t n) const {
    const int64_t pitch = space.lanes.pitch(t);
    C* const to = lane(space.panels, t, n);
    for (int64_t i = 0; i < n; ++i) to[i * pitch] = t < s.tokens() ? C(from[t * n + i]) : C(0);
  }

  MSOPS_CPU WeightProduct<T> product_of(const Workspace& w, const Weights<T>& weights, const C* panels) const {
    return {weights, {space.lanes, weights.columns, panels, w.weights.get(), w.sums.get()}, w.widened.get()};
  }

  // Multiplies the rows of a matrix by all tokens, and calls f with tiles.
  template <typename F>
  MSOPS_CPU void multiply(const Workspace& w, Team& team, const Weights<T>& weights, const C* panels,
                          const F& f) const {
    const WeightProduct<T> product = product_of(w, weights, panels);
    for (int64_t block; team.take(parts_of(weights.rows, kBlock), block);)
      product(block * kBlock, least(kBlock, weights.rows - block * kBlock), f);
    team.end();
  }

  // Writes silu(gate) up to the panels of hidden features, from rows of both.
  MSOPS_CPU void multiply_gates(const Workspace& w, Team& team, const Weights<T>& weights, const C* panels) const {
    Weights<T> ups = weights;
    ups.numbers = weights.numbers ? weights.numbers + s.hidden * s.width : nullptr, ups.first += s.hidden;
    const WeightProduct<T> gate = product_of(w, weights, panels), up = product_of(w, ups, panels);
    for (int64_t block; team.take(parts_of(s.hidden, kBlock), block);) {
      const int64_t row = block * kBlock, n = least(kBlock, s.hidden - row);
      gate(row, n, PutGates{*this});
      up(row, n, Gate{*this});
    }
    team.end();
  }

  // Norms and rotates a head of a token's queries or keys, and copies one of its values.
  MSOPS_CPU void turn(const Workspace& w, const Layer<T>& layer, int64_t item) const {
    const int64_t t = item / s.all_heads(), head = item % s.all_heads(), key = head - s.heads;
    const int64_t pitch = space.lanes.pitch(t);
    const C* const rows = lane(space.rows, t, s.qkv_rows()) + head * s.head_size * pitch;
    if (key >= s.kv_heads) {
      T* const v = layer.v + (t * s.kv_heads + key - s.kv_heads) * s.head_size;
      for (int64_t i = 0; i < s.head_size; ++i) assign(v[i], rows[i * pitch]);
      return;
    }
    C* const from = w.sums.get();
    for (int64_t i = 0; i < s.head_size; ++i) from[i] = rows[i * pitch];
    const bool is_query = key < 0;
    T* const to =
        is_query ? space.q + (t * s.heads + head) * s.head_size : layer.k + (t * s.kv_heads + key) * s.head_size;
    const Numbers<T>& factors = is_query ? layer.q_norm : layer.k_norm;
    const C r = factors.data ? reciprocal(from, s.head_size) : C(1);
    const int64_t angles = (s.has_table_of_text ? t : t % s.length) * (s.head_size / 2);
    for (int64_t i = 0; i < s.head_size / 2; ++i) {
      const Pair pair(i, s.head_size, s.interleaved);
      C a = from[pair.first], b = from[pair.second];
      if (factors.data) a = normed<T>(a, r, factors[pair.first]), b = normed<T>(b, r, factors[pair.second]);
      const C cos = s.cos[angles + i], sin = s.sin[angles + i];
      assign(to[pair.first], a * cos - b * sin);
      assign(to[pair.second], b * cos + a * sin);
    }
  }

  MSOPS_CPU void attend(const Workspace& w, const Layer<T>& layer, Team& team) const {
    if (s.length < kTileLength) {
      for (int64_t item; team.take(s.tokens() * s.heads, item);) attend_alone(w, layer, item);
      return team.end();
    }
    if (s.has_cache) {
      for (int64_t b; team.take(s.batch, b);) gather(layer, b);
      team.end();
    }
    flash_attention::ExtendedAttention<T> a{};
    static_cast<flash_attention::Attention<T>&>(a) = attention_of(s, layer, space);
    const flash_attention::cpu::Forward<T> tiles{a};
    const int64_t items = tiles.items();
    for (int64_t item; team.take(items, item);) tiles(item, items);
    team.end();
  }

  // Returns how many rows of a text's cache lie one after another from row j on.
  MSOPS_CPU int64_t run_from(int64_t j, int64_t cached) const {
    return s.has_blocks ? least(cached - j, s.block_size - j % s.block_size) : cached - j;
  }

  // Puts the cached rows of a text that count, and the new ones, one after another.
  MSOPS_CPU void gather(const Layer<T>& layer, int64_t b) const {
    const int64_t width = s.of_kv_heads(), cached = s.cached(b), rows = s.room + s.length;
    for (const auto& [cache, added, to] :
         {std::make_tuple(layer.keys, layer.k, space.keys), std::make_tuple(layer.values, layer.v, space.values)}) {
      for (int64_t j = 0, run; j < cached; j += run) {
        run = run_from(j, cached);
        std::copy_n(cache + s.row_of_cache(b, j) * width, run * width, to + (b * rows + j) * width);
      }
      std::copy_n(added + b * s.length * width, s.length * width, to + (b * rows + cached) * width);
    }
    space.lengths[b] = static_cast<int32_t>(cached + s.length);
  }

  // Part is a part of the rows that a query sees, which lie one after another: the new ones, or some of the cache.
  struct Part {
    const T *keys, *values;
    int64_t count;

    MSOPS_CPU Part(const Forward& f, const Layer<T>& layer, int64_t b, int64_t j, int64_t cached, int64_t seen) {
      const Stack<T>& s = f.s;
      const bool is_new = j >= cached;
      const int64_t row = (is_new ? b * s.length + j - cached : s.row_of_cache(b, j)) * s.of_kv_heads();
      keys = (is_new ? layer.k : layer.keys) + row, values = (is_new ? layer.v : layer.values) + row;
      count = is_new ? seen - j : f.run_from(j, cached);
    }
  };

  // Computes a head of a token's o by itself: the cache is read where it is.
  MSOPS_CPU void attend_alone(const Workspace& w, const Layer<T>& layer, int64_t item) const {
    const int64_t t = item / s.heads, head = item % s.heads, b = t / s.length, kv = head / s.group();
    const int64_t cached = s.cached(b), seen = cached + t % s.length + 1, width = s.of_kv_heads(), size = s.head_size;
    const T* const q = space.q + item * size;
    C* const mine = w.sums.get();
    for (int64_t d = 0; d < size; ++d) mine[d] = C(q[d]) * s.scale();
    for (int64_t j = 0; j < seen;) {
      const Part part(*this, layer, b, j, cached, seen);
      run_apart(VectorProduct<T>{part.keys + kv * size, width, part.count, size, mine, w.scores.get() + j});
      j += part.count;
    }
    C sum;
    run_apart(Softmax<C>{w.scores.get(), seen, &sum});
    C* const total = w.weights.get();
    std::fill_n(total, size, C(0));
    for (int64_t j = 0; j < seen;) {
      const Part part(*this, layer, b, j, cached, seen);
      run_apart(WeightedSum<T>{part.values + kv * size, width, part.count, size, w.scores.get() + j, total});
      j += part.count;
    }
    for (int64_t d = 0; d < size; ++d) assign(space.o[item * size + d], total[d] / sum);
  }

  MSOPS_CPU void finish(int64_t t) const {
    const int64_t pitch = space.lanes.pitch(t);
    const C* const h = lane(space.h, t, s.width);
    C sum = 0;
    if (s.norm.data)
      for (int64_t i = 0; i < s.width; ++i) sum += h[i * pitch] * h[i * pitch];
    const C r = reciprocal(sum, s.width);
    for (int64_t i = 0; i < s.width; ++i) {
      const C number = h[i * pitch];
      assign(s.y[t * s.width + i], s.norm.data ? normed<T>(number, r, s.norm[i]) : number);
    }
  }
};

template <typename T>
void forward(Call& call, const Stack<T>& s, const Space<T>& space) {
  Barrier barrier;
  Shares shares(Forward<T>::kPhases * s.layers + 2);
  const double of_token =
      static_cast<double>(s.width) * static_cast<double>(s.qkv_rows() + s.of_heads() + 3 * s.hidden);
  on_threads(call, INT32_MAX, static_cast<double>(s.layers * s.tokens()) * of_token / 8,
             Forward<T>{s, space, barrier, shares});
}

}  // namespace msops::decoder_stack::cpu
