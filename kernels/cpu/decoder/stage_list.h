// The stages of a decoder's layers, and of what precedes and follows them.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "decoder/buffers.h"
#include "ops.h"

namespace quire::decoder {

// The language-model head and the norm before it, after the layers.
struct LmHead {
  const Tensor& norm;
  double epsilon;
  const Tensor& panels;
  const std::optional<Tensor>& bias;
};

// The layers' stages. For few tokens, layers alternate between two sets of separate buffers, so that
// threads may be almost a layer apart. For many tokens, those would take too much memory.
class StageList {
 public:
  // `hidden_states` [num_tokens, hidden_size], not empty; `next` is the linear layer after them.
  StageList(const Weights& weights, const Caches& caches, const Tensor& hidden_states,
            const linear::NextLinear& next = {})
      : weights_(weights), caches_(caches), heads_(weights, caches), next_(next), in_(hidden_states) {
    const int64_t num_active = linear::num_inputs_of(weights.panels[kDown]);
    const int64_t num_heads = heads_.num_all() + heads_.num_rotated() + heads_.num_queries;
    const int64_t numbers = 4 * hidden_states.size(1) + num_active + num_heads * heads_.dim;
    const int64_t bytes = hidden_states.size(0) * numbers * hidden_states.element_size();
    is_separate_ = bytes <= kMostSeparateBytes;
    if (is_separate_) {
      sets_ = separate_buffers(hidden_states, heads_, num_active);
    } else {
      sets_ = {shared_buffers(hidden_states, heads_, num_active)};
    }
    for (const LayerBuffers& results : sets_) views_.emplace_back(results, heads_);
  }

  // Looks up rows of a weight, or of any matrix [rows, numbers, 1].
  void add_rows(const Tensor& panels, int64_t num_rows, const Tensor& rows, const Tensor& out) {
    add(linear::lookup_stage(panels, num_rows, rows, out));
  }

  // Returns the output of the last layer.
  Tensor add_layers(const Step& step) {
    for (int64_t layer = 0; layer < weights_.num_layers(); ++layer) {
      const auto num_before = static_cast<int64_t>(stages_.size());
      const LayerBuffers& results = sets_[layer % sets_.size()];
      add_attention(layer, step, results, views_[layer % views_.size()]);
      add_mlp(layer, results);
      TORCH_INTERNAL_ASSERT(num_before + kStagesPerLayer == static_cast<int64_t>(stages_.size()));
      in_ = results.out;
    }
    return in_;
  }

  // `rounded` are the logits in the model's dtype, `logits` in float32: the same tensor if that is it.
  void add_lm_head(const LmHead& head, const Tensor& hidden_states, const Tensor& normed,
                   const Tensor& rounded, const Tensor& logits) {
    add(fused::norm_stage(hidden_states, head.norm, head.epsilon, normed, weights_.isa));
    add(linear::linear_stage(normed, head.panels, head.bias, std::nullopt, std::nullopt,
                             weights_.activation, std::nullopt, rounded, weights_.isa));
    if (!rounded.is_same(logits)) add(fused::widen_stage(rounded, logits, weights_.isa));
  }

  void run() const { run_stages(stages_, is_separate_ ? Backup::kStragglers : Backup::kNever); }

 private:
  // Bytes of a set: about the size of a few cores' second-level caches.
  static constexpr int64_t kMostSeparateBytes = 8 << 20;
  static constexpr int64_t kStagesPerLayer = 10;

  void add(Stage stage) {
    const auto index = static_cast<int64_t>(stages_.size());
    // A separate buffer is overwritten two layers later. Its last reader is in the same layer; that of
    // a layer's output is in the next layer, at the latest the linear layer after attention. Shared
    // buffers need no such wait: no chunk is executed twice, so a completed stage is idle.
    stage.num_must_be_idle = is_separate_ ? std::max<int64_t>(0, index - kStagesPerLayer + 1) : 0;
    stages_.push_back(std::move(stage));
  }

  void add_norm(int64_t layer, int64_t which, const Tensor& in, const Tensor& out) {
    add(fused::norm_stage(in, weights_.norms[layer * kNorms + which],
                          weights_.epsilons[layer * kEpsilons + which], out, weights_.isa));
  }

  void add_linear(int64_t layer, int64_t which, const Tensor& in,
                  const std::optional<Tensor>& residual, const Tensor& out,
                  const linear::NextLinear& next) {
    add(linear::linear_stage(in, panels(layer, which), bias(layer, which), std::nullopt, std::nullopt,
                             weights_.activation, residual, out, weights_.isa, next));
  }

  // One linear layer gives queries, keys and values of all heads; keys and values are written into
  // the caches before the queries attend to them.
  void add_attention(int64_t layer, const Step& step, const LayerBuffers& results,
                     const LayerViews& views) {
    add_norm(layer, 0, in_, results.normed);
    // Without prefetching: attention would evict what was prefetched.
    add_linear(layer, kQkvProj, results.normed, std::nullopt, views.flat_heads, {});
    add(fused::rope_stage(views.unrotated, step.cosines, step.sines, weights_.head_norms[layer],
                          weights_.epsilons[layer * kEpsilons + 2], results.rotated, weights_.isa));
    const Tensor &k_cache = caches_.tensors[layer * kCaches],
                 &v_cache = caches_.tensors[layer * kCaches + 1];
    const double k_scale = caches_.scales[layer * kCaches],
                 v_scale = caches_.scales[layer * kCaches + 1];
    add(attention::kv_write_stage(views.keys, views.values, k_cache, v_cache, step.slot_mapping,
                                  k_scale, v_scale, weights_.isa));
    for (Stage& stage :
         attention::stages(results.attended, views.queries, k_cache, v_cache, step.block_table,
                           step.query_start_loc, step.seq_lens, weights_.scales[layer],
                           weights_.windows[layer], 0.0, std::nullopt, std::nullopt, k_scale, v_scale, 0,
                           weights_.isa, results.partials))
      add(std::move(stage));
    add_linear(layer, kOProj, views.flat_attended, in_, results.post_attention,
               {in_.size(0), &panels(layer, kGate), &panels(layer, kUp)});
  }

  void add_mlp(int64_t layer, const LayerBuffers& results) {
    add_norm(layer, 1, results.post_attention, results.mlp_normed);
    add(linear::linear_stage(results.mlp_normed, panels(layer, kGate), bias(layer, kGate),
                             panels(layer, kUp), bias(layer, kUp), weights_.activation, std::nullopt,
                             results.active, weights_.isa, {in_.size(0), &panels(layer, kDown)}));
    const bool is_last = layer + 1 == weights_.num_layers();
    add_linear(layer, kDown, results.active, results.post_attention, results.out,
               is_last ? next_ : linear::NextLinear{in_.size(0), &panels(layer + 1, kQkvProj)});
  }

  const Tensor& panels(int64_t layer, int64_t which) const {
    return weights_.panels[layer * kLinears + which];
  }
  const std::optional<Tensor>& bias(int64_t layer, int64_t which) const {
    return weights_.biases[layer * kLinears + which];
  }

  const Weights& weights_;
  const Caches& caches_;
  const Heads heads_;
  const linear::NextLinear next_;
  bool is_separate_;
  Tensor in_;  // the input of the next layer
  std::vector<LayerBuffers> sets_;
  std::vector<LayerViews> views_;  // of each set
  std::vector<Stage> stages_;
};

}  // namespace quire::decoder
