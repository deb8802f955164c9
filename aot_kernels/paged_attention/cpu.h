// Paged attention on the CPU: the tiles of flash_attention/cpu.h, whose keys come from blocks.
#pragma once

#include <vector>

#include "../flash_attention/cpu.h"
#include "problem.h"

namespace msops::paged::cpu {

namespace flash = flash_attention;

// Items are the tiles of one sequence.
template <typename T, typename K>
struct Tiles : flash::cpu::Forward<T> {
  using Base = flash::cpu::Forward<T>;
  using C = Compute<T>;
  const Paged<T, K>& p;
  int64_t b;
  Sequence s;

  // Scales and zeros of a head's features, which codes of a cache need.
  struct Workspace : Base::Workspace {
    int64_t head = -1;
    std::vector<C> scale_k, zero_k, scale_v, zero_v;

    explicit Workspace(const flash::Attention<T>& a) : Base::Workspace(a) {}
  };

  Tiles(const Paged<T, K>& paged, int64_t sequence)
      : Base{attention_of(paged, sequence)}, p(paged), b(sequence), s(paged.sequence(sequence)) {}

  MSOPS_CPU void tile(Workspace& w, int64_t item) const {
    const flash::Sequence sequence{0, 0, s.tokens, s.keys};
    const int64_t outer = item / this->query_tiles(), kv_head = outer / this->head_tiles();
    const int64_t begin =
        flash::cpu::balanced(item % this->query_tiles(), this->query_tiles()) * flash::cpu::kQueries<C>;
    const Span queries{begin, least(begin + flash::cpu::kQueries<C>, s.tokens)};
    const int64_t first_head = kv_head * this->a.group() + outer % this->head_tiles() * this->heads_of_tile();
    this->load_queries(w, sequence, 0, first_head,
                       least(first_head + this->heads_of_tile(), (kv_head + 1) * this->a.group()), queries);
    if (Paged<T, K>::kHasCodes) load_codes(w, kv_head);
    const Span keys = p.keys_of(s, queries);
    for (int64_t j = keys.begin; j < keys.end; j += flash::cpu::kKeys) {
      const int64_t n = least(flash::cpu::kKeys, keys.end - j);
      load_keys(w, kv_head, j, n);
      const bool in_range = flash::cpu::in_range(this->a, sequence, queries, {j, j + n});
      for (int64_t c = 0; c < w.columns; c += flash::cpu::kColumns<C>) this->panel(w, sequence, 0, c, j, n, in_range);
    }
    for (int64_t c = 0; c < w.columns; ++c) this->store(w, c, sequence, 0);
  }

  // Returns the attention of one sequence, without keys.
  static flash::ExtendedAttention<T> attention_of(const Paged<T, K>& p, int64_t b) {
    const Sequence s = p.sequence(b);
    flash::ExtendedAttention<T> all{};
    all.batch = 1, all.heads = p.heads, all.kv_heads = p.kv_heads, all.queries = all.query_rows = s.tokens;
    all.keys = all.key_rows = s.keys, all.width = p.width, all.value_width = p.value_width;
    all.q = p.query(s.first, 0), all.of_q = {0, p.width, p.heads * p.width};
    all.out = p.out + s.first * p.heads * p.value_width, all.of_out = {0, p.value_width, p.heads * p.value_width};
    all.lse = p.lse + s.first, all.of_lse = {0, p.tokens, 1};
    all.scale = p.scale, all.softcap = p.softcap, all.left = p.left, all.right = p.right, all.splits = 1;
    if (p.mask) all.mask = p.mask + s.first * p.mask_token;
    all.mask_query = p.mask_token, all.mask_head = p.mask_head, all.mask_key = p.mask_key;
    all.bias = moved(p.bias, s.first * p.bias_token);
    all.bias_query = p.bias_token, all.bias_head = p.bias_head, all.bias_key = p.bias_key;
    all.slopes = moved(p.slopes, b * p.slopes_batch);
    return all;
  }

 private:
  static Floats<T> moved(const Floats<T>& x, int64_t by) {
    return {x.narrow ? x.narrow + by : nullptr, x.wide ? x.wide + by : nullptr};
  }

  MSOPS_CPU void load_codes(Workspace& w, int64_t head) const {
    if (w.head == head) return;
    w.head = head;
    load_codes(p.of_k, head, p.width, w.scale_k, w.zero_k);
    if (has_values()) load_codes(p.of_v, head, p.value_width, w.scale_v, w.zero_v);
  }
  static MSOPS_CPU void load_codes(const Codes<T>& codes, int64_t head, int64_t width, std::vector<C>& scale,
                                   std::vector<C>& zero) {
    scale.resize(width), zero.resize(width);
    for (int64_t d = 0; d < width; ++d) scale[d] = codes.scale(head, d), zero[d] = codes.zero(head, d);
  }
  bool has_values() const { return p.v != p.k; }

  // Loads n keys from key j on, a run of rows of a block after another.
  MSOPS_CPU void load_keys(Workspace& w, int64_t kv_head, int64_t j, int64_t n) const {
    for (int64_t done = 0; done < n;) {
      const int64_t run = least(n - done, p.block_size - (j + done) % p.block_size), row = p.row_of_key(b, j + done);
      C *const k = w.k.get() + done * p.width, *const v = w.v.get() + done * w.value_pitch;
      load_rows(p.key(row, kv_head), p.kv_heads * p.width, run, p.width, k, p.width, w.scale_k, w.zero_k);
      if (has_values())
        load_rows(p.value(row, kv_head), p.kv_heads * p.v_width, run, p.value_width, v, w.value_pitch, w.scale_v,
                  w.zero_v);
      for (int64_t r = 0; r < run && !has_values(); ++r) {
        std::copy_n(k + r * p.width, p.value_width, v + r * w.value_pitch);
        std::fill(v + r * w.value_pitch + p.value_width, v + (r + 1) * w.value_pitch, C(0));
      }
      done += run;
    }
  }
  static MSOPS_CPU void load_rows(const T* from, int64_t stride, int64_t rows, int64_t width, C* to, int64_t pitch,
                                  const std::vector<C>&, const std::vector<C>&) {
    flash::cpu::load_rows(from, stride, rows, width, to, pitch);
  }
  static MSOPS_CPU void load_rows(const int8_t* from, int64_t stride, int64_t rows, int64_t width, C* to, int64_t pitch,
                                  const std::vector<C>& scales, const std::vector<C>& zeros) {
    const C *const scale = scales.data(), *const zero = zeros.data();
    for (int64_t r = 0; r < rows; ++r) {
#pragma omp simd
      for (int64_t d = 0; d < width; ++d)
        to[r * pitch + d] = (C(static_cast<int32_t>(from[r * stride + d])) - zero[d]) * scale[d];
      for (int64_t d = width; d < pitch; ++d) to[r * pitch + d] = 0;
    }
  }
};

// A thread takes items of all sequences, one after another.
template <typename T, typename K>
struct Forward {
  const Paged<T, K>& p;
  std::vector<int64_t> first;  // the number of the first item of each sequence, and of all items

  explicit Forward(const Paged<T, K>& paged) : p(paged), first{0} {
    for (int64_t b = 0; b < p.batch; ++b)
      first.push_back(first.back() + (p.sequence(b).tokens > 0 ? Tiles<T, K>(p, b).items() : 0));
  }
  int64_t items() const { return first.back(); }
  double work() const {
    double pairs = 0;
    for (int64_t b = 0; b < p.batch; ++b) {
      const Sequence s = p.sequence(b);
      pairs += static_cast<double>(s.tokens) * static_cast<double>(s.keys);
    }
    return pairs * static_cast<double>(p.heads * (p.width + p.value_width + 20));
  }

  MSOPS_CPU void operator()(int64_t part, int64_t parts) const {
    int64_t item = part_begin(items(), part, parts);
    const int64_t end = part_begin(items(), part + 1, parts);
    if (item == end) return;
    int64_t b = std::upper_bound(first.begin(), first.end(), item) - first.begin() - 1;
    flash::Attention<T> sizes{};
    sizes.width = p.width, sizes.value_width = p.value_width;
    typename Tiles<T, K>::Workspace w(sizes);
    for (; item < end; ++b) {
      const Tiles<T, K> tiles(p, b);
      for (; item < least(end, first[b + 1]); ++item) tiles.tile(w, item - first[b]);
    }
  }
};

template <typename T, typename K>
void forward(Call& call, const Paged<T, K>& p) {
  const Forward<T, K> body(p);
  on_threads(call, body.items(), body.work() / 4, body);
}

}  // namespace msops::paged::cpu
