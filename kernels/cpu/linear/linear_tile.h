// Products of some rows with panels of a weight. Included once per instruction set, after
// activations.h.
//
// The scheme is the inner kernel of Goto and van de Geijn, "Anatomy of High-Performance Matrix
// Multiplication" (2008). Every output is one chain of multiplications and additions in the order of
// the inputs, so a row's result does not depend on the rows that are computed beside it.

constexpr int kPanelWidth = 2 * kLanes;
// As many rows as there are registers for their sums.
constexpr int kTileRows = kLanes == 16 ? 12 : 6;

// The sums of kRows rows and one panel.
template <int kRows, typename W>
QUIRE_INLINE void multiply_tile(const float* rows, int64_t row_stride, const W* panel,
                                int64_t num_inputs, const PrefetchSchedule& prefetch,
                                Floats (&sums)[kRows][2]) {
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) sums[r][0] = sums[r][1] = Floats{};
  // Six rows are addressed by one pointer and three strides. The asm statement hides how the strides
  // are related: otherwise the compiler keeps a pointer per row, for which there are too few registers.
  constexpr int kGroup = 6;
  int64_t once = row_stride, thrice = 3 * row_stride, five_times = 5 * row_stride;
  asm("" : "+r"(once), "+r"(thrice), "+r"(five_times));
  const int64_t places[kGroup] = {0, once, 2 * once, thrice, 4 * once, five_times};
  const float* groups[(kRows + kGroup - 1) / kGroup];
#pragma GCC unroll 2
  for (const float*& group : groups) group = rows, rows += kGroup * row_stride;
  int64_t k = 0;
  for (const PrefetchSpan* span = prefetch.spans; k < num_inputs; ++span) {
    const int64_t end = span->end, step = span->step;
    const char* due = span->due;
    for (; k < end; ++k, due += step) {
      __builtin_prefetch(due, 0, 2);
      if (step > kLine) __builtin_prefetch(due + kLine, 0, 2);
      const Floats left = load(panel), right = load(panel + kLanes);
#pragma GCC unroll 12
      for (int r = 0; r < kRows; ++r) {
        const Floats x = broadcast(groups[r / kGroup][places[r % kGroup]]);
        sums[r][0] += x * left;
        sums[r][1] += x * right;
      }
      panel += kPanelWidth;
#pragma GCC unroll 2
      for (const float*& group : groups) {
        ++group;
        asm("" : "+r"(group));
      }
    }
  }
}

// The products of kRows rows and one panel.
template <int kRows, typename W>
QUIRE_INLINE void multiply_panel(const LinearCall& call, const char* panel, const float* bias,
                                 const float* rows, int64_t row_stride, int64_t first_output,
                                 const PrefetchSchedule& prefetch, Floats (&sums)[kRows][2]) {
  multiply_tile<kRows>(rows, row_stride, reinterpret_cast<const W*>(panel), call.num_inputs, prefetch,
                       sums);
  if (!bias) return;
  float row[kPanelWidth] = {};
  const int64_t count = std::min<int64_t>(kPanelWidth, call.num_outputs - first_output);
  __builtin_memcpy(row, bias + first_output, count * sizeof(float));
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
    sums[r][0] += load(row);
    sums[r][1] += load(row + kLanes);
  }
}

// The offset in bytes of a row's outputs from `first_output` on.
QUIRE_INLINE int64_t output_offset(const LinearCall& call, int64_t row, int64_t first_output) {
  return (row * call.num_outputs + first_output) * bytes_of(call.format);
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
  const int64_t first = row * call.num_outputs + first_output;
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

template <int kRows, typename W>
static void tile(const LinearCall& call, const float* rows, int64_t row_stride, int64_t first_row,
                 int64_t panel, const PrefetchSchedule* prefetch) {
  const int64_t first_output = panel * kPanelWidth;
  const Panels own = call.panels.from(panel);
  float outputs[kRows][kPanelWidth];
  Floats sums[kRows][2];
  prefetch_outputs(call, first_row, kRows, first_output);
  multiply_panel<kRows, W>(call, own.first, call.bias, rows, row_stride, first_output,
                           prefetch[0], sums);
  if (own.second) {
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r)
      for (int half = 0; half < 2; ++half)
        store(outputs[r] + half * kLanes, activated(call.activation, sums[r][half]));
    multiply_panel<kRows, W>(call, own.second, call.second_bias, rows, row_stride,
                             first_output, prefetch[1], sums);
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r)
      for (int half = 0; half < 2; ++half) sums[r][half] *= load(outputs[r] + half * kLanes);
  }
  if (call.format == Format::kFloat32 && is_whole(call, first_output)) {
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) store_row<float>(call, first_row + r, first_output, sums[r]);
  } else {
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) store_part(call, first_row + r, first_output, sums[r]);
  }
}

using Tile = void (*)(const LinearCall&, const float*, int64_t, int64_t, int64_t,
                      const PrefetchSchedule*);

// For 1 to kTileRows rows.
template <typename W, int... kFewer>
static Tile tile_of(int64_t num_rows, std::integer_sequence<int, kFewer...>) {
  static constexpr Tile kTiles[] = {tile<1 + kFewer, W>...};
  return kTiles[num_rows - 1];
}

static Tile tile_of(Format panel_format, int64_t num_rows) {
  Tile found;
  visit_wide(panel_format, [&](auto number) {
    found = tile_of<decltype(number)>(num_rows, std::make_integer_sequence<int, kTileRows>());
  });
  return found;
}

static int64_t row_bytes(Format, int64_t num_inputs) { return num_inputs * sizeof(float); }

static bool is_read_in_place(const LinearCall& call) { return call.format == Format::kFloat32; }

static int64_t scratch_bytes(const LinearCall& call, int64_t num_rows) {
  // Rows are widened by whole vectors.
  return is_read_in_place(call) ? 0 : (num_rows * call.num_inputs + kLanes) * sizeof(float);
}

static void prepare(const LinearCall& call, int64_t first_row, int64_t end_row, char* scratch) {
  if (is_read_in_place(call)) return;
  const int64_t row_bytes = call.row_stride * bytes_of(call.format);
  const auto* rows = static_cast<const uint8_t*>(call.rows) + first_row * row_bytes;
  float* wide = reinterpret_cast<float*>(scratch);
  for (int64_t row = first_row; row < end_row; ++row, rows += row_bytes, wide += call.num_inputs)
    widen_row(call.format, rows, wide, call.num_inputs, 1.0f);
}

static void multiply(const LinearCall& call, const Chunk& chunk, char* scratch) {
  const int64_t num_rows = chunk.end_row - chunk.first_row;
  const int64_t num_tiles = (num_rows + kTileRows - 1) / kTileRows;
  // Tiles differ by at most one row.
  const auto begin_of = [&](int64_t number) { return num_rows * number / num_tiles; };
  const bool in_place = is_read_in_place(call);
  const int64_t stride = in_place ? call.row_stride : call.num_inputs;
  const float* rows = in_place ? static_cast<const float*>(call.rows) + chunk.first_row * stride
                               : reinterpret_cast<const float*>(scratch);
  // A tile ahead.
  const auto next_rows = [&](int64_t panel, int64_t number) -> ByteRange {
    if (!in_place || !chunk.prefetches_rows || panel > chunk.first_panel) return {};
    if (number + 1 == num_tiles) return {};
    const int64_t from = begin_of(number + 1), to = begin_of(number + 2);
    return {reinterpret_cast<const char*>(rows + from * stride),
            (to - from) * stride * static_cast<int64_t>(sizeof(float))};
  };
  const Prefetcher prefetcher(call, num_tiles);
  for (int64_t panel = chunk.first_panel; panel < chunk.end_panel; ++panel) {
    const Panels own = call.panels.from(panel);
    const Panels next_panels = chunk.panels_after(panel, call);
    for (int64_t number = chunk.first_tile; number < chunk.end_tile; ++number) {
      const int64_t from = begin_of(number), to = begin_of(number + 1);
      const ByteRange rows_ahead = next_rows(panel, number);
      const PrefetchSchedule prefetch[] = {
          prefetcher.schedule(own.first, 0, number, next_panels, rows_ahead),
          own.second ? prefetcher.schedule(own.second, 1, number, next_panels, rows_ahead)
                     : PrefetchSchedule{}};
      tile_of(call.panel_format, to - from)(call, rows + from * stride, stride,
                                            chunk.first_row + from, panel, prefetch);
    }
  }
}

// Larger blocks were measured to be slower, though panels are read from memory less often.
constexpr int64_t kMostBlockRows = 96;

constexpr Functions kFunctions{kPanelWidth, kTileRows,     kMostBlockRows, row_bytes,
                               scratch_bytes, prepare, multiply};
