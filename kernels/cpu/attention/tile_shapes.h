// Shapes of the tiles of keys and of the blocks of rows. Included once per instruction set.

// Keys of a packed tile.
constexpr int kPackedKeys = 128;
// Columns of a packed panel, and rows of the block of sums that stays in registers.
constexpr int kPanel = 2 * kLanes;
constexpr int kRowBlock = kLanes == 16 ? 12 : 6;
// Keys of a streamed tile, the most whose values are processed together, and those whose scores are.
constexpr int kStreamedKeys = 64, kMostGroup = 16, kStep = 4;

// Rows of numbers that are multiplied as pairs are padded to a multiple of this.
constexpr int kPairedRow = 64;

QUIRE_INLINE int64_t rounded_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// kLanes numbers of a row from `d` on; zeros beyond `dim`.
template <typename T>
QUIRE_INLINE Floats load_within(const T* row, int64_t d, int64_t dim) {
  return d + kLanes <= dim ? load(row + d) : load_first(row + d, dim - d);
}
