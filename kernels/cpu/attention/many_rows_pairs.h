// Inner loops over packed keys and values, multiplied as pairs of bfloat16. Included once, with AVX-512
// and its dot products of bfloat16, after pairs.h and many_rows_tile.h.

// c [kRowBlock, kVectors vectors] = a [kRowBlock, 2 * depth] * b [depth, …, 2] * factor, or += a * b
// with kAdd. Rows of a are `a_bytes` apart; b is a packed panel of pairs.
template <bool kAdd, int kVectors>
QUIRE_INLINE void multiply_paired_vectors(const char* a, int64_t a_bytes, const Ints* b,
                                          int64_t depth, float factor, float* c,
                                          int64_t c_stride) {
  Floats sums[kRowBlock][kVectors];
#pragma GCC unroll 16
  for (int i = 0; i < kRowBlock; ++i) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      sums[i][v] = kAdd ? load(c + i * c_stride + v * kLanes) : Floats{};
    }
  }
  for (int64_t k = 0; k < depth; ++k, a += sizeof(int32_t), b += kPanel / kLanes) {
    Ints columns[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) columns[v] = load_as<Ints>(b + v);
#pragma GCC unroll 16
    for (int i = 0; i < kRowBlock; ++i) {
      const Ints x = broadcast_bits(load_as<int32_t>(a + i * a_bytes));
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) add_dots(sums[i][v], x, columns[v]);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kRowBlock; ++i) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      store(c + i * c_stride + v * kLanes, kAdd ? sums[i][v] : sums[i][v] * factor);
    }
  }
}

template <bool kAdd>
QUIRE_INLINE void multiply_paired(const void* a, int64_t a_bytes, const Ints* b, int64_t depth,
                                  float factor, float* c, int64_t c_stride, int64_t num_columns) {
  const char* from = static_cast<const char*>(a);
  if (num_columns > kLanes) {
    multiply_paired_vectors<kAdd, 2>(from, a_bytes, b, depth, factor, c, c_stride);
  } else {
    multiply_paired_vectors<kAdd, 1>(from, a_bytes, b, depth, factor, c, c_stride);
  }
}

// The first 16 or the last 16 numbers of a and b, as pairs of a number of a and one of b.
template <bool kLast, std::size_t... kLane>
QUIRE_INLINE Ints paired_half(Ints a, Ints b, std::index_sequence<kLane...>) {
  return reinterpret_cast<Ints>(__builtin_shufflevector(
      reinterpret_cast<Words>(a), reinterpret_cast<Words>(b),
      (kLane / 2 + (kLast ? kLanes : 0) + (kLane % 2 ? kPairedLanes : 0))...));
}

// Packed keys and values of type T as pairs, and their products with bfloat16 queries and weights.
template <typename T>
struct PairedTile {
  using Number = T;
  using Weight = BFloat16;

  static constexpr int kNumbers = kLoadedNumbers<T>, kVectors = kLoadedVectors<T>;
  // Vectors of a panel's pair.
  static constexpr int kWidth = kPanel / kLanes;

  float *key_panels, *value_panels;

  void pack(const T* keys, const int64_t* key_at, int64_t dim, const T* values,
            const int64_t* value_at, int64_t value_dim, int64_t num_keys) const {
    for (int64_t j = 0; j < num_keys; j += kLanes) pack_keys(keys, key_at, j, num_keys, dim);
    for (int64_t j = 0; j < num_keys; j += 2) pack_values(values, value_at, j, num_keys, value_dim);
  }

  // scores [kRowBlock, kPackedKeys] of `num_keys` keys from the panel at `first_key` on: their
  // products times `factor`.
  void score(const float* queries, int64_t query_stride, int64_t first_key, int64_t num_keys,
             int64_t dim, float factor, float* scores) const {
    multiply_paired<false>(queries, query_stride * sizeof(float), key_panel(first_key, dim),
                           num_pairs(dim), factor, scores + first_key, kPackedKeys, num_keys);
  }

  // sums [kRowBlock, num_columns from `d` on] += weights [kRowBlock, kPackedKeys floats] * values, of
  // the keys in [first_key, end_key) and of those that they are paired with, whose weights are 0.
  void add(const BFloat16* weights, int64_t first_key, int64_t end_key, int64_t d,
           int64_t num_columns, float* sums, int64_t sum_stride) const {
    const int64_t first_pair = first_key / 2;
    multiply_paired<true>(weights + 2 * first_pair, kPackedKeys * sizeof(float),
                          value_panel(d) + first_pair * kWidth, num_pairs(end_key) - first_pair,
                          1.0f, sums + d, sum_stride, num_columns);
  }

 private:
  static int64_t num_pairs(int64_t count) { return (count + 1) / 2; }

  // Panels [num_pairs(dim), kPanel, 2] of kPanel keys each.
  Ints* key_panel(int64_t key, int64_t dim) const {
    return reinterpret_cast<Ints*>(key_panels) + key / kPanel * num_pairs(dim) * kWidth;
  }

  // Panels [kPackedKeys / 2, kPanel, 2] of kPanel dimensions each.
  Ints* value_panel(int64_t d) const {
    return reinterpret_cast<Ints*>(value_panels) + d / kPanel * (kPackedKeys / 2) * kWidth;
  }

  // kLanes keys from `first` on; zeros beyond `num_keys`.
  void pack_keys(const T* keys, const int64_t* at, int64_t first, int64_t num_keys,
                 int64_t dim) const {
    Ints* const panel = key_panel(first, dim) + first % kPanel / kLanes;
    for (int64_t d = 0; d < dim; d += kNumbers) {
      Floats squares[kVectors][kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        Ints numbers[kVectors] = {};
        if (first + i < num_keys) load_pairs_within(keys + at[first + i], d, dim, numbers);
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) squares[v][i] = from_bits(numbers[v]);
      }
      for (int v = 0; v < kVectors; ++v) {
        const int64_t pair = (d + v * kPairedLanes) / 2;
        transpose(squares[v]);
        for (int i = 0; i < kLanes && pair + i < num_pairs(dim); ++i) {
          store_as(panel + (pair + i) * kWidth, squares[v][i]);
        }
      }
    }
  }

  // The pair of values from `j` on, the second of which is zeros beyond `num_keys`.
  void pack_values(const T* values, const int64_t* at, int64_t j, int64_t num_keys,
                   int64_t dim) const {
    constexpr auto kAll = std::make_index_sequence<kPairedLanes>();
    for (int64_t d = 0; d < dim; d += kNumbers) {
      Ints a[kVectors], b[kVectors] = {};
      load_pairs_within(values + at[j], d, dim, a);
      if (j + 1 < num_keys) load_pairs_within(values + at[j + 1], d, dim, b);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        if (d + v * kPairedLanes >= dim) break;
        Ints* const to = value_panel(d + v * kPairedLanes) + j / 2 * kWidth;
        store_as(to, paired_half<false>(a[v], b[v], kAll));
        store_as(to + 1, paired_half<true>(a[v], b[v], kAll));
      }
    }
  }
};
