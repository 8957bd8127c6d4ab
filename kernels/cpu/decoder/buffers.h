// What a step of a decoder's layers has of its own: its inputs, and the memory for intermediate results.
#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "decoder/layers.h"
#include "ops.h"

namespace quire::decoder {

struct Step {
  const Tensor &cosines, &sines, &block_table, &query_start_loc, &seq_lens, &slot_mapping;
};

// A token's heads [queries, keys, values] and their dimension.
struct Heads {
  int64_t num_queries, num_keys, dim;

  Heads(const Weights& weights, const Caches& caches)
      : num_queries(weights.num_heads),
        num_keys(caches.tensors[0].size(2)),
        dim(caches.tensors[0].size(3)) {}

  int64_t num_rotated() const { return num_queries + num_keys; }
  int64_t num_all() const { return num_queries + 2 * num_keys; }
};

// Memory for intermediate results, kept by the thread for its next pass: many tokens take tens of
// megabytes, which a fragmented heap would have to place elsewhere now and then.
class Arena {
 public:
  Arena(int64_t num_numbers, const at::TensorOptions& options) : options_(options) {
    thread_local Tensor kept;
    const auto bytes = num_numbers * static_cast<int64_t>(options.dtype().itemsize());
    if (!kept.defined() || kept.numel() < bytes) {
      // Doubles, so that it rarely moves. Pages that are not touched take no memory.
      const int64_t grown = kept.defined() ? std::max(bytes, 2 * kept.numel()) : bytes;
      kept.reset();
      kept = at::empty({grown}, options.dtype(at::kByte));
    }
    memory_ = static_cast<char*>(kept.mutable_data_ptr());
  }

  Tensor allocate(at::IntArrayRef sizes) {
    char* const begin = memory_;
    memory_ += c10::multiply_integers(sizes) * options_.dtype().itemsize();
    return at::from_blob(begin, sizes, options_);
  }

 private:
  const at::TensorOptions options_;
  char* memory_;  // the first free byte
};

// A layer's intermediate results and its output.
struct LayerBuffers {
  Tensor normed, heads, rotated, attended, post_attention, mlp_normed, active;
  Tensor out;  // not in the arena: the caller may keep it
  attention::Partials partials;
};

// Memory for the partials of a set of buffers, kept by the thread like that of the arena.
inline const attention::Partials& partials_of_set(int set) {
  thread_local const attention::Partials kept[] = {std::make_shared<attention::PartialMemory>(),
                                                   std::make_shared<attention::PartialMemory>()};
  return kept[set];
}

// Views of such results, which all layers share: making them for each layer would take longer than
// some of the operations on them.
struct LayerViews {
  LayerViews(const LayerBuffers& results, const Heads& heads)
      : flat_heads(results.heads.flatten(1)),
        unrotated(results.heads.narrow(1, 0, heads.num_rotated())),
        values(results.heads.narrow(1, heads.num_rotated(), heads.num_keys)),
        queries(results.rotated.narrow(1, 0, heads.num_queries)),
        keys(results.rotated.narrow(1, heads.num_queries, heads.num_keys)),
        flat_attended(results.attended.flatten(1)) {}

  Tensor flat_heads, unrotated, values, queries, keys, flat_attended;
};

// Buffers without shared memory: two sets, which layers use alternately.
inline std::vector<LayerBuffers> separate_buffers(const Tensor& hidden_states, const Heads& heads,
                                                  int64_t num_active) {
  const int64_t num_tokens = hidden_states.size(0), hidden_size = hidden_states.size(1);
  const int64_t dim = heads.dim, num_heads = heads.num_all() + heads.num_rotated() + heads.num_queries;
  Arena arena(2 * num_tokens * (3 * hidden_size + num_heads * dim + num_active),
              hidden_states.options());
  std::vector<LayerBuffers> sets;
  for (int set = 0; set < 2; ++set) {
    sets.push_back({arena.allocate({num_tokens, hidden_size}),
                    arena.allocate({num_tokens, heads.num_all(), dim}),
                    arena.allocate({num_tokens, heads.num_rotated(), dim}),
                    arena.allocate({num_tokens, heads.num_queries, dim}),
                    arena.allocate({num_tokens, hidden_size}),
                    arena.allocate({num_tokens, hidden_size}),
                    arena.allocate({num_tokens, num_active}),
                    at::empty_like(hidden_states),
                    partials_of_set(set)});
  }
  return sets;
}

// Buffers that reuse the memory of results that are no longer needed.
inline LayerBuffers shared_buffers(const Tensor& hidden_states, const Heads& heads,
                                   int64_t num_active) {
  const int64_t num_tokens = hidden_states.size(0), hidden_size = hidden_states.size(1);
  const int64_t dim = heads.dim, num_shared = std::max(heads.num_all() * dim, num_active);
  Arena arena(num_tokens * (2 * hidden_size + num_shared + heads.num_queries * dim),
              hidden_states.options());
  const Tensor shared = arena.allocate({num_tokens * num_shared});
  const auto view = [&](at::IntArrayRef sizes) {
    return shared.narrow(0, 0, c10::multiply_integers(sizes)).view(sizes);
  };
  const Tensor all_heads = view({num_tokens, heads.num_all(), dim});
  const Tensor normed = arena.allocate({num_tokens, hidden_size});
  return {normed,
          all_heads,
          all_heads.narrow(1, 0, heads.num_rotated()),
          arena.allocate({num_tokens, heads.num_queries, dim}),
          arena.allocate({num_tokens, hidden_size}),
          normed,
          view({num_tokens, num_active}),
          at::empty_like(hidden_states),
          partials_of_set(0)};
}

}  // namespace quire::decoder
