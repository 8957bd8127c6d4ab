// Weights in panels, as tensors.
#pragma once

#include "linear/linear.h"
#include "ops.h"

namespace quire::linear {

// Reads a weight's layout from the tensor of its panels: [panels, num_inputs, width], pairs
// [panels, num_inputs / 2, width, 2] of bfloat16, or bytes that begin with a QuantizedHeader. Points
// into the tensor.
Weight weight_of(const Tensor& panels);

// Whether one call may multiply with both.
bool are_alike(const Weight& one, const Weight& other);

Panels panels_of(const Weight& weight, const Tensor& panels, const Tensor* second_panels);

// Writes rows of a quantised weight to `out` [num_rows, num_inputs], of 16 or 32 bits.
Stage dequantize_stage(const Weight& weight, const Tensor& panels, const int64_t* rows,
                       const Tensor& out);

}  // namespace quire::linear
