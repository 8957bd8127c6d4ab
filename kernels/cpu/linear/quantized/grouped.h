// Products of converted rows with quantised panels whose values are multiplied before they are scaled.
// Included once per instruction set that has such products, after converting.h.
//
// The sum of a group's products is multiplied by the output's scale, and the offset times the sum of
// the row's numbers is subtracted; at the end the row's factor is applied. Groups are added in order,
// so a row's result does not depend on other rows. A step multiplies with values less its kCentre.

namespace grouped {

// A row: its numbers [groups, padded group], then, as float32, their sums by group, then a factor.
struct RowLayout {
  RowLayout(const Quantization& quantization, int64_t number_bytes)
      : sums_at(whole_lines(quantization.num_groups * quantization.padded_group() * number_bytes)),
        scale_at(sums_at + quantization.num_groups * static_cast<int64_t>(sizeof(float))),
        bytes(whole_lines(scale_at + static_cast<int64_t>(sizeof(float)))) {}

  static constexpr int64_t whole_lines(int64_t size) { return (size + kLine - 1) / kLine * kLine; }

  const int64_t sums_at, scale_at, bytes;
};

// Rows that are computed together. With AVX-512, sums of a group and of all groups take 24 of 32
// registers; with AVX2 those of a group take 8 of 16.
constexpr int kGroupedRows = kLanes == 16 ? 6 : 4;

// Whether tiles of few rows prefetch what they read. The processors differ: some keep up with such
// tiles by themselves, and lose time by it.
enum class FewRows { kPlain, kPrefetch };

// Writes the sums of kRows rows and a panel.
template <int kRows, typename Step, FewRows kFew>
static void multiply_groups(const char* rows, const Quantization& quantization, const char* panel,
                            const PrefetchSchedule& prefetch, float* out) {
  const RowLayout layout(quantization, Step::kNumberBytes);
  int64_t once = layout.bytes, thrice = 3 * layout.bytes, five_times = 5 * layout.bytes;
  // As in multiply_tile.
  asm("" : "+r"(once), "+r"(thrice), "+r"(five_times));
  const int64_t places[] = {0, once, 2 * once, thrice, 4 * once, five_times};
  const int64_t group_steps = quantization.group_steps(), scale_bytes = quantization.scale_bytes;
  const int64_t scales_bytes = quantization.scales_bytes(kPanelWidth);
  const PrefetchSpan* span = prefetch.spans;
  int64_t due_steps = span->end, due_step = span->step, done = 0;
  const char *due = span->due, *row = rows, *row_sums = rows + layout.sums_at;
  Floats totals[kRows][2] = {};
  for (int64_t group = 0; group < quantization.num_groups; ++group, row_sums += sizeof(float)) {
    const char* const scales = panel;
    panel += scales_bytes;
    typename Step::Sum sums[kRows][2] = {};
    const auto add = [&]() __attribute__((always_inline)) {
      Step::template add<kRows>(row, places, panel, sums);
      row += Step::kInputs * Step::kNumberBytes;
      panel += 2 * sizeof(Ints);
    };
    if constexpr (kRows <= kFewRows && kFew == FewRows::kPlain) {
#pragma GCC unroll 4
      for (int64_t step = 0; step < group_steps; ++step) add();
    } else {
      // Few rows prefetch exactly the lines that they read, a distance ahead.
      if constexpr (kRows <= kFewRows) {
        for (int64_t line = 0; line < scales_bytes; line += kLine) prefetch_line(due + line);
        due += scales_bytes;
      }
      for (int64_t step = 0; step < group_steps;) {
        while (done == due_steps) {
          ++span;
          due = span->due, due_step = span->step, due_steps = span->end;
        }
        const int64_t count = std::min(group_steps - step, due_steps - done);
        if constexpr (kRows <= kFewRows) {
#pragma GCC unroll 4
          for (int64_t i = 0; i < count; ++i, due += 2 * kLine) {
            prefetch_line(due);
            prefetch_line(due + kLine);
            add();
          }
        } else {
          for (int64_t i = 0; i < count; ++i, due += due_step) {
            prefetch_line(due);
            if (due_step > kLine) prefetch_line(due + kLine);
            if (due_step > 2 * kLine) prefetch_line(due + 2 * kLine);
            add();
          }
        }
        step += count, done += count;
      }
    }
    Floats factors[2], offsets[2];
    load_scales(scales, scale_bytes, factors);
    load_scales(scales + scales_bytes / 2, scale_bytes, offsets);
    if constexpr (Step::kCentre != 0.0f)
      for (int half = 0; half < 2; ++half) offsets[half] -= factors[half] * Step::kCentre;
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      const Floats row_sum = broadcast(load_as<float>(row_sums + places[r]));
      for (int half = 0; half < 2; ++half) {
        totals[r][half] += Step::as_floats(sums[r][half]) * factors[half];
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

using MultiplyGroups = void (*)(const char*, const Quantization&, const char*,
                                const PrefetchSchedule&, float*);

// For 1 to kGroupedRows rows.
template <typename Step, FewRows kFew, int... kFewer>
static MultiplyGroups multiply_of(int64_t num_rows, std::integer_sequence<int, kFewer...>) {
  static constexpr MultiplyGroups kTiles[] = {multiply_groups<1 + kFewer, Step, kFew>...};
  return kTiles[num_rows - 1];
}

template <typename Step, FewRows kFew>
static MultiplyGroups multiply_of(int64_t num_rows) {
  return multiply_of<Step, kFew>(num_rows, std::make_integer_sequence<int, kGroupedRows>());
}

// `Rows` converts rows, and chooses the step for a weight.
template <typename Rows, FewRows kFew>
class GroupedKernel {
 public:
  static constexpr int64_t kMostRows = kGroupedRows;

  GroupedKernel(const LinearCall& call, const Chunk& chunk, const Tiles& tiles, const char* rows)
      : call_(call),
        chunk_(chunk),
        tiles_(tiles),
        rows_(rows),
        row_bytes_(layout_of(call.weight).bytes),
        prefetcher_(call, tiles.count, call.weight.quantization.num_steps()) {}

  void add_up(const Pass& pass) const {
    const Panels next = chunk_.panels_after(pass.panel_number, call_);
    const Quantization& quantization = call_.weight.quantization;
    for (int64_t number = chunk_.first_tile; number < chunk_.end_tile; ++number) {
      const int64_t from = tiles_.begin_of(number), num_rows = tiles_.begin_of(number + 1) - from;
      if (pass.number == 0)
        prefetch_outputs(call_, chunk_.first_row + from, num_rows, pass.panel_number * kPanelWidth);
      const bool few = kFew == FewRows::kPrefetch && num_rows <= kFewRows;
      Rows::template multiply_of<kFew>(quantization.bits, num_rows)(
          rows_ + from * row_bytes_, quantization, pass.panel,
          few ? prefetcher_.ahead(pass.panel, panel_after(pass, next))
              : prefetcher_.schedule(pass.panel, pass.number, number, next, {}),
          pass.sums + from * kPanelWidth);
    }
  }

  static int64_t row_bytes(Format, const Weight& weight) { return layout_of(weight).bytes; }

  // The last bytes are for a row in float32, before and after its columns are permuted.
  static int64_t scratch_bytes(const LinearCall& call, int64_t num_rows) {
    return BlockScratch::num_bytes(num_rows) + num_rows * layout_of(call.weight).bytes +
           2 * (call.weight.num_inputs + kLanes) * static_cast<int64_t>(sizeof(float));
  }

  static void prepare(const LinearCall& call, int64_t first_row, int64_t end_row, char* scratch) {
    const int64_t num_rows = end_row - first_row, bytes = layout_of(call.weight).bytes;
    char* to = BlockScratch(num_rows, scratch).rest;
    float* const spare = reinterpret_cast<float*>(to + num_rows * bytes);
    float* const columns = spare + call.weight.num_inputs + kLanes;
    for (int64_t row = first_row; row < end_row; ++row, to += bytes) {
      widen_columns(call, row, spare, columns);
      Rows::convert(columns, call.weight.quantization, to);
    }
  }

 private:
  static RowLayout layout_of(const Weight& weight) {
    return RowLayout(weight.quantization, Rows::kNumberBytes);
  }

  // The panel that is read after that of a pass; null if there is none.
  const char* panel_after(const Pass& pass, const Panels& next) const {
    const char* const second = call_.panels.from(pass.panel_number).second;
    return second && pass.number == 0 ? second : next.first;
  }

  const LinearCall& call_;
  const Chunk& chunk_;
  const Tiles& tiles_;
  const char* const rows_;
  const int64_t row_bytes_;
  const Prefetcher prefetcher_;
};

template <typename Rows, FewRows kFew>
constexpr Multiplier kMultiplier{kGroupedRows,
                                 kMostBlockRows,
                                 GroupedKernel<Rows, kFew>::row_bytes,
                                 GroupedKernel<Rows, kFew>::scratch_bytes,
                                 GroupedKernel<Rows, kFew>::prepare,
                                 multiply_blocked<GroupedKernel<Rows, kFew>>};

}  // namespace grouped
