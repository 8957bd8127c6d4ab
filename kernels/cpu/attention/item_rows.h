// The rows of a work item, and the addresses of its keys and values. Included once per instruction
// set, after merge.h.
//
// The rows of a key head are its query tokens times the query heads that share it, so that a key is
// read once for all of them. Keys are processed tile by tile, with an online softmax, as in Dao et
// al., "FlashAttention" (2022).

// The layout of an item's scratch memory, in floats. Rows are padded to whole blocks. If numbers are
// multiplied as pairs, queries, packed keys and packed values are bfloat16.
struct Layout {
  bool is_streamed, is_paired;
  int64_t rows, padded_rows, query_stride, sum_stride, tile_keys;
  int64_t queries, sums, scores, score_floats, zeros, key_panels, value_panels, states;
  int64_t partials, partial_floats, end;  // partials that the item merges itself

  Layout(const AttentionCall& call, const WorkItem& item, bool is_paired)
      : is_streamed(item.num_tokens * call.group_size() <= kMostStreamedRows),
        is_paired(is_paired),
        rows(item.num_tokens * call.group_size()),
        padded_rows(rounded_up(rows, is_streamed ? 1 : kRowBlock)),
        query_stride(is_paired ? rounded_up(call.keys.head_dim, kPairedRow) / 2
                               : padded(call.keys.head_dim)),
        sum_stride(rounded_up(call.values.head_dim, is_paired ? kPairedRow : kPanel)),
        tile_keys(is_streamed ? int64_t{kStreamedKeys} : kPackedKeys) {
    const int64_t all_rows = item.num_heads * padded_rows;
    const int64_t packed_keys = is_streamed ? 0 : tile_keys;
    queries = 0;
    sums = queries + all_rows * query_stride;
    scores = sums + all_rows * sum_stride;
    score_floats = (is_streamed ? all_rows : kRowBlock) * tile_keys;
    // When streaming, one tile's weights are used while the next tile's scores are computed.
    zeros = scores + (is_streamed ? 2 : 1) * score_floats;
    key_panels = zeros + (is_streamed ? sum_stride : 0);
    value_panels = key_panels + packed_keys * query_stride;
    states = value_panels + packed_keys * sum_stride / (is_paired ? 2 : 1);
    partials = rounded_up(states + 2 * all_rows, 16);
    partial_floats = item.num_heads * rows * partial_stride(call);
    const bool merges = item.partials_at < 0 && item.num_partitions() > 1;
    end = rounded_up(partials + (merges ? item.num_partitions() * partial_floats : 0), 16);
  }
};

static int64_t scratch_floats(const AttentionCall& call, const WorkItem& item) {
  return Layout(call, item, false).end;
}

// The rows of an item: queries, running softmax and sums; independent of the caches' format.
class ItemRows {
 public:
  // `partials` are those of all items.
  ItemRows(const AttentionCall& call, const WorkItem& item, bool is_paired, float* scratch,
           float* partials)
      : call(call),
        item(item),
        layout(call, item, is_paired),
        queries_(scratch + layout.queries),
        sums_(scratch + layout.sums),
        states_(reinterpret_cast<RowState*>(scratch + layout.states)),
        own_partials_(scratch + layout.partials),
        partial_(item.partials_at < 0 ? own_partials_ : partials + item.partials_at),
        group_(call.group_size()),
        first_token_(call.query_start_loc[item.seq] + item.first_token) {
    const int64_t end_token = call.query_start_loc[item.seq + 1];
    first_position_ = call.seq_lens[item.seq] - (end_token - first_token_);
    load_queries();
    begin_partition();
  }

  const AttentionCall& call;
  const WorkItem& item;
  const Layout layout;

  float* queries(int64_t head, int64_t row) {
    return queries_ + index(head, row) * layout.query_stride;
  }
  float* sums(int64_t head, int64_t row) { return sums_ + index(head, row) * layout.sum_stride; }
  // What products of queries and stored keys are multiplied by.
  float score_factor() const { return call.scale * call.keys.scale; }
  int64_t index(int64_t head, int64_t row) const { return head * layout.padded_rows + row; }

  // The keys that a row sees, of `num_keys` from `first_key` on.
  Span seen(int64_t row, int64_t first_key, int64_t num_keys) const {
    const int64_t end = position(row) + 1 - first_key;
    const int64_t begin = call.sliding_window > 0 ? end - call.sliding_window : 0;
    const auto within = [&](int64_t j) { return std::clamp<int64_t>(j, 0, num_keys); };
    return {within(begin), within(end)};
  }

  // Replaces a row's scores of the keys in `span`, whole vectors of a tile, by weights. The row sees
  // the keys in `seen`.
  template <typename Weight>
  void update_row(int64_t head, int64_t row, float* scores, Span span, Span seen) {
    if (call.softcap > 0.0f) cap_scores(scores, span);
    const float factor = update_softmax<Weight>(scores, span, seen, states_[index(head, row)]);
    if (factor == 1.0f) return;
    float* sum = sums(head, row);
    for (int64_t d = 0; d < layout.sum_stride; d += kLanes) store(sum + d, load(sum + d) * factor);
  }

  // Ends a partition that is not the last one.
  void end_partition() {
    write_partial();
    begin_partition();
  }

  void end_item() {
    if (item.partials_at >= 0) return write_partial();
    if (item.num_partitions() == 1) return write_outputs();
    write_partial();
    WorkItem whole = item;
    whole.partials_at = 0, whole.partial_floats = layout.partial_floats;
    merge(call, whole, sums_, own_partials_);
  }

 private:
  void begin_partition() {
    const int64_t num_rows = item.num_heads * layout.padded_rows;
    std::fill(states_, states_ + num_rows, RowState{kMinusInfinity, 0.0f});
    std::memset(sums_, 0, num_rows * layout.sum_stride * sizeof(float));
  }

  void load_queries() {
    const HeadsView& query = call.query;
    for (int64_t head = 0; head < item.num_heads; ++head) {
      for (int64_t row = 0; row < layout.padded_rows; ++row) {
        if (row >= layout.rows) {
          std::memset(queries(head, row), 0, layout.query_stride * sizeof(float));
          continue;
        }
        const int64_t offset =
            token(row) * query.token_stride + query_head(head, row) * query.head_stride;
        load_query(static_cast<const char*>(query.data) + offset * bytes_of(query.format),
                   queries(head, row));
      }
    }
  }

  // As pairs, queries stay as they are: their products are exact, and scaled afterwards.
  void load_query(const char* from, float* to) {
    const int64_t dim = call.keys.head_dim;
    if (!layout.is_paired) return widen_row(call.query.format, from, to, dim, score_factor());
    std::memset(to, 0, layout.query_stride * sizeof(float));
    std::memcpy(to, from, dim * sizeof(BFloat16));
  }

  void cap_scores(float* scores, Span span) {
    const float cap = call.softcap;
    for (int64_t j = span.begin; j < span.end; j += kLanes) {
      store(scores + j, hyperbolic_tangent(load(scores + j) / cap) * cap);
    }
  }

  void write_outputs() {
    for (int64_t head = 0; head < item.num_heads; ++head) {
      for (int64_t row = 0; row < layout.rows; ++row) {
        write_output(call, token(row), query_head(head, row), states_[index(head, row)],
                     sums(head, row));
      }
    }
  }

  void write_partial() {
    const int64_t stride = partial_stride(call);
    float* to = partial_;
    partial_ += item.partials_at < 0 ? layout.partial_floats : item.partial_floats;
    for (int64_t head = 0; head < item.num_heads; ++head) {
      for (int64_t row = 0; row < layout.rows; ++row, to += stride) {
        std::memcpy(to, sums(head, row), (stride - 2) * sizeof(float));
        std::memcpy(to + stride - 2, &states_[index(head, row)], sizeof(RowState));
      }
    }
  }

  int64_t token(int64_t row) const { return first_token_ + row / group_; }
  int64_t position(int64_t row) const { return first_position_ + row / group_; }
  int64_t query_head(int64_t head, int64_t row) const {
    return (item.first_head + head) * group_ + row % group_;
  }

  float *queries_, *sums_;
  RowState* states_;
  float* const own_partials_;  // those that the item merges itself
  float* partial_;             // of the next partition to end
  int64_t group_, first_token_, first_position_;
};

// Offsets of a tile's keys and values, from the first number of a key head.
//
// Up to kBeyond offsets of the next tile's keys follow, for prefetching. Missing keys repeat the last
// one, for loops that process several at a time.
template <int kKeys, int kBeyond>
struct TileOffsets {
  int64_t first_key = 0, num_keys = 0, num_found = 0;
  int64_t keys[kKeys + kBeyond], values[kKeys + kBeyond];

  void find(const AttentionCall& call, const WorkItem& item, int64_t from) {
    first_key = from;
    num_keys = std::min<int64_t>(kKeys, item.partition_end(from) - from);
    num_found = std::min<int64_t>(kKeys + kBeyond, item.end_key - from);
    const int32_t* block =
        call.block_table + item.seq * call.block_table_stride + from / call.block_size;
    int64_t slot = from % call.block_size;
    for (int64_t j = 0; j < num_found; ++j) {
      keys[j] = *block * call.keys.block_stride + slot * call.keys.slot_stride;
      values[j] = *block * call.values.block_stride + slot * call.values.slot_stride;
      if (++slot == call.block_size) ++block, slot = 0;
    }
    std::fill(keys + num_found, std::end(keys), keys[num_found - 1]);
  }
};

// The address of an item's key head in a cache's first slot.
template <typename T>
QUIRE_INLINE const T* head_numbers(const Cache& cache, const WorkItem& item, int64_t head) {
  return static_cast<const T*>(cache.data) + (item.first_head + head) * cache.head_stride;
}
