// Products of float32 rows with plain panels. Included once per instruction set, after outputs.h.

// The products of kRows rows and one panel.
template <int kRows, typename W>
QUIRE_INLINE void multiply_panel(const LinearCall& call, const char* panel, const float* bias,
                                 const float* rows, int64_t row_stride, int64_t first_output,
                                 const PrefetchSchedule& prefetch, Floats (&sums)[kRows][2]) {
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) sums[r][0] = sums[r][1] = Floats{};
  multiply_tile<kRows, WideningStep<W>>(reinterpret_cast<const char*>(rows),
                                        row_stride * sizeof(float), panel, call.weight.num_inputs,
                                        prefetch, sums);
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

static int64_t row_bytes(Format, const Weight& weight) {
  return weight.num_inputs * sizeof(float);
}

static bool is_read_in_place(const LinearCall& call) { return call.format == Format::kFloat32; }

static int64_t scratch_bytes(const LinearCall& call, int64_t num_rows) {
  // Rows are widened by whole vectors.
  return is_read_in_place(call) ? 0 : (num_rows * call.weight.num_inputs + kLanes) * sizeof(float);
}

static void prepare(const LinearCall& call, int64_t first_row, int64_t end_row, char* scratch) {
  if (is_read_in_place(call)) return;
  const int64_t row_bytes = call.row_stride * bytes_of(call.format);
  const auto* rows = static_cast<const uint8_t*>(call.rows) + first_row * row_bytes;
  float* wide = reinterpret_cast<float*>(scratch);
  const int64_t num_inputs = call.weight.num_inputs;
  for (int64_t row = first_row; row < end_row; ++row, rows += row_bytes, wide += num_inputs)
    widen_row(call.format, rows, wide, num_inputs, 1.0f);
}

static void multiply(const LinearCall& call, const Chunk& chunk, char* scratch) {
  const Tiles tiles(chunk, kTileRows);
  const bool in_place = is_read_in_place(call);
  const int64_t stride = in_place ? call.row_stride : call.weight.num_inputs;
  const float* rows = in_place ? static_cast<const float*>(call.rows) + chunk.first_row * stride
                               : reinterpret_cast<const float*>(scratch);
  const Prefetcher prefetcher(call, tiles.count, call.weight.num_inputs);
  for (int64_t panel = chunk.first_panel; panel < chunk.end_panel; ++panel) {
    const Panels own = call.panels.from(panel);
    const Panels next_panels = chunk.panels_after(panel, call);
    const bool prefetches_rows =
        in_place && chunk.prefetches_rows && panel == chunk.first_panel;
    for (int64_t number = chunk.first_tile; number < chunk.end_tile; ++number) {
      const int64_t from = tiles.begin_of(number), to = tiles.begin_of(number + 1);
      ByteRange rows_ahead;
      if (prefetches_rows)
        rows_ahead = tiles.rows_after(number, reinterpret_cast<const char*>(rows),
                                      stride * static_cast<int64_t>(sizeof(float)));
      const PrefetchSchedule prefetch[] = {
          prefetcher.schedule(own.first, 0, number, next_panels, rows_ahead),
          own.second ? prefetcher.schedule(own.second, 1, number, next_panels, rows_ahead)
                     : PrefetchSchedule{}};
      tile_of(call.weight.format, to - from)(call, rows + from * stride, stride,
                                             chunk.first_row + from, panel, prefetch);
    }
  }
}

// Larger blocks were measured to be slower, though panels are read from memory less often.
constexpr int64_t kMostBlockRows = 96;

constexpr Multiplier kPlain{kTileRows,     kMostBlockRows, row_bytes,
                            scratch_bytes, prepare,        multiply};
