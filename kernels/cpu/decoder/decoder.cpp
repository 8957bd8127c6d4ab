// `torch.ops.quire.decoder_layers` and `decoder_forward`: all layers of a model, or its whole forward
// pass, in one call. Separate calls would wait for the Python interpreter and for all
// threads between two operations.
#include "decoder/stage_list.h"

#include <torch/library.h>

namespace quire::decoder {
namespace {

// `hidden_states` [num_tokens, hidden_size]
Tensor decoder_layers(const Tensor& hidden_states, const Tensor& cosines, const Tensor& sines,
                      at::TensorList norms, at::TensorList panels, const Optionals& biases,
                      const Optionals& head_norms, at::TensorList caches,
                      const Tensor& block_table, const Tensor& query_start_loc,
                      const Tensor& seq_lens, const Tensor& slot_mapping,
                      at::ArrayRef<double> epsilons, at::ArrayRef<double> scales,
                      at::IntArrayRef windows, at::ArrayRef<double> kv_scales, int64_t num_heads,
                      int64_t activation, int64_t isa) {
  const Layers layers{norms,    panels, biases,  head_norms, caches,     epsilons,
                      scales,   windows, kv_scales, num_heads, activation, isa};
  layers.check();
  TORCH_CHECK(hidden_states.dim() == 2 && hidden_states.is_contiguous(),
              "hidden_states must be dense, [num_tokens, hidden_size]");
  if (!hidden_states.numel()) return hidden_states.clone();
  StageList stages(layers, hidden_states);
  const Tensor out =
      stages.add_layers({cosines, sines, block_table, query_start_loc, seq_lens, slot_mapping});
  stages.run();
  return out;
}

// The logits of these tokens; `ids` and `positions` [num_tokens].
Tensor decoder_forward(const Tensor& ids, const Tensor& positions, const Tensor& logits_indices,
                       const Tensor& embedding, int64_t num_embeddings, const Tensor& cosine_table,
                       const Tensor& sine_table, const Tensor& norm, double epsilon,
                       const Tensor& lm_head, const std::optional<Tensor>& lm_head_bias,
                       int64_t num_outputs, at::TensorList norms, at::TensorList panels,
                       const Optionals& biases, const Optionals& head_norms, at::TensorList caches,
                       const Tensor& block_table, const Tensor& query_start_loc,
                       const Tensor& seq_lens, const Tensor& slot_mapping,
                       at::ArrayRef<double> epsilons, at::ArrayRef<double> scales,
                       at::IntArrayRef windows, at::ArrayRef<double> kv_scales, int64_t num_heads,
                       int64_t activation, int64_t isa) {
  const Layers layers{norms,    panels, biases,  head_norms, caches,     epsilons,
                      scales,   windows, kv_scales, num_heads, activation, isa};
  layers.check();
  const auto rows = [&](int64_t num_rows, int64_t num_numbers) {
    return at::empty({num_rows, num_numbers}, cosine_table.options());
  };
  const int64_t num_tokens = ids.numel(), num_logits = logits_indices.numel();
  const int64_t hidden_size = linear::num_inputs_of(embedding);
  const Tensor hidden_states = rows(num_tokens, hidden_size);
  const Tensor cosines = rows(num_tokens, cosine_table.size(1)),
               sines = rows(num_tokens, sine_table.size(1));
  const Tensor logits_states = rows(num_logits, hidden_size);
  const Tensor normed = at::empty_like(logits_states);
  const Tensor logits = rows(num_logits, num_outputs);
  if (!num_tokens && !num_logits) return logits;
  TORCH_CHECK_INDEX(num_tokens, "there are logits to compute, but no tokens");
  TORCH_CHECK(hidden_size, "the embedding has dimension 0");
  StageList stages(layers, hidden_states, {num_logits, &lm_head});
  stages.add_rows(embedding, num_embeddings, ids, hidden_states);
  stages.add_rows(cosine_table.unsqueeze(-1), cosine_table.size(0), positions, cosines);
  stages.add_rows(sine_table.unsqueeze(-1), sine_table.size(0), positions, sines);
  const Tensor out =
      stages.add_layers({cosines, sines, block_table, query_start_loc, seq_lens, slot_mapping});
  stages.add_rows(out.unsqueeze(-1), num_tokens, logits_indices, logits_states);
  stages.add_lm_head({norm, epsilon, lm_head, lm_head_bias}, logits_states, normed, logits);
  stages.run();
  return logits;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(quire, library) {
  library.def(
      "decoder_layers(Tensor hidden_states, Tensor cosines, Tensor sines, Tensor[] norms, "
      "Tensor[] panels, Tensor?[] biases, Tensor?[] head_norms, Tensor(a!)[] caches, "
      "Tensor block_table, Tensor query_start_loc, Tensor seq_lens, Tensor slot_mapping, "
      "float[] epsilons, float[] scales, int[] windows, float[] kv_scales, int num_heads, "
      "int activation, int isa) -> Tensor");
  library.def(
      "decoder_forward(Tensor ids, Tensor positions, Tensor logits_indices, Tensor embedding, "
      "int num_embeddings, Tensor cosine_table, Tensor sine_table, Tensor norm, float epsilon, "
      "Tensor lm_head, Tensor? lm_head_bias, int num_outputs, Tensor[] norms, Tensor[] panels, "
      "Tensor?[] biases, Tensor?[] head_norms, Tensor(a!)[] caches, Tensor block_table, "
      "Tensor query_start_loc, Tensor seq_lens, Tensor slot_mapping, float[] epsilons, "
      "float[] scales, int[] windows, float[] kv_scales, int num_heads, int activation, "
      "int isa) -> Tensor");
}

TORCH_LIBRARY_IMPL(quire, CPU, library) {
  library.impl("decoder_layers", decoder_layers);
  library.impl("decoder_forward", decoder_forward);
}

}  // namespace quire::decoder
