// The operations on tensors, as other operations call them.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace quire {

using at::Tensor;

void kv_write(const Tensor& key, const Tensor& value, const Tensor& k_cache, const Tensor& v_cache,
              const Tensor& slot_mapping, double k_scale, double v_scale, int64_t isa);

void paged_attention(const Tensor& out, const Tensor& query, const Tensor& k_cache,
                     const Tensor& v_cache, const Tensor& block_table,
                     const Tensor& query_start_loc, const Tensor& seq_lens, double scale,
                     int64_t sliding_window, double softcap, const std::optional<Tensor>& sinks,
                     const std::optional<Tensor>& alibi_slopes, double k_scale, double v_scale,
                     int64_t partition_keys, int64_t isa);

namespace linear {

Tensor linear(const Tensor& input, const Tensor& panels, int64_t num_outputs,
              const std::optional<Tensor>& bias, const std::optional<Tensor>& second_panels,
              const std::optional<Tensor>& second_bias, int64_t activation,
              const std::optional<Tensor>& residual, int64_t isa);

}  // namespace linear

namespace fused {

Tensor rms_norm(const Tensor& input, const Tensor& weight, double epsilon, int64_t isa);

void turn_heads(const Tensor& heads, const Tensor& cosines, const Tensor& sines,
                const std::optional<Tensor>& norms, double epsilon, int64_t isa);

}  // namespace fused

}  // namespace quire
