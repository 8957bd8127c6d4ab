// `torch.ops.quire.decoder_layers` and `torch.ops.quire.decoder_pass`: all layers of a model, or its
// whole forward pass, in one call. Between two operations a caller in Python would wait for its
// interpreter, and threads for each other; here nobody does.
#include <ATen/core/List.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "ops.h"

namespace quire {
namespace {

using Optionals = c10::List<std::optional<Tensor>>;

// Per layer, whose caches are its own: norms before attention and MLP; products for heads,
// attention's output, gate, up and down; caches of keys and values.
constexpr int64_t kNorms = 2, kProducts = 5, kCaches = 2;
enum { kHeads, kOut, kGate, kUp, kDown };
// Epsilons of both norms and of the heads' own.
constexpr int64_t kEpsilons = 3;

struct Step {
  const Tensor &cosines, &sines, &block_table, &query_start_loc, &seq_lens, &slot_mapping;
};

struct Layers {
  at::TensorList norms, panels;
  const Optionals &biases, &head_norms;
  at::TensorList caches;
  at::ArrayRef<double> epsilons, scales;
  at::IntArrayRef windows;
  at::ArrayRef<double> kv_scales;
  int64_t num_heads, activation, isa;

  int64_t count() const { return static_cast<int64_t>(scales.size()); }

  void check() const {
    TORCH_CHECK(count() && num_heads, "there are no layers, or no heads");
    const auto fits = [&](size_t size, int64_t per_layer) {
      return static_cast<int64_t>(size) == per_layer * count();
    };
    TORCH_CHECK(fits(norms.size(), kNorms) && fits(panels.size(), kProducts) &&
                    fits(biases.size(), kProducts) && fits(head_norms.size(), 1) &&
                    fits(caches.size(), kCaches) && fits(epsilons.size(), kEpsilons) &&
                    fits(windows.size(), 1) && fits(kv_scales.size(), kCaches),
                "the lists must be of equally many layers");
  }
};

// Heads of a token, [queries, keys, values], and their dimension.
struct Heads {
  int64_t num_queries, num_keys, dim;

  Heads(const Layers& layers)
      : num_queries(layers.num_heads),
        num_keys(layers.caches[0].size(2)),
        dim(layers.caches[0].size(3)) {}

  int64_t num_turned() const { return num_queries + num_keys; }
  int64_t num_all() const { return num_queries + 2 * num_keys; }
};

// Memory for what a pass makes on its way. It stays with the thread for the next pass: many tokens
// take tens of megabytes, and a heap in which small objects have come to lie between would find that
// in a new place now and then.
class Room {
 public:
  Room(int64_t num_numbers, const at::TensorOptions& options) : options_(options) {
    thread_local Tensor kept;
    const auto bytes = num_numbers * static_cast<int64_t>(options.dtype().itemsize());
    if (!kept.defined() || kept.numel() < bytes) {
      // Twice as much each time, so that it is not moved often. What is not touched takes nothing.
      const int64_t grown = kept.defined() ? std::max(bytes, 2 * kept.numel()) : bytes;
      kept.reset();
      kept = at::empty({grown}, options.dtype(at::kByte));
    }
    memory_ = static_cast<char*>(kept.mutable_data_ptr());
  }

  Tensor place(at::IntArrayRef sizes) {
    char* const begin = memory_;
    memory_ += c10::multiply_integers(sizes) * options_.dtype().itemsize();
    return at::from_blob(begin, sizes, options_);
  }

 private:
  const at::TensorOptions options_;
  char* memory_;  // from here on it is free
};

// What a layer makes on its way.
struct Results {
  Tensor normed, heads, turned, attended, between, mlp_normed, active;
  Tensor out;  // which others ask for, so that it has memory of its own
  Partials partials = std::make_shared<std::vector<float>>();
};

// Where each result has a place of its own: two sets, as layers take turns.
std::vector<Results> apart(const Tensor& states, const Heads& heads, int64_t num_active) {
  const int64_t num_tokens = states.size(0), hidden_size = states.size(1), dim = heads.dim;
  const int64_t num_heads = heads.num_all() + heads.num_turned() + heads.num_queries;
  Room room(2 * num_tokens * (3 * hidden_size + num_heads * dim + num_active), states.options());
  std::vector<Results> sets;
  for (int set = 0; set < 2; ++set) {
    sets.push_back({room.place({num_tokens, hidden_size}),
                    room.place({num_tokens, heads.num_all(), dim}),
                    room.place({num_tokens, heads.num_turned(), dim}),
                    room.place({num_tokens, heads.num_queries, dim}),
                    room.place({num_tokens, hidden_size}),
                    room.place({num_tokens, hidden_size}),
                    room.place({num_tokens, num_active}),
                    at::empty_like(states)});
  }
  return sets;
}

// Where results take the places of others that nobody needs any more.
Results together(const Tensor& states, const Heads& heads, int64_t num_active) {
  const int64_t num_tokens = states.size(0), hidden_size = states.size(1), dim = heads.dim;
  const int64_t num_shared = std::max(heads.num_all() * dim, num_active);
  Room room(num_tokens * (2 * hidden_size + num_shared + heads.num_queries * dim),
            states.options());
  const Tensor shared = room.place({num_tokens * num_shared});
  const auto place = [&](at::IntArrayRef sizes) {
    return shared.narrow(0, 0, c10::multiply_integers(sizes)).view(sizes);
  };
  const Tensor all_heads = place({num_tokens, heads.num_all(), dim});
  const Tensor normed = room.place({num_tokens, hidden_size});
  return {normed,
          all_heads,
          all_heads.narrow(1, 0, heads.num_turned()),
          room.place({num_tokens, heads.num_queries, dim}),
          room.place({num_tokens, hidden_size}),
          normed,
          place({num_tokens, num_active}),
          at::empty_like(states)};
}

// What stands behind the layers.
struct Head {
  const Tensor& norm;
  double epsilon;
  const Tensor& panels;
  const std::optional<Tensor>& bias;
};

// The layers' stages. Few tokens' results stand apart, and layers take turns in two sets of them:
// then threads may be almost a layer apart. Those of many would take too much memory.
class Program {
 public:
  // `states` [num_tokens, hidden_size], not empty; `after` the layers comes another product
  Program(const Layers& layers, const Tensor& states, const linear::After& after = {})
      : layers_(layers), heads_(layers), after_(after), in_(states) {
    const int64_t num_active = layers.panels[kDown].size(1);
    const int64_t num_heads = heads_.num_all() + heads_.num_turned() + heads_.num_queries;
    const int64_t numbers = 4 * states.size(1) + num_active + num_heads * heads_.dim;
    is_apart_ = states.size(0) * numbers * states.element_size() <= kMostApart;
    if (is_apart_) {
      sets_ = apart(states, heads_, num_active);
    } else {
      sets_ = {together(states, heads_, num_active)};
    }
  }

  // Rows of a weight, or of any matrix [rows, numbers, 1].
  void add_rows(const Tensor& panels, int64_t num_rows, const Tensor& rows, const Tensor& out) {
    add(linear::looked_up(panels, num_rows, rows, out));
  }

  // Returns what they make of the states.
  Tensor add_layers(const Step& step) {
    for (int64_t layer = 0; layer < layers_.count(); ++layer) {
      const auto num_before = static_cast<int64_t>(stages_.size());
      const Results& results = sets_[layer % sets_.size()];
      add_attention(layer, step, results);
      add_mlp(layer, results);
      TORCH_INTERNAL_ASSERT(num_before + kStagesPerLayer == static_cast<int64_t>(stages_.size()));
      in_ = results.out;
    }
    return in_;
  }

  void add_head(const Head& head, const Tensor& states, const Tensor& normed, const Tensor& logits) {
    add(fused::normed(states, head.norm, head.epsilon, normed, layers_.isa));
    add(linear::product(normed, head.panels, head.bias, std::nullopt, std::nullopt,
                        layers_.activation, std::nullopt, logits, layers_.isa));
  }

  void run() const { run_stages(stages_, is_apart_ ? Twice::kWhereStalled : Twice::kNever); }

 private:
  // Bytes of a set. It is also about what the second-level caches of a few cores hold.
  static constexpr int64_t kMostApart = 8 << 20;
  static constexpr int64_t kStagesPerLayer = 10;

  void add(Stage stage) {
    const auto index = static_cast<int64_t>(stages_.size());
    // A place is written again two layers later. What was there is read last in the same layer, but
    // for the layer's outcome: that in the next one, up to the product of its attention. Where
    // results take each other's places, no piece is done twice, so none of a stage that is done is at work.
    stage.num_left = is_apart_ ? std::max<int64_t>(0, index - kStagesPerLayer + 1) : 0;
    stages_.push_back(std::move(stage));
  }

  void add_norm(int64_t layer, int64_t which, const Tensor& in, const Tensor& out) {
    add(fused::normed(in, layers_.norms[layer * kNorms + which],
                      layers_.epsilons[layer * kEpsilons + which], out, layers_.isa));
  }

  void add_product(int64_t layer, int64_t which, const Tensor& in,
                   const std::optional<Tensor>& residual, const Tensor& out,
                   const linear::After& after) {
    add(linear::product(in, panels(layer, which), bias(layer, which), std::nullopt, std::nullopt,
                        layers_.activation, residual, out, layers_.isa, after));
  }

  // Queries, keys and values of all heads are one product's outputs; the keys and values go into the
  // caches, and the queries meet all that are there.
  void add_attention(int64_t layer, const Step& step, const Results& results) {
    const int64_t num_queries = heads_.num_queries, num_keys = heads_.num_keys;
    add_norm(layer, 0, in_, results.normed);
    // After the attention nothing that was fetched before would be left.
    add_product(layer, kHeads, results.normed, std::nullopt, results.heads.flatten(1), {});
    add(fused::turned(results.heads.narrow(1, 0, heads_.num_turned()), step.cosines, step.sines,
                      layers_.head_norms.get(layer), layers_.epsilons[layer * kEpsilons + 2],
                      results.turned, layers_.isa));
    const Tensor &k_cache = layers_.caches[layer * kCaches],
                 &v_cache = layers_.caches[layer * kCaches + 1];
    const double k_scale = layers_.kv_scales[layer * kCaches],
                 v_scale = layers_.kv_scales[layer * kCaches + 1];
    add(writing(results.turned.narrow(1, num_queries, num_keys),
                results.heads.narrow(1, heads_.num_turned(), num_keys), k_cache, v_cache,
                step.slot_mapping, k_scale, v_scale, layers_.isa));
    for (Stage& stage :
         attention(results.attended, results.turned.narrow(1, 0, num_queries), k_cache, v_cache,
                   step.block_table, step.query_start_loc, step.seq_lens, layers_.scales[layer],
                   layers_.windows[layer], 0.0, std::nullopt, std::nullopt, k_scale, v_scale, 0,
                   layers_.isa, results.partials))
      add(std::move(stage));
    add_product(layer, kOut, results.attended.flatten(1), in_, results.between,
                {in_.size(0), &panels(layer, kGate), &panels(layer, kUp)});
  }

  void add_mlp(int64_t layer, const Results& results) {
    add_norm(layer, 1, results.between, results.mlp_normed);
    add(linear::product(results.mlp_normed, panels(layer, kGate), bias(layer, kGate),
                        panels(layer, kUp), bias(layer, kUp), layers_.activation, std::nullopt,
                        results.active, layers_.isa, {in_.size(0), &panels(layer, kDown)}));
    const bool is_last = layer + 1 == layers_.count();
    add_product(layer, kDown, results.active, results.between, results.out,
                is_last ? after_ : linear::After{in_.size(0), &panels(layer + 1, kHeads)});
  }

  const Tensor& panels(int64_t layer, int64_t which) const {
    return layers_.panels[layer * kProducts + which];
  }
  std::optional<Tensor> bias(int64_t layer, int64_t which) const {
    return layers_.biases.get(layer * kProducts + which);
  }

  const Layers& layers_;
  const Heads heads_;
  const linear::After after_;
  bool is_apart_;
  Tensor in_;  // what the next layer is given
  std::vector<Results> sets_;
  std::vector<Stage> stages_;
};

// `states` [num_tokens, hidden_size]
Tensor decoder_layers(const Tensor& states, const Tensor& cosines, const Tensor& sines,
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
  TORCH_CHECK(states.dim() == 2 && states.is_contiguous(),
              "states must be dense, [num_tokens, hidden_size]");
  if (!states.numel()) return states.clone();
  Program program(layers, states);
  const Tensor out =
      program.add_layers({cosines, sines, block_table, query_start_loc, seq_lens, slot_mapping});
  program.run();
  return out;
}

// `ids` and `positions` [num_tokens]; of the tokens `kept` the logits.
Tensor decoder_pass(const Tensor& ids, const Tensor& positions, const Tensor& kept,
                    const Tensor& embedding, int64_t num_embeddings, const Tensor& cosine_table,
                    const Tensor& sine_table, const Tensor& norm, double epsilon,
                    const Tensor& head, const std::optional<Tensor>& head_bias,
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
  const auto room = [&](int64_t num_rows, int64_t num_numbers) {
    return at::empty({num_rows, num_numbers}, embedding.options());
  };
  const int64_t num_tokens = ids.numel(), num_kept = kept.numel();
  const Tensor states = room(num_tokens, embedding.size(1));
  const Tensor cosines = room(num_tokens, cosine_table.size(1)),
               sines = room(num_tokens, sine_table.size(1));
  const Tensor kept_states = room(num_kept, embedding.size(1)), normed = at::empty_like(kept_states);
  const Tensor logits = room(num_kept, num_outputs);
  if (!num_tokens && !num_kept) return logits;
  TORCH_CHECK_INDEX(num_tokens, "of no token there are no logits");
  TORCH_CHECK(states.size(1), "the embedding has no numbers");
  Program program(layers, states, {num_kept, &head});
  program.add_rows(embedding, num_embeddings, ids, states);
  program.add_rows(cosine_table.unsqueeze(-1), cosine_table.size(0), positions, cosines);
  program.add_rows(sine_table.unsqueeze(-1), sine_table.size(0), positions, sines);
  const Tensor out =
      program.add_layers({cosines, sines, block_table, query_start_loc, seq_lens, slot_mapping});
  program.add_rows(out.unsqueeze(-1), num_tokens, kept, kept_states);
  program.add_head({norm, epsilon, head, head_bias}, kept_states, normed, logits);
  program.run();
  return logits;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(quire, library) {
  library.def(
      "decoder_layers(Tensor states, Tensor cosines, Tensor sines, Tensor[] norms, "
      "Tensor[] panels, Tensor?[] biases, Tensor?[] head_norms, Tensor(a!)[] caches, "
      "Tensor block_table, Tensor query_start_loc, Tensor seq_lens, Tensor slot_mapping, "
      "float[] epsilons, float[] scales, int[] windows, float[] kv_scales, int num_heads, "
      "int activation, int isa) -> Tensor");
  library.def(
      "decoder_pass(Tensor ids, Tensor positions, Tensor kept, Tensor embedding, "
      "int num_embeddings, Tensor cosine_table, Tensor sine_table, Tensor norm, float epsilon, "
      "Tensor head, Tensor? head_bias, int num_outputs, Tensor[] norms, Tensor[] panels, "
      "Tensor?[] biases, Tensor?[] head_norms, Tensor(a!)[] caches, Tensor block_table, "
      "Tensor query_start_loc, Tensor seq_lens, Tensor slot_mapping, float[] epsilons, "
      "float[] scales, int[] windows, float[] kv_scales, int num_heads, int activation, "
      "int isa) -> Tensor");
}

TORCH_LIBRARY_IMPL(quire, CPU, library) {
  library.impl("decoder_layers", decoder_layers);
  library.impl("decoder_pass", decoder_pass);
}

}  // namespace quire
