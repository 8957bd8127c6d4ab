// Inner loops over packed keys and values: packing, and products of small matrices. Included once per
// instruction set, after tile_shapes.h.

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
