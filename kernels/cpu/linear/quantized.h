// The layout of weights of 8 and 4 bits in panels. Independent of torch.
#pragma once

#include <cstdint>

namespace quire::linear {

// A quantised weight: number = scale * value - offset, with a scale and an offset per output and group
// of inputs. A panel has its groups in order, and each group
//   scales [panel_width], offsets [panel_width],
//   steps [steps, panel_width, 4 bytes].
// A byte of a step of 8 bits is the value of one of four adjacent inputs. With 4 bits the lower halves
// of the bytes belong to four inputs and the upper halves to the next four. The last step of a group is
// filled up with zeros. Outputs beyond the last have scales and offsets of zero.
struct Quantization {
  int64_t bits = 0;         // 4 or 8
  int64_t scale_bytes = 0;  // 4: float32, 2: float16
  int64_t group_size = 0, num_groups = 0;
  bool int8_activations = false;         // whether rows may be rounded to 8 bits
  const int32_t* permutation = nullptr;  // the inputs of the columns, or null: the same

  int64_t step_inputs() const { return bits == 4 ? 8 : 4; }
  int64_t group_steps() const { return (group_size + step_inputs() - 1) / step_inputs(); }
  int64_t num_steps() const { return num_groups * group_steps(); }
  // Inputs of a group's steps.
  int64_t padded_group() const { return group_steps() * step_inputs(); }

  int64_t scales_bytes(int64_t panel_width) const { return 2 * panel_width * scale_bytes; }
  static int64_t step_bytes(int64_t panel_width) { return 4 * panel_width; }
  int64_t group_bytes(int64_t panel_width) const {
    return scales_bytes(panel_width) + group_steps() * step_bytes(panel_width);
  }
  int64_t panel_bytes(int64_t panel_width) const { return num_groups * group_bytes(panel_width); }
};

// The first bytes of a quantised weight's tensor. The permutation follows, if there is one, then the
// panels, which begin at a multiple of 64 bytes.
struct QuantizedHeader {
  static constexpr int64_t kMagic = 0x3154574751;  // "QGWT1"

  int64_t magic, num_outputs, num_inputs, panel_width, group_size;
  int32_t bits, scale_bytes, has_permutation, int8_activations, unused[2];

  int64_t permutation_bytes() const {
    const int64_t bytes = has_permutation ? num_inputs * int64_t{sizeof(int32_t)} : 0;
    return (bytes + 63) / 64 * 64;
  }
};
static_assert(sizeof(QuantizedHeader) == 64);

}  // namespace quire::linear
