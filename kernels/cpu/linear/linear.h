// Products with a weight that was packed into panels: the calls, and the functions that each
// instruction set has for them. Independent of torch.
#pragma once

#include <cstdint>

#include "isa/isa.h"
#include "linear/quantized.h"
#include "tensor_views.h"

namespace quire::linear {

// How a panel holds the numbers of its outputs.
enum class Layout : int {
  kPlain,      // [num_inputs, panel_width]
  kPaired,     // bfloat16 [num_inputs / 2, panel_width, 2]
  kQuantized,  // see Quantization
};

// A weight in panels, with zeros beyond the last output.
struct Weight {
  Layout layout;
  Format format;  // unless quantised
  int64_t num_inputs, num_panels, panel_width;
  int64_t panel_bytes;
  int64_t offset;  // bytes before the first panel
  Quantization quantization;
};

// Panels of a weight, and the same panels of a second weight that is multiplied with it, or null.
struct Panels {
  const char *first = nullptr, *second = nullptr;
  int64_t bytes = 0;  // of a panel

  Panels from(int64_t panel) const {
    return {first + panel * bytes, second ? second + panel * bytes : nullptr, bytes};
  }
};

// rows [num_rows, num_inputs] times the weight, transposed: out [num_rows, num_outputs]. With a
// second weight, which is like the first, the first product goes through the activation and is
// multiplied with the second.
struct LinearCall {
  const void* rows;
  Format format;       // of rows and outputs
  int64_t row_stride;  // in elements
  int64_t num_rows, num_outputs;
  Weight weight;
  Panels panels;
  const float *bias, *second_bias;  // [num_outputs] or null
  Activation activation;
  const void* residual;  // added to the outputs, or null; like `out`, in other memory
  void* out;
  int64_t out_stride;  // of rows, in elements
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

// The functions for some layouts of panels and formats of rows.
struct Multiplier {
  // Rows that are computed together, and the most rows of a block.
  int64_t tile_rows, most_block_rows;
  // Bytes of a row as `multiply` reads it.
  int64_t (*row_bytes)(Format, const Weight&);
  // Bytes of memory that a thread needs for a block.
  int64_t (*scratch_bytes)(const LinearCall&, int64_t num_rows);
  // Converts a block's rows into the scratch memory, before any of the block's chunks.
  void (*prepare)(const LinearCall&, int64_t first_row, int64_t end_row, char* scratch);
  void (*multiply)(const LinearCall&, const Chunk&, char* scratch);
};

// The functions of an instruction set. Null: there is no instruction for it.
struct Functions {
  int64_t panel_width;  // outputs of a panel
  Multiplier plain;     // for plain panels
  // For all panels and rows: panels are converted to float32.
  const Multiplier* converting;
  // For quantised panels and all rows.
  const Multiplier* widened = nullptr;
  // For rows of bfloat16: panels of pairs, quantised panels converted to pairs, and of 4 bits.
  const Multiplier *paired = nullptr, *converting_to_pairs = nullptr, *nibbles = nullptr;
  // For quantised panels and rows that may be rounded to 8 bits.
  const Multiplier* integers = nullptr;

  const Multiplier& multiplier(Format rows, const Weight& weight) const {
    const bool narrow = rows == Format::kBFloat16;
    switch (weight.layout) {
      case Layout::kPlain: return plain;
      case Layout::kPaired: return narrow && paired ? *paired : *converting;
      default: {
        const Quantization& quantization = weight.quantization;
        if (quantization.int8_activations && integers) return *integers;
        if (narrow && quantization.bits == 4 && nibbles) return *nibbles;
        const bool has_pairs = quantization.group_size % 2 == 0;
        if (narrow && has_pairs && converting_to_pairs) return *converting_to_pairs;
        return widened ? *widened : *converting;
      }
    }
  }
};

const Functions& functions_of(Isa isa);

}  // namespace quire::linear
