// Attention of few rows, as in decoding: keys and values are streamed from the cache without packing,
// at the speed of memory. Included once per instruction set, after item_rows.h and few_rows_tile.h.
//
// Both are read once, a few tokens at a time, all key heads together, which are adjacent in memory.
// Keys of a tile alternate with values of the previous tile, whose softmax weights are known: two
// streams in the order of addresses, without a pause between tiles. Cache lines are prefetched at an
// even pace, since blocks lie anywhere and the hardware prefetcher stops at the end of each; into the
// second-level cache, as more reads can be under way to it than to the first.

// Rows of a cache that are to be prefetched, in order, a share at a time.
template <typename T>
class PrefetchQueue {
 public:
  PrefetchQueue() = default;
  PrefetchQueue(const T* first, const int64_t* offsets, int64_t num_rows, int64_t row_numbers)
      : first_(first), offsets_(offsets), num_rows_(num_rows), row_numbers_(row_numbers) {}

  inline __attribute__((always_inline)) void prefetch(int64_t num_numbers) {
    while (num_numbers > 0 && next_ < num_rows_) {
      const int64_t end = std::min(at_ + num_numbers, row_numbers_);
      num_numbers -= end - at_;
      const T* from = first_ + offsets_[next_];
      for (; at_ < end; at_ += kLineNumbers) __builtin_prefetch(from + at_, 0, 2);
      if (at_ >= row_numbers_) ++next_, at_ = 0;
    }
  }

  void prefetch_all() { prefetch(num_rows_ * row_numbers_); }

 private:
  static constexpr int64_t kLineNumbers = 64 / sizeof(T);

  const T* first_ = nullptr;
  const int64_t* offsets_ = nullptr;
  int64_t num_rows_ = 0, row_numbers_ = 0, next_ = 0, at_ = 0;
};

// `Products` multiplies: Widened<T> or Paired<T>.
template <typename Products>
class FewRowsAttention {
  using T = typename Products::Number;
  using Weight = typename Products::Weight;

 public:
  FewRowsAttention(ItemRows& rows, float* scratch)
      : rows_(rows),
        call_(rows.call),
        item_(rows.item),
        layout_(rows.layout),
        factor_(rows.score_factor()),
        scores_(scratch + layout_.scores),
        weights_(scores_ + layout_.score_floats),
        zeros_(reinterpret_cast<const T*>(scratch + layout_.zeros)),
        first_key_(head_numbers<T>(call_.keys, item_, 0)),
        first_value_(head_numbers<T>(call_.values, item_, 0)),
        key_numbers_(adjacent_numbers(call_.keys)),
        value_numbers_(adjacent_numbers(call_.values)),
        group_(keys_together()),
        ahead_(keys_ahead()) {
    std::memset(scratch + layout_.zeros, 0, layout_.sum_stride * sizeof(float));
  }

  void run() {
    int64_t partition_end = item_.partition_end(item_.first_key);
    for (int64_t key = item_.first_key; key < item_.end_key; key += tile_.num_keys) {
      tile_.find(call_, item_, key);
      if (key == item_.first_key) keys_due(0, ahead_).prefetch_all();
      seen_ = {seen(0).begin, seen(layout_.rows - 1).end};
      attend_tile();
      if (key == partition_end) {
        order_sums();
        rows_.end_partition();
        partition_end = item_.partition_end(key);
      }
      update_rows();
      std::swap(scores_, weights_);
      previous_ = tile_;
      weighed_ = seen_;
    }
    tile_ = {};
    seen_ = {0, 0};
    attend_tile();
    order_sums();
  }

 private:
  // Computes scores of the tile, and adds the values of the previous one.
  void attend_tile() {
    for (int64_t j = 0; j < kStreamedKeys; j += group_) {
      score_group(j);
      add_group(j);
    }
  }

  // Scores of keys that are not seen are undefined.
  void score_group(int64_t first) {
    PrefetchQueue<T> due = keys_due(first + ahead_, group_);
    for (int64_t j = first; j < first + group_; j += kStep) {
      if (j < seen_.end && j + kStep > seen_.begin) score_step(j, due);
    }
    due.prefetch_all();
  }

  void score_step(int64_t j, PrefetchQueue<T>& due) {
    const int64_t dim = call_.keys.head_dim, query_stride = layout_.query_stride;
    const T* key[kStep];
#pragma GCC unroll 4
    for (int i = 0; i < kStep; ++i) key[i] = first_key_ + tile_.keys[j + i];
    for (int64_t head = 0; head < item_.num_heads; ++head) {
      due.prefetch(dim * kStep);
      for_row_blocks(layout_.rows, [&](int64_t row, auto count) __attribute__((always_inline)) {
        Products::template score_keys<count>(rows_.queries(head, row), query_stride, key, dim, factor_,
                                             scores_ + rows_.index(head, row) * kStreamedKeys + j);
      });
#pragma GCC unroll 4
      for (int i = 0; i < kStep; ++i) key[i] += call_.keys.head_stride;
    }
  }

  void add_group(int64_t first) {
    PrefetchQueue<T> due = values_due(first + ahead_);
    const Span keys{std::max(weighed_.begin - first, int64_t{0}),
                    std::min(weighed_.end - first, group_)};
    if (keys.begin < keys.end) add_keys(first, keys, due);
    due.prefetch_all();
  }

  // Adds the values of `keys`, of the group from `first` on. The others are read as zeros.
  void add_keys(int64_t first, Span keys, PrefetchQueue<T>& due) {
    const int64_t dim = call_.values.head_dim, sum_stride = layout_.sum_stride;
    const T* value[kMostGroup];
    for (int64_t i = 0; i < group_; ++i) {
      const bool is_seen = i >= keys.begin && i < keys.end;
      value[i] = is_seen ? first_value_ + previous_.values[first + i] : zeros_;
    }
    for (int64_t head = 0; head < item_.num_heads; ++head) {
      for_row_blocks(layout_.rows, [&](int64_t row, auto count) __attribute__((always_inline)) {
        const auto tick = [&](int64_t num_numbers) __attribute__((always_inline)) {
          if (row == 0) due.prefetch(num_numbers);
        };
        const float* row_weights = weights_ + rows_.index(head, row) * kStreamedKeys;
        Products::template add_values<count>(reinterpret_cast<const Weight*>(row_weights) + first,
                                             value, keys, dim, rows_.sums(head, row), sum_stride,
                                             tick);
      });
      for (int64_t i = keys.begin; i < keys.end; ++i) value[i] += call_.values.head_stride;
    }
  }

  void update_rows() {
    const Span span{seen_.begin / kLanes * kLanes, rounded_up(seen_.end, kLanes)};
    for (int64_t head = 0; head < item_.num_heads; ++head) {
      for (int64_t row = 0; row < layout_.rows; ++row) {
        rows_.update_row<Weight>(head, row, scores_ + rows_.index(head, row) * kStreamedKeys, span,
                                 seen(row));
      }
    }
  }

  void order_sums() {
    for (int64_t head = 0; head < item_.num_heads; ++head) {
      for (int64_t row = 0; row < layout_.rows; ++row) {
        Products::order(rows_.sums(head, row), layout_.sum_stride);
      }
    }
  }

  // Keys of the tile and of the next one.
  PrefetchQueue<T> keys_due(int64_t first, int64_t count) const {
    const int64_t num_rows = std::min(count, tile_.num_found - first);
    return {first_key_, tile_.keys + first, num_rows, key_numbers_};
  }

  // Values of the previous tile and of this one.
  PrefetchQueue<T> values_due(int64_t first) const {
    const bool is_previous = first < kStreamedKeys;
    const auto& tile = is_previous ? previous_ : tile_;
    if (!is_previous) first -= kStreamedKeys;
    const int64_t num_rows = std::min(group_, tile.num_keys - first);
    return {first_value_, tile.values + first, num_rows, value_numbers_};
  }

  // Keys whose values are added together. Where computing takes longer than reading, sums should be
  // loaded and stored seldom; else keys and values should alternate often.
  int64_t keys_together() const {
    return layout_.rows > 2 || sizeof(T) == 1 ? kMostGroup : kMostGroup / 2;
  }

  // The distance of prefetching, whole groups of keys.
  int64_t keys_ahead() const {
    const int64_t token_bytes = item_.num_heads * call_.keys.head_dim * sizeof(T);
    const int64_t wanted = rounded_up(kPrefetchBytes / token_bytes, group_);
    return std::clamp<int64_t>(wanted, group_, kMostAhead);
  }

  // A token's numbers of all heads if these are adjacent, as is usual; else 0: nothing is prefetched.
  int64_t adjacent_numbers(const Cache& cache) const {
    return cache.head_stride == cache.head_dim ? item_.num_heads * cache.head_dim : 0;
  }

  Span seen(int64_t row) const { return rows_.seen(row, tile_.first_key, tile_.num_keys); }

  // The least distance of prefetching in bytes of keys, and the greatest in keys.
  static constexpr int64_t kPrefetchBytes = 4096;
  static constexpr int kMostAhead = 2 * kMostGroup;

  ItemRows& rows_;
  const AttentionCall& call_;
  const WorkItem& item_;
  const Layout& layout_;
  const float factor_;
  float *scores_, *weights_;  // of the tile, and of the previous one
  const T* const zeros_;      // a value
  const T *first_key_, *first_value_;
  const int64_t key_numbers_, value_numbers_, group_, ahead_;
  TileOffsets<kStreamedKeys, kMostAhead> tile_, previous_;
  Span seen_{0, 0}, weighed_{0, 0};
};
