// Products with a weight whose rows were put side by side in panels, as every instruction set has
// them.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace quire::linear {

// Panels of a weight, and the same ones of another that are met together with them, or null.
struct Panels {
  const char *first = nullptr, *second = nullptr;
  int64_t bytes = 0;  // of a panel

  Panels from(int64_t panel) const {
    return {first + panel * bytes, second ? second + panel * bytes : nullptr, bytes};
  }
};

// rows [num_rows, num_inputs] times the weight, transposed: out [num_rows, num_outputs]. With a
// second weight the first product goes through the activation and is multiplied with the second.
struct Product {
  const void* rows;
  Format format;       // of rows and outputs
  int64_t row_stride;  // in elements
  int64_t num_rows, num_inputs, num_outputs;
  Panels panels;  // [num_panels, num_inputs, panel_width], zeros beyond num_outputs
  Format panel_format;
  const float *bias, *second_bias;  // [num_outputs] or null
  Activation activation;
  const void* residual;  // what is added to the outputs, or null; like `out`, but elsewhere
  void* out;             // dense
};

// What one thread does in one go: some tiles of a block of rows, with some panels.
struct Piece {
  int64_t first_row, end_row;    // the block's
  int64_t first_tile, end_tile;  // of the block's tiles; maybe none
  int64_t first_panel, end_panel;
  bool meets_rows;  // for the first time in its run
  Panels coming;    // after the last one in its run, or null
};

struct Functions {
  // Outputs of a panel; how many rows are computed at once; and how many a block has at most.
  int64_t panel_width, tile_rows, most_block_rows;
  // Of a row of so many numbers as `multiply` meets it.
  int64_t (*row_bytes)(Format, int64_t num_inputs);
  // Of memory that a thread needs for a block of so many rows.
  int64_t (*scratch_bytes)(const Product&, int64_t num_rows);
  // Brings a block's rows there: once before any of its pieces.
  void (*prepare)(const Product&, int64_t first_row, int64_t end_row, char* scratch);
  void (*multiply)(const Product&, const Piece&, char* scratch);
};

const Functions& functions_of(Isa isa);

}  // namespace quire::linear
