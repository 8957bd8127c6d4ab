// Attention of many rows: tiles of keys and values are packed and multiplied as matrices. Included
// once per instruction set, after item_rows.h and many_rows_tile.h.

// `Tile` packs and multiplies: WidenedTile<T> or PairedTile<T>.
template <typename Tile>
class ManyRowsAttention {
  using T = typename Tile::Number;
  using Weight = typename Tile::Weight;

 public:
  ManyRowsAttention(ItemRows& rows, float* scratch)
      : rows_(rows),
        call_(rows.call),
        item_(rows.item),
        layout_(rows.layout),
        factor_(rows.score_factor()),
        scores_(scratch + layout_.scores),
        tile_{scratch + layout_.key_panels, scratch + layout_.value_panels} {}

  void run() {
    for (int64_t key = item_.first_key; key < item_.end_key; key += kPackedKeys) {
      offsets_.find(call_, item_, key);
      for (int64_t head = 0; head < item_.num_heads; ++head) attend_tile(head);
    }
  }

 private:
  void attend_tile(int64_t head) {
    tile_.pack(head_numbers<T>(call_.keys, item_, head), offsets_.keys, call_.keys.head_dim,
               head_numbers<T>(call_.values, item_, head), offsets_.values, call_.values.head_dim,
               offsets_.num_keys);
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
      rows_.update_row<Weight>(head, i, scores_ + (i - row) * kPackedKeys, vectors, seen(i));
    }
    add_block(head, row, span);
  }

  void score_block(int64_t head, int64_t row, Span span) {
    for (int64_t j = span.begin / kPanel * kPanel; j < span.end; j += kPanel) {
      tile_.score(rows_.queries(head, row), layout_.query_stride, j, span.end - j,
                  call_.keys.head_dim, factor_, scores_);
    }
  }

  void add_block(int64_t head, int64_t row, Span span) {
    const int64_t dim = call_.values.head_dim;
    for (int64_t d = 0; d < dim; d += kPanel) {
      tile_.add(reinterpret_cast<const Weight*>(scores_), span.begin, span.end, d, dim - d,
                rows_.sums(head, row), layout_.sum_stride);
    }
  }

  Span seen(int64_t row) const { return rows_.seen(row, offsets_.first_key, offsets_.num_keys); }

  ItemRows& rows_;
  const AttentionCall& call_;
  const WorkItem& item_;
  const Layout& layout_;
  const float factor_;
  float* scores_;
  const Tile tile_;
  TileOffsets<kPackedKeys, 0> offsets_;
};
