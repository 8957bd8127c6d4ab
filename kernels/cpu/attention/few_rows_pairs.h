// Inner loops over keys and values that are read where they lie in the cache, and multiplied as pairs
// of bfloat16. Included once, with AVX-512 and its dot products of bfloat16, after pairs.h and
// few_rows_tile.h.

// Products of bfloat16 queries and weights with keys and values of type T, all exact, added up in
// float32. T has at most the precision of bfloat16.
template <typename T>
struct Paired {
  using Number = T;
  using Weight = BFloat16;

  static constexpr int kNumbers = kLoadedNumbers<T>, kVectors = kLoadedVectors<T>;
  static constexpr int kWeightStride = kStreamedKeys * sizeof(float) / sizeof(Weight);

  // scores [kRows, kStep of kStreamedKeys] of the keys at `key`, their products times `factor`.
  template <int kRows>
  QUIRE_INLINE void score_keys(const float* queries, int64_t query_stride, const T* const* key,
                               int64_t dim, float factor, float* scores) {
    Floats products[kRows][kStep] = {};
    int64_t d = 0;
    for (; d + kNumbers <= dim; d += kNumbers) {
      add_products(queries + d / 2, query_stride, key, d, dim, products);
    }
    if (d < dim) add_products(queries + d / 2, query_stride, key, d, dim, products);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const Floats* p = products[r];
      store_as(scores + r * kStreamedKeys, sums(p[0], p[1], p[2], p[3]) * factor);
    }
  }

  template <int kRows>
  QUIRE_INLINE void add_products(const float* queries, int64_t query_stride, const T* const* key,
                                 int64_t d, int64_t dim, Floats (&products)[kRows][kStep]) {
    Ints k[kStep][kVectors];
#pragma GCC unroll 4
    for (int i = 0; i < kStep; ++i) load_pairs_within(key[i], d, dim, k[i]);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        const Ints q = load_as<Ints>(queries + r * query_stride + v * kLanes);
#pragma GCC unroll 4
        for (int i = 0; i < kStep; ++i) add_dots(products[r][i], q, k[i][v]);
      }
    }
  }

  // sums [kRows, dim] += weights [kRows, keys of kWeightStride] * the values at `value`, those in
  // `keys`; the others are zeros. Calls `tick(n)` for every n numbers. Sums are in the order of pairs.
  template <int kRows, typename Tick>
  QUIRE_INLINE void add_values(const Weight* weights, const T* const* value, Span keys, int64_t dim,
                               float* sums, int64_t sum_stride, const Tick& tick) {
    constexpr int kLoads = kVectors == 2 ? (kRows >= 4 ? 1 : 2) : (kRows >= 4 ? 2 : 4);
    int64_t d = 0;
    for (; d + kLoads * kNumbers <= dim; d += kLoads * kNumbers) {
      add_columns<kLoads, kRows>(weights, value, keys, d, dim, sums + d, sum_stride, tick);
    }
    for (; d < dim; d += kNumbers) {
      add_columns<1, kRows>(weights, value, keys, d, dim, sums + d, sum_stride, tick);
    }
  }

  template <int kLoads, int kRows, typename Tick>
  QUIRE_INLINE void add_columns(const Weight* weights, const T* const* value, Span keys, int64_t d,
                                int64_t dim, float* sums, int64_t sum_stride, const Tick& tick) {
    constexpr int kSums = 2 * kLoads * kVectors;
    Floats acc[kRows][kSums];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
      for (int i = 0; i < kSums; ++i) acc[r][i] = load(sums + r * sum_stride + i * kLanes);
    }
    for (int64_t j = keys.begin & ~int64_t{1}; j < keys.end; j += 2) {
      tick(2 * kLoads * kNumbers);
      Ints w[kRows];
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        w[r] = broadcast_bits(load_as<int32_t>(weights + r * kWeightStride + j));
      }
#pragma GCC unroll 4
      for (int i = 0; i < kLoads; ++i) {
        Ints a[kVectors], b[kVectors];
        load_pairs_within(value[j], d + i * kNumbers, dim, a);
        load_pairs_within(value[j + 1], d + i * kNumbers, dim, b);
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
          const Ints first = pair_first(a[v], b[v]), last = pair_last(a[v], b[v]);
#pragma GCC unroll 4
          for (int r = 0; r < kRows; ++r) {
            add_dots(acc[r][2 * (i * kVectors + v)], first, w[r]);
            add_dots(acc[r][2 * (i * kVectors + v) + 1], last, w[r]);
          }
        }
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
      for (int i = 0; i < kSums; ++i) store(sums + r * sum_stride + i * kLanes, acc[r][i]);
    }
  }

  // Puts sums in the order of dimensions.
  QUIRE_INLINE void order(float* sums, int64_t num_sums) {
    for (int64_t d = 0; d < num_sums; d += kPairedLanes) {
      Floats first = load(sums + d), last = load(sums + d + kLanes);
      order_paired(first, last);
      store(sums + d, first);
      store(sums + d + kLanes, last);
    }
  }
};
