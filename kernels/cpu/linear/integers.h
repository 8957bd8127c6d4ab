// Products of rows rounded to 8 bits with quantised panels, by dot products of integers. Included once,
// with AVX-512 and VNNI, after converting.h.
//
// A row has one scale: its numbers are rounded to integers from -127 to 127. The sum of a group's
// products is exact; it is multiplied by the output's scale, and the offset times the sum of the row's
// integers is subtracted. Groups are added in order, so a row's result does not depend on other rows.

namespace integers {

// Row r, from a block's first: values [groups, padded group] of 8 bits, then, as float32, the sums of
// the groups' values, then the row's scale.
struct RowLayout {
  explicit RowLayout(const Quantization& quantization)
      : sums_at(whole_lines(quantization.num_groups * quantization.padded_group())),
        scale_at(sums_at + quantization.num_groups * static_cast<int64_t>(sizeof(float))),
        bytes(whole_lines(scale_at + static_cast<int64_t>(sizeof(float)))) {}

  static constexpr int64_t whole_lines(int64_t size) { return (size + kLine - 1) / kLine * kLine; }

  const int64_t sums_at, scale_at, bytes;
};

// Rounds `count` numbers times `factor`; returns the sum of the integers.
static int32_t round_group(const float* numbers, int64_t count, float factor, char* to) {
  __m512i sum = _mm512_setzero_si512();
  for (int64_t k = 0; k < count; k += kLanes) {
    const int64_t left = count - k;
    const __mmask16 mask = left >= kLanes ? 0xFFFF : static_cast<__mmask16>((1 << left) - 1);
    const __m512 some = _mm512_maskz_loadu_ps(mask, numbers + k);
    const __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(some, _mm512_set1_ps(factor)));
    sum = _mm512_add_epi32(sum, rounded);
    _mm512_mask_cvtsepi32_storeu_epi8(to + k, mask, rounded);
  }
  return _mm512_reduce_add_epi32(sum);
}

// The largest magnitude; NaN if a number is infinite or NaN.
static float magnitude(const float* numbers, int64_t count) {
  Floats most{}, nothing{};
  int64_t k = 0;
  const auto take = [&](Floats x) {
    most = larger(from_bits(bits(x) & 0x7FFFFFFF), most);
    nothing += x * 0.0f;
  };
  for (; k + kLanes <= count; k += kLanes) take(load(numbers + k));
  if (k < count) take(load_first(numbers + k, count - k));
  return largest(most) + sum(nothing);
}

static void round_row(const float* numbers, const Quantization& quantization, char* to) {
  const RowLayout layout(quantization);
  const int64_t group_size = quantization.group_size, padded = quantization.padded_group();
  const float most = magnitude(numbers, quantization.num_groups * group_size);
  const float factor = most > 0.0f ? 127.0f / most : 0.0f;
  float* const sums = reinterpret_cast<float*>(to + layout.sums_at);
  if (padded != group_size) std::memset(to, 0, layout.sums_at);
  for (int64_t group = 0; group < quantization.num_groups; ++group)
    sums[group] = static_cast<float>(
        round_group(numbers + group * group_size, group_size, factor, to + group * padded));
  *reinterpret_cast<float*>(to + layout.scale_at) = most / 127.0f;
}

QUIRE_INLINE void add_products(Ints& sum, Ints row, Ints weights) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(weights), "v"(row));
}

// Rows that are computed together: sums of integers and of floats take 24 of 32 registers.
constexpr int kIntegerRows = 6;

// Adds four inputs of kRows rows times a panel's outputs.
template <int kRows>
QUIRE_INLINE void add_four(const char* row, const int64_t (&places)[kIntegerRows], Ints left,
                           Ints right, Ints (&sums)[kRows][2]) {
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) {
    const Ints x = broadcast_bits(load_as<int32_t>(row + places[r]));
    add_products(sums[r][0], x, left);
    add_products(sums[r][1], x, right);
  }
}

template <int kRows, int kBits>
QUIRE_INLINE void add_step(const char* row, const int64_t (&places)[kIntegerRows],
                           const char* values, Ints (&sums)[kRows][2]) {
  const Ints left = load_as<Ints>(values), right = load_as<Ints>(values + sizeof(Ints));
  if constexpr (kBits == 8) {
    add_four<kRows>(row, places, left, right, sums);
  } else {
    constexpr int kLower = 0x0F0F0F0F;
    add_four<kRows>(row, places, left & kLower, right & kLower, sums);
    add_four<kRows>(row + 4, places, (left >> 4) & kLower, (right >> 4) & kLower, sums);
  }
}

// Writes the sums of kRows rows and a panel.
template <int kRows, int kBits>
static void multiply_integers(const char* rows, const Quantization& quantization, const char* panel,
                              const PrefetchSchedule& prefetch, float* out) {
  constexpr int64_t kStepInputs = kBits == 4 ? 8 : 4;
  const RowLayout layout(quantization);
  int64_t once = layout.bytes, thrice = 3 * layout.bytes, five_times = 5 * layout.bytes;
  // As in multiply_tile.
  asm("" : "+r"(once), "+r"(thrice), "+r"(five_times));
  const int64_t places[kIntegerRows] = {0, once, 2 * once, thrice, 4 * once, five_times};
  const int64_t group_steps = quantization.group_steps(), scale_bytes = quantization.scale_bytes;
  const int64_t scales_bytes = quantization.scales_bytes(kPanelWidth);
  const bool is_near = kRows <= kFewRows && prefetch.is_near;
  const PrefetchSpan* span = prefetch.spans;
  int64_t due_steps = span->end, due_step = span->step, done = 0;
  const char *due = span->due, *row = rows, *row_sums = rows + layout.sums_at;
  Floats totals[kRows][2] = {};
  for (int64_t group = 0; group < quantization.num_groups; ++group, row_sums += sizeof(float)) {
    const char* const scales = panel;
    panel += scales_bytes;
    Ints sums[kRows][2] = {};
    for (int64_t step = 0; step < group_steps;) {
      while (done == due_steps) {
        ++span;
        due = span->due, due_step = span->step, due_steps = span->end;
      }
      const int64_t count = std::min(group_steps - step, due_steps - done);
      for (int64_t i = 0; i < count; ++i, due += due_step) {
        prefetch_line(due, is_near);
        if (due_step > kLine) prefetch_line(due + kLine, is_near);
        if (due_step > 2 * kLine) prefetch_line(due + 2 * kLine, is_near);
        add_step<kRows, kBits>(row, places, panel, sums);
        row += kStepInputs;
        panel += 2 * sizeof(Ints);
      }
      step += count, done += count;
    }
    Floats factors[2], offsets[2];
    load_scales(scales, scale_bytes, factors);
    load_scales(scales + scales_bytes / 2, scale_bytes, offsets);
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      const Floats row_sum = broadcast(load_as<float>(row_sums + places[r]));
      for (int half = 0; half < 2; ++half) {
        totals[r][half] += to_floats(sums[r][half]) * factors[half];
        totals[r][half] -= row_sum * offsets[half];
      }
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) {
    const float scale = load_as<float>(rows + layout.scale_at + places[r]);
    for (int half = 0; half < 2; ++half)
      store(out + r * kPanelWidth + half * kLanes, totals[r][half] * scale);
  }
}

using MultiplyIntegers = void (*)(const char*, const Quantization&, const char*,
                                  const PrefetchSchedule&, float*);

// For 1 to kIntegerRows rows.
template <int kBits, int... kFewer>
static MultiplyIntegers multiply_of(int64_t num_rows, std::integer_sequence<int, kFewer...>) {
  static constexpr MultiplyIntegers kTiles[] = {multiply_integers<1 + kFewer, kBits>...};
  return kTiles[num_rows - 1];
}

static MultiplyIntegers multiply_of(int64_t bits, int64_t num_rows) {
  constexpr auto kAll = std::make_integer_sequence<int, kIntegerRows>();
  return bits == 4 ? multiply_of<4>(num_rows, kAll) : multiply_of<8>(num_rows, kAll);
}

class IntegerKernel {
 public:
  static constexpr int64_t kMostRows = kIntegerRows;

  IntegerKernel(const LinearCall& call, const Chunk& chunk, const Tiles& tiles, const char* rows)
      : call_(call),
        chunk_(chunk),
        tiles_(tiles),
        rows_(rows),
        row_bytes_(RowLayout(call.weight.quantization).bytes),
        prefetcher_(call, tiles.count, call.weight.quantization.num_steps()) {}

  void add_up(const Pass& pass) const {
    const Panels next = chunk_.panels_after(pass.panel_number, call_);
    const Quantization& quantization = call_.weight.quantization;
    for (int64_t number = chunk_.first_tile; number < chunk_.end_tile; ++number) {
      const int64_t from = tiles_.begin_of(number), num_rows = tiles_.begin_of(number + 1) - from;
      if (pass.number == 0)
        prefetch_outputs(call_, chunk_.first_row + from, num_rows, pass.panel_number * kPanelWidth);
      multiply_of(quantization.bits, num_rows)(
          rows_ + from * row_bytes_, quantization, pass.panel,
          prefetcher_.schedule(pass.panel, pass.number, number, next, {}),
          pass.sums + from * kPanelWidth);
    }
  }

 private:
  const LinearCall& call_;
  const Chunk& chunk_;
  const Tiles& tiles_;
  const char* const rows_;
  const int64_t row_bytes_;
  const Prefetcher prefetcher_;
};

static int64_t row_bytes(Format, const Weight& weight) {
  return RowLayout(weight.quantization).bytes;
}

// The last bytes are for a row in float32, before and after its columns are permuted.
static int64_t scratch_bytes(const LinearCall& call, int64_t num_rows) {
  return BlockScratch::num_bytes(num_rows) + num_rows * RowLayout(call.weight.quantization).bytes +
         2 * (call.weight.num_inputs + kLanes) * static_cast<int64_t>(sizeof(float));
}

static void prepare(const LinearCall& call, int64_t first_row, int64_t end_row, char* scratch) {
  const Quantization& quantization = call.weight.quantization;
  const int64_t num_rows = end_row - first_row, bytes = RowLayout(quantization).bytes;
  char* to = BlockScratch(num_rows, scratch).rest;
  float* const spare = reinterpret_cast<float*>(to + num_rows * bytes);
  float* const columns = spare + call.weight.num_inputs + kLanes;
  for (int64_t row = first_row; row < end_row; ++row, to += bytes) {
    widen_columns(call, row, spare, columns);
    round_row(columns, quantization, to);
  }
}

constexpr Multiplier kIntegers{kIntegerRows,  kMostBlockRows, row_bytes,
                               scratch_bytes, prepare,        multiply_blocked<IntegerKernel>};

}  // namespace integers
