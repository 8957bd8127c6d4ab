// Packs quantised weights into panels and reads them back.
#include <ATen/ops/empty.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <tuple>
#include <vector>

#include "linear/weight_tensors.h"
#include "tensors.h"

namespace quire::linear {
namespace {

// A panel's part for one output and one group.
template <typename Byte>
struct OutputGroup {
  OutputGroup(const Weight& weight, Byte* panels, int64_t output, int64_t group)
      : quantization(weight.quantization),
        width(weight.panel_width),
        begin(panels + output / width * weight.panel_bytes +
              group * quantization.group_bytes(width)),
        lane(output % width) {}

  Byte* scale() const { return begin + lane * quantization.scale_bytes; }
  Byte* offset() const { return scale() + width * quantization.scale_bytes; }

  // Writes the group's values.
  void write(const uint8_t* values) const {
    visit_steps([&](Byte* to, int64_t first, int64_t count, int64_t upper_count) {
      uint32_t lower = 0, upper = 0;
      std::memcpy(&lower, values + first, count);
      std::memcpy(&upper, values + first + count, upper_count);
      const uint32_t both = lower | upper << 4;
      std::memcpy(to, &both, sizeof both);
    });
  }

  // Reads them.
  void read(uint8_t* values) const {
    const uint32_t mask = quantization.bits == 4 ? 0x0F0F0F0F : 0xFFFFFFFF;
    visit_steps([&](Byte* from, int64_t first, int64_t count, int64_t upper_count) {
      uint32_t both;
      std::memcpy(&both, from, sizeof both);
      const uint32_t lower = both & mask, upper = both >> 4 & mask;
      std::memcpy(values + first, &lower, count);
      std::memcpy(values + first + count, &upper, upper_count);
    });
  }

  const Quantization& quantization;
  const int64_t width;
  Byte* const begin;
  const int64_t lane;

 private:
  // Calls `visit` with the four bytes of each step, the first of its inputs, and the numbers of inputs
  // in the bytes' lower halves, or in whole bytes, and in their upper halves.
  template <typename Visit>
  void visit_steps(Visit visit) const {
    Byte* at = begin + quantization.scales_bytes(width) + lane * 4;
    const int64_t step_inputs = quantization.step_inputs(), end = quantization.group_size;
    for (int64_t k = 0; k < end; k += step_inputs, at += quantization.step_bytes(width)) {
      const int64_t left = std::min(end - k, step_inputs);
      if (left == 8)
        visit(at, k, 4, 4);
      else if (left > 4)
        visit(at, k, 4, left - 4);
      else if (left == 4)
        visit(at, k, 4, 0);
      else
        visit(at, k, left, 0);
    }
  }
};

float read_scale(const char* from, int64_t scale_bytes) {
  if (scale_bytes == 4) {
    float scale;
    std::memcpy(&scale, from, sizeof scale);
    return scale;
  }
  c10::Half scale;
  std::memcpy(&scale, from, sizeof scale);
  return static_cast<float>(scale);
}

void write_scale(char* to, int64_t scale_bytes, float scale) {
  const c10::Half half(scale);
  if (scale_bytes == 4)
    std::memcpy(to, &scale, sizeof scale);
  else
    std::memcpy(to, &half, sizeof half);
}

constexpr int64_t kOutputsPerChunk = 64;  // whole panels of any width

Tensor pack_quantized(const Tensor& values, int64_t bits, const Tensor& scales, const Tensor& offsets,
                      int64_t group_size, const std::optional<Tensor>& permutation,
                      bool int8_activations, bool has_half_scales, int64_t isa) {
  const int64_t num_outputs = values.size(0), num_inputs = values.size(1);
  // Sums of products of integers must not overflow.
  const int64_t largest_group = int64_t{1} << (bits == 4 ? 17 : 16);
  TORCH_CHECK((bits == 4 || bits == 8) && group_size > 0 && num_inputs % group_size == 0,
              "weights have 4 or 8 bits, in groups that divide their inputs");
  TORCH_CHECK(group_size <= largest_group, "a group has at most ", largest_group, " inputs");
  TORCH_CHECK(values.scalar_type() == at::kByte && values.is_contiguous(), "values must be dense bytes");
  for (const Tensor& one : {scales, offsets})
    TORCH_CHECK(one.scalar_type() == at::kFloat && one.is_contiguous() &&
                    one.numel() == num_outputs * (num_inputs / group_size),
                "scales and offsets must be dense float32, one per group");
  QuantizedHeader header{QuantizedHeader::kMagic,
                         num_outputs,
                         num_inputs,
                         functions_of(static_cast<Isa>(isa)).panel_width,
                         group_size,
                         static_cast<int32_t>(bits),
                         has_half_scales ? 2 : 4,
                         permutation.has_value(),
                         int8_activations,
                         {}};
  Quantization quantization{bits, header.scale_bytes, group_size, num_inputs / group_size};
  const int64_t first = sizeof header, offset = first + header.permutation_bytes();
  const int64_t num_panels = ceil_div(num_outputs, header.panel_width);
  Tensor packed = at::empty({offset + num_panels * quantization.panel_bytes(header.panel_width)},
                            values.options());
  char* const bytes = static_cast<char*>(packed.mutable_data_ptr());
  std::memset(bytes, 0, packed.numel());
  std::memcpy(bytes, &header, sizeof header);
  if (permutation) {
    const int64_t* columns = int64s(*permutation, num_inputs, "the permutation");
    auto* const to = reinterpret_cast<int32_t*>(bytes + first);
    for (int64_t k = 0; k < num_inputs; ++k) {
      TORCH_CHECK_INDEX(columns[k] >= 0 && columns[k] < num_inputs, "there is no input ", columns[k]);
      to[k] = static_cast<int32_t>(columns[k]);
    }
  }
  const Weight weight = weight_of(packed);
  const auto* value = values.const_data_ptr<uint8_t>();
  const auto *scale = scales.const_data_ptr<float>(), *off = offsets.const_data_ptr<float>();
  run(range_stage(num_outputs, kOutputsPerChunk, [=, &weight](int64_t begin, int64_t end) {
    for (int64_t output = begin; output < end; ++output)
      for (int64_t group = 0; group < weight.quantization.num_groups; ++group) {
        const int64_t number = output * weight.quantization.num_groups + group;
        const OutputGroup<char> place(weight, bytes + offset, output, group);
        write_scale(place.scale(), weight.quantization.scale_bytes, scale[number]);
        write_scale(place.offset(), weight.quantization.scale_bytes, off[number]);
        place.write(value + number * group_size);
      }
  }));
  return packed;
}

// Values, scales, offsets and the permutation, which is empty if there is none; bits, the size of
// groups, and whether rows may be rounded to 8 bits.
std::tuple<Tensor, Tensor, Tensor, Tensor, int64_t, int64_t, bool> unpack_quantized(
    const Tensor& panels, int64_t num_outputs) {
  const Weight weight = weight_of(panels);
  const Quantization& quantization = weight.quantization;
  TORCH_CHECK(weight.layout == Layout::kQuantized &&
                  ceil_div(num_outputs, weight.panel_width) == weight.num_panels,
              "panels must be those of a quantised weight, and have all outputs");
  const int64_t num_groups = quantization.num_groups, group_size = quantization.group_size;
  const auto floats = panels.options().dtype(at::kFloat);
  Tensor values = at::empty({num_outputs, weight.num_inputs}, panels.options());
  Tensor scales = at::empty({num_outputs, num_groups}, floats);
  Tensor offsets = at::empty({num_outputs, num_groups}, floats);
  Tensor permutation = at::empty({quantization.permutation ? weight.num_inputs : 0},
                                 panels.options().dtype(at::kLong));
  if (quantization.permutation)
    std::copy_n(quantization.permutation, weight.num_inputs, permutation.mutable_data_ptr<int64_t>());
  const char* const from = panels_of(weight, panels, nullptr).first;
  auto* const value = values.mutable_data_ptr<uint8_t>();
  auto *const scale = scales.mutable_data_ptr<float>(), *const offset = offsets.mutable_data_ptr<float>();
  run(range_stage(num_outputs, kOutputsPerChunk, [=, &weight](int64_t begin, int64_t end) {
    for (int64_t output = begin; output < end; ++output)
      for (int64_t group = 0; group < num_groups; ++group) {
        const int64_t number = output * num_groups + group;
        const OutputGroup<const char> place(weight, from, output, group);
        scale[number] = read_scale(place.scale(), weight.quantization.scale_bytes);
        offset[number] = read_scale(place.offset(), weight.quantization.scale_bytes);
        place.read(value + number * group_size);
      }
  }));
  return {values, scales, offsets, permutation, quantization.bits, group_size,
          quantization.int8_activations};
}

template <typename Number>
void dequantize_row(const Weight& weight, const char* panels, int64_t output, Number* out) {
  const Quantization& quantization = weight.quantization;
  const int32_t* const permutation = quantization.permutation;
  std::vector<uint8_t> values(quantization.group_size);
  for (int64_t group = 0, column = 0; group < quantization.num_groups; ++group) {
    const OutputGroup<const char> place(weight, panels, output, group);
    const float scale = read_scale(place.scale(), quantization.scale_bytes);
    const float offset = read_scale(place.offset(), quantization.scale_bytes);
    place.read(values.data());
    for (const uint8_t value : values) {
      const auto number = static_cast<Number>(scale * static_cast<float>(value) - offset);
      out[permutation ? permutation[column] : column] = number;
      ++column;
    }
  }
}

template <typename Number>
Stage dequantize_stage(const Weight& weight, const char* panels, const int64_t* rows,
                       const Tensor& out) {
  auto* const to = static_cast<Number*>(out.mutable_data_ptr());
  constexpr int64_t kRowsPerChunk = 4;
  return range_stage(out.size(0), kRowsPerChunk, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      dequantize_row(weight, panels, rows[i], to + i * weight.num_inputs);
  });
}

}  // namespace

Stage dequantize_stage(const Weight& weight, const Tensor& panels, const int64_t* rows,
                       const Tensor& out) {
  const char* const from = panels_of(weight, panels, nullptr).first;
  switch (out.scalar_type()) {
    case at::kHalf: return dequantize_stage<c10::Half>(weight, from, rows, out);
    case at::kBFloat16: return dequantize_stage<c10::BFloat16>(weight, from, rows, out);
    default: return dequantize_stage<float>(weight, from, rows, out);
  }
}

TORCH_LIBRARY_FRAGMENT(quire, library) {
  library.def(
      "pack_quantized(Tensor values, int bits, Tensor scales, Tensor offsets, int group_size, "
      "Tensor? permutation, bool int8_activations, bool has_half_scales, int isa) -> Tensor");
  library.def(
      "unpack_quantized(Tensor panels, int num_outputs) -> "
      "(Tensor, Tensor, Tensor, Tensor, int, int, bool)");
}

TORCH_LIBRARY_IMPL(quire, CPU, library) {
  library.impl("pack_quantized", pack_quantized);
  library.impl("unpack_quantized", unpack_quantized);
}

}  // namespace quire::linear
