// Chains of elementwise operations in one pass over memory, as every instruction set has them.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace quire::fused {

// Dense rows of `dim` numbers; a weight per column in float32.
struct Norm {
  const void* source;
  void* out;
  Format format;
  int64_t dim;
  const float* weight;
  float epsilon;
};

struct Gate {
  const void *gate, *up;
  void* out;
  Format format;
  Activation activation;
};

// Heads' vectors of `dim` numbers, each half dense; cosines and sines [num_tokens, dim] are dense.
// Where there are norms, a weight per head and number, vectors go through them first. The output may
// be the source.
struct Rotation {
  Tokens source, out;
  const void *cosines, *sines;
  int64_t num_heads, dim;
  const float* norms;  // [num_heads, dim] or null
  float epsilon;
};

struct Functions {
  void (*norm)(const Norm&, int64_t first_row, int64_t end_row);
  void (*gate)(const Gate&, int64_t first, int64_t end);
  void (*rotate)(const Rotation&, int64_t first_token, int64_t end_token);
};

const Functions& functions_of(Isa isa);

}  // namespace quire::fused
