// Tensors described to the kernels in plain structures, and work spread over ATen's threads.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <atomic>
#include <vector>

#include "kernels.h"

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

// The same numbers, dense in the last dimension.
inline Tensor dense(const Tensor& tensor) {
  return tensor.stride(-1) == 1 || tensor.size(-1) == 1 ? tensor : tensor.contiguous();
}

inline Tokens tokens_of(const Tensor& tensor) {
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

// Calls `work(i)` for all i below `count`; threads take them in turn.
template <typename Work>
void share_out(int64_t count, const Work& work) {
  std::atomic<int64_t> next{0};
  at::parallel_for(0, std::min<int64_t>(count, at::get_num_threads()), 1, [&](int64_t, int64_t) {
    for (int64_t i = next++; i < count; i = next++) work(i);
  });
}

// The same; each thread begins with its own run of neighbours, and helps others when it is through.
// What lies side by side is then done by one thread, as a rule, and by the same one every time.
template <typename Work>
void share_out_runs(int64_t count, const Work& work) {
  constexpr int64_t kLineBytes = 64;
  struct alignas(kLineBytes) Run {
    std::atomic<int64_t> next;
  };
  const int64_t num_runs = std::min<int64_t>(count, at::get_num_threads());
  std::vector<Run> runs(num_runs);
  const auto begin_of = [&](int64_t run) { return run * count / num_runs; };
  for (int64_t run = 0; run < num_runs; ++run) runs[run].next = begin_of(run);
  at::parallel_for(0, num_runs, 1, [&](int64_t own, int64_t) {
    for (int64_t turn = 0; turn < num_runs; ++turn) {
      const int64_t run = (own + turn) % num_runs, end = begin_of(run + 1);
      for (int64_t i = runs[run].next++; i < end; i = runs[run].next++) work(i);
    }
  });
}

}  // namespace quire
