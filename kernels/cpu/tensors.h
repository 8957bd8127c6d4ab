// Converts torch's tensors to the kernels' views, with checks.
#pragma once

#include <ATen/core/Tensor.h>

#include "tensor_views.h"

namespace quire {

using at::Tensor;

inline Format format_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat: return Format::kFloat32;
    case at::kHalf: return Format::kFloat16;
    case at::kBFloat16: return Format::kBFloat16;
    case at::kFloat8_e4m3fn: return Format::kE4M3;
    case at::kFloat8_e5m2: return Format::kE5M2;
    default: TORCH_CHECK_NOT_IMPLEMENTED(false, "no kernel for ", tensor.scalar_type());
  }
}

// Whether all operations support the numbers: those of 8 bits are for caches alone.
inline bool is_wide(const Tensor& tensor) {
  const auto type = tensor.scalar_type();
  return type == at::kFloat || type == at::kHalf || type == at::kBFloat16;
}

// The same numbers, dense in the last dimension.
inline Tensor dense(const Tensor& tensor) {
  return tensor.stride(-1) == 1 || tensor.size(-1) == 1 ? tensor : tensor.contiguous();
}

inline HeadsView heads_view(const Tensor& tensor) {
  TORCH_CHECK(tensor.dim() == 3 && tensor.is_cpu(), "tokens are [num_tokens, num_heads, dim]");
  TORCH_CHECK(tensor.stride(2) == 1 || tensor.size(2) == 1, "a head's numbers must be dense");
  return {tensor.data_ptr(), format_of(tensor), tensor.stride(0), tensor.stride(1)};
}

inline Cache cache_of(const Tensor& cache, double scale) {
  TORCH_CHECK(cache.dim() == 4 && cache.is_cpu(),
              "a cache is [num_blocks, block_size, num_kv_heads, head_dim]");
  TORCH_CHECK(cache.stride(3) == 1 || cache.size(3) == 1, "a head's numbers must be dense");
  return {cache.data_ptr(), format_of(cache), cache.stride(0),          cache.stride(1),
          cache.stride(2),  cache.size(3),    static_cast<float>(scale)};
}

inline const int64_t* int64s(const Tensor& tensor, int64_t count, const char* name) {
  TORCH_CHECK(tensor.scalar_type() == at::kLong && tensor.is_contiguous() && tensor.is_cpu() &&
                  tensor.numel() == count,
              name, " must be ", count, " dense int64 numbers");
  return tensor.const_data_ptr<int64_t>();
}

}  // namespace quire
