// Products of bfloat16 rows with panels of pairs by dot products. Included once, with AVX-512 and its
// dot products of bfloat16, after blocked.h.

namespace bfloat16 {

// One pair of a row's inputs, times pairs of a panel's outputs.
struct PairStep {
  static constexpr int64_t kPanelBytes = kPanelWidth * 2 * sizeof(BFloat16);

  QUIRE_INLINE Ints weights(const char* panel, int half) {
    return load_as<Ints>(panel + half * sizeof(Ints));
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

constexpr Functions kFunctions{kPanelWidth, kPlain, &kPaired, &kConverting};

}  // namespace bfloat16
