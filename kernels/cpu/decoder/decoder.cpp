// `torch.classes.quire.DecoderWeights`: all layers of a model, or its whole forward pass, in one call.
// Separate calls would wait for the Python interpreter and for all threads between two operations.
// Methods of a class and not operations: torch searches the arguments of an operation that takes an
// object, in Python, before each call.
#include "decoder/stage_list.h"
#include "threading/thread_pool.h"

#include <torch/library.h>

namespace quire::decoder {
namespace {

using WeightsPtr = c10::intrusive_ptr<Weights>;
using CachesPtr = c10::intrusive_ptr<Caches>;
// With other ranks, which make the same calls with their shards.
using ExchangePtr = std::optional<c10::intrusive_ptr<ranks::Exchange>>;

ranks::Exchange* get(const ExchangePtr& exchange) { return exchange ? exchange->get() : nullptr; }

// `hidden_states` [num_tokens, hidden_size]
Tensor run_layers(const WeightsPtr& weights, const CachesPtr& caches, const Tensor& hidden_states,
                  const Tensor& cosines, const Tensor& sines, const Tensor& block_table,
                  const Tensor& query_start_loc, const Tensor& seq_lens, const Tensor& slot_mapping,
                  const ExchangePtr& exchange) {
  caches->check(*weights);
  TORCH_CHECK(hidden_states.dim() == 2 && hidden_states.is_contiguous(),
              "hidden_states must be dense, [num_tokens, hidden_size]");
  if (!hidden_states.numel()) return hidden_states.clone();
  StageList stages(*weights, *caches, hidden_states, get(exchange));
  const Tensor out =
      stages.add_layers({cosines, sines, block_table, query_start_loc, seq_lens, slot_mapping});
  stages.run();
  return out;
}

// The logits of these tokens, float32; `ids` and `positions` [num_tokens]. `into`, if given, gets them:
// its rows are dense.
Tensor run_forward(const WeightsPtr& weights, const CachesPtr& caches, const Tensor& ids,
                   const Tensor& positions, const Tensor& logits_indices, const Tensor& embedding,
                   int64_t num_embeddings, const Tensor& cosine_table, const Tensor& sine_table,
                   const Tensor& norm, double epsilon, const Tensor& lm_head,
                   const std::optional<Tensor>& lm_head_bias, int64_t num_outputs,
                   const Tensor& block_table, const Tensor& query_start_loc,
                   const Tensor& seq_lens, const Tensor& slot_mapping, const ExchangePtr& exchange,
                   const std::optional<Tensor>& into) {
  call_pool();
  caches->check(*weights);
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
  const Tensor logits =
      into ? *into : at::empty({num_logits, num_outputs}, cosine_table.options().dtype(at::kFloat));
  TORCH_CHECK(logits.scalar_type() == at::kFloat && logits.dim() == 2 &&
                  logits.size(0) == num_logits && logits.size(1) == num_outputs,
              "logits are float32, a row per token");
  const Tensor rounded =
      cosine_table.scalar_type() == at::kFloat ? logits : rows(num_logits, num_outputs);
  if (!num_tokens && !num_logits) return logits;
  TORCH_CHECK_INDEX(num_tokens, "there are logits to compute, but no tokens");
  TORCH_CHECK(hidden_size, "the embedding has dimension 0");
  StageList stages(*weights, *caches, hidden_states, get(exchange), {num_logits, &lm_head});
  stages.add_embedding(embedding, num_embeddings, ids, hidden_states);
  stages.add_rows(cosine_table.unsqueeze(-1), cosine_table.size(0), positions, cosines);
  stages.add_rows(sine_table.unsqueeze(-1), sine_table.size(0), positions, sines);
  const Tensor out =
      stages.add_layers({cosines, sines, block_table, query_start_loc, seq_lens, slot_mapping});
  stages.add_rows(out.unsqueeze(-1), num_tokens, logits_indices, logits_states);
  stages.add_lm_head({norm, epsilon, lm_head, lm_head_bias}, logits_states, normed, rounded, logits);
  stages.run();
  return logits;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(quire, library) {
  using Optional = c10::List<std::optional<Tensor>>;
  ranks::define_exchange(library);
  library.class_<Caches>("DecoderCaches")
      .def(torch::init<std::vector<Tensor>, std::vector<double>>());
  library.class_<Weights>("DecoderWeights")
      .def(torch::init<std::vector<Tensor>, std::vector<Tensor>, Optional, Optional,
                       std::vector<double>, std::vector<double>, std::vector<int64_t>, int64_t,
                       int64_t, int64_t>())
      .def("run_layers", run_layers)
      .def("run_forward", run_forward);
}

}  // namespace quire::decoder
