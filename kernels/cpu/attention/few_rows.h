// Attention of few rows, as in decoding: keys and values are streamed from the cache without packing,
// at the speed of memory. Included once per instruction set, after item_rows.h and few_rows_tile.h.
//
// Both are read once, one token or a few at a time, all key heads together, which are adjacent in
// memory. Keys of a tile alternate with values of the previous tile, whose softmax weights are known:
// two streams in the order of addresses, without a pause between tiles. Cache lines are prefetched
// token by token and at an even pace, since blocks lie anywhere and the hardware prefetcher stops at
// the end of each.
//
// One token at a time is read faster; with a few at a time, a query or a sum is loaded only once.

// Rows to be prefetched, in order, a share at a time.
class PrefetchQueue {
 public:
  void add(const void* from, int64_t num_bytes) {
    rows_[count_++] = {static_cast<const char*>(from), num_bytes};
  }

  inline __attribute__((always_inline)) void prefetch(int64_t num_bytes) {
    while (num_bytes > 0 && next_ < count_) {
      const int64_t end = std::min(at_ + num_bytes, rows_[next_].num_bytes);
      num_bytes -= end - at_;
      const char* from = rows_[next_].from;
#pragma GCC unroll 4
      for (; at_ < end; at_ += 64) __builtin_prefetch(from + at_);
      if (end == rows_[next_].num_bytes) ++next_, at_ = 0;
    }
  }

 private:
  struct Row {
    const char* from;
    int64_t num_bytes;
  };
  Row rows_[2 * kStep];
  int64_t count_ = 0, next_ = 0, at_ = 0;
};

template <typename T>
class FewRowsAttention {
 public:
  FewRowsAttention(ItemRows& rows, float* scratch)
      : rows_(rows),
        call_(rows.call),
        item_(rows.item),
        layout_(rows.layout),
        scores_(scratch + layout_.scores),
        weights_(scores_ + layout_.score_floats),
        products_(scratch + layout_.products),
        first_key_(head_numbers<T>(call_.keys, item_, 0)),
        first_value_(head_numbers<T>(call_.values, item_, 0)),
        key_bytes_(dense_bytes(call_.keys)),
        value_bytes_(dense_bytes(call_.values)),
        ahead_(tokens_ahead()) {}

  void run() {
    for (int64_t key = item_.first_key; key < item_.end_key; key += kStreamedKeys) {
      tile_.find(call_, item_, key);
      seen_ = {seen(0).begin, seen(layout_.rows - 1).end};
      attend_tile();
      update_rows();
      std::swap(scores_, weights_);
      previous_ = tile_;
      weighed_ = seen_;
    }
    seen_ = {0, 0};
    attend_tile();
  }

 private:
  // Computes scores of the tile, and adds the values of the previous one.
  void attend_tile() { by_token() ? attend_by_token() : attend_by_step(); }

  // Where reading takes longer than computing: few rows, and numbers that are cheap to widen.
  bool by_token() const { return layout_.rows <= kTokenRows && sizeof(T) > 1; }

  void attend_by_token() {
    for (int64_t j = 0; j < kStreamedKeys; ++j) {
      if (j >= seen_.begin && j < seen_.end) score_token(j);
      if (j >= weighed_.begin && j < weighed_.end) add_token(j);
    }
  }

  void score_token(int64_t j) {
    for_row_blocks<kTokenRows>(layout_.rows, [&](int64_t row, auto count) __attribute__((always_inline)) {
      multiply_heads<count>(row, j);
    });
    if (j % kStep == kStep - 1 || j == seen_.end - 1) add_up_scores(j / kStep * kStep);
  }

  // Products of kRows rows from `row` on with one token's keys, for all heads.
  template <int kRows>
  inline __attribute__((always_inline)) void multiply_heads(int64_t row, int64_t j) {
    const int64_t dim = call_.keys.head_dim, key_stride = call_.keys.head_stride;
    const int64_t query_stride = layout_.query_stride, padded_rows = layout_.padded_rows;
    const T *key = first_key_ + tile_.keys[j], *next = first_key_ + tile_.keys[j + ahead_];
    const float* queries = rows_.queries(0, row);
    float* products = products_ + (rows_.index(0, row) * kStep + j % kStep) * kLanes;
    for (int64_t left = item_.num_heads; left > 0; --left) {
      prefetch_row(next, dim);
      multiply_key<kRows>(queries, query_stride, key, dim, products);
      key += key_stride, next += key_stride;
      queries += padded_rows * query_stride, products += padded_rows * kStep * kLanes;
    }
  }

  // Scores of keys that are not seen are undefined.
  void add_up_scores(int64_t j) {
    const float* products = products_;
    float* scores = scores_ + j;
    for (int64_t left = item_.num_heads * layout_.padded_rows; left > 0; --left) {
      add_up(products, scores);
      products += kStep * kLanes, scores += kStreamedKeys;
    }
  }

  void add_token(int64_t j) {
    for_row_blocks<kTokenRows>(layout_.rows, [&](int64_t row, auto count) __attribute__((always_inline)) {
      add_heads<count>(row, j);
    });
  }

  // Adds one token's values to the sums of kRows rows from `row` on, for all heads.
  template <int kRows>
  inline __attribute__((always_inline)) void add_heads(int64_t row, int64_t j) {
    const int64_t dim = call_.values.head_dim, value_stride = call_.values.head_stride;
    const int64_t sum_stride = layout_.sum_stride, padded_rows = layout_.padded_rows;
    const T* value = first_value_ + previous_.values[j];
    const T* next = first_value_ + previous_.values[j + ahead_];
    const float* weights = weights_ + rows_.index(0, row) * kStreamedKeys + j;
    float* sums = rows_.sums(0, row);
    for (int64_t left = item_.num_heads; left > 0; --left) {
      prefetch_row(next, dim);
      add_value<kRows>(weights, value, dim, sums, sum_stride);
      value += value_stride, next += value_stride;
      weights += padded_rows * kStreamedKeys, sums += padded_rows * sum_stride;
    }
  }

  void attend_by_step() {
    for (int64_t j = 0; j < kStreamedKeys; j += kStep) {
      const Span keys = within(seen_, j), values = within(weighed_, j);
      const bool any_keys = keys.begin < keys.end, any_values = values.begin < values.end;
      PrefetchQueue due;
      for (int64_t i = j + ahead_; i < j + ahead_ + kStep; ++i) {
        if (any_keys) due.add(first_key_ + tile_.keys[i], key_bytes_);
        if (any_values) due.add(first_value_ + previous_.values[i], value_bytes_);
      }
      if (any_keys) {
        for_row_blocks(layout_.rows, [&](int64_t row, auto count) __attribute__((always_inline)) {
          score_step<count>(row, j, due);
        });
      }
      if (any_values) {
        for_row_blocks(layout_.rows, [&](int64_t row, auto count) __attribute__((always_inline)) {
          add_step<count>(row, values, due);
        });
      }
    }
  }

  // Scores of kRows rows from `row` on with kStep keys, for all heads.
  template <int kRows>
  inline __attribute__((always_inline)) void score_step(int64_t row, int64_t j, PrefetchQueue& due) {
    const int64_t dim = call_.keys.head_dim, query_stride = layout_.query_stride;
    const int64_t share = row == 0 ? dim * int64_t{kStep * sizeof(T)} : 0;
    const T* key[kStep];
#pragma GCC unroll 4
    for (int i = 0; i < kStep; ++i) key[i] = first_key_ + tile_.keys[j + i];
    const float* queries = rows_.queries(0, row);
    float* scores = scores_ + rows_.index(0, row) * kStreamedKeys + j;
    for (int64_t left = item_.num_heads; left > 0; --left) {
      due.prefetch(share);
      score_keys<T, kRows>(queries, query_stride, key, dim, scores);
#pragma GCC unroll 4
      for (int i = 0; i < kStep; ++i) key[i] += call_.keys.head_stride;
      queries += layout_.padded_rows * query_stride, scores += layout_.padded_rows * kStreamedKeys;
    }
  }

  // Adds the values of `keys` to the sums of kRows rows from `row` on, for all heads.
  template <int kRows>
  inline __attribute__((always_inline)) void add_step(int64_t row, Span keys, PrefetchQueue& due) {
    const int64_t dim = call_.values.head_dim, sum_stride = layout_.sum_stride;
    const int64_t share = row == 0 ? dim * int64_t{kStep * sizeof(T)} : 0;
    const T* value[kStep];
    const int64_t num_keys = keys.end - keys.begin;
    for (int64_t i = 0; i < num_keys; ++i) value[i] = first_value_ + previous_.values[keys.begin + i];
    const float* weights = weights_ + rows_.index(0, row) * kStreamedKeys + keys.begin;
    float* sums = rows_.sums(0, row);
    for (int64_t left = item_.num_heads; left > 0; --left) {
      due.prefetch(share);
      if (num_keys == kStep) {
        add_values<T, kRows>(weights, value, kStep, dim, sums, sum_stride);
      } else {
        add_values<T, kRows>(weights, value, num_keys, dim, sums, sum_stride);
      }
      for (int64_t i = 0; i < num_keys; ++i) value[i] += call_.values.head_stride;
      weights += layout_.padded_rows * kStreamedKeys, sums += layout_.padded_rows * sum_stride;
    }
  }

  void update_rows() {
    const Span span{seen_.begin / kLanes * kLanes, rounded_up(seen_.end, kLanes)};
    for (int64_t head = 0; head < item_.num_heads; ++head) {
      for (int64_t row = 0; row < layout_.rows; ++row) {
        rows_.update_row(head, row, scores_ + rows_.index(head, row) * kStreamedKeys,
                         tile_.first_key, span, seen(row));
      }
    }
  }

  int64_t tokens_ahead() const {
    const int64_t token_bytes = item_.num_heads * call_.keys.head_dim * sizeof(T);
    return std::clamp<int64_t>(kPrefetchBytes / token_bytes, kLeastAhead, kMostAhead);
  }

  // Bytes of a token's heads if they are adjacent, as is usual; else 0: nothing is prefetched.
  int64_t dense_bytes(const Cache& cache) const {
    return cache.head_stride == cache.head_dim ? item_.num_heads * cache.head_dim * sizeof(T) : 0;
  }

  static Span within(Span span, int64_t j) {
    return {std::max(span.begin, j), std::min<int64_t>(span.end, j + kStep)};
  }

  Span seen(int64_t row) const { return rows_.seen(row, tile_.first_key, tile_.num_keys); }

  // The most rows that are processed token by token.
  static constexpr int kTokenRows = 2;
  // The distance of prefetching: bytes of keys, and bounds in tokens.
  static constexpr int64_t kPrefetchBytes = 4096;
  static constexpr int kLeastAhead = 4, kMostAhead = 16;

  ItemRows& rows_;
  const AttentionCall& call_;
  const WorkItem& item_;
  const Layout& layout_;
  float *scores_, *weights_;  // of the tile, and of the previous one
  float* products_;           // of a step's keys and all rows
  const T *first_key_, *first_value_;
  const int64_t key_bytes_, value_bytes_, ahead_;
  TileOffsets<kStreamedKeys, kMostAhead + kStep> tile_, previous_;
  Span seen_{0, 0}, weighed_{0, 0};
};
