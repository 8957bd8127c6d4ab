// Multiplies one step's inputs by AMX tiles, and splits the next step's weights meanwhile. Included
// once, after split.h.

namespace amx {

// The next pair of a weight to be split, and the next bytes to be prefetched with it.
template <typename W>
struct SplitCursor {
  const W* from;
  char* to;
  const char* due;
  int64_t due_step;
};

// Splits one pair, unless the pairs are already split, and prefetches its share.
template <bool kSplits, typename W>
QUIRE_INLINE void split_next(SplitCursor<W>& cursor) {
  for (int64_t line = 0; line < cursor.due_step; line += kLine)
    __builtin_prefetch(cursor.due + line, 0, 2);
  cursor.due += cursor.due_step;
  if constexpr (kSplits) {
    split_pair(cursor.from, cursor.to);
    cursor.from += kPanelWidth;
    cursor.to += 64;
  }
}

// The indices of parts that are multiplied.
struct Factors {
  int row, weight;
};

// Whether a product is not one of the smallest.
constexpr bool counts(Factors parts) { return parts.row + parts.weight <= 2; }

constexpr int num_factors(int row_parts, int weight_parts) {
  int count = 0;
  for (int w = 0; w < weight_parts; ++w)
    for (int r = 0; r < row_parts; ++r) count += counts({r, w});
  return count;
}

constexpr Factors factors(int index, int row_parts, int weight_parts) {
  for (int w = 0; w < weight_parts; ++w)
    for (int r = row_parts - 1; r >= 0; --r)
      if (counts({r, w}) && index-- == 0) return {r, w};
  return {};
}

// Multiplies one step's inputs of one or two tiles of rows, the second `second` bytes after the first,
// and splits all pairs of the next step.
template <int kTiles, int kRowParts, bool kSplits, typename W, int kIndex = 0>
QUIRE_INLINE void multiply_step(const char* rows, int64_t second, const char* weight,
                                SplitCursor<W>& cursor) {
  constexpr int kWeightParts = kPartsOf<W>, kCount = num_factors(kRowParts, kWeightParts);
  constexpr Factors kNow = factors(kIndex, kRowParts, kWeightParts);
  if constexpr (kIndex == 0 || factors(kIndex - 1, kRowParts, kWeightParts).weight != kNow.weight) {
    load_tile<6>(weight + 2 * kNow.weight * kTileBytes);
    load_tile<7>(weight + (2 * kNow.weight + 1) * kTileBytes);
  }
  load_tile<4>(rows + kNow.row * kTileBytes);
  multiply_tiles<0, 4, 6>();
  multiply_tiles<1, 4, 7>();
  if constexpr (kTiles == 2) {
    load_tile<5>(rows + second + kNow.row * kTileBytes);
    multiply_tiles<2, 5, 6>();
    multiply_tiles<3, 5, 7>();
  }
  // None with the last product, so that all are written before the next step loads them.
  constexpr int kShares = std::max(kCount - 1, 1);
  constexpr int kShare =
      kIndex < kShares ? kPairs * (kIndex + 1) / kShares - kPairs * kIndex / kShares : 0;
#pragma GCC unroll 16
  for (int i = 0; i < kShare; ++i) split_next<kSplits>(cursor);
  if constexpr (kIndex + 1 < kCount)
    multiply_step<kTiles, kRowParts, kSplits, W, kIndex + 1>(rows, second, weight, cursor);
}

}  // namespace amx
