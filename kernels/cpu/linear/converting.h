// Products of float32 rows with panels that are converted to float32, a part at a time, before all
// tiles of a chunk are multiplied with it. Included once per instruction set, after blocked.h.

// Reads a panel's inputs from the first to the last.
class PanelReader {
 public:
  PanelReader(const Weight& weight, const char* panel)
      : panel_(panel), left_(weight.num_inputs / 2) {}

  // Writes the next inputs, at most `most`, which is even, as [inputs, kPanelWidth]; returns how many.
  int64_t read(int64_t most, float* to) {
    const int64_t count = std::min(left_, most / 2);
    for (int64_t pair = 0; pair < count; ++pair, to += 2 * kPanelWidth) {
      __builtin_prefetch(panel_ + kAhead, 0, 2);
      for (int half = 0; half < 2; ++half, panel_ += sizeof(Ints)) {
        const Ints both = load_as<Ints>(panel_);
        store(to + half * kLanes, from_bits(both << 16));
        store(to + kPanelWidth + half * kLanes, from_bits(both & kUpperHalf));
      }
    }
    left_ -= count;
    return 2 * count;
  }

 private:
  static constexpr int64_t kAhead = 8 << 10;
  static constexpr int32_t kUpperHalf = static_cast<int32_t>(0xFFFF0000);

  const char* panel_;
  int64_t left_;  // pairs
};

// Inputs of a part: it stays in the first-level cache.
constexpr int64_t kPartInputs = 64;
constexpr int64_t kPartBytes = kPartInputs * kPanelWidth * sizeof(float);

class ConvertingKernel {
 public:
  static constexpr int64_t kMostRows = kTileRows;

  ConvertingKernel(const LinearCall& call, const Chunk& chunk, const Tiles& tiles, char* scratch)
      : call_(call), chunk_(chunk), tiles_(tiles), part_(reinterpret_cast<float*>(scratch)) {
    const bool in_place = is_read_in_place(call);
    row_bytes_ = (in_place ? call.row_stride : call.weight.num_inputs) * sizeof(float);
    rows_ = in_place ? static_cast<const char*>(call.rows) + chunk.first_row * row_bytes_
                     : scratch + kPartBytes;
  }

  void add_up(const Pass& pass) const {
    PanelReader reader(call_.weight, pass.panel);
    const int64_t num_inputs = call_.weight.num_inputs;
    int64_t k = 0;
    do {
      const int64_t count = reader.read(kPartInputs, part_);
      const PrefetchSchedule nothing{{{count, pass.panel, 0}}};
      for (int64_t number = chunk_.first_tile; number < chunk_.end_tile; ++number) {
        const int64_t from = tiles_.begin_of(number), num_rows = tiles_.begin_of(number + 1) - from;
        add_tile_of<WideningStep<float>>(num_rows)(
            rows_ + from * row_bytes_ + k * sizeof(float), row_bytes_,
            reinterpret_cast<const char*>(part_), count, nothing, k == 0,
            pass.sums + from * kPanelWidth);
      }
      k += count;
    } while (k < num_inputs);
  }

 private:
  const LinearCall& call_;
  const Chunk& chunk_;
  const Tiles& tiles_;
  float* const part_;
  int64_t row_bytes_;
  const char* rows_;
};

static int64_t converting_scratch_bytes(const LinearCall& call, int64_t num_rows) {
  return BlockScratch::num_bytes(num_rows) + kPartBytes + scratch_bytes(call, num_rows);
}

static void converting_prepare(const LinearCall& call, int64_t first_row, int64_t end_row,
                               char* scratch) {
  prepare(call, first_row, end_row,
          BlockScratch(end_row - first_row, scratch).rest + kPartBytes);
}

constexpr Multiplier kConverting{
    kTileRows,          kMostBlockRows,    row_bytes, converting_scratch_bytes,
    converting_prepare, multiply_blocked<ConvertingKernel>};
