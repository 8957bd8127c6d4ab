// Packs weights of 16 and 32 bits into panels, and joins panels.
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "linear/weight_tensors.h"
#include "tensors.h"

namespace quire::linear {
namespace {

// What stays together in a panel: a number, or the two numbers of a pair. Rows [num_rows, num_units],
// fewer than `width` in the last panel.
template <typename Unit>
void pack_panel(const Unit* rows, int64_t row_stride, int64_t num_rows, int64_t num_units, int64_t width,
                Unit* panel) {
  // A cache line of each row at a time: what is written stays in the first-level cache.
  constexpr int64_t kBlock = 64 / sizeof(Unit);
  for (int64_t begin = 0; begin < num_units; begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, num_units);
    for (int64_t row = 0; row < num_rows; ++row)
      for (int64_t k = begin; k < end; ++k) panel[k * width + row] = rows[row * row_stride + k];
    for (int64_t k = begin; k < end; ++k)
      std::fill(panel + k * width + num_rows, panel + (k + 1) * width, Unit{});
  }
}

template <typename Unit>
Stage pack_stage(const Tensor& weight, const Tensor& panels) {
  const auto* const rows = static_cast<const Unit*>(weight.const_data_ptr());
  auto* const packed = static_cast<Unit*>(panels.mutable_data_ptr());
  const int64_t num_outputs = weight.size(0), num_units = panels.size(1), width = panels.size(2);
  return range_stage(panels.size(0), 1, [=](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) {
      const int64_t first = panel * width, num_rows = std::min(width, num_outputs - first);
      pack_panel(rows + first * num_units, num_units, num_rows, num_units, width,
                 packed + panel * num_units * width);
    }
  });
}

// `weight` [num_outputs, num_inputs]; pairs for an even number of inputs.
Tensor pack_panels(const Tensor& weight, bool pairs, int64_t isa) {
  TORCH_CHECK(weight.dim() == 2 && is_wide(weight), "a weight is [num_outputs, num_inputs], of floats");
  TORCH_CHECK(!pairs || (weight.scalar_type() == at::kBFloat16 && weight.size(1) % 2 == 0),
              "pairs are of bfloat16, and of an even number of inputs");
  const Tensor rows = weight.contiguous();
  const int64_t width = functions_of(static_cast<Isa>(isa)).panel_width;
  std::vector<int64_t> shape{ceil_div(rows.size(0), width), rows.size(1) / (pairs ? 2 : 1), width};
  if (pairs) shape.push_back(2);
  const Tensor panels = at::empty(shape, rows.options());
  const bool has_large_units = pairs || rows.element_size() == sizeof(uint32_t);
  run(has_large_units ? pack_stage<uint32_t>(rows, panels) : pack_stage<uint16_t>(rows, panels));
  return panels;
}

// The panels of weights that are alike, the last panel of each but the last one full.
Tensor join_panels(at::TensorList all) {
  const Weight first = weight_of(all[0]);
  for (const Tensor& panels : all)
    TORCH_CHECK(are_alike(first, weight_of(panels)), "weights must be alike");
  if (first.layout != Layout::kQuantized) return at::cat(all);
  QuantizedHeader header;
  std::memcpy(&header, all[0].const_data_ptr(), sizeof header);
  std::vector<Tensor> parts{all[0]};
  for (const Tensor& panels : all.slice(1)) {
    QuantizedHeader other;
    std::memcpy(&other, panels.const_data_ptr(), sizeof other);
    header.num_outputs += other.num_outputs;
    parts.push_back(panels.slice(0, weight_of(panels).offset));
  }
  const Tensor joined = at::cat(parts);
  std::memcpy(joined.mutable_data_ptr(), &header, sizeof header);
  return joined;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(quire, library) {
  library.def("pack_panels(Tensor weight, bool pairs, int isa) -> Tensor");
  library.def("join_panels(Tensor[] all) -> Tensor");
}

TORCH_LIBRARY_IMPL(quire, CPU, library) {
  library.impl("pack_panels", pack_panels);
  library.impl("join_panels", join_panels);
}

}  // namespace quire::linear
