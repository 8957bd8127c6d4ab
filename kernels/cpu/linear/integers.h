// Rows rounded to 8 bits, and dot products of integers. Included once, with AVX-512 and VNNI, after
// grouped.h.
//
// A row has one scale: its numbers are rounded to integers from -127 to 127. Sums of a group's products
// are exact.

namespace integers {

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
  const grouped::RowLayout layout(quantization, 1);
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

// Adds four inputs of kRows rows times a panel's outputs.
template <int kRows>
QUIRE_INLINE void add_four(const char* row, const int64_t* places, Ints left, Ints right,
                           Ints (&sums)[kRows][2]) {
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) {
    const Ints x = broadcast_bits(load_as<int32_t>(row + places[r]));
    add_products(sums[r][0], x, left);
    add_products(sums[r][1], x, right);
  }
}

template <int kBits>
struct IntegerStep {
  using Sum = Ints;
  static constexpr int64_t kInputs = kBits == 4 ? 8 : 4, kNumberBytes = 1;

  template <int kRows>
  QUIRE_INLINE void add(const char* row, const int64_t (&places)[grouped::kGroupedRows],
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

  QUIRE_INLINE Floats as_floats(Ints sum) { return to_floats(sum); }
};

// The same sums of values of 4 bits in twice as many chains of additions: those of a single row would
// not keep the processor busy. The upper halves of bytes are multiplied in their place, as 16 times
// their values.
struct SingleRowStep {
  struct Sum {
    Ints lower{}, upper{};
  };
  static constexpr int64_t kInputs = 8, kNumberBytes = 1;

  template <int kRows>
  QUIRE_INLINE void add(const char* row, const int64_t (&)[grouped::kGroupedRows], const char* values,
                        Sum (&sums)[kRows][2]) {
    static_assert(kRows == 1);
    constexpr int kLower = 0x0F0F0F0F;
    const Ints first = broadcast_bits(load_as<int32_t>(row));
    const Ints second = broadcast_bits(load_as<int32_t>(row + 4));
    for (int half = 0; half < 2; ++half) {
      const Ints both = load_as<Ints>(values + half * sizeof(Ints));
      add_products(sums[0][half].lower, first, both & kLower);
      add_products(sums[0][half].upper, second, both & ~kLower);
    }
  }

  QUIRE_INLINE Floats as_floats(const Sum& sum) { return to_floats(sum.lower + (sum.upper >> 4)); }
};

struct IntegerRows {
  static constexpr int64_t kNumberBytes = 1;

  template <grouped::FewRows kFew>
  static grouped::MultiplyGroups multiply_of(int64_t bits, int64_t num_rows) {
    if (bits == 8) return grouped::multiply_of<IntegerStep<8>, kFew>(num_rows);
    if (num_rows == 1) return grouped::multiply_groups<1, SingleRowStep, kFew>;
    return grouped::multiply_of<IntegerStep<4>, kFew>(num_rows);
  }

  static void convert(const float* numbers, const Quantization& quantization, char* to) {
    round_row(numbers, quantization, to);
  }
};

}  // namespace integers

template <grouped::FewRows kFew>
constexpr const Multiplier& kIntegers = grouped::kMultiplier<integers::IntegerRows, kFew>;
