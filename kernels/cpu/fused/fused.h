// Fused elementwise operations: the calls, and the functions that each instruction set has for them.
// Independent of torch.
#pragma once

#include <cstdint>

#include "isa/isa.h"
#include "tensor_views.h"

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

// Rotary embedding of heads' vectors of `dim` numbers, each half dense; cosines and sines
// [num_tokens, dim] are dense. With norms, vectors are normalised first. The output may be the source.
struct Rope {
  HeadsView source, out;
  const void *cosines, *sines;
  int64_t num_heads, dim;
  const float* norms;  // [num_heads, dim] or null
  float epsilon;
};

// Numbers to float32.
struct Widen {
  const void* source;
  float* out;
  Format format;
};

// Adds the numbers of several tensors in their order, in float32.
struct Sum {
  const void* const* parts;
  int64_t num_parts;
  void* out;
  Format format;
};

struct Functions {
  void (*norm)(const Norm&, int64_t first_row, int64_t end_row);
  void (*gate)(const Gate&, int64_t first, int64_t end);
  void (*rope)(const Rope&, int64_t first_token, int64_t end_token);
  void (*widen)(const Widen&, int64_t first, int64_t end);
  void (*sum)(const Sum&, int64_t first, int64_t end);
};

const Functions& functions_of(Isa isa);

}  // namespace quire::fused
