// A decoder's layers as objects that Python keeps: converting lists of hundreds of tensors in each call
// would take a fraction of a millisecond.
#pragma once

#include <ATen/core/List.h>
#include <torch/custom_class.h>

#include <optional>
#include <utility>
#include <vector>

#include "ops.h"

namespace quire::decoder {

// Numbers per layer. Norms: before attention and before the MLP. Linear layers: queries with keys and
// values, attention's output, gate, up and down. Caches: keys and values.
constexpr int64_t kNorms = 2, kLinears = 5, kCaches = 2;
enum LinearIndex { kQkvProj, kOProj, kGate, kUp, kDown };
// Epsilons: of both norms, and of the heads' norms.
constexpr int64_t kEpsilons = 3;

using Optionals = std::vector<std::optional<Tensor>>;

inline Optionals optionals(const c10::List<std::optional<Tensor>>& list) {
  Optionals copied;
  for (size_t at = 0; at < list.size(); ++at) copied.push_back(list.get(at));
  return copied;
}

struct Weights : torch::CustomClassHolder {
  std::vector<Tensor> norms, panels;
  Optionals biases, head_norms;
  std::vector<double> epsilons, scales;
  std::vector<int64_t> windows;
  int64_t num_heads, activation, isa;

  Weights(std::vector<Tensor> norms, std::vector<Tensor> panels,
          const c10::List<std::optional<Tensor>>& biases,
          const c10::List<std::optional<Tensor>>& head_norms, std::vector<double> epsilons,
          std::vector<double> scales, std::vector<int64_t> windows, int64_t num_heads,
          int64_t activation, int64_t isa)
      : norms(std::move(norms)),
        panels(std::move(panels)),
        biases(optionals(biases)),
        head_norms(optionals(head_norms)),
        epsilons(std::move(epsilons)),
        scales(std::move(scales)),
        windows(std::move(windows)),
        num_heads(num_heads),
        activation(activation),
        isa(isa) {
    TORCH_CHECK(num_layers() && num_heads, "there are no layers, or no heads");
    TORCH_CHECK(fits(this->norms, kNorms) && fits(this->panels, kLinears) &&
                    fits(this->biases, kLinears) && fits(this->head_norms, 1) &&
                    fits(this->epsilons, kEpsilons) && fits(this->windows, 1),
                "the lists must have the same number of layers");
  }

  int64_t num_layers() const { return static_cast<int64_t>(scales.size()); }

  // Whether a list has so many items for each layer.
  template <typename List>
  bool fits(const List& list, int64_t per_layer) const {
    return static_cast<int64_t>(list.size()) == per_layer * num_layers();
  }
};

struct Caches : torch::CustomClassHolder {
  std::vector<Tensor> tensors;
  std::vector<double> scales;

  Caches(std::vector<Tensor> tensors, std::vector<double> scales)
      : tensors(std::move(tensors)), scales(std::move(scales)) {}

  void check(const Weights& weights) const {
    TORCH_CHECK(weights.fits(tensors, kCaches) && weights.fits(scales, kCaches),
                "weights and caches must have the same number of layers");
  }
};

}  // namespace quire::decoder
