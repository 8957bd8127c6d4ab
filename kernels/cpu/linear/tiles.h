// The tiles of a block of rows.
#pragma once

#include <cstdint>

#include "linear/linear.h"
#include "linear/prefetch.h"

namespace quire::linear {

// Tiles of a chunk's block, of at most `tile_rows` rows; they differ by at most one row.
struct Tiles {
  Tiles(const Chunk& chunk, int64_t tile_rows)
      : num_rows(chunk.end_row - chunk.first_row), count((num_rows + tile_rows - 1) / tile_rows) {}

  // The first row of a tile, counted from the block's first.
  int64_t begin_of(int64_t number) const { return num_rows * number / count; }

  // The rows of the tile after this one, of the block's `rows`.
  ByteRange rows_after(int64_t number, const char* rows, int64_t row_bytes) const {
    if (number + 1 == count) return {};
    const int64_t from = begin_of(number + 1), to = begin_of(number + 2);
    return {rows + from * row_bytes, (to - from) * row_bytes};
  }

  const int64_t num_rows, count;
};

}  // namespace quire::linear
