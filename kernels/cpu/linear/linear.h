// Products with a weight that was packed into panels: the calls, and the functions that each
// instruction set has for them. Independent of torch.
#pragma once

#include <cstdint>

#include "isa/isa.h"
#include "tensor_views.h"

namespace quire::linear {

// Panels of a weight, and the same panels of a second weight that is multiplied with it, or null.
struct Panels {
  const char *first = nullptr, *second = nullptr;
  int64_t bytes = 0;  // of a panel

  Panels from(int64_t panel) const {
    return {first + panel * bytes, second ? second + panel * bytes : nullptr, bytes};
  }
};

// rows [num_rows, num_inputs] times the weight, transposed: out [num_rows, num_outputs]. With a
// second weight the first product goes through the activation and is multiplied with the second.
struct LinearCall {
  const void* rows;
  Format format;       // of rows and outputs
  int64_t row_stride;  // in elements
  int64_t num_rows, num_inputs, num_outputs;
  Panels panels;  // [num_panels, num_inputs, panel_width], zeros beyond num_outputs
  Format panel_format;
  const float *bias, *second_bias;  // [num_outputs] or null
  Activation activation;
  const void* residual;  // added to the outputs, or null; like `out`, in other memory
  void* out;             // dense
};

// A chunk of the stage: some tiles of a block of rows, times some panels.
struct Chunk {
  int64_t first_row, end_row;    // the block's
  int64_t first_tile, end_tile;  // of the block's tiles; may be empty
  int64_t first_panel, end_panel;
  bool prefetches_rows;  // as the first chunk of its range with these rows
  Panels next_panels;    // that follow its last panel in the range, or null

  Panels panels_after(int64_t panel, const LinearCall& call) const {
    return panel + 1 < end_panel ? call.panels.from(panel + 1) : next_panels;
  }
};

struct Functions {
  // Outputs of a panel, rows that are computed together, and the most rows of a block.
  int64_t panel_width, tile_rows, most_block_rows;
  // Bytes of a row as `multiply` reads it.
  int64_t (*row_bytes)(Format, int64_t num_inputs);
  // Bytes of memory that a thread needs for a block.
  int64_t (*scratch_bytes)(const LinearCall&, int64_t num_rows);
  // Converts a block's rows into the scratch memory, before any of the block's chunks.
  void (*prepare)(const LinearCall&, int64_t first_row, int64_t end_row, char* scratch);
  void (*multiply)(const LinearCall&, const Chunk&, char* scratch);
};

const Functions& functions_of(Isa isa);

}  // namespace quire::linear
