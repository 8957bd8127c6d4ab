// The stages of a decoder's layers, and of what precedes and follows them.
#pragma once

#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "decoder/buffers.h"
#include "ops.h"
#include "ranks/exchange.h"
#include "tensors.h"

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
//
// With an exchange the weights are a shard of each layer. Products that add the residual, and the
// embedding, then write into this rank's slot, and the slots of all ranks are added. The first rank alone
// adds the residual.
class StageList {
 public:
  // `hidden_states` [num_tokens, hidden_size], not empty; `next` is the linear layer after them.
  StageList(const Weights& weights, const Caches& caches, const Tensor& hidden_states,
            ranks::Exchange* exchange, const linear::NextLinear& next = {})
      : weights_(weights),
        caches_(caches),
        heads_(weights, caches),
        exchange_(exchange),
        next_(next),
        in_(hidden_states) {
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

  // Looks up rows of an embedding, of which each rank has `num_rows`.
  void add_embedding(const Tensor& panels, int64_t num_rows, const Tensor& ids, const Tensor& out) {
    if (!exchange_) return add_rows(panels, num_rows, ids, out);
    const int64_t* const all = int64s(ids, ids.numel(), "rows");
    const int64_t first = exchange_->rank() * num_rows, end = exchange_->size() * num_rows;
    std::vector<int64_t> owners;
    // Any row in place of those that other ranks have.
    own_ids_ = at::zeros_like(ids);
    for (int64_t i = 0; i < ids.numel(); ++i) {
      TORCH_CHECK_INDEX(all[i] >= 0 && all[i] < end, "there is no row ", all[i]);
      owners.push_back(all[i] / num_rows);
      const int64_t own = all[i] - first;
      if (own >= 0 && own < num_rows) own_ids_.mutable_data_ptr<int64_t>()[i] = own;
    }
    const uint32_t number = exchange_->next();
    add_rows(panels, num_rows, own_ids_, part_of(number, out));
    add_exchanged(exchange_->select_stages(number, std::move(owners), out));
  }

  // Returns the output of the last layer.
  Tensor add_layers(const Step& step) {
    for (int64_t layer = 0; layer < weights_.num_layers(); ++layer) {
      const auto num_before = static_cast<int64_t>(stages_.size());
      const LayerBuffers& results = sets_[layer % sets_.size()];
      add_attention(layer, step, results, views_[layer % views_.size()]);
      add_mlp(layer, results);
      TORCH_INTERNAL_ASSERT(num_before + kStagesPerLayer <= static_cast<int64_t>(stages_.size()));
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
  static constexpr int64_t kStagesPerLayer = 10;  // and those of exchanges

  void add(Stage stage) {
    const auto index = static_cast<int64_t>(stages_.size());
    // A separate buffer is overwritten two layers later. Its last reader is in the same layer; that of
    // a layer's output is in the next layer, at the latest the linear layer after attention. Shared
    // buffers need no such wait: no chunk is executed twice, so a completed stage is idle.
    if (is_separate_)
      stage.num_must_be_idle =
          std::max({int64_t{0}, index - kStagesPerLayer + 1, stage.num_must_be_idle});
    stages_.push_back(std::move(stage));
  }

  // This rank's part of an exchange, like `out`. The first stage of a pass that writes one waits until
  // it may: rank 0 has sent the pass without waiting for the others. Later exchanges have waited.
  Tensor part_of(uint32_t number, const Tensor& out) {
    if (!num_exchanged_)
      add({1, Stage::kQueue, [this, number](int64_t) { exchange_->wait_for_slot(number); }});
    return exchange_->slot_like(exchange_->rank(), number, out);
  }

  void add_exchanged(std::vector<Stage> stages) {
    // When this rank has arrived, others may write into the slots of the previous exchange, and then
    // this rank itself. So no thread may read or write those any more.
    stages.front().num_must_be_idle = num_exchanged_;
    for (Stage& stage : stages) add(std::move(stage));
    num_exchanged_ = static_cast<int64_t>(stages_.size());
  }

  void add_norm(int64_t layer, int64_t which, const Tensor& in, const Tensor& out) {
    add(fused::norm_stage(in, weights_.norms[layer * kNorms + which],
                          weights_.epsilons[layer * kEpsilons + which], out, weights_.isa));
  }

  // A linear layer that adds a residual, and with ranks the sum of their outputs.
  void add_summed(int64_t layer, int64_t which, const Tensor& in, const Tensor& residual,
                  const Tensor& out, const linear::NextLinear& next) {
    if (!exchange_) return add_linear(layer, which, in, residual, out, next);
    const uint32_t number = exchange_->next();
    add_linear(layer, which, in,
               exchange_->is_first() ? std::optional<Tensor>(residual) : std::nullopt,
               part_of(number, out), next);
    add_exchanged(exchange_->sum_stages(number, out));
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
                           weights_.windows[layer], 0.0, std::nullopt, k_scale, v_scale, 0,
                           weights_.isa, results.partials))
      add(std::move(stage));
    add_summed(layer, kOProj, views.flat_attended, in_, results.post_attention,
               {in_.size(0), &panels(layer, kGate), &panels(layer, kUp)});
  }

  void add_mlp(int64_t layer, const LayerBuffers& results) {
    add_norm(layer, 1, results.post_attention, results.mlp_normed);
    add(linear::linear_stage(results.mlp_normed, panels(layer, kGate), bias(layer, kGate),
                             panels(layer, kUp), bias(layer, kUp), weights_.activation, std::nullopt,
                             results.active, weights_.isa, {in_.size(0), &panels(layer, kDown)}));
    const bool is_last = layer + 1 == weights_.num_layers();
    add_summed(layer, kDown, results.active, results.post_attention, results.out,
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
  ranks::Exchange* const exchange_;  // null without other ranks
  const linear::NextLinear next_;
  bool is_separate_;
  Tensor in_;  // the input of the next layer
  Tensor own_ids_;
  int64_t num_exchanged_ = 0;  // stages up to the last exchange
  std::vector<LayerBuffers> sets_;
  std::vector<LayerViews> views_;  // of each set
  std::vector<Stage> stages_;
};

}  // namespace quire::decoder
