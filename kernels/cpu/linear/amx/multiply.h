// Products of some rows with panels of a weight by AMX tiles, which multiply bfloat16 numbers and add
// in float32. Included once, after scratch.h and step.h.
//
// A float32 is exactly the sum of three bfloat16 numbers, a float16 of two. A product is the sum of the
// products of parts, as in Henry, Tang and Heinecke, "Leveraging the bfloat16 Artificial Intelligence
// Datatype For Higher-Precision Computations" (2019); of nine products the three smallest, together
// below 2^-22 of the whole, are left out. Six tile products take half as long as one by fused
// multiply-add. The rows' parts are rounded to nearest, so that the omitted products have no bias; the
// weight's parts, of which there are more, are truncated.
//
// A row's result does not depend on other rows: each output's products are added in one order. An
// infinite number with several parts gives NaN: its second part is infinity minus infinity.

namespace amx {

// Multiplies a chunk: for each panel, tiles of 32 rows; for each tile a pass with the weight, and one
// with the second weight, if any.
template <typename T, typename W>
class ChunkMultiplier {
 public:
  ChunkMultiplier(const LinearCall& call, const Chunk& chunk, char* scratch)
      : call_(call),
        chunk_(chunk),
        scratch_(call, scratch),
        num_steps_(num_steps(call.weight.num_inputs)),
        num_passes_(call.panels.second ? 2 : 1),
        ring_(call),
        keeps_(ring_.may_keep && chunk.end_tile - chunk.first_tile > 1),
        num_ring_steps_(keeps_ ? ring_.num_kept : 2),
        ring_step_bytes_(keeps_ ? StepRing::kKeptBytes : StepRing::kStepBytes),
        rows_per_step_(num_steps_ ? (kHeight + num_steps_ - 1) / num_steps_ : 0),
        prefetcher_(call, (chunk.end_row - chunk.first_row + kHeight - 1) / kHeight,
                    call.weight.num_inputs) {}

  void run() {
    const TileRegisters registers(chunk_.end_row - chunk_.first_row);
    Position position{chunk_.first_panel, chunk_.first_tile, 0};
    SplitCursor<W> first{inputs(position, 0), ring_step(0), nullptr, 0};
    for (int i = 0; i < kPairs; ++i) split_next<true>(first);
    while (position.panel < chunk_.end_panel) {
      const int64_t tile_row = position.tile * kHeight, first_row = chunk_.first_row + tile_row;
      const int64_t num_rows = std::min<int64_t>(kHeight, chunk_.end_row - first_row);
      if (num_rows > kSide)
        add_up<2>(position, first_row, num_rows);
      else
        add_up<1>(position, first_row, num_rows);
      if (position.pass + 1 == num_passes_) write(position.panel, first_row, num_rows);
      const Position next = after(position);
      if (!keeps_)
        first_step_ += num_steps_;
      else if (next.panel != position.panel)
        first_step_ += num_passes_ * num_steps_;
      position = next;
    }
  }

 private:
  struct Position {
    int64_t panel, tile, pass;
  };

  Position after(const Position& position) const {
    if (position.pass + 1 < num_passes_) return {position.panel, position.tile, position.pass + 1};
    if (position.tile + 1 < chunk_.end_tile) return {position.panel, position.tile + 1, 0};
    return {position.panel + 1, chunk_.first_tile, 0};
  }

  const char* panel_of(const Position& position) const {
    const Panels own = call_.panels.from(position.panel);
    return position.pass ? own.second : own.first;
  }

  // A step's inputs, padded to a whole step.
  const W* inputs(const Position& position, int64_t step) const {
    const W* panel = reinterpret_cast<const W*>(panel_of(position)) + step * kStepInputs * kPanelWidth;
    const int64_t count = call_.weight.num_inputs - step * kStepInputs;
    if (count >= kStepInputs) return panel;
    std::memset(scratch_.tail, 0, kStepInputs * kPanelWidth * sizeof(W));
    if (count > 0) std::memcpy(scratch_.tail, panel, count * kPanelWidth * sizeof(W));
    return reinterpret_cast<const W*>(scratch_.tail);
  }

  char* ring_step(int64_t number) const {
    return scratch_.ring + number % num_ring_steps_ * ring_step_bytes_;
  }

  char* following(char* step) const {
    step += ring_step_bytes_;
    return step == scratch_.ring + num_ring_steps_ * ring_step_bytes_ ? scratch_.ring : step;
  }

  // The number of a position's first ring step; the others follow.
  int64_t first_step_of(const Position& position) const {
    return first_step_ + (keeps_ ? position.pass * num_steps_ : 0);
  }

  // Whether the steps of a position must be split.
  bool is_split(const Position& position) const {
    return position.panel < chunk_.end_panel && (!keeps_ || position.tile == chunk_.first_tile);
  }

  // Computes a tile's sums. The step after its last one is the first of the next position.
  template <int kTiles>
  void add_up(const Position& position, int64_t first_row, int64_t num_rows) {
    const Position next = after(position);
    const PrefetchSchedule prefetch =
        prefetcher_.schedule(panel_of(position), position.pass, position.tile,
                         chunk_.panels_after(position.panel, call_), {});
    const PrefetchSpan* span = prefetch.spans;
    const char* due = span->due;
    int64_t rows_due = position.pass == 0 ? num_rows : 0;
    constexpr int kRowParts = kPartsOf<T>;
    constexpr int64_t kStepBytes = kRowParts * kTileBytes;
    const int64_t tile_bytes = num_steps_ * kStepBytes;
    const char* rows = scratch_.rows + 2 * position.tile * tile_bytes;
    clear_tile<0>(), clear_tile<1>();
    if constexpr (kTiles == 2) clear_tile<2>(), clear_tile<3>();
    char* now = ring_step(first_step_of(position));
    for (int64_t step = 0; step < num_steps_; ++step, rows += kStepBytes) {
      while (step * kStepInputs >= span->end && span->end < call_.weight.num_inputs)
        due = (++span)->due;
      if (rows_due > 0) {
        const int64_t count = std::min(rows_due, rows_per_step_);
        prefetch_outputs(call_, first_row + num_rows - rows_due, count, position.panel * kPanelWidth);
        rows_due -= count;
      }
      const char* const weight = now;
      now = following(now);
      const bool is_last = step + 1 == num_steps_, splits = is_split(is_last ? next : position);
      const W* from = !splits ? nullptr : is_last ? inputs(next, 0) : inputs(position, step + 1);
      SplitCursor<W> cursor{from, now, due, 2 * span->step};
      due += kStepInputs * span->step;
      if (splits)
        multiply_step<kTiles, kRowParts, true, W>(rows, tile_bytes, weight, cursor);
      else
        multiply_step<kTiles, kRowParts, false, W>(rows, tile_bytes, weight, cursor);
    }
    float* const sums = scratch_.sums[position.pass];
    store_tile<0>(sums), store_tile<1>(sums + kSide);
    if constexpr (kTiles == 2) {
      float* const lower = sums + kSide * kPanelWidth;
      store_tile<2>(lower), store_tile<3>(lower + kSide);
    }
  }

  // A row's sums, in the order of outputs.
  static void load_sums(const float* sums, Floats (&row)[2]) {
    row[0] = load(sums), row[1] = load(sums + kLanes);
    if constexpr (std::is_same_v<W, BFloat16>) {
      constexpr auto kAll = std::make_index_sequence<kLanes>();
      const Floats even = row[0], odd = row[1];
      row[0] = interleaved<0>(even, odd, kAll), row[1] = interleaved<kLanes / 2>(even, odd, kAll);
    }
  }

  template <int kFirst, std::size_t... kLane>
  static Floats interleaved(Floats even, Floats odd, std::index_sequence<kLane...>) {
    return __builtin_shufflevector(even, odd, (kFirst + kLane / 2 + kLane % 2 * kLanes)...);
  }

  // The sums of a pass plus the bias.
  void finish_sums(int64_t pass, int64_t row, const float* biases, Floats (&outputs)[2]) const {
    load_sums(scratch_.sums[pass] + row * kPanelWidth, outputs);
    for (int half = 0; half < 2; ++half) outputs[half] += load(biases + half * kLanes);
  }

  template <bool kIsGated, bool kIsWhole>
  void write_rows(int64_t first_output, int64_t first_row, int64_t num_rows,
                  const float (&biases)[2][kPanelWidth]) const {
    for (int64_t r = 0; r < num_rows; ++r) {
      Floats outputs[2];
      finish_sums(0, r, biases[0], outputs);
      if constexpr (kIsGated) {
        Floats values[2];
        finish_sums(1, r, biases[1], values);
        for (int half = 0; half < 2; ++half)
          outputs[half] = activated(call_.activation, outputs[half]) * values[half];
      }
      if constexpr (kIsWhole)
        store_row<T>(call_, first_row + r, first_output, outputs);
      else
        store_part(call_, first_row + r, first_output, outputs);
    }
  }

  void write(int64_t panel, int64_t first_row, int64_t num_rows) const {
    const int64_t first_output = panel * kPanelWidth;
    const int64_t count = std::min<int64_t>(kPanelWidth, call_.num_outputs - first_output);
    float biases[2][kPanelWidth] = {};
    const float* const given[] = {call_.bias, call_.second_bias};
    for (int64_t pass = 0; pass < num_passes_; ++pass)
      if (given[pass])
        std::memcpy(biases[pass], given[pass] + first_output, count * sizeof(float));
    const bool is_gated = num_passes_ == 2, whole = is_whole(call_, first_output);
    const auto write_all = is_gated && whole ? &ChunkMultiplier::write_rows<true, true>
                           : is_gated        ? &ChunkMultiplier::write_rows<true, false>
                           : whole           ? &ChunkMultiplier::write_rows<false, true>
                                             : &ChunkMultiplier::write_rows<false, false>;
    (this->*write_all)(first_output, first_row, num_rows, biases);
  }

  const LinearCall& call_;
  const Chunk& chunk_;
  const Scratch scratch_;
  const int64_t num_steps_, num_passes_;
  const StepRing ring_;
  const bool keeps_;
  const int64_t num_ring_steps_, ring_step_bytes_, rows_per_step_;
  const Prefetcher prefetcher_;
  int64_t first_step_ = 0;  // in the ring: of the panel if it is kept, else of the position
};

static void multiply(const LinearCall& call, const Chunk& chunk, char* scratch) {
  const FlushDenormals flush_denormals;
  visit_wide(call.format, [&](auto row) {
    visit_wide(call.weight.format, [&](auto weight) {
      ChunkMultiplier<decltype(row), decltype(weight)>(call, chunk, scratch).run();
    });
  });
}

static int64_t row_bytes(Format format, const Weight& weight) {
  return num_steps(weight.num_inputs) * parts_of(format) * kStepInputs * sizeof(BFloat16);
}

static int64_t scratch_bytes(const LinearCall& call, int64_t num_rows) {
  const int64_t padded_rows = (num_rows + kSide - 1) / kSide * kSide;
  return Scratch::num_bytes(call) + padded_rows * row_bytes(call.format, call.weight);
}

static void prepare(const LinearCall& call, int64_t first_row, int64_t end_row, char* scratch) {
  const FlushDenormals flush_denormals;
  char* const to = Scratch(call, scratch).rows;
  visit_wide(call.format,
             [&](auto row) { split_rows<decltype(row)>(call, first_row, end_row, to); });
}

// More rows than without AMX: panels must be read from memory less often than they are multiplied.
constexpr int64_t kMostBlockRows = 192;

constexpr Multiplier kPlain{kHeight,       kMostBlockRows, row_bytes,
                            scratch_bytes, prepare,        multiply};

}  // namespace amx
