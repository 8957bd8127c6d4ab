// Products with panels that are converted, a part at a time, before all tiles of a chunk are multiplied
// with the part. Included once per instruction set, after blocked.h.

// Parts of float32 [inputs, kPanelWidth], which stay in the first-level cache.
struct FloatPart {
  using Step = WideningStep<float>;
  static constexpr int64_t kInputs = 64, kStepInputs = 1;

  // Writes numbers of half of a panel's outputs, for `count` inputs from input `k` of the part on.
  QUIRE_INLINE void store_inputs(char* part, int64_t k, int half, const Floats* numbers,
                                 int64_t count) {
    float* const to = reinterpret_cast<float*>(part) + k * kPanelWidth + half * kLanes;
    for (int64_t i = 0; i < count; ++i) store(to + i * kPanelWidth, numbers[i]);
  }
};

// Converts panels of pairs.
class PairReader {
 public:
  PairReader(const Weight& weight, const char* panel)
      : panel_(panel), left_(weight.num_inputs / 2) {}

  // Converts the panel's next inputs, at most the part's; returns how many.
  template <typename Part>
  int64_t read(char* part) {
    const int64_t count = std::min(left_, Part::kInputs / 2);
    for (int64_t pair = 0; pair < count; ++pair) {
      __builtin_prefetch(panel_ + kAhead, 0, 2);
      for (int half = 0; half < 2; ++half, panel_ += sizeof(Ints)) {
        const Ints both = load_as<Ints>(panel_);
        const Floats numbers[] = {from_bits(both << 16), from_bits(both & kUpperHalf)};
        Part::store_inputs(part, 2 * pair, half, numbers, 2);
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

// Two vectors of scales or offsets.
QUIRE_INLINE void load_scales(const char* from, int64_t scale_bytes, Floats (&scales)[2]) {
  if (scale_bytes == 2)
    load_pair(reinterpret_cast<const Float16*>(from), scales[0], scales[1]);
  else
    load_pair(reinterpret_cast<const float*>(from), scales[0], scales[1]);
}

// Converts quantised panels.
class QuantizedReader {
 public:
  QuantizedReader(const Weight& weight, const char* panel)
      : quantization_(weight.quantization), panel_(panel), groups_left_(quantization_.num_groups) {}

  // As PairReader::read.
  template <typename Part>
  int64_t read(char* part) {
    return quantization_.bits == 4 ? read<Part, 4>(part) : read<Part, 8>(part);
  }

 private:
  static constexpr int64_t kAhead = 2 << 10;

  template <typename Part, int kBits>
  int64_t read(char* part) {
    constexpr int64_t kStepInputs = kBits == 4 ? 8 : 4;
    int64_t k = 0;
    while (k + kStepInputs <= Part::kInputs) {
      if (!inputs_left_ && !begin_group()) break;
      const int64_t count = std::min(inputs_left_, kStepInputs);
      __builtin_prefetch(panel_ + kAhead, 0, 2);
      for (int half = 0; half < 2; ++half, panel_ += sizeof(Ints)) {
        Floats numbers[kStepInputs];
        dequantize<kBits>(load_as<Ints>(panel_), scales_[half], offsets_[half], numbers);
        Part::store_inputs(part, k, half, numbers, count);
      }
      k += count;
      inputs_left_ -= count;
    }
    return k;
  }

  // A byte's value is one of the next four inputs, or, with 4 bits, two of the next eight.
  template <int kBits>
  QUIRE_INLINE void dequantize(Ints values, Floats scale, Floats offset, Floats* numbers) {
    constexpr int kMask = (1 << kBits) - 1;
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
#pragma GCC unroll 2
      for (int upper = 0; upper < 8 / kBits; ++upper)
        numbers[4 * upper + i] =
            to_floats((values >> (8 * i + 4 * upper)) & kMask) * scale - offset;
  }

  // Whether there is one.
  bool begin_group() {
    if (!groups_left_) return false;
    --groups_left_;
    inputs_left_ = quantization_.group_size;
    const int64_t bytes = quantization_.scales_bytes(kPanelWidth);
    load_scales(panel_, quantization_.scale_bytes, scales_);
    load_scales(panel_ + bytes / 2, quantization_.scale_bytes, offsets_);
    panel_ += bytes;
    return true;
  }

  const Quantization& quantization_;
  const char* panel_;
  int64_t groups_left_, inputs_left_ = 0;  // of the current group
  Floats scales_[2], offsets_[2];
};

// Writes a row as float32, in the order of a weight's columns.
static void widen_columns(const LinearCall& call, int64_t row, float* spare, float* to) {
  const int64_t num_inputs = call.weight.num_inputs;
  const int32_t* permutation = call.weight.quantization.permutation;
  const auto* from = static_cast<const uint8_t*>(call.rows) + row * call.row_stride * bytes_of(call.format);
  widen_row(call.format, from, permutation ? spare : to, num_inputs, 1.0f);
  if (permutation)
    for (int64_t k = 0; k < num_inputs; ++k) to[k] = spare[permutation[k]];
}

// The rows of float32 parts.
struct FloatRows {
  using Part = FloatPart;
  using Number = float;

  static bool is_in_place(const LinearCall& call) {
    return call.format == Format::kFloat32 && !call.weight.quantization.permutation;
  }

  // The last bytes are for a row before its columns are permuted. Rows are widened by whole vectors.
  static int64_t num_bytes(const LinearCall& call, int64_t num_rows) {
    return (num_rows + 1) * (call.weight.num_inputs + kLanes) * sizeof(float);
  }

  static void prepare(const LinearCall& call, int64_t first_row, int64_t end_row, char* to) {
    float* columns = reinterpret_cast<float*>(to);
    const int64_t num_inputs = call.weight.num_inputs, num_rows = end_row - first_row;
    float* const spare = columns + num_rows * num_inputs + kLanes;
    for (int64_t row = first_row; row < end_row; ++row, columns += num_inputs)
      widen_columns(call, row, spare, columns);
  }
};

template <typename Rows>
class ConvertingKernel {
 public:
  static constexpr int64_t kMostRows = kTileRows;

  using Part = typename Rows::Part;
  using Step = typename Part::Step;
  static constexpr int64_t kPartBytes =
      Part::kInputs / Part::kStepInputs * kPanelWidth * static_cast<int64_t>(sizeof(float));

  ConvertingKernel(const LinearCall& call, const Chunk& chunk, const Tiles& tiles, char* scratch)
      : call_(call), chunk_(chunk), tiles_(tiles), part_(scratch) {
    const bool in_place = Rows::is_in_place(call);
    row_bytes_ = (in_place ? call.row_stride : call.weight.num_inputs) * kNumberBytes;
    rows_ = in_place ? static_cast<const char*>(call.rows) + chunk.first_row * row_bytes_
                     : scratch + kPartBytes;
  }

  void add_up(const Pass& pass) const {
    if (call_.weight.layout == Layout::kPaired)
      add_parts(pass, PairReader(call_.weight, pass.panel));
    else
      add_parts(pass, QuantizedReader(call_.weight, pass.panel));
  }

  static int64_t scratch_bytes(const LinearCall& call, int64_t num_rows) {
    const int64_t row_bytes = Rows::is_in_place(call) ? 0 : Rows::num_bytes(call, num_rows);
    return BlockScratch::num_bytes(num_rows) + kPartBytes + row_bytes;
  }

  static void prepare(const LinearCall& call, int64_t first_row, int64_t end_row, char* scratch) {
    const BlockScratch own(end_row - first_row, scratch);
    if (!Rows::is_in_place(call)) Rows::prepare(call, first_row, end_row, own.rest + kPartBytes);
  }

  static int64_t row_bytes(Format, const Weight& weight) { return weight.num_inputs * kNumberBytes; }

 private:
  static constexpr int64_t kNumberBytes = sizeof(typename Rows::Number);

  template <typename Reader>
  void add_parts(const Pass& pass, Reader reader) const {
    int64_t k = 0;
    do {
      const int64_t count = reader.template read<Part>(part_);
      const int64_t num_steps = count / Part::kStepInputs;
      const PrefetchSchedule nothing{{{num_steps, pass.panel, 0}}};
      for (int64_t number = chunk_.first_tile; number < chunk_.end_tile; ++number) {
        const int64_t from = tiles_.begin_of(number), num_rows = tiles_.begin_of(number + 1) - from;
        add_tile_of<Step>(num_rows)(rows_ + from * row_bytes_ + k * kNumberBytes, row_bytes_, part_,
                                    num_steps, nothing, k == 0, pass.sums + from * kPanelWidth);
      }
      k += count;
    } while (k < call_.weight.num_inputs);
  }

  const LinearCall& call_;
  const Chunk& chunk_;
  const Tiles& tiles_;
  char* const part_;
  int64_t row_bytes_;
  const char* rows_;
};

template <typename Rows>
constexpr Multiplier kConvertingWith{kTileRows,
                                     kMostBlockRows,
                                     ConvertingKernel<Rows>::row_bytes,
                                     ConvertingKernel<Rows>::scratch_bytes,
                                     ConvertingKernel<Rows>::prepare,
                                     multiply_blocked<ConvertingKernel<Rows>>};

constexpr const Multiplier& kConverting = kConvertingWith<FloatRows>;
