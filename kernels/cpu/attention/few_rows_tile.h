// Inner loops over keys and values that are read where they lie in the cache, and widened. Included
// once per instruction set, after tile_shapes.h.

// Calls `work(row, count)` for blocks of `num_rows` rows, `count` being a constant: as many rows as
// there are registers for.
template <int kCount = kLanes == 16 ? 4 : 2, typename Work>
QUIRE_INLINE void for_row_blocks(int64_t num_rows, const Work& work, int64_t row = 0) {
  for (; row + kCount <= num_rows; row += kCount) {
    work(row, std::integral_constant<int, kCount>());
  }
  if constexpr (kCount > 1) for_row_blocks<kCount / 2>(num_rows, work, row);
}

// kVectors vectors of a row from `d` on.
template <int kVectors, typename T>
QUIRE_INLINE void load_several(const T* row, int64_t d, int64_t dim, Floats (&to)[kVectors]) {
  if constexpr (kVectors == 1) {
    to[0] = load_within(row, d, dim);
  } else {
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; i += 2) load_pair(row + d + i * kLanes, to[i], to[i + 1]);
  }
}

// Products of float32 queries and weights with keys and values of type T, widened.
template <typename T>
struct Widened {
  using Number = T;
  using Weight = float;

  // products [kRows, kStep] += those of queries and keys, in kVectors vectors from `d` on.
  template <int kVectors, int kRows>
  QUIRE_INLINE void add_products(const float* queries, int64_t query_stride, const T* const* key,
                                 int64_t d, int64_t dim, Floats (&products)[kRows][kStep]) {
    Floats k[kStep][kVectors];
#pragma GCC unroll 4
    for (int i = 0; i < kStep; ++i) load_several<kVectors>(key[i], d, dim, k[i]);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        const Floats q = load(queries + r * query_stride + d + v * kLanes);
#pragma GCC unroll 4
        for (int i = 0; i < kStep; ++i) products[r][i] += q * k[i][v];
      }
    }
  }

  // scores [kRows, kStep of kStreamedKeys] of the keys at `key`. Queries are scaled already.
  template <int kRows>
  QUIRE_INLINE void score_keys(const float* queries, int64_t query_stride, const T* const* key,
                               int64_t dim, float, float* scores) {
    Floats products[kRows][kStep] = {};
    int64_t d = 0;
    for (; d + 2 * kLanes <= dim; d += 2 * kLanes) {
      add_products<2>(queries, query_stride, key, d, dim, products);
    }
    for (; d < dim; d += kLanes) add_products<1>(queries, query_stride, key, d, dim, products);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const Floats* p = products[r];
      store_as(scores + r * kStreamedKeys, sums(p[0], p[1], p[2], p[3]));
    }
  }

  // sums [kRows, kVectors vectors from `d` on] += weights [kRows, num_keys of kStreamedKeys] * the
  // values at `value`.
  template <int kVectors, int kRows, typename Tick>
  QUIRE_INLINE void add_columns(const float* weights, const T* const* value, int64_t num_keys,
                                int64_t d, int64_t dim, float* sums, int64_t sum_stride,
                                const Tick& tick) {
    Floats acc[kRows][kVectors];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int i = 0; i < kVectors; ++i) acc[r][i] = load(sums + r * sum_stride + d + i * kLanes);
    }
    for (int64_t j = 0; j < num_keys; ++j) {
      tick(kVectors * kLanes);
      Floats v[kVectors];
      load_several<kVectors>(value[j], d, dim, v);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const Floats w = broadcast(weights[r * kStreamedKeys + j]);
#pragma GCC unroll 8
        for (int i = 0; i < kVectors; ++i) acc[r][i] += w * v[i];
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int i = 0; i < kVectors; ++i) store(sums + r * sum_stride + d + i * kLanes, acc[r][i]);
    }
  }

  // sums [kRows, dim] += weights [kRows, keys of kStreamedKeys] * the values at `value`, those in
  // `keys`; the others have weight 0. Calls `tick(n)` for every n numbers.
  template <int kRows, typename Tick>
  QUIRE_INLINE void add_values(const float* weights, const T* const* value, Span keys, int64_t dim,
                               float* sums, int64_t sum_stride, const Tick& tick) {
    constexpr int kVectors = kRows * 8 <= kLanes ? 8 : 4;
    const int64_t num_keys = keys.end - keys.begin;
    weights += keys.begin, value += keys.begin;
    int64_t d = 0;
    for (; d + kVectors * kLanes <= dim; d += kVectors * kLanes) {
      add_columns<kVectors, kRows>(weights, value, num_keys, d, dim, sums, sum_stride, tick);
    }
    for (; d < dim; d += kLanes) {
      add_columns<1, kRows>(weights, value, num_keys, d, dim, sums, sum_stride, tick);
    }
  }

  // Sums are in the order of dimensions.
  QUIRE_INLINE void order(float*, int64_t) {}
};
