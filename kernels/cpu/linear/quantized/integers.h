// Rows rounded to 8 bits, which are multiplied with quantised values as integers. Included once per
// instruction set that has such products, after dot_products.h or byte_products.h.
//
// A row has one scale: its numbers are rounded to integers from -127 to 127. Sums of a group's products
// are exact. So are those of its integers in float32: a group has at most 2^17 inputs.

namespace integers {

// To the nearest integers, ties to even.
QUIRE_INLINE Ints rounded(Floats x) {
#if QUIRE_LANES == 16
  return reinterpret_cast<Ints>(_mm512_cvtps_epi32(reinterpret_cast<__m512>(x)));
#else
  return reinterpret_cast<Ints>(_mm256_cvtps_epi32(reinterpret_cast<__m256>(x)));
#endif
}

// Rounds `count` numbers times `factor`; returns the sum of the integers.
static float round_group(const float* numbers, int64_t count, float factor, char* to) {
  Ints total{};
  int64_t k = 0;
  const auto take = [&](Floats some) {
    const Ints integers = rounded(some * factor);
    total += integers;
    return __builtin_convertvector(integers, Bytes);
  };
  for (; k + kLanes <= count; k += kLanes) store_as(to + k, take(load(numbers + k)));
  if (k < count) {
    const Bytes last = take(load_first(numbers + k, count - k));
    __builtin_memcpy(to + k, &last, count - k);
  }
  return sum(to_floats(total));
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
    sums[group] = round_group(numbers + group * group_size, group_size, factor, to + group * padded);
  *reinterpret_cast<float*>(to + layout.scale_at) = most / 127.0f;
}

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
