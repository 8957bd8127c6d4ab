// Few rows, as when a token is decoded: keys and values are read where they lie, which has to go as
// fast as memory gives them. Included once per instruction set, after item.h.
//
// Both are read once, one token or a few at a time, all key heads of them together, as they lie
// side by side: in turn keys, and values of the tile before, whose weights are known by then. So
// there are two streams in the order of addresses, and no pause between tiles. Lines are fetched a
// little before their turn, token by token and at an even pace, since blocks lie anywhere: the
// processor's own guesses end with each of them.
//
// One token at a time is read faster; for a few at a time, a query or a sum is loaded only once.

// What is due soon, in that order: to be fetched a share at a time.
class Queue {
 public:
  void add(const void* from, int64_t num_bytes) {
    rows_[count_++] = {static_cast<const char*>(from), num_bytes};
  }

  inline __attribute__((always_inline)) void fetch(int64_t num_bytes) {
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
class InPlace {
 public:
  InPlace(Rows& rows, float* scratch)
      : rows_(rows),
        call_(rows.call),
        item_(rows.item),
        at_(rows.at),
        scores_(scratch + at_.scores),
        weights_(scores_ + at_.score_floats),
        products_(scratch + at_.products),
        first_key_(head_numbers<T>(call_.keys, item_, 0)),
        first_value_(head_numbers<T>(call_.values, item_, 0)),
        key_bytes_(dense_bytes(call_.keys)),
        value_bytes_(dense_bytes(call_.values)),
        ahead_(tokens_ahead()) {}

  void run() {
    for (int64_t key = item_.first_key; key < item_.end_key; key += kInPlaceKeys) {
      tile_.find(call_, item_, key);
      seen_ = {seen(0).begin, seen(at_.rows - 1).end};
      meet_tile();
      soften();
      std::swap(scores_, weights_);
      former_ = tile_;
      weighed_ = seen_;
    }
    seen_ = {0, 0};
    meet_tile();
  }

 private:
  // Scores of the tile, and sums of the former one.
  void meet_tile() { by_token() ? meet_tokens() : meet_steps(); }

  // Where reading takes longer than computing: there are few rows, and little to be widened.
  bool by_token() const { return at_.rows <= kTokenRows && sizeof(T) > 1; }

  void meet_tokens() {
    for (int64_t j = 0; j < kInPlaceKeys; ++j) {
      if (j >= seen_.begin && j < seen_.end) meet_key(j);
      if (j >= weighed_.begin && j < weighed_.end) meet_value(j);
    }
  }

  void meet_key(int64_t j) {
    in_parts<kTokenRows>(at_.rows, [&](int64_t row, auto count) __attribute__((always_inline)) {
      multiply_heads<count>(row, j);
    });
    if (j % kStep == kStep - 1 || j == seen_.end - 1) add_up_scores(j / kStep * kStep);
  }

  // Of all heads, the products of kRows rows from `row` on and one token's keys.
  template <int kRows>
  inline __attribute__((always_inline)) void multiply_heads(int64_t row, int64_t j) {
    const int64_t dim = call_.keys.head_dim, key_stride = call_.keys.head_stride;
    const int64_t query_stride = at_.query_stride, padded_rows = at_.padded_rows;
    const T *key = first_key_ + tile_.keys[j], *next = first_key_ + tile_.keys[j + ahead_];
    const float* queries = rows_.queries(0, row);
    float* products = products_ + (rows_.index(0, row) * kStep + j % kStep) * kLanes;
    for (int64_t left = item_.num_heads; left > 0; --left) {
      fetch(next, dim);
      multiply_key<kRows>(queries, query_stride, key, dim, products);
      key += key_stride, next += key_stride;
      queries += padded_rows * query_stride, products += padded_rows * kStep * kLanes;
    }
  }

  // Those of keys that are not seen are of no meaning.
  void add_up_scores(int64_t j) {
    const float* products = products_;
    float* scores = scores_ + j;
    for (int64_t left = item_.num_heads * at_.padded_rows; left > 0; --left) {
      add_up(products, scores);
      products += kStep * kLanes, scores += kInPlaceKeys;
    }
  }

  void meet_value(int64_t j) {
    in_parts<kTokenRows>(at_.rows, [&](int64_t row, auto count) __attribute__((always_inline)) {
      add_heads<count>(row, j);
    });
  }

  // Of all heads, the sums of kRows rows from `row` on, with one token's values.
  template <int kRows>
  inline __attribute__((always_inline)) void add_heads(int64_t row, int64_t j) {
    const int64_t dim = call_.values.head_dim, value_stride = call_.values.head_stride;
    const int64_t sum_stride = at_.sum_stride, padded_rows = at_.padded_rows;
    const T* value = first_value_ + former_.values[j];
    const T* next = first_value_ + former_.values[j + ahead_];
    const float* weights = weights_ + rows_.index(0, row) * kInPlaceKeys + j;
    float* sums = rows_.sums(0, row);
    for (int64_t left = item_.num_heads; left > 0; --left) {
      fetch(next, dim);
      add_value<kRows>(weights, value, dim, sums, sum_stride);
      value += value_stride, next += value_stride;
      weights += padded_rows * kInPlaceKeys, sums += padded_rows * sum_stride;
    }
  }

  void meet_steps() {
    for (int64_t j = 0; j < kInPlaceKeys; j += kStep) {
      const Span keys = within(seen_, j), values = within(weighed_, j);
      const bool any_keys = keys.begin < keys.end, any_values = values.begin < values.end;
      Queue due;
      for (int64_t i = j + ahead_; i < j + ahead_ + kStep; ++i) {
        if (any_keys) due.add(first_key_ + tile_.keys[i], key_bytes_);
        if (any_values) due.add(first_value_ + former_.values[i], value_bytes_);
      }
      if (any_keys) {
        in_parts(at_.rows, [&](int64_t row, auto count) __attribute__((always_inline)) {
          score_part<count>(row, j, due);
        });
      }
      if (any_values) {
        in_parts(at_.rows, [&](int64_t row, auto count) __attribute__((always_inline)) {
          add_part<count>(row, values, due);
        });
      }
    }
  }

  // Of all heads, the scores of kRows rows from `row` on and kStep keys.
  template <int kRows>
  inline __attribute__((always_inline)) void score_part(int64_t row, int64_t j, Queue& due) {
    const int64_t dim = call_.keys.head_dim, query_stride = at_.query_stride;
    const int64_t share = row == 0 ? dim * int64_t{kStep * sizeof(T)} : 0;
    const T* key[kStep];
#pragma GCC unroll 4
    for (int i = 0; i < kStep; ++i) key[i] = first_key_ + tile_.keys[j + i];
    const float* queries = rows_.queries(0, row);
    float* scores = scores_ + rows_.index(0, row) * kInPlaceKeys + j;
    for (int64_t left = item_.num_heads; left > 0; --left) {
      due.fetch(share);
      score_keys<T, kRows>(queries, query_stride, key, dim, scores);
#pragma GCC unroll 4
      for (int i = 0; i < kStep; ++i) key[i] += call_.keys.head_stride;
      queries += at_.padded_rows * query_stride, scores += at_.padded_rows * kInPlaceKeys;
    }
  }

  // Of all heads, the sums of kRows rows from `row` on.
  template <int kRows>
  inline __attribute__((always_inline)) void add_part(int64_t row, Span keys, Queue& due) {
    const int64_t dim = call_.values.head_dim, sum_stride = at_.sum_stride;
    const int64_t share = row == 0 ? dim * int64_t{kStep * sizeof(T)} : 0;
    const T* value[kStep];
    const int64_t num_keys = keys.end - keys.begin;
    for (int64_t i = 0; i < num_keys; ++i) value[i] = first_value_ + former_.values[keys.begin + i];
    const float* weights = weights_ + rows_.index(0, row) * kInPlaceKeys + keys.begin;
    float* sums = rows_.sums(0, row);
    for (int64_t left = item_.num_heads; left > 0; --left) {
      due.fetch(share);
      if (num_keys == kStep) {
        add_values<T, kRows>(weights, value, kStep, dim, sums, sum_stride);
      } else {
        add_values<T, kRows>(weights, value, num_keys, dim, sums, sum_stride);
      }
      for (int64_t i = 0; i < num_keys; ++i) value[i] += call_.values.head_stride;
      weights += at_.padded_rows * kInPlaceKeys, sums += at_.padded_rows * sum_stride;
    }
  }

  void soften() {
    const Span span{seen_.begin / kLanes * kLanes, rounded_up(seen_.end, kLanes)};
    for (int64_t head = 0; head < item_.num_heads; ++head) {
      for (int64_t row = 0; row < at_.rows; ++row) {
        rows_.soften_row(head, row, scores_ + rows_.index(head, row) * kInPlaceKeys,
                         tile_.first_key, span, seen(row));
      }
    }
  }

  int64_t tokens_ahead() const {
    const int64_t token_bytes = item_.num_heads * call_.keys.head_dim * sizeof(T);
    return std::clamp<int64_t>(kBytesAhead / token_bytes, kLeastAhead, kMostAhead);
  }

  // Of a token's heads, which lie side by side as a rule. Else 0: nothing is fetched ahead.
  int64_t dense_bytes(const Cache& cache) const {
    return cache.head_stride == cache.head_dim ? item_.num_heads * cache.head_dim * sizeof(T) : 0;
  }

  static Span within(Span span, int64_t j) {
    return {std::max(span.begin, j), std::min<int64_t>(span.end, j + kStep)};
  }

  Span seen(int64_t row) const { return rows_.seen(row, tile_.first_key, tile_.num_keys); }

  // Rows that are attended token by token, unless there are more.
  static constexpr int kTokenRows = 2;
  // How far ahead lines are fetched: so many bytes of keys, and in tokens.
  static constexpr int64_t kBytesAhead = 4096;
  static constexpr int kLeastAhead = 4, kMostAhead = 16;

  Rows& rows_;
  const Attention& call_;
  const Item& item_;
  const Layout& at_;
  float *scores_, *weights_;  // of the tile, and of the former one
  float* products_;           // of a step's keys and all rows
  const T *first_key_, *first_value_;
  const int64_t key_bytes_, value_bytes_, ahead_;
  Places<kInPlaceKeys, kMostAhead + kStep> tile_, former_;
  Span seen_{0, 0}, weighed_{0, 0};
};
