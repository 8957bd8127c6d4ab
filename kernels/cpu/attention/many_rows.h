// Attention of many rows: tiles of keys and values are packed and multiplied as matrices. Included
// once per instruction set, after item_rows.h and many_rows_tile.h.

template <typename T>
class ManyRowsAttention {
 public:
  ManyRowsAttention(ItemRows& rows, float* scratch)
      : rows_(rows),
        call_(rows.call),
        item_(rows.item),
        layout_(rows.layout),
        scores_(scratch + layout_.scores),
        key_panels_(scratch + layout_.key_panels),
        value_panels_(scratch + layout_.value_panels) {}

  void run() {
    for (int64_t key = item_.first_key; key < item_.end_key; key += kPackedKeys) {
      offsets_.find(call_, item_, key);
      for (int64_t head = 0; head < item_.num_heads; ++head) attend_tile(head);
    }
  }

 private:
  void attend_tile(int64_t head) {
    const int64_t num_keys = offsets_.num_keys;
    pack_keys(head_numbers<T>(call_.keys, item_, head), offsets_.keys, num_keys,
              call_.keys.head_dim, key_panels_);
    pack_values(head_numbers<T>(call_.values, item_, head), offsets_.values, num_keys,
                call_.values.head_dim, value_panels_);
    for (int64_t row = 0; row < layout_.rows; row += kRowBlock) attend_block(head, row);
  }

  // The scores of a block of rows stay in the first-level cache until they are used.
  void attend_block(int64_t head, int64_t row) {
    const int64_t end_row = std::min<int64_t>(row + kRowBlock, layout_.rows);
    const Span span{seen(row).begin, seen(end_row - 1).end};
    if (span.begin >= span.end) return;
    score_block(head, row, span);
    const Span vectors{span.begin / kLanes * kLanes, rounded_up(span.end, kLanes)};
    for (int64_t i = row; i < end_row; ++i) {
      rows_.update_row(head, i, scores_ + (i - row) * kPackedKeys, offsets_.first_key, vectors,
                       seen(i));
    }
    add_block(head, row, span);
  }

  void score_block(int64_t head, int64_t row, Span span) {
    const int64_t dim = call_.keys.head_dim;
    for (int64_t j = span.begin / kPanel * kPanel; j < span.end; j += kPanel) {
      multiply<false>(rows_.queries(head, row), layout_.query_stride, key_panels_ + j * dim, dim,
                      scores_ + j, kPackedKeys, span.end - j);
    }
  }

  void add_block(int64_t head, int64_t row, Span span) {
    const int64_t dim = call_.values.head_dim;
    for (int64_t d = 0; d < dim; d += kPanel) {
      multiply<true>(scores_ + span.begin, kPackedKeys,
                     value_panels_ + d * kPackedKeys + span.begin * kPanel, span.end - span.begin,
                     rows_.sums(head, row) + d, layout_.sum_stride, dim - d);
    }
  }

  Span seen(int64_t row) const { return rows_.seen(row, offsets_.first_key, offsets_.num_keys); }

  ItemRows& rows_;
  const AttentionCall& call_;
  const WorkItem& item_;
  const Layout& layout_;
  float *scores_, *key_panels_, *value_panels_;
  TileOffsets<kPackedKeys, 0> offsets_;
};
