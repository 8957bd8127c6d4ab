// Tensors as kernels see them: plain structures, independent of torch.
#pragma once

#include <cstdint>

namespace quire {

enum class Format : int { kFloat32, kFloat16, kBFloat16, kE4M3, kE5M2 };

enum class Activation : int { kSilu, kGeluTanh };

// A cache [num_blocks, block_size, num_kv_heads, head_dim], dense in its last dimension. Strides
// are in elements.
struct Cache {
  void* data;
  Format format;
  int64_t block_stride, slot_stride, head_stride;
  int64_t head_dim;
  float scale;  // value = stored number * scale
};

// Queries, keys or values [num_tokens, num_heads, dim], dense in the last dimension.
struct HeadsView {
  void* data;
  Format format;
  int64_t token_stride, head_stride;
};

}  // namespace quire
