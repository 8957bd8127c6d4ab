// Many rows: tiles of keys and values are packed and multiplied as matrices. Included once per
// instruction set, after item.h.

template <typename T>
class Packed {
 public:
  Packed(Rows& rows, float* scratch)
      : rows_(rows),
        call_(rows.call),
        item_(rows.item),
        at_(rows.at),
        scores_(scratch + at_.scores),
        key_panels_(scratch + at_.key_panels),
        value_panels_(scratch + at_.value_panels),
        spans_(reinterpret_cast<Span*>(scratch + at_.spans)) {}

  void run() {
    for (int64_t key = item_.first_key; key < item_.end_key; key += kPackedKeys) {
      places_.find(call_, item_, key);
      for (int64_t row = 0; row < at_.rows; row += kRowBlock) {
        spans_[row / kRowBlock] = block_span(row);
      }
      for (int64_t head = 0; head < item_.num_heads; ++head) meet_tile(head);
    }
  }

 private:
  void meet_tile(int64_t head) {
    const int64_t num_keys = places_.num_keys;
    pack_keys(head_numbers<T>(call_.keys, item_, head), places_.keys, num_keys,
              call_.keys.head_dim, key_panels_);
    for (int64_t j = 0; j < num_keys; j += kPanel) score_panel(head, j);
    for (int64_t row = 0; row < at_.rows; ++row) soften_row(head, row);
    pack_values(head_numbers<T>(call_.values, item_, head), places_.values, num_keys,
                call_.values.head_dim, value_panels_);
    for (int64_t d = 0; d < at_.sum_stride; d += kPanel) add_panel(head, d);
  }

  void score_panel(int64_t head, int64_t j) {
    const int64_t dim = call_.keys.head_dim;
    for (int64_t row = 0; row < at_.rows; row += kRowBlock) {
      const Span span = spans_[row / kRowBlock];
      if (j < span.begin || j >= span.end) continue;
      multiply<false>(rows_.queries(head, row), at_.query_stride, key_panels_ + j * dim, dim,
                      scores(head, row) + j, kPackedKeys);
    }
  }

  void soften_row(int64_t head, int64_t row) {
    rows_.soften_row(head, row, scores(head, row), places_.first_key, spans_[row / kRowBlock],
                     seen(row));
  }

  void add_panel(int64_t head, int64_t d) {
    for (int64_t row = 0; row < at_.rows; row += kRowBlock) {
      const Span span = spans_[row / kRowBlock];
      if (span.begin >= span.end) continue;
      multiply<true>(scores(head, row) + span.begin, kPackedKeys,
                     value_panels_ + d * kPackedKeys + span.begin * kPanel, span.end - span.begin,
                     rows_.sums(head, row) + d, at_.sum_stride);
    }
  }

  float* scores(int64_t head, int64_t row) { return scores_ + rows_.index(head, row) * kPackedKeys; }

  Span seen(int64_t row) const { return rows_.seen(row, places_.first_key, places_.num_keys); }

  // Whole panels that hold all that the rows of a block see.
  Span block_span(int64_t row) const {
    const int64_t last_row = std::min<int64_t>(row + kRowBlock, at_.rows) - 1;
    return {seen(row).begin / kPanel * kPanel, rounded_up(seen(last_row).end, kPanel)};
  }

  Rows& rows_;
  const Attention& call_;
  const Item& item_;
  const Layout& at_;
  float *scores_, *key_panels_, *value_panels_;
  Span* spans_;  // of each block of rows, in whole panels
  Places<kPackedKeys, 0> places_;
};
