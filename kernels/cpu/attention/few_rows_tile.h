// Inner loops over keys and values that are read where they lie in the cache. Included once per
// instruction set, after tile_shapes.h.

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

// products [kRows, kStep] += those of queries and keys, in kVectors vectors from `d` on.
template <int kVectors, int kRows, typename T>
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

// scores [kRows, kStep of kStreamedKeys] of the keys at `key`.
template <typename T, int kRows>
QUIRE_INLINE void score_keys(const float* queries, int64_t query_stride, const T* const* key,
                             int64_t dim, float* scores) {
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
template <int kVectors, int kRows, typename T>
QUIRE_INLINE void add_columns(const float* weights, const T* const* value, int64_t num_keys,
                              int64_t d, int64_t dim, float* sums, int64_t sum_stride) {
  Floats acc[kRows][kVectors];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) acc[r][i] = load(sums + r * sum_stride + d + i * kLanes);
  }
  for (int64_t j = 0; j < num_keys; ++j) {
    Floats v[kVectors];
    load_several<kVectors>(value[j], d, dim, v);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const Floats w = broadcast(weights[r * kStreamedKeys + j]);
#pragma GCC unroll 4
      for (int i = 0; i < kVectors; ++i) acc[r][i] += w * v[i];
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) store(sums + r * sum_stride + d + i * kLanes, acc[r][i]);
  }
}

template <typename T, int kRows>
QUIRE_INLINE void add_values(const float* weights, const T* const* value, int64_t num_keys,
                             int64_t dim, float* sums, int64_t sum_stride) {
  int64_t d = 0;
  for (; d + 4 * kLanes <= dim; d += 4 * kLanes) {
    add_columns<4, kRows>(weights, value, num_keys, d, dim, sums, sum_stride);
  }
  for (; d < dim; d += kLanes) {
    add_columns<1, kRows>(weights, value, num_keys, d, dim, sums, sum_stride);
  }
}

// Calls `add(d, vector)` for the vectors of a row.
template <typename T, typename Add>
QUIRE_INLINE void for_vectors(const T* row, int64_t dim, const Add& add) {
  int64_t d = 0;
  for (; d + 2 * kLanes <= dim; d += 2 * kLanes) {
    Floats first, second;
    load_pair(row + d, first, second);
    add(d, first);
    add(d + kLanes, second);
  }
  for (; d < dim; d += kLanes) add(d, load_within(row, d, dim));
}

// products [kRows, kStep vectors] = those of queries and one key. Their lanes are not yet added up.
template <int kRows, typename T>
QUIRE_INLINE void multiply_key(const float* queries, int64_t query_stride, const T* key,
                               int64_t dim, float* products) {
  Floats acc[kRows] = {};
  const auto add = [&](int64_t d, Floats k) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) acc[r] += load(queries + r * query_stride + d) * k;
  };
  for_vectors(key, dim, add);
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) store(products + r * kStep * kLanes, acc[r]);
}

// The scores of kStep keys from their products.
QUIRE_INLINE void add_up(const float* products, float* scores) {
  store_as(scores, sums(load(products), load(products + kLanes), load(products + 2 * kLanes),
                        load(products + 3 * kLanes)));
}

// sums [kRows, dim] += weights [kRows] * one value.
template <int kRows, typename T>
QUIRE_INLINE void add_value(const float* weights, const T* value, int64_t dim, float* sums,
                            int64_t sum_stride) {
  Floats w[kRows];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) w[r] = broadcast(weights[r * kStreamedKeys]);
  const auto add = [&](int64_t d, Floats v) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      float* to = sums + r * sum_stride + d;
      store(to, load(to) + w[r] * v);
    }
  };
  for_vectors(value, dim, add);
}

template <typename T>
QUIRE_INLINE void prefetch_row(const T* row, int64_t dim) {
#pragma GCC unroll 4
  for (int64_t d = 0; d < dim; d += 64 / sizeof(T)) __builtin_prefetch(row + d, 0, 2);
}

