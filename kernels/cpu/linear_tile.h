// Products of some rows with panels of a weight. Included once per instruction set, after vec.h and
// formats.h.
//
// The scheme is the inner kernel of Goto and van de Geijn, "Anatomy of High-Performance Matrix
// Multiplication" (2008). Every output is one chain of multiplications and additions in the order
// of the inputs, whatever rows are computed beside it: a row's result depends on nothing else.

constexpr int kPanelWidth = 2 * kLanes;
// As many as there are registers for their sums.
constexpr int kTileRows = kLanes == 16 ? 12 : 6;

// The sums of kRows rows and one panel.
template <int kRows, typename W>
QUIRE_INLINE void multiply_tile(const float* rows, int64_t row_stride, const W* panel,
                                int64_t num_inputs, const Ahead& ahead,
                                Floats (&sums)[kRows][2]) {
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) sums[r][0] = sums[r][1] = Floats{};
  // Six rows are found by one pointer and three strides, which the compiler must not take apart: it
  // would keep a pointer per row, for which there are too few registers.
  constexpr int kGroup = 6;
  int64_t once = row_stride, thrice = 3 * row_stride, five_times = 5 * row_stride;
  asm("" : "+r"(once), "+r"(thrice), "+r"(five_times));
  const int64_t places[kGroup] = {0, once, 2 * once, thrice, 4 * once, five_times};
  const float* groups[(kRows + kGroup - 1) / kGroup];
#pragma GCC unroll 2
  for (const float*& group : groups) group = rows, rows += kGroup * row_stride;
  int64_t k = 0;
  for (const Stretch* stretch = ahead.stretches; k < num_inputs; ++stretch) {
    const int64_t end = stretch->end, step = stretch->step;
    const char* due = stretch->due;
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
QUIRE_INLINE void multiply_panel(const Product& call, const char* panel, const float* bias,
                                 const float* rows, int64_t row_stride, int64_t first_output,
                                 const Ahead& ahead, Floats (&sums)[kRows][2]) {
  multiply_tile<kRows>(rows, row_stride, reinterpret_cast<const W*>(panel), call.num_inputs, ahead,
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

// Where a panel's outputs of a row go, from the first of all outputs on.
QUIRE_INLINE int64_t place_of(const Product& call, int64_t row, int64_t first_output) {
  return (row * call.num_outputs + first_output) * bytes_of(call.format);
}

// Outputs, and what is added to them, have left the caches by the time they are needed: they come
// while the sums are computed.
QUIRE_INLINE void fetch_outputs(const Product& call, int64_t first_row, int64_t num_rows,
                                int64_t first_output) {
  const int64_t bytes = kPanelWidth * bytes_of(call.format);
  for (int64_t r = 0; r < num_rows; ++r) {
    const int64_t place = place_of(call, first_row + r, first_output);
    for (int64_t line = place; line < place + bytes; line += kLine) {
      __builtin_prefetch(static_cast<const char*>(call.out) + line, 1, 3);
      if (call.residual) __builtin_prefetch(static_cast<const char*>(call.residual) + line, 0, 3);
    }
  }
}

// Whether there are as many outputs as a panel has.
QUIRE_INLINE bool is_whole(const Product& call, int64_t first_output) {
  return first_output + kPanelWidth <= call.num_outputs;
}

// A row of a whole panel's outputs.
template <typename T>
QUIRE_INLINE void store_row(const Product& call, int64_t row, int64_t first_output,
                            const Floats (&sums)[2]) {
  const int64_t first = row * call.num_outputs + first_output;
  const T* others = static_cast<const T*>(call.residual);
  for (int half = 0; half < 2; ++half) {
    const int64_t at = first + half * kLanes;
    store(static_cast<T*>(call.out) + at, others ? sums[half] + load(others + at) : sums[half]);
  }
}

// A row of a panel's outputs, of any format and maybe fewer than a panel has.
static void store_part(const Product& call, int64_t row, int64_t first_output,
                       const Floats (&sums)[2]) {
  const int64_t count = std::min<int64_t>(kPanelWidth, call.num_outputs - first_output);
  const int64_t place = place_of(call, row, first_output);
  float outputs[kPanelWidth], others[kPanelWidth] = {};
  if (call.residual)
    widen_row(call.format, static_cast<const uint8_t*>(call.residual) + place, others, count, 1.0f);
  for (int half = 0; half < 2; ++half)
    store(outputs + half * kLanes, sums[half] + load(others + half * kLanes));
  narrow_row(call.format, outputs, static_cast<uint8_t*>(call.out) + place, count);
}

template <int kRows, typename W>
static void tile(const Product& call, const float* rows, int64_t row_stride, int64_t first_row,
                 int64_t panel, const Ahead* ahead) {
  const int64_t first_output = panel * kPanelWidth;
  const Panels own = call.panels.from(panel);
  float outputs[kRows][kPanelWidth];
  Floats sums[kRows][2];
  fetch_outputs(call, first_row, kRows, first_output);
  multiply_panel<kRows, W>(call, own.first, call.bias, rows, row_stride, first_output,
                          ahead[0], sums);
  if (own.second) {
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r)
      for (int half = 0; half < 2; ++half)
        store(outputs[r] + half * kLanes, activated(call.activation, sums[r][half]));
    multiply_panel<kRows, W>(call, own.second, call.second_bias, rows, row_stride,
                             first_output, ahead[1], sums);
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

using Tile = void (*)(const Product&, const float*, int64_t, int64_t, int64_t, const Ahead*);

// For 1 to kTileRows rows.
template <typename W, int... kFewer>
static Tile tile_of(int64_t num_rows, std::integer_sequence<int, kFewer...>) {
  static constexpr Tile kTiles[] = {tile<1 + kFewer, W>...};
  return kTiles[num_rows - 1];
}

static Tile tile_of(Format panel_format, int64_t num_rows) {
  constexpr auto kAll = std::make_integer_sequence<int, kTileRows>();
  switch (panel_format) {
    case Format::kFloat16: return tile_of<Float16>(num_rows, kAll);
    case Format::kBFloat16: return tile_of<BFloat16>(num_rows, kAll);
    default: return tile_of<float>(num_rows, kAll);
  }
}

static int64_t row_bytes(Format, int64_t num_inputs) { return num_inputs * sizeof(float); }

static bool is_met_in_place(const Product& call) { return call.format == Format::kFloat32; }

static int64_t scratch_bytes(const Product& call, int64_t num_rows) {
  // Rows are widened by whole vectors.
  return is_met_in_place(call) ? 0 : (num_rows * call.num_inputs + kLanes) * sizeof(float);
}

static void prepare(const Product& call, int64_t first_row, int64_t end_row, char* scratch) {
  if (is_met_in_place(call)) return;
  const int64_t row_bytes = call.row_stride * bytes_of(call.format);
  const auto* rows = static_cast<const uint8_t*>(call.rows) + first_row * row_bytes;
  float* wide = reinterpret_cast<float*>(scratch);
  for (int64_t row = first_row; row < end_row; ++row, rows += row_bytes, wide += call.num_inputs)
    widen_row(call.format, rows, wide, call.num_inputs, 1.0f);
}

static void multiply(const Product& call, const Piece& piece, char* scratch) {
  const int64_t num_rows = piece.end_row - piece.first_row;
  const int64_t num_tiles = (num_rows + kTileRows - 1) / kTileRows;
  // Of equal height, one row more or less.
  const auto begin_of = [&](int64_t number) { return num_rows * number / num_tiles; };
  const bool in_place = is_met_in_place(call);
  const int64_t stride = in_place ? call.row_stride : call.num_inputs;
  const float* rows = in_place ? static_cast<const float*>(call.rows) + piece.first_row * stride
                               : reinterpret_cast<const float*>(scratch);
  // Rows that a thread meets for the first time are fetched a tile ahead.
  const auto next_rows = [&](int64_t panel, int64_t number) -> Range {
    if (!in_place || !piece.meets_rows || panel > piece.first_panel) return {};
    if (number + 1 == num_tiles) return {};
    const int64_t from = begin_of(number + 1), to = begin_of(number + 2);
    return {reinterpret_cast<const char*>(rows + from * stride),
            (to - from) * stride * static_cast<int64_t>(sizeof(float))};
  };
  const Fetching fetching(call, num_tiles);
  for (int64_t panel = piece.first_panel; panel < piece.end_panel; ++panel) {
    const Panels own = call.panels.from(panel);
    const Panels coming = panel + 1 < piece.end_panel ? call.panels.from(panel + 1) : piece.coming;
    for (int64_t number = piece.first_tile; number < piece.end_tile; ++number) {
      const int64_t from = begin_of(number), to = begin_of(number + 1);
      const Range next = next_rows(panel, number);
      const Ahead ahead[] = {
          fetching.ahead(own.first, 0, number, coming, next),
          own.second ? fetching.ahead(own.second, 1, number, coming, next) : Ahead{}};
      tile_of(call.panel_format, to - from)(call, rows + from * stride, stride,
                                            piece.first_row + from, panel, ahead);
    }
  }
}

// Blocks of more rows were found to be slower, though panels come from memory less often.
constexpr int64_t kMostBlockRows = 96;

constexpr Functions kFunctions{kPanelWidth, kTileRows,     kMostBlockRows, row_bytes,
                               scratch_bytes, prepare, multiply};
