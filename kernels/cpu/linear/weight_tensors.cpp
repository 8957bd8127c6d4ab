// The layouts of weights in panels, and rows of weights.
#include "linear/weight_tensors.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>

#include "tensors.h"

namespace quire::linear {
namespace {

// Vectors of weights are loaded by instructions that require it; torch allocates memory so.
constexpr uintptr_t kPanelAlignment = 64;

int64_t panel_width(int64_t isa) { return functions_of(static_cast<Isa>(isa)).panel_width; }

// Whether panels of bfloat16 have pairs of inputs.
bool pairs_bfloat16(int64_t isa) { return functions_of(static_cast<Isa>(isa)).paired; }

Weight quantized_weight_of(const Tensor& panels) {
  const auto* bytes = static_cast<const char*>(panels.const_data_ptr());
  QuantizedHeader header{};
  const int64_t size = panels.numel(), header_bytes = sizeof header;
  if (size >= header_bytes) std::memcpy(&header, bytes, sizeof header);
  const bool plausible = header.magic == QuantizedHeader::kMagic && header.num_outputs >= 0 &&
                         header.num_inputs >= 0 && header.panel_width > 0 && header.group_size > 0 &&
                         header.num_inputs % header.group_size == 0 &&
                         (header.bits == 4 || header.bits == 8) &&
                         (header.scale_bytes == 2 || header.scale_bytes == 4);
  TORCH_CHECK(plausible, "the bytes are not a quantised weight");
  Quantization quantization{header.bits, header.scale_bytes, header.group_size,
                            header.num_inputs / header.group_size, header.int8_activations != 0};
  if (header.has_permutation)
    quantization.permutation = reinterpret_cast<const int32_t*>(bytes + header_bytes);
  const Weight weight{Layout::kQuantized,
                      Format::kFloat32,
                      header.num_inputs,
                      ceil_div(header.num_outputs, header.panel_width),
                      header.panel_width,
                      quantization.panel_bytes(header.panel_width),
                      header_bytes + header.permutation_bytes(),
                      quantization};
  TORCH_CHECK(size == weight.offset + weight.num_panels * weight.panel_bytes,
              "a quantised weight of the wrong size");
  return weight;
}

// Copies rows, of which a panel has `kAdjacent` numbers after one another.
template <typename Number, int64_t kAdjacent>
Stage copy_rows_stage(const Weight& weight, const Tensor& panels, const int64_t* rows,
                      const Tensor& out) {
  const auto* from = static_cast<const Number*>(panels.const_data_ptr());
  auto* to = static_cast<Number*>(out.mutable_data_ptr());
  const int64_t num_inputs = weight.num_inputs, width = weight.panel_width;
  constexpr int64_t kRowsPerChunk = 4;
  return range_stage(out.size(0), kRowsPerChunk, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Number* column = from + rows[i] / width * num_inputs * width + rows[i] % width * kAdjacent;
      Number* const row = to + i * num_inputs;
      for (int64_t k = 0; k < num_inputs; k += kAdjacent, column += width * kAdjacent)
        std::copy_n(column, kAdjacent, row + k);
    }
  });
}

}  // namespace

Weight weight_of(const Tensor& panels) {
  TORCH_CHECK(panels.is_contiguous() && panels.is_cpu(), "panels must be dense");
  if (panels.scalar_type() == at::kByte) return quantized_weight_of(panels);
  const bool is_paired = panels.dim() == 4;
  TORCH_CHECK(is_wide(panels) && (panels.dim() == 3 || (is_paired && panels.size(3) == 2 &&
                                                        panels.scalar_type() == at::kBFloat16)),
              "panels must be [panels, num_inputs, width], or pairs [panels, num_inputs / 2, width, 2]");
  const int64_t num_inputs = panels.size(1) * (is_paired ? 2 : 1), width = panels.size(2);
  return {is_paired ? Layout::kPaired : Layout::kPlain,
          format_of(panels),
          num_inputs,
          panels.size(0),
          width,
          num_inputs * width * static_cast<int64_t>(panels.element_size()),
          0,
          {}};
}

bool are_alike(const Weight& one, const Weight& other) {
  const Quantization &first = one.quantization, &second = other.quantization;
  if (one.layout != other.layout || one.format != other.format ||
      one.num_inputs != other.num_inputs || one.panel_bytes != other.panel_bytes ||
      first.bits != second.bits || first.scale_bytes != second.scale_bytes ||
      first.group_size != second.group_size ||
      first.int8_activations != second.int8_activations ||
      !first.permutation != !second.permutation)
    return false;
  return !first.permutation || std::equal(first.permutation, first.permutation + one.num_inputs,
                                          second.permutation);
}

Panels panels_of(const Weight& weight, const Tensor& panels, const Tensor* second_panels) {
  const auto at = [&](const Tensor& all) {
    const char* const panels = static_cast<const char*>(all.const_data_ptr()) + weight.offset;
    TORCH_CHECK(reinterpret_cast<uintptr_t>(panels) % kPanelAlignment == 0,
                "panels must be aligned to a cache line");
    return panels;
  };
  return {at(panels), second_panels ? at(*second_panels) : nullptr, weight.panel_bytes};
}

int64_t num_inputs_of(const Tensor& panels) { return weight_of(panels).num_inputs; }

Stage lookup_stage(const Tensor& panels, int64_t num_outputs, const Tensor& rows, const Tensor& out) {
  const Weight weight = weight_of(panels);
  TORCH_CHECK(num_outputs <= weight.num_panels * weight.panel_width, "panels must have all rows");
  TORCH_CHECK(out.dim() == 2 && out.size(1) == weight.num_inputs && out.is_contiguous() &&
                  is_wide(out),
              "the output must be [num_rows, num_inputs], of floats");
  const int64_t* numbers = int64s(rows, out.size(0), "rows");
  for (int64_t i = 0; i < out.size(0); ++i) {
    TORCH_CHECK_INDEX(numbers[i] >= 0 && numbers[i] < num_outputs, "there is no row ", numbers[i]);
  }
  if (weight.layout == Layout::kQuantized) return dequantize_stage(weight, panels, numbers, out);
  TORCH_CHECK(out.scalar_type() == panels.scalar_type(), "the output must be of the panels' dtype");
  if (weight.layout == Layout::kPaired)
    return copy_rows_stage<uint16_t, 2>(weight, panels, numbers, out);
  return panels.element_size() == sizeof(uint32_t)
             ? copy_rows_stage<uint32_t, 1>(weight, panels, numbers, out)
             : copy_rows_stage<uint16_t, 1>(weight, panels, numbers, out);
}

namespace {

Tensor panel_rows(const Tensor& panels, int64_t num_outputs, const Tensor& rows, at::ScalarType dtype) {
  Tensor out = at::empty({rows.numel(), weight_of(panels).num_inputs}, panels.options().dtype(dtype));
  run(lookup_stage(panels, num_outputs, rows, out));
  return out;
}

bool are_panels_alike(const Tensor& one, const Tensor& other) {
  return are_alike(weight_of(one), weight_of(other));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(quire, library) {
  library.def("panel_width(int isa) -> int", panel_width);
  library.def("pairs_bfloat16(int isa) -> bool", pairs_bfloat16);
  library.def(
      "panel_rows(Tensor panels, int num_outputs, Tensor rows, ScalarType dtype) -> Tensor");
  library.def("are_alike(Tensor panels, Tensor other) -> bool");
}

TORCH_LIBRARY_IMPL(quire, CPU, library) {
  library.impl("panel_rows", panel_rows);
  library.impl("are_alike", are_panels_alike);
}

}  // namespace quire::linear
