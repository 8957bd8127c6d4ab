// Attention of one item of work. Included once per instruction set, after
// tile.h and finish.h.
//
// Keys are met tile by tile, with a running softmax, as in Dao et al., "FlashAttention" (2022).
// The rows of a key head are its queries' tokens times the query heads that share it, so that a key
// is read once for all of them. Many rows: tiles are packed and multiplied as matrices. Few rows,
// as when one token is decoded: tiles are read in place, all key heads together, since they lie
// side by side in the cache.

// Where an item's parts lie in scratch memory. Rows are padded to whole blocks.
struct Layout {
  int64_t rows, padded_rows, query_stride, sum_stride, num_heads;
  int64_t queries, sums, scores, key_panels, value_panels, states, spans, end;

  Layout(const Attention& call, const Item& item)
      : rows(item.num_tokens * call.group_size()),
        padded_rows(rounded_up(rows, kRowBlock)),
        query_stride(padded(call.keys.head_dim)),
        sum_stride(rounded_up(call.values.head_dim, kPanel)),
        num_heads(item.num_heads) {
    const int64_t all_rows = num_heads * padded_rows;
    const int64_t packed_keys = rows > kFewRows ? kTileKeys : 0;
    queries = 0;
    sums = queries + all_rows * query_stride;
    scores = sums + all_rows * sum_stride;
    key_panels = scores + all_rows * kTileKeys;
    value_panels = key_panels + packed_keys * query_stride;
    states = value_panels + packed_keys * sum_stride;
    spans = rounded_up(states + 2 * all_rows, 2);
    end = spans + rounded_up(padded_rows / kRowBlock * (sizeof(Span) / sizeof(float)), 16);
  }
};

static int64_t scratch_floats(const Attention& call, const Item& item) {
  return Layout(call, item).end;
}

template <typename T>
class ItemRun {
 public:
  ItemRun(const Attention& call, const Item& item, float* scratch)
      : call_(call),
        item_(item),
        at_(call, item),
        queries_(scratch + at_.queries),
        sums_(scratch + at_.sums),
        scores_(scratch + at_.scores),
        key_panels_(scratch + at_.key_panels),
        value_panels_(scratch + at_.value_panels),
        states_(reinterpret_cast<RowState*>(scratch + at_.states)),
        spans_(reinterpret_cast<Span*>(scratch + at_.spans)),
        group_(call.group_size()),
        first_token_(call.query_start_loc[item.seq] + item.first_token) {
    const int64_t end_token = call.query_start_loc[item.seq + 1];
    first_position_ = call.seq_lens[item.seq] - (end_token - first_token_);
  }

  void run(float* partials, int64_t partial_floats) {
    load_queries();
    for (int64_t key = item_.first_key; key < item_.end_key; key += kTileKeys) {
      find_tile(key);
      at_.rows > kFewRows ? meet_packed() : meet_in_place();
    }
    item_.partial < 0 ? write_out() : write_partial(partials + item_.partial * partial_floats);
  }

 private:
  void load_queries() {
    const Tokens& query = call_.query;
    const float factor = call_.scale * call_.keys.scale;
    for (int64_t head = 0; head < item_.num_heads; ++head) {
      for (int64_t row = 0; row < at_.padded_rows; ++row) {
        float* to = queries_ + index(head, row) * at_.query_stride;
        states_[index(head, row)] = {kMinusInfinity, 0.0f};
        std::memset(sums_ + index(head, row) * at_.sum_stride, 0, at_.sum_stride * sizeof(float));
        if (row >= at_.rows) {
          std::memset(to, 0, at_.query_stride * sizeof(float));
          continue;
        }
        const int64_t offset =
            token(row) * query.token_stride + query_head(head, row) * query.head_stride;
        widen_row(query.format,
                  static_cast<const char*>(query.data) + offset * bytes_of(query.format), to,
                  call_.keys.head_dim, factor);
      }
    }
  }

  // Where the tile's keys and values lie: offsets of a key head's first number.
  void find_tile(int64_t first_key) {
    tile_key_ = first_key;
    tile_keys_ = std::min<int64_t>(kTileKeys, item_.end_key - first_key);
    const int64_t count = std::min<int64_t>(kTileKeys + kBeyond, item_.end_key - first_key);
    const int32_t* block = call_.block_table + item_.seq * call_.block_table_stride +
                           first_key / call_.block_size;
    int64_t slot = first_key % call_.block_size;
    for (int64_t j = 0; j < count; ++j) {
      keys_at_[j] = *block * call_.keys.block_stride + slot * call_.keys.slot_stride;
      values_at_[j] = *block * call_.values.block_stride + slot * call_.values.slot_stride;
      if (++slot == call_.block_size) ++block, slot = 0;
    }
    std::fill(keys_at_ + count, std::end(keys_at_), keys_at_[count - 1]);
    std::fill(values_at_ + count, std::end(values_at_), values_at_[count - 1]);
  }

  void meet_packed() {
    for (int64_t row = 0; row < at_.rows; row += kRowBlock) {
      spans_[row / kRowBlock] = block_span(row);
    }
    for (int64_t head = 0; head < item_.num_heads; ++head) {
      pack_keys(keys(head), keys_at_, tile_keys_, call_.keys.head_dim, key_panels_);
      for (int64_t j = 0; j < tile_keys_; j += kPanel) score_panel(head, j);
      for (int64_t row = 0; row < at_.rows; row += kRowBlock) soften_block(head, row);
      pack_values(values(head), values_at_, tile_keys_, call_.values.head_dim, value_panels_);
      for (int64_t d = 0; d < at_.sum_stride; d += kPanel) add_panel(head, d);
    }
  }

  void score_panel(int64_t head, int64_t j) {
    const int64_t dim = call_.keys.head_dim;
    for (int64_t row = 0; row < at_.rows; row += kRowBlock) {
      const Span span = spans_[row / kRowBlock];
      if (j < span.begin || j >= span.end) continue;
      multiply<false>(queries_ + index(head, row) * at_.query_stride, at_.query_stride,
                      key_panels_ + j * dim, dim, scores_ + index(head, row) * kTileKeys + j,
                      kTileKeys);
    }
  }

  void soften_block(int64_t head, int64_t first_row) {
    const Span span = spans_[first_row / kRowBlock];
    const int64_t end_row = std::min<int64_t>(first_row + kRowBlock, at_.rows);
    for (int64_t row = first_row; row < end_row; ++row) soften_row(head, row, span);
  }

  void add_panel(int64_t head, int64_t d) {
    for (int64_t row = 0; row < at_.rows; row += kRowBlock) {
      const Span span = spans_[row / kRowBlock];
      if (span.begin >= span.end) continue;
      multiply<true>(scores_ + index(head, row) * kTileKeys + span.begin, kTileKeys,
                     value_panels_ + d * kTileKeys + span.begin * kPanel, span.end - span.begin,
                     sums_ + index(head, row) * at_.sum_stride + d, at_.sum_stride);
    }
  }

  void meet_in_place() {
    const Span seen{row_span(0).begin, row_span(at_.rows - 1).end};
    // A run of keys for all heads, then the next: near the order of addresses.
    for (int64_t j = seen.begin / kRun * kRun; j < seen.end; j += kRun) {
      const int64_t count = std::min(kRun, seen.end - j);
      for (int64_t head = 0; head < item_.num_heads; ++head) score_in_place(head, j, count);
    }
    const Span span{seen.begin / kLanes * kLanes, rounded_up(seen.end, kLanes)};
    for (int64_t head = 0; head < item_.num_heads; ++head) {
      for (int64_t row = 0; row < at_.rows; ++row) soften_row(head, row, span);
    }
    for (int64_t j = seen.begin; j < seen.end; j += kRun) {
      const int64_t count = std::min(kRun, seen.end - j);
      for (int64_t head = 0; head < item_.num_heads; ++head) add_in_place(head, j, count);
    }
  }

  void score_in_place(int64_t head, int64_t j, int64_t count) {
    const int64_t dim = call_.keys.head_dim, stride = at_.query_stride;
    for (int64_t row = 0; row < at_.rows; row += 2) {
      const float* queries = queries_ + index(head, row) * stride;
      float* scores = scores_ + index(head, row) * kTileKeys + j;
      if (row + 1 < at_.rows) {
        score_keys<T, 2>(queries, stride, keys(head), keys_at_ + j, count, dim, scores);
      } else {
        score_keys<T, 1>(queries, stride, keys(head), keys_at_ + j, count, dim, scores);
      }
    }
  }

  void add_in_place(int64_t head, int64_t j, int64_t count) {
    const int64_t dim = call_.values.head_dim, stride = at_.sum_stride;
    for (int64_t row = 0; row < at_.rows; row += 2) {
      const float* weights = scores_ + index(head, row) * kTileKeys + j;
      float* sums = sums_ + index(head, row) * stride;
      if (row + 1 < at_.rows) {
        add_values<T, 2>(weights, values(head), values_at_ + j, count, dim, sums, stride);
      } else {
        add_values<T, 1>(weights, values(head), values_at_ + j, count, dim, sums, stride);
      }
    }
  }

  void soften_row(int64_t head, int64_t row, Span span) {
    float* scores = scores_ + index(head, row) * kTileKeys;
    if (call_.softcap > 0.0f || call_.alibi_slopes != nullptr) bend(scores, head, row, span);
    const float factor = soften(scores, span, row_span(row), states_[index(head, row)]);
    if (factor == 1.0f) return;
    float* sums = sums_ + index(head, row) * at_.sum_stride;
    for (int64_t d = 0; d < at_.sum_stride; d += kLanes) store(sums + d, load(sums + d) * factor);
  }

  // Soft-cap, then the bias by distance (Press et al., "Train Short, Test Long", 2022).
  void bend(float* scores, int64_t head, int64_t row, Span span) {
    const float cap = call_.softcap;
    const float slope =
        call_.alibi_slopes == nullptr ? 0.0f : call_.alibi_slopes[query_head(head, row)];
    const Floats lanes = lane_numbers();
    for (int64_t j = span.begin; j < span.end; j += kLanes) {
      Floats x = load(scores + j);
      if (cap > 0.0f) x = hyperbolic_tangent(x / cap) * cap;
      x += (lanes + static_cast<float>(tile_key_ + j - position(row))) * slope;
      store(scores + j, x);
    }
  }

  void write_out() {
    for (int64_t head = 0; head < item_.num_heads; ++head) {
      for (int64_t row = 0; row < at_.rows; ++row) {
        finish(call_, token(row), query_head(head, row), states_[index(head, row)],
               sums_ + index(head, row) * at_.sum_stride);
      }
    }
  }

  void write_partial(float* to) {
    const int64_t stride = partial_stride(call_);
    for (int64_t head = 0; head < item_.num_heads; ++head) {
      for (int64_t row = 0; row < at_.rows; ++row, to += stride) {
        std::memcpy(to, sums_ + index(head, row) * at_.sum_stride, (stride - 2) * sizeof(float));
        std::memcpy(to + stride - 2, &states_[index(head, row)], sizeof(RowState));
      }
    }
  }

  int64_t index(int64_t head, int64_t row) const { return head * at_.padded_rows + row; }
  int64_t token(int64_t row) const { return first_token_ + row / group_; }
  int64_t position(int64_t row) const { return first_position_ + row / group_; }
  int64_t query_head(int64_t head, int64_t row) const {
    return (item_.first_head + head) * group_ + row % group_;
  }
  const T* keys(int64_t head) const {
    return static_cast<const T*>(call_.keys.data) +
           (item_.first_head + head) * call_.keys.head_stride;
  }
  const T* values(int64_t head) const {
    return static_cast<const T*>(call_.values.data) +
           (item_.first_head + head) * call_.values.head_stride;
  }

  // The keys of the tile that a row sees.
  Span row_span(int64_t row) const {
    const int64_t end = position(row) + 1 - tile_key_;
    const int64_t begin = call_.sliding_window > 0 ? end - call_.sliding_window : 0;
    const auto within = [&](int64_t j) { return std::clamp<int64_t>(j, 0, tile_keys_); };
    return {within(begin), within(end)};
  }

  // Whole panels that hold all that the rows of a block see.
  Span block_span(int64_t row) const {
    const int64_t last_row = std::min<int64_t>(row + kRowBlock, at_.rows) - 1;
    return {row_span(row).begin / kPanel * kPanel, rounded_up(row_span(last_row).end, kPanel)};
  }

  const Attention& call_;
  const Item& item_;
  const Layout at_;
  float *queries_, *sums_, *scores_, *key_panels_, *value_panels_;
  RowState* states_;
  Span* spans_;  // of each block of rows, in whole panels
  int64_t group_, first_token_, first_position_;
  int64_t tile_key_, tile_keys_;
  // Keys per turn of a head where tiles are read in place.
  static constexpr int64_t kRun = 16;
  // Beyond the tile stand the first keys of the next, for loops that look ahead, and in their place
  // the last one again, for loops that take four at a time.
  static constexpr int64_t kBeyond = kAhead + 4;
  int64_t keys_at_[kTileKeys + kBeyond], values_at_[kTileKeys + kBeyond];
};

static void attend(const Attention& call, const Item& item, float* scratch, float* partials,
                   int64_t partial_floats) {
  switch (call.keys.format) {
    case Format::kFloat32:
      return ItemRun<float>(call, item, scratch).run(partials, partial_floats);
    case Format::kFloat16:
      return ItemRun<Float16>(call, item, scratch).run(partials, partial_floats);
    case Format::kBFloat16:
      return ItemRun<BFloat16>(call, item, scratch).run(partials, partial_floats);
    case Format::kE4M3:
      return ItemRun<E4M3>(call, item, scratch).run(partials, partial_floats);
    case Format::kE5M2:
      return ItemRun<E5M2>(call, item, scratch).run(partials, partial_floats);
  }
}
