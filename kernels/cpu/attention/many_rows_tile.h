// Inner loops over packed keys and values, widened: packing, and products of small matrices. Included
// once per instruction set, after tile_shapes.h.

// c [kRowBlock, kVectors vectors] = a [kRowBlock, depth] * b [depth, …], or += with kAdd. b is a
// packed panel.
template <bool kAdd, int kVectors>
QUIRE_INLINE void multiply_vectors(const float* a, int64_t a_stride, const float* b, int64_t depth,
                                   float* c, int64_t c_stride) {
  Floats sums[kRowBlock][kVectors];
#pragma GCC unroll 16
  for (int i = 0; i < kRowBlock; ++i) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      sums[i][v] = kAdd ? load(c + i * c_stride + v * kLanes) : Floats{};
    }
  }
  for (int64_t k = 0; k < depth; ++k, b += kPanel) {
    Floats columns[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) columns[v] = load(b + v * kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < kRowBlock; ++i) {
      const Floats x = broadcast(a[i * a_stride + k]);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sums[i][v] += x * columns[v];
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kRowBlock; ++i) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) store(c + i * c_stride + v * kLanes, sums[i][v]);
  }
}

// Multiplies with a whole panel, or only with its first vector if that has all `num_columns`.
template <bool kAdd>
QUIRE_INLINE void multiply(const float* a, int64_t a_stride, const float* b, int64_t depth,
                           float* c, int64_t c_stride, int64_t num_columns) {
  if (num_columns > kLanes) {
    multiply_vectors<kAdd, 2>(a, a_stride, b, depth, c, c_stride);
  } else {
    multiply_vectors<kAdd, 1>(a, a_stride, b, depth, c, c_stride);
  }
}

// Keys as columns: panels [dim, kPanel] of kPanel keys each, zeros beyond `num_keys` up to a whole
// vector; the rest of the last panel is not written. Key j lies at `keys + at[j]`.
template <typename T>
static void pack_keys(const T* keys, const int64_t* at, int64_t num_keys, int64_t dim,
                      float* panels) {
  for (int64_t j = 0; j < num_keys; j += kLanes) {
    float* panel = panels + j / kPanel * kPanel * dim + j % kPanel;
    for (int64_t d = 0; d < dim; d += kLanes) {
      Floats square[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        square[i] = j + i < num_keys ? load_within(keys + at[j + i], d, dim) : Floats{};
      }
      transpose(square);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        if (d + i < dim) store(panel + (d + i) * kPanel, square[i]);
      }
    }
  }
}

// Values as rows: panels [kPackedKeys, kPanel] of kPanel dimensions each, zeros beyond `dim`.
template <typename T>
static void pack_values(const T* values, const int64_t* at, int64_t num_keys, int64_t dim,
                        float* panels) {
  for (int64_t j = 0; j < num_keys; ++j) {
    float* to = panels + j * kPanel;
    for (int64_t d = 0; d < dim; d += kPanel, to += kPackedKeys * kPanel) {
      const bool half = d + kLanes >= dim;
      store(to, load_within(values + at[j], d, dim));
      store(to + kLanes, half ? Floats{} : load_within(values + at[j], d + kLanes, dim));
    }
  }
}

// Packed keys and values of type T, widened, and their products with float32 queries and weights.
template <typename T>
struct WidenedTile {
  using Number = T;
  using Weight = float;

  float *key_panels, *value_panels;

  void pack(const T* keys, const int64_t* key_at, int64_t dim, const T* values,
            const int64_t* value_at, int64_t value_dim, int64_t num_keys) const {
    pack_keys(keys, key_at, num_keys, dim, key_panels);
    pack_values(values, value_at, num_keys, value_dim, value_panels);
  }

  // scores [kRowBlock, kPackedKeys] of `num_keys` keys from the panel at `first_key` on. Queries are
  // scaled already.
  void score(const float* queries, int64_t query_stride, int64_t first_key, int64_t num_keys,
             int64_t dim, float, float* scores) const {
    multiply<false>(queries, query_stride, key_panels + first_key * dim, dim, scores + first_key,
                    kPackedKeys, num_keys);
  }

  // sums [kRowBlock, num_columns from `d` on] += weights [kRowBlock, kPackedKeys] * values, of the
  // keys in [first_key, end_key).
  void add(const float* weights, int64_t first_key, int64_t end_key, int64_t d,
           int64_t num_columns, float* sums, int64_t sum_stride) const {
    multiply<true>(weights + first_key, kPackedKeys,
                   value_panels + d * kPackedKeys + first_key * kPanel, end_key - first_key,
                   sums + d, sum_stride, num_columns);
  }
};
