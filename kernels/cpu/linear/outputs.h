// Writes sums of a panel's outputs. Included once per instruction set, after inner_tile.h.

// The offset in bytes of a row's outputs from `first_output` on.
QUIRE_INLINE int64_t output_offset(const LinearCall& call, int64_t row, int64_t first_output) {
  return (row * call.out_stride + first_output) * bytes_of(call.format);
}

// Prefetches outputs and residuals, which are no longer in the caches, while the sums are computed.
QUIRE_INLINE void prefetch_outputs(const LinearCall& call, int64_t first_row, int64_t num_rows,
                                   int64_t first_output) {
  const int64_t bytes = kPanelWidth * bytes_of(call.format);
  for (int64_t r = 0; r < num_rows; ++r) {
    const int64_t offset = output_offset(call, first_row + r, first_output);
    for (int64_t line = offset; line < offset + bytes; line += kLine) {
      __builtin_prefetch(static_cast<const char*>(call.out) + line, 1, 3);
      if (call.residual) __builtin_prefetch(static_cast<const char*>(call.residual) + line, 0, 3);
    }
  }
}

// Whether the panel has no padding.
QUIRE_INLINE bool is_whole(const LinearCall& call, int64_t first_output) {
  return first_output + kPanelWidth <= call.num_outputs;
}

// Stores a row of a panel without padding.
template <typename T>
QUIRE_INLINE void store_row(const LinearCall& call, int64_t row, int64_t first_output,
                            const Floats (&sums)[2]) {
  const int64_t first = row * call.out_stride + first_output;
  const T* others = static_cast<const T*>(call.residual);
  for (int half = 0; half < 2; ++half) {
    const int64_t at = first + half * kLanes;
    store(static_cast<T*>(call.out) + at, others ? sums[half] + load(others + at) : sums[half]);
  }
}

// Stores a row of any panel, in any format.
static void store_part(const LinearCall& call, int64_t row, int64_t first_output,
                       const Floats (&sums)[2]) {
  const int64_t count = std::min<int64_t>(kPanelWidth, call.num_outputs - first_output);
  const int64_t offset = output_offset(call, row, first_output);
  float outputs[kPanelWidth], others[kPanelWidth] = {};
  if (call.residual)
    widen_row(call.format, static_cast<const uint8_t*>(call.residual) + offset, others, count, 1.0f);
  for (int half = 0; half < 2; ++half)
    store(outputs + half * kLanes, sums[half] + load(others + half * kLanes));
  narrow_row(call.format, outputs, static_cast<uint8_t*>(call.out) + offset, count);
}

// `count` rows of sums [kPanelWidth] and, for a gated product, of its second weight: adds biases,
// applies the activation, adds the residual, and writes the outputs.
template <typename T>
static void write_rows(const LinearCall& call, int64_t first_row, int64_t count, int64_t first_output,
                       const float* sums, const float* second_sums) {
  float biases[2][kPanelWidth] = {};
  const int64_t num_biases = std::min<int64_t>(kPanelWidth, call.num_outputs - first_output);
  if (call.bias) __builtin_memcpy(biases[0], call.bias + first_output, num_biases * sizeof(float));
  if (call.second_bias)
    __builtin_memcpy(biases[1], call.second_bias + first_output, num_biases * sizeof(float));
  const bool whole = is_whole(call, first_output);
  for (int64_t r = 0; r < count; ++r) {
    Floats outputs[2];
    for (int half = 0; half < 2; ++half) {
      const int64_t at = r * kPanelWidth + half * kLanes;
      outputs[half] = load(sums + at) + load(biases[0] + half * kLanes);
      if (call.panels.second)
        outputs[half] = activated(call.activation, outputs[half]) *
                        (load(second_sums + at) + load(biases[1] + half * kLanes));
    }
    if (whole)
      store_row<T>(call, first_row + r, first_output, outputs);
    else
      store_part(call, first_row + r, first_output, outputs);
  }
}

static void write_rows(const LinearCall& call, int64_t first_row, int64_t count, int64_t first_output,
                       const float* sums, const float* second_sums) {
  visit_wide(call.format, [&](auto number) {
    write_rows<decltype(number)>(call, first_row, count, first_output, sums, second_sums);
  });
}
