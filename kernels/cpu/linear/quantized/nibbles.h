// Rows of bfloat16 times weights of 4 bits, whose values are looked up as bfloat16. Included once, with
// AVX-512 and its dot products of bfloat16, after grouped.h and bfloat16.h.

namespace nibbles {

struct NibbleStep {
  using Sum = Floats;
  static constexpr int64_t kInputs = 8, kNumberBytes = sizeof(BFloat16);
  static constexpr float kCentre = 0.0f;

  // A shift moves the values of two inputs to the lowest bits of a number's halves, which select their
  // bfloat16: of the first and third input of four, or of the second and the fourth.
  template <int kRows>
  QUIRE_INLINE void add(const char* row, const int64_t* places,
                        const char* values, Floats (&sums)[kRows][2]) {
    const Ints left = load_weights<kRows, Ints>(values);
    const Ints right = load_weights<kRows, Ints>(values + sizeof(Ints));
    add_pair<kRows, 0>(row, places, left, right, sums);
    add_pair<kRows, 8>(row + 4, places, left, right, sums);
    add_pair<kRows, 4>(row + 8, places, left, right, sums);
    add_pair<kRows, 12>(row + 12, places, left, right, sums);
  }

  QUIRE_INLINE Floats as_floats(Floats sum) { return sum; }

  // The inputs of a step in the order of `add`.
  static constexpr int kOrder[kInputs] = {0, 2, 1, 3, 4, 6, 5, 7};

 private:
  template <int kRows, int kShift>
  QUIRE_INLINE void add_pair(const char* row, const int64_t* places, Ints left, Ints right,
                             Floats (&sums)[kRows][2]) {
    const Ints first = looked_up(left >> kShift), second = looked_up(right >> kShift);
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      const Ints x = bfloat16::PairStep::row(row + places[r]);
      bfloat16::PairStep::add(sums[r][0], x, first);
      bfloat16::PairStep::add(sums[r][1], x, second);
    }
  }

  // Five bits of each 16 are the index; the table has every number twice, as the fifth is another
  // value's.
  QUIRE_INLINE Ints looked_up(Ints halves) {
    alignas(64) static constexpr uint16_t kNumbers[2 * kLanes] = {
        0x0000, 0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0,
        0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170,
        0x0000, 0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0,
        0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};
    return reinterpret_cast<Ints>(_mm512_permutexvar_epi16(
        reinterpret_cast<__m512i>(halves), reinterpret_cast<__m512i>(load_as<Ints>(kNumbers))));
  }
};

struct BFloat16Rows {
  static constexpr int64_t kNumberBytes = NibbleStep::kNumberBytes;

  template <grouped::FewRows kFew>
  static grouped::MultiplyGroups multiply_of(int64_t, int64_t num_rows) {
    return grouped::multiply_of<NibbleStep, kFew>(num_rows);
  }

  // The numbers are bfloat16 already.
  static void convert(const float* numbers, const Quantization& quantization, char* to) {
    const grouped::RowLayout layout(quantization, kNumberBytes);
    const int64_t group_size = quantization.group_size, padded = quantization.padded_group();
    float* const sums = reinterpret_cast<float*>(to + layout.sums_at);
    auto* halves = reinterpret_cast<uint16_t*>(to);
    for (int64_t group = 0; group < quantization.num_groups; ++group, numbers += group_size) {
      float sum = 0.0f;
      for (int64_t k = 0; k < group_size; ++k) sum += numbers[k];
      sums[group] = sum;
      for (int64_t k = 0; k < padded; k += NibbleStep::kInputs)
        for (int64_t i = 0; i < NibbleStep::kInputs; ++i) {
          const int64_t input = k + NibbleStep::kOrder[i];
          uint32_t number = 0;
          if (input < group_size) __builtin_memcpy(&number, numbers + input, sizeof number);
          *halves++ = static_cast<uint16_t>(number >> 16);
        }
    }
    *reinterpret_cast<float*>(to + layout.scale_at) = 1.0f;
  }
};

}  // namespace nibbles

template <grouped::FewRows kFew>
constexpr const Multiplier& kNibbles = grouped::kMultiplier<nibbles::BFloat16Rows, kFew>;
