// decoder_stack on the CPU: threads that go through all layers together, so that weights are read once a call.
// shared/product/cpu.h says how panels hold the tokens that are to be multiplied.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>

#include "../common/parallel.h"
#include "../common/scratch.h"
#include "../flash_attention/cpu.h"
#include "cpu_attention.h"
#include "tiles.h"

namespace msops::decoder_stack::cpu {

using flash_attention::least;
using flash_attention::most;
using flash_attention::parts_of;

// Lets threads wait for each other. They sleep: a thread that is woken gets its core at once, also where a thread of
// MindSpore's that waits in a loop has it, and one that yields does not.
class Barrier {
 public:
  // All of `threads` threads must call this.
  void wait(int64_t threads) {
    if (threads == 1) return;
    std::unique_lock<std::mutex> lock(mutex_);
    const int64_t turn = turn_;
    if (++arrived_ == threads) {
      arrived_ = 0;
      ++turn_;
      lock.unlock();
      return changed_.notify_all();
    }
    changed_.wait(lock, [&] { return turn_ != turn; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int64_t arrived_ = 0, turn_ = 0;
};

// A pass of this many or more tokens of each text attends by tiles of queries (flash_attention/cpu.h).
constexpr int64_t kTileLength = 8;

// Space is the scratch of a call, in numbers of type C.
template <typename T>
struct Space {
  using C = Compute<T>;
  int64_t pitch;                 // tokens of a panel
  C *h, *panels, *rows, *gates;  // (tokens, C), panels, (tokens, qkv_rows), (tokens, 2F)
  T *q, *o;                      // (tokens, heads D)
  T *keys, *values;              // the rows that count, one after another: (B, S + T, kv_heads D)
  C* lse;                        // (B, heads, T)
  int32_t* lengths;              // (B)

  // Lays the scratch out from `data` on, which may be null. Returns how many numbers it takes.
  int64_t place(const Stack<T>& s, C* data) {
    constexpr int64_t kMost = INT64_C(1) << 60;
    int64_t at = 0;
    const int64_t tokens = s.tokens(), deep = most(most(s.width, s.hidden), s.of_heads());
    pitch = lanes_for<C>(tokens);
    const auto take = [&](std::initializer_list<int64_t> sizes) {
      C* const begin = data ? data + at : nullptr;
      at = least(kMost, at + least(kMost, size_of(sizes)));
      return begin;
    };
    h = take({tokens, s.width}), panels = take({parts_of(tokens, pitch) * pitch, deep});
    rows = take({tokens, s.qkv_rows()}), gates = take({tokens, 2, s.hidden});
    q = reinterpret_cast<T*>(take({tokens, s.of_heads()})), o = reinterpret_cast<T*>(take({tokens, s.of_heads()}));
    const bool gathers = s.has_cache && s.length >= kTileLength;
    const int64_t kept = gathers ? size_of({s.batch, s.room + s.length, s.of_kv_heads()}) : 0;
    keys = reinterpret_cast<T*>(take({kept})), values = reinterpret_cast<T*>(take({kept}));
    lse = take({tokens, s.heads}), lengths = reinterpret_cast<int32_t*>(take({s.batch}));
    return at;
  }
};

// Team is a thread's view of the threads, which go through the same phases.
struct Team {
  Barrier& barrier;
  Shares& shares;
  int64_t thread, threads, phase = 0;

  // A phase is a loop over the items that the thread takes, and its end:
  //   for (int64_t i; team.take(n, i);) { ... }
  //   team.end();
  // The body is no lambda, since nvcc's lambdas are not inlined into the code for the CPU's vectors.
  MSOPS_CPU bool take(int64_t n, int64_t& i) { return shares.take(phase, thread, threads, n, i); }
  void end() {
    ++phase;
    barrier.wait(threads);
  }
};

template <typename T>
struct Forward {
  using C = Compute<T>;
  static constexpr int64_t kPhases = 11;  // of a layer, at most
  const Stack<T>& s;
  const Space<T>& space;
  Barrier& barrier;
  Shares& shares;

  struct Workspace {
    std::unique_ptr<C[]> weights, sums, scores;

    explicit Workspace(const Forward& f, int64_t deep)
        : weights(new C[kBlock * deep]),
          sums(new C[most(most(2 * kBlock, kRows * kMostLanes<C>), f.s.head_size)]),
          scores(new C[f.s.room + f.s.length]) {}
  };

  MSOPS_CPU void operator()(int64_t part, int64_t parts) const {
    const Workspace w(*this, most(most(s.width, s.hidden), s.of_heads()));
    Team team{barrier, shares, part, parts};
    if (s.tokens() == 1) return read_one(w, team);
    const int64_t tokens = s.tokens(), places = parts_of(tokens, space.pitch) * space.pitch;
    for (int64_t t; team.take(tokens, t);)
      for (int64_t c = 0; c < s.width; ++c) space.h[t * s.width + c] = C(s.x[t * s.width + c]);
    team.end();
    for (int64_t i = 0; i < s.layers; ++i) {
      const Layer<T> layer = s.layer(i);
      for (int64_t t; team.take(places, t);) put_normed(t, layer.norm1, panel(t, s.width));
      team.end();
      multiply(w, team, layer.qkv, s.qkv_rows(), s.width, space.panels, Project{*this, layer});
      for (int64_t item; team.take(tokens * (s.heads + s.kv_heads), item);) turn(layer, item);
      team.end();
      attend(w, layer, team);
      for (int64_t t; team.take(places, t);) put(t, space.o, s.of_heads());
      team.end();
      multiply(w, team, layer.out, s.width, s.of_heads(), space.panels, Add{*this});
      for (int64_t t; team.take(places, t);) put_normed(t, layer.norm2, panel(t, s.width));
      team.end();
      multiply(w, team, layer.gate_up, 2 * s.hidden, s.width, space.panels, PutGates{*this});
      for (int64_t t; team.take(places, t);) put_gated(t);
      team.end();
      multiply(w, team, layer.down, s.width, s.hidden, space.panels, Add{*this});
    }
    for (int64_t t; team.take(tokens, t);) finish(t);
  }

 private:
  // Reads a single token. Each thread norms it for itself, so that fewer phases end.
  MSOPS_CPU void read_one(const Workspace& w, Team& team) const {
    C* const vector = w.weights.get();  // attend() overwrites it
    for (int64_t i; team.take(1, i);)
      for (int64_t c = 0; c < s.width; ++c) space.h[c] = C(s.x[c]);
    team.end();
    for (int64_t i = 0; i < s.layers; ++i) {
      const Layer<T> layer = s.layer(i);
      put_normed(0, layer.norm1, vector);
      multiply(w, team, layer.qkv, s.qkv_rows(), s.width, vector, Project{*this, layer});
      for (int64_t item; team.take(s.heads + s.kv_heads, item);) turn(layer, item);
      team.end();
      attend(w, layer, team);
      for (int64_t k = 0; k < s.of_heads(); ++k) vector[k] = C(space.o[k]);
      multiply(w, team, layer.out, s.width, s.of_heads(), vector, Add{*this});
      put_normed(0, layer.norm2, vector);
      multiply_gates(w, team, layer.gate_up, vector);
      multiply(w, team, layer.down, s.width, s.hidden, space.panels, Add{*this});
    }
    for (int64_t t; team.take(1, t);) finish(t);
  }

  // Writes silu(gate) up to the panel, from rows of both.
  MSOPS_CPU void multiply_gates(const Workspace& w, Team& team, const T* matrix, const C* vector) const {
    C *const gates = w.sums.get(), *const ups = gates + kBlock;
    for (int64_t block; team.take(parts_of(s.hidden, kBlock), block);) {
      const int64_t row = block * kBlock, n = least(kBlock, s.hidden - row);
      run_apart(VectorProduct<T>{matrix + row * s.width, s.width, n, s.width, vector, gates});
      run_apart(VectorProduct<T>{matrix + (s.hidden + row) * s.width, s.width, n, s.width, vector, ups});
      for (int64_t i = 0; i < n; ++i) space.panels[row + i] = gated<T>(rounded<T>(gates[i]), rounded<T>(ups[i]));
    }
    team.end();
  }

  // These take the sum of a row of a matrix and a token.
  struct Project {
    const Forward& f;
    const Layer<T>& layer;

    MSOPS_CPU void operator()(int64_t row, int64_t t, C sum) const {
      const Stack<T>& s = f.s;
      const int64_t first_value = s.of_heads() + s.of_kv_heads();
      C number = rounded<T>(sum);
      if (layer.qkv_bias) number = rounded<T>(number + C(layer.qkv_bias[row]));
      if (row >= first_value) return assign(layer.v[t * s.of_kv_heads() + row - first_value], number);
      f.space.rows[t * s.qkv_rows() + row] = number;
    }
  };
  struct Add {
    const Forward& f;

    MSOPS_CPU void operator()(int64_t row, int64_t t, C sum) const {
      C& h = f.space.h[t * f.s.width + row];
      h = rounded<T>(h + rounded<T>(sum));
    }
  };
  struct PutGates {
    const Forward& f;

    MSOPS_CPU void operator()(int64_t row, int64_t t, C sum) const {
      f.space.gates[t * 2 * f.s.hidden + row] = rounded<T>(sum);
    }
  };

  MSOPS_CPU C* panel(int64_t t, int64_t deep) const { return lane_of(space.panels, t, space.pitch, deep); }

  MSOPS_CPU C reciprocal(const C* numbers, int64_t n) const {
    C sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; ++i) sum += numbers[i] * numbers[i];
    return 1 / std::sqrt(sum / C(most(n, 1)) + s.eps);
  }

  // Writes a token's normed row to a column of a panel; zeros after the last token.
  MSOPS_CPU void put_normed(int64_t t, const Numbers<T>& factors, C* to) const {
    if (t >= s.tokens()) return put_zeros(to, s.width);
    const C* const h = space.h + t * s.width;
    const C r = reciprocal(h, s.width);
    for (int64_t i = 0; i < s.width; ++i) to[i * space.pitch] = normed<T>(h[i], r, factors[i]);
  }
  MSOPS_CPU void put(int64_t t, const T* from, int64_t n) const {
    C* const to = panel(t, n);
    if (t >= s.tokens()) return put_zeros(to, n);
    for (int64_t i = 0; i < n; ++i) to[i * space.pitch] = C(from[t * n + i]);
  }
  MSOPS_CPU void put_gated(int64_t t) const {
    C* const to = panel(t, s.hidden);
    if (t >= s.tokens()) return put_zeros(to, s.hidden);
    const C *const gate = space.gates + t * 2 * s.hidden, *const up = gate + s.hidden;
    for (int64_t i = 0; i < s.hidden; ++i) to[i * space.pitch] = gated<T>(gate[i], up[i]);
  }
  MSOPS_CPU void put_zeros(C* to, int64_t n) const {
    for (int64_t i = 0; i < n; ++i) to[i * space.pitch] = 0;
  }

  // Multiplies the rows of a matrix (rows, deep) by all tokens, and calls f(row, token, sum).
  template <typename F>
  MSOPS_CPU void multiply(const Workspace& w, Team& team, const T* matrix, int64_t rows, int64_t deep, const C* panels,
                          const F& f) const {
    const TokenProduct<T> product{s.tokens(), deep, space.pitch, panels, w.weights.get(), w.sums.get()};
    for (int64_t block; team.take(parts_of(rows, kBlock), block);)
      product(matrix, block * kBlock, least(kBlock, rows - block * kBlock), f);
    team.end();
  }

  // Norms and rotates a head of a token's queries or keys.
  MSOPS_CPU void turn(const Layer<T>& layer, int64_t item) const {
    const int64_t t = item / (s.heads + s.kv_heads), head = item % (s.heads + s.kv_heads);
    const bool is_query = head < s.heads;
    const C* const from = space.rows + t * s.qkv_rows() + head * s.head_size;
    T* const to = is_query ? space.q + (t * s.heads + head) * s.head_size
                           : layer.k + (t * s.kv_heads + head - s.heads) * s.head_size;
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

  // Puts the cached rows of a text that count, and the new ones, one after another.
  MSOPS_CPU void gather(const Layer<T>& layer, int64_t b) const {
    const int64_t width = s.of_kv_heads(), cached = s.cached(b), rows = s.room + s.length;
    for (const auto& [cache, added, to] :
         {std::make_tuple(layer.keys, layer.k, space.keys), std::make_tuple(layer.values, layer.v, space.values)}) {
      std::copy_n(cache + b * s.room * width, cached * width, to + b * rows * width);
      std::copy_n(added + b * s.length * width, s.length * width, to + (b * rows + cached) * width);
    }
    space.lengths[b] = static_cast<int32_t>(cached + s.length);
  }

  // Part is a part of the rows that a query sees, which lie one after another.
  struct Part {
    const T *keys, *values;
    int64_t begin, count;
  };

  // Computes a head of a token's o by itself: the cache is read where it is.
  MSOPS_CPU void attend_alone(const Workspace& w, const Layer<T>& layer, int64_t item) const {
    const int64_t t = item / s.heads, head = item % s.heads, b = t / s.length, kv = head / s.group();
    const int64_t cached = s.cached(b), seen = cached + t % s.length + 1, width = s.of_kv_heads(), size = s.head_size;
    const T* const q = space.q + item * size;
    C* const mine = w.sums.get();
    for (int64_t d = 0; d < size; ++d) mine[d] = C(q[d]) * s.scale();
    const Part parts[] = {{layer.keys + b * s.room * width, layer.values + b * s.room * width, 0, cached},
                          {layer.k + b * s.length * width, layer.v + b * s.length * width, cached, seen - cached}};
    for (const Part& part : parts)
      run_apart(VectorProduct<T>{part.keys + kv * size, width, part.count, size, mine, w.scores.get() + part.begin});
    C sum;
    run_apart(Softmax<C>{w.scores.get(), seen, &sum});
    C* const total = w.weights.get();
    std::fill_n(total, size, C(0));
    for (const Part& part : parts)
      run_apart(WeightedSum<T>{part.values + kv * size, width, part.count, size, w.scores.get() + part.begin, total});
    for (int64_t d = 0; d < size; ++d) assign(space.o[item * size + d], total[d] / sum);
  }

  MSOPS_CPU void finish(int64_t t) const {
    const C* const h = space.h + t * s.width;
    const C r = s.norm.data ? reciprocal(h, s.width) : C(1);
    for (int64_t i = 0; i < s.width; ++i)
      assign(s.y[t * s.width + i], s.norm.data ? normed<T>(h[i], r, s.norm[i]) : h[i]);
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
