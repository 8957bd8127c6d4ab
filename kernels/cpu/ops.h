// The operations on tensors as stages of work, for those that have several of them done in one go.
//
// Tensors have to be there until all stages are done. Outputs are dense. A piece writes each number
// of theirs once, and it follows from what the stage only reads, unless they are the same memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <vector>

#include "stages.h"

namespace quire {

using at::Tensor;

// Slots differ from each other. Keys and values [num_tokens, num_kv_heads, head_dim], dense in the
// last dimension.
Stage writing(const Tensor& keys, const Tensor& values, const Tensor& k_cache,
              const Tensor& v_cache, const Tensor& slot_mapping, double k_scale, double v_scale,
              int64_t isa);

// Room for parts of outputs. It grows, while stages are made, to what the largest of them needs;
// those may share it whose pieces are never at work together.
using Partials = std::shared_ptr<std::vector<float>>;

// `query` is dense in its last dimension. The second stage has no pieces if nothing is partitioned.
// The first writes the partials, the second reads them.
std::vector<Stage> attention(const Tensor& out, const Tensor& query, const Tensor& k_cache,
                             const Tensor& v_cache, const Tensor& block_table,
                             const Tensor& query_start_loc, const Tensor& seq_lens, double scale,
                             int64_t sliding_window, double softcap,
                             const std::optional<Tensor>& sinks,
                             const std::optional<Tensor>& alibi_slopes, double k_scale,
                             double v_scale, int64_t partition_keys, int64_t isa,
                             const Partials& partials);

namespace linear {

// What the threads meet after a product: so many rows and a weight, or two together. Null: not known.
struct After {
  int64_t num_rows = 0;
  const Tensor *panels = nullptr, *second_panels = nullptr;
};

// `input` [num_rows, num_inputs], dense in its last dimension; `out` [..., num_outputs]. Of what comes
// after it, the panels that threads begin with are fetched into their caches.
Stage product(const Tensor& input, const Tensor& panels, const std::optional<Tensor>& bias,
              const std::optional<Tensor>& second_panels, const std::optional<Tensor>& second_bias,
              int64_t activation, const std::optional<Tensor>& residual, const Tensor& out,
              int64_t isa, const After& after = {});

// Rows of a weight in panels of any width: `out` [rows.numel(), num_inputs].
Stage looked_up(const Tensor& panels, int64_t num_outputs, const Tensor& rows, const Tensor& out);

}  // namespace linear

namespace fused {

// `input` is dense.
Stage normed(const Tensor& input, const Tensor& weight, double epsilon, const Tensor& out,
             int64_t isa);

// `heads` [num_tokens, num_heads, dim], dense in the last dimension; `out` may be the same.
Stage turned(const Tensor& heads, const Tensor& cosines, const Tensor& sines,
             const std::optional<Tensor>& norms, double epsilon, const Tensor& out, int64_t isa);

}  // namespace fused

}  // namespace quire
