// The operations on tensors as stages of work, for callers that execute several stages in one call.
//
// Tensors must live until all stages are done. Outputs are dense unless a stage says otherwise. A chunk reads only what its stage does
// not write, unless input and output share memory, and writes each number once.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <vector>

#include "threading/stages.h"

namespace quire {

using at::Tensor;

namespace attention {

// Writes keys and values [num_tokens, num_kv_heads, head_dim], dense in the last dimension, into
// slots, all of them different.
Stage kv_write_stage(const Tensor& keys, const Tensor& values, const Tensor& k_cache,
                     const Tensor& v_cache, const Tensor& slot_mapping, double k_scale, double v_scale,
                     int64_t isa);

// Memory for partial outputs, not initialised. Creating a stage enlarges it as far as that stage needs.
// Stages whose chunks never execute at the same time may share it.
class PartialMemory {
 public:
  // Loses the content.
  void reserve(int64_t num_floats) {
    if (num_floats <= num_floats_) return;
    memory_.reset();
    memory_.reset(new float[num_floats]);
    num_floats_ = num_floats;
  }

  float* data() const { return memory_.get(); }

 private:
  std::unique_ptr<float[]> memory_;
  int64_t num_floats_ = 0;
};

using Partials = std::shared_ptr<PartialMemory>;

// `query` is dense in its last dimension. The first stage writes the partials, the second merges them.
// The second has no chunks if nothing is partitioned.
std::vector<Stage> stages(const Tensor& out, const Tensor& query, const Tensor& k_cache,
                          const Tensor& v_cache, const Tensor& block_table,
                          const Tensor& query_start_loc, const Tensor& seq_lens, double scale,
                          int64_t sliding_window, double softcap,
                          const std::optional<Tensor>& sinks, double k_scale, double v_scale,
                          int64_t partition_keys, int64_t isa, const Partials& partials);

}  // namespace attention

namespace linear {

// The next linear layer: its rows, its weight, and the second weight if it is gated. Unknown if null.
struct NextLinear {
  int64_t num_rows = 0;
  const Tensor *panels = nullptr, *second_panels = nullptr;
};

// `input` [num_rows, num_inputs], dense in its last dimension; `out` [..., num_outputs], or, without a
// residual, some columns of a wider matrix. Each thread also prefetches the panels with which it begins
// the next linear layer.
Stage linear_stage(const Tensor& input, const Tensor& panels, const std::optional<Tensor>& bias,
                   const std::optional<Tensor>& second_panels,
                   const std::optional<Tensor>& second_bias, int64_t activation,
                   const std::optional<Tensor>& residual, const Tensor& out, int64_t isa,
                   const NextLinear& next = {});

// The number of inputs of a weight in panels.
int64_t num_inputs_of(const Tensor& panels);

// Copies rows of a weight in panels of any width: `out` [rows.numel(), num_inputs].
Stage lookup_stage(const Tensor& panels, int64_t num_outputs, const Tensor& rows, const Tensor& out);

}  // namespace linear

namespace fused {

// `input` is dense.
Stage norm_stage(const Tensor& input, const Tensor& weight, double epsilon, const Tensor& out,
                 int64_t isa);

// `heads` [num_tokens, num_heads, dim], dense in the last dimension; `out` may be the same.
Stage rope_stage(const Tensor& heads, const Tensor& cosines, const Tensor& sines,
                 const std::optional<Tensor>& norms, double epsilon, const Tensor& out, int64_t isa);

// Converts a dense matrix to float32, whose rows are dense.
Stage widen_stage(const Tensor& input, const Tensor& out, int64_t isa);

// Adds tensors like `out` in their order, in float32. The output is dense.
Stage sum_stage(std::vector<const void*> parts, const Tensor& out, int64_t isa);

}  // namespace fused

}  // namespace quire
