// Products of bfloat16 rows with panels of pairs by dot products. Included once, with AVX-512 and its
// dot products of bfloat16, after blocked.h.

namespace bfloat16 {

// One pair of a row's inputs, times pairs of a panel's outputs.
struct PairStep {
  static constexpr int64_t kPanelBytes = kPanelWidth * 2 * sizeof(BFloat16);

  template <int kRows>
  QUIRE_INLINE Ints weights(const char* panel, int half) {
    return load_weights<kRows, Ints>(panel + half * sizeof(Ints));
  }
  QUIRE_INLINE Ints row(const char* from) { return broadcast_bits(load_as<int32_t>(from)); }
  // By assembly, as functions for AVX-512 cannot inline those for instructions beyond it.
  QUIRE_INLINE void add(Floats& sum, Ints x, Ints weights) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(weights), "v"(x));
  }
};

class PairedKernel {
 public:
  static constexpr int64_t kMostRows = kTileRows;

  PairedKernel(const LinearCall& call, const Chunk& chunk, const Tiles& tiles, char*)
      : call_(call),
        chunk_(chunk),
        tiles_(tiles),
        row_bytes_(call.row_stride * sizeof(BFloat16)),
        rows_(static_cast<const char*>(call.rows) + chunk.first_row * row_bytes_),
        num_steps_(call.weight.num_inputs / 2),
        prefetcher_(call, tiles.count, num_steps_) {}

  void add_up(const Pass& pass) const {
    const Panels next = chunk_.panels_after(pass.panel_number, call_);
    const bool prefetches_rows = chunk_.prefetches_rows && pass.panel_number == chunk_.first_panel;
    for (int64_t number = chunk_.first_tile; number < chunk_.end_tile; ++number) {
      const int64_t from = tiles_.begin_of(number), num_rows = tiles_.begin_of(number + 1) - from;
      if (pass.number == 0)
        prefetch_outputs(call_, chunk_.first_row + from, num_rows, pass.panel_number * kPanelWidth);
      ByteRange rows_ahead;
      if (prefetches_rows) rows_ahead = tiles_.rows_after(number, rows_, row_bytes_);
      const PrefetchSchedule prefetch =
          prefetcher_.schedule(pass.panel, pass.number, number, next, rows_ahead);
      add_tile_of<PairStep>(num_rows)(rows_ + from * row_bytes_, row_bytes_, pass.panel, num_steps_,
                                      prefetch, true, pass.sums + from * kPanelWidth);
    }
  }

 private:
  const LinearCall& call_;
  const Chunk& chunk_;
  const Tiles& tiles_;
  const int64_t row_bytes_;
  const char* const rows_;
  const int64_t num_steps_;
  const Prefetcher prefetcher_;
};

static int64_t row_bytes(Format, const Weight& weight) {
  return weight.num_inputs * sizeof(BFloat16);
}

static int64_t scratch_bytes(const LinearCall&, int64_t num_rows) {
  return BlockScratch::num_bytes(num_rows);
}

// Rows are read in place.
static void prepare(const LinearCall&, int64_t, int64_t, char*) {}

constexpr int64_t kMostBlockRows = 96;

constexpr Multiplier kPaired{kTileRows,     kMostBlockRows, row_bytes,
                             scratch_bytes, prepare,        multiply_blocked<PairedKernel>};

// Parts of pairs [inputs / 2, kPanelWidth, 2].
struct PairPart {
  using Step = PairStep;
  static constexpr int64_t kInputs = 128, kStepInputs = 2;

  // An even number of inputs.
  QUIRE_INLINE void store_inputs(char* part, int64_t k, int half, const Floats* numbers,
                                 int64_t count) {
    char* const to = part + k / 2 * PairStep::kPanelBytes + half * sizeof(Ints);
    for (int64_t i = 0; i < count; i += 2)
      store_as(to + i / 2 * PairStep::kPanelBytes, rounded(numbers[i], numbers[i + 1]));
  }

  // Rounds to bfloat16, the first number in the lower half.
  QUIRE_INLINE Ints rounded(Floats first, Floats second) {
    using Words = uint16_t __attribute__((vector_size(sizeof(Ints))));
    Words both;
    asm("vcvtne2ps2bf16 %2, %1, %0" : "=v"(both) : "v"(second), "v"(first));
    constexpr auto kAll = std::make_index_sequence<2 * kLanes>();
    return reinterpret_cast<Ints>(interleaved(both, kAll));
  }

  template <typename V, std::size_t... kLane>
  QUIRE_INLINE V interleaved(V both, std::index_sequence<kLane...>) {
    return __builtin_shufflevector(both, both, (kLane / 2 + kLane % 2 * kLanes)...);
  }
};

// The rows of such parts.
struct BFloat16Rows {
  using Part = PairPart;
  using Number = BFloat16;

  static bool is_in_place(const LinearCall& call) { return !call.weight.quantization.permutation; }

  static int64_t num_bytes(const LinearCall& call, int64_t num_rows) {
    return num_rows * call.weight.num_inputs * sizeof(BFloat16);
  }

  static void prepare(const LinearCall& call, int64_t first_row, int64_t end_row, char* to) {
    auto* columns = reinterpret_cast<BFloat16*>(to);
    const int32_t* permutation = call.weight.quantization.permutation;
    const int64_t num_inputs = call.weight.num_inputs;
    for (int64_t row = first_row; row < end_row; ++row, columns += num_inputs) {
      const auto* from = static_cast<const BFloat16*>(call.rows) + row * call.row_stride;
      for (int64_t k = 0; k < num_inputs; ++k) columns[k] = from[permutation[k]];
    }
  }
};

constexpr const Multiplier& kConvertingToPairs = kConvertingWith<BFloat16Rows>;

}  // namespace bfloat16
