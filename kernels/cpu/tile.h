// The inner loops of attention: products of small matrices, packed or in place, and the softmax
// of a row. Included once per instruction set, after formats.h.

// Keys of a tile that is packed.
constexpr int kPackedKeys = 128;
// Columns of a packed panel, and rows of the block of sums that stays in registers.
constexpr int kPanel = 2 * kLanes;
constexpr int kRowBlock = kLanes == 16 ? 12 : 6;
// So many rows per key head or fewer are attended in place.
constexpr int kFewRows = 8;
// Keys of a tile in place, and those of them that are dealt with at once.
constexpr int kInPlaceKeys = 64, kStep = 4;

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

QUIRE_INLINE int64_t rounded_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// c [kRowBlock, kVectors vectors] = a [kRowBlock, depth] * b [depth, …], or added to c. b is a packed
// panel.
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

// The same with a whole panel, or with its first vector if that has the `num_columns` of use.
template <bool kAdd>
QUIRE_INLINE void multiply(const float* a, int64_t a_stride, const float* b, int64_t depth,
                           float* c, int64_t c_stride, int64_t num_columns) {
  if (num_columns > kLanes) {
    multiply_vectors<kAdd, 2>(a, a_stride, b, depth, c, c_stride);
  } else {
    multiply_vectors<kAdd, 1>(a, a_stride, b, depth, c, c_stride);
  }
}

// kLanes numbers of a row from `d` on; zeros beyond `dim`.
template <typename T>
QUIRE_INLINE Floats load_within(const T* row, int64_t d, int64_t dim) {
  return d + kLanes <= dim ? load(row + d) : load_first(row + d, dim - d);
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

// Calls `work(row, count)` for parts of `num_rows` rows, with their number as a constant: as many as
// there are registers for.
template <int kCount = kLanes == 16 ? 4 : 2, typename Work>
QUIRE_INLINE void in_parts(int64_t num_rows, const Work& work, int64_t row = 0) {
  for (; row + kCount <= num_rows; row += kCount) {
    work(row, std::integral_constant<int, kCount>());
  }
  if constexpr (kCount > 1) in_parts<kCount / 2>(num_rows, work, row);
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

// scores [kRows, kStep of kInPlaceKeys] of the keys at `key`, read in place.
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
    store_as(scores + r * kInPlaceKeys, sums(p[0], p[1], p[2], p[3]));
  }
}

// sums [kRows, kVectors vectors from `d` on] += weights [kRows, num_keys of kInPlaceKeys] * the
// values at `value`, read in place.
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
      const Floats w = broadcast(weights[r * kInPlaceKeys + j]);
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

// products [kRows, kStep vectors] = those of queries and one key, which is read in place. Their
// lanes are yet to be added up.
template <int kRows, typename T>
QUIRE_INLINE void multiply_key(const float* queries, int64_t query_stride, const T* key,
                               int64_t dim, float* products) {
  Floats acc[kRows] = {};
  const auto add = [&](int64_t d, Floats k) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) acc[r] += load(queries + r * query_stride + d) * k;
  };
  int64_t d = 0;
  for (; d + 2 * kLanes <= dim; d += 2 * kLanes) {
    Floats first, second;
    load_pair(key + d, first, second);
    add(d, first);
    add(d + kLanes, second);
  }
  for (; d < dim; d += kLanes) add(d, load_within(key, d, dim));
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) store(products + r * kStep * kLanes, acc[r]);
}

// The scores of kStep keys from their products.
QUIRE_INLINE void add_up(const float* products, float* scores) {
  store_as(scores, sums(load(products), load(products + kLanes), load(products + 2 * kLanes),
                        load(products + 3 * kLanes)));
}

// sums [kRows, dim] += weights [kRows] * one value, which is read in place.
template <int kRows, typename T>
QUIRE_INLINE void add_value(const float* weights, const T* value, int64_t dim, float* sums,
                            int64_t sum_stride) {
  Floats w[kRows];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) w[r] = broadcast(weights[r * kInPlaceKeys]);
  const auto add = [&](int64_t d, Floats v) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      float* to = sums + r * sum_stride + d;
      store(to, load(to) + w[r] * v);
    }
  };
  int64_t d = 0;
  for (; d + 2 * kLanes <= dim; d += 2 * kLanes) {
    Floats first, second;
    load_pair(value + d, first, second);
    add(d, first);
    add(d + kLanes, second);
  }
  for (; d < dim; d += kLanes) add(d, load_within(value, d, dim));
}

// Fetches a row before its turn.
template <typename T>
QUIRE_INLINE void fetch(const T* row, int64_t dim) {
#pragma GCC unroll 4
  for (int64_t d = 0; d < dim; d += 64 / sizeof(T)) __builtin_prefetch(row + d, 0, 2);
}

// Keys of a tile, as offsets into it.
struct Span {
  int64_t begin, end;
};

// What has come of a row so far: weights are relative to the maximum.
struct RowState {
  float maximum, total;
};

// Makes weights of the scores in `tile`, which is whole vectors; those outside `seen` become 0.
// Returns what former sums are to be multiplied with, as the maximum may have risen.
//
// Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018).
QUIRE_INLINE float soften(float* scores, Span tile, Span seen, RowState& state) {
  Floats most = broadcast(state.maximum);
  for (int64_t j = tile.begin; j < tile.end; j += kLanes) {
    Floats x = load(scores + j);
    if (j < seen.begin || j + kLanes > seen.end) {
      x = within(x, seen.begin - j, seen.end - j, kMinusInfinity);
      store(scores + j, x);
    }
    most = larger(x, most);
  }
  const float maximum = largest(most);
  // Where nothing has been seen, e^-inf is 0; -inf - -inf would be NaN.
  const float base = maximum == kMinusInfinity ? 0.0f : maximum;
  Floats totals{};
  for (int64_t j = tile.begin; j < tile.end; j += kLanes) {
    const Floats weights = exponential(load(scores + j) - base);
    store(scores + j, weights);
    totals += weights;
  }
  // Former sums are zeros where nothing had been seen.
  const bool keep = state.maximum == maximum || state.total == 0.0f;
  const float factor = keep ? 1.0f : exponential(broadcast(state.maximum - base))[0];
  state = {maximum, state.total * factor + sum(totals)};
  return factor;
}
