// `torch.ops.quire.decoder_layers`: decoder layers, one after the other, in one call. Between two
// operations a caller in Python would wait for its interpreter; here nobody does.
#include <ATen/core/List.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "ops.h"

namespace quire {
namespace {

using Optionals = c10::List<std::optional<Tensor>>;

// Per layer: norms before attention and MLP; products for heads, attention's output, gate, up and
// down; caches of keys and values.
constexpr int64_t kNorms = 2, kProducts = 5, kCaches = 2;
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

class Layer {
 public:
  Layer(const Layers& layers, int64_t index) : layers_(layers), index_(index) {}

  Tensor run(const Tensor& states, const Step& step) const {
    const Tensor attended = attend(norm(states, 0), step);
    const Tensor between = product(attended, kOut, states.size(-1), states);
    const Tensor active = gated(norm(between, 1));
    return product(active, kDown, states.size(-1), between);
  }

 private:
  enum { kHeads, kOut, kGate, kUp, kDown };

  const Tensor& panels(int64_t which) const { return layers_.panels[index_ * kProducts + which]; }
  std::optional<Tensor> bias(int64_t which) const {
    return layers_.biases.get(index_ * kProducts + which);
  }
  const Tensor& cache(int64_t which) const { return layers_.caches[index_ * kCaches + which]; }
  double kv_scale(int64_t which) const { return layers_.kv_scales[index_ * kCaches + which]; }

  Tensor norm(const Tensor& states, int64_t which) const {
    return fused::rms_norm(states, layers_.norms[index_ * kNorms + which],
                           layers_.epsilons[index_ * kEpsilons + which], layers_.isa);
  }

  Tensor product(const Tensor& states, int64_t which, int64_t num_outputs,
                 const std::optional<Tensor>& residual) const {
    return linear::linear(states, panels(which), num_outputs, bias(which), std::nullopt,
                          std::nullopt, layers_.activation, residual, layers_.isa);
  }

  Tensor gated(const Tensor& states) const {
    return linear::linear(states, panels(kGate), panels(kDown).size(1), bias(kGate), panels(kUp),
                          bias(kUp), layers_.activation, std::nullopt, layers_.isa);
  }

  // Queries, keys and values of all heads are one product's outputs; the keys and values go into the
  // caches, and the queries meet all that are there.
  Tensor attend(const Tensor& states, const Step& step) const {
    const int64_t num_heads = layers_.num_heads, num_kv_heads = cache(0).size(2);
    const int64_t dim = cache(0).size(3), num_all = num_heads + 2 * num_kv_heads;
    const int64_t num_turned = num_heads + num_kv_heads;
    const Tensor heads =
        product(states, kHeads, num_all * dim, std::nullopt).view({-1, num_all, dim});
    fused::turn_heads(heads.narrow(1, 0, num_turned), step.cosines, step.sines,
                      layers_.head_norms.get(index_), layers_.epsilons[index_ * kEpsilons + 2],
                      layers_.isa);
    kv_write(heads.narrow(1, num_heads, num_kv_heads), heads.narrow(1, num_turned, num_kv_heads),
             cache(0), cache(1), step.slot_mapping, kv_scale(0), kv_scale(1), layers_.isa);
    const Tensor out = at::empty({heads.size(0), num_heads, dim}, heads.options());
    paged_attention(out, heads.narrow(1, 0, num_heads), cache(0), cache(1), step.block_table,
                    step.query_start_loc, step.seq_lens, layers_.scales[index_],
                    layers_.windows[index_], 0.0, std::nullopt, std::nullopt, kv_scale(0),
                    kv_scale(1), 0, layers_.isa);
    return out.flatten(1);
  }

  const Layers& layers_;
  const int64_t index_;
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
  const Step step{cosines, sines, block_table, query_start_loc, seq_lens, slot_mapping};
  Tensor out = states;
  for (int64_t index = 0; index < layers.count(); ++index) out = Layer(layers, index).run(out, step);
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(quire, library) {
  library.def(
      "decoder_layers(Tensor states, Tensor cosines, Tensor sines, Tensor[] norms, "
      "Tensor[] panels, Tensor?[] biases, Tensor?[] head_norms, Tensor(a!)[] caches, "
      "Tensor block_table, Tensor query_start_loc, Tensor seq_lens, Tensor slot_mapping, "
      "float[] epsilons, float[] scales, int[] windows, float[] kv_scales, int num_heads, "
      "int activation, int isa) -> Tensor");
}

TORCH_LIBRARY_IMPL(quire, CPU, library) { library.impl("decoder_layers", decoder_layers); }

}  // namespace quire
