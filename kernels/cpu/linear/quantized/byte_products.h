// Products of rows of 8 bits and quantised values, added in pairs. Included once, with AVX2, after
// grouped.h.
//
// An instruction multiplies bytes, unsigned ones with signed ones, and adds each two products in 16
// bits, where it saturates. So 128 is subtracted from values of 8 bits, and the sign of the rest is
// given to the row, whose products with the magnitudes are added: no pair exceeds 2 * 128 * 127 then.

namespace integers {

QUIRE_INLINE __m256i as_bytes(Ints x) { return reinterpret_cast<__m256i>(x); }

QUIRE_INLINE Ints pairs(Ints unsigned_bytes, __m256i signed_bytes) {
  return reinterpret_cast<Ints>(_mm256_maddubs_epi16(as_bytes(unsigned_bytes), signed_bytes));
}

// Adds adjacent numbers of 16 bits.
QUIRE_INLINE Ints fours(Ints pairs) {
  return reinterpret_cast<Ints>(_mm256_madd_epi16(as_bytes(pairs), _mm256_set1_epi16(1)));
}

template <int kBits>
struct IntegerStep;

template <>
struct IntegerStep<8> {
  using Sum = Ints;
  static constexpr int64_t kInputs = 4, kNumberBytes = 1;
  static constexpr float kCentre = 128.0f;

  // Adds four inputs of kRows rows times a panel's outputs.
  template <int kRows>
  QUIRE_INLINE void add(const char* row, const int64_t* places, const char* values,
                        Ints (&sums)[kRows][2]) {
    Ints numbers[2], magnitudes[2];
    for (int half = 0; half < 2; ++half) {
      numbers[half] = load_as<Ints>(values + half * sizeof(Ints)) ^ kSigns;
      magnitudes[half] = reinterpret_cast<Ints>(_mm256_abs_epi8(as_bytes(numbers[half])));
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const __m256i x = as_bytes(broadcast_bits(load_as<int32_t>(row + places[r])));
      for (int half = 0; half < 2; ++half)
        sums[r][half] +=
            fours(pairs(magnitudes[half], _mm256_sign_epi8(x, as_bytes(numbers[half]))));
    }
  }

  QUIRE_INLINE Floats as_floats(Ints sum) { return to_floats(sum); }

 private:
  static constexpr int kSigns = static_cast<int>(0x80808080);
};

template <>
struct IntegerStep<4> {
  using Sum = Ints;
  static constexpr int64_t kInputs = 8, kNumberBytes = 1;
  static constexpr float kCentre = 0.0f;

  // Pairs of both halves of bytes are at most 4 * 15 * 127 together.
  template <int kRows>
  QUIRE_INLINE void add(const char* row, const int64_t* places, const char* values,
                        Ints (&sums)[kRows][2]) {
    constexpr int kLower = 0x0F0F0F0F;
    Ints lower[2], upper[2];
    for (int half = 0; half < 2; ++half) {
      const Ints both = load_as<Ints>(values + half * sizeof(Ints));
      lower[half] = both & kLower, upper[half] = (both >> 4) & kLower;
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const __m256i first = as_bytes(broadcast_bits(load_as<int32_t>(row + places[r])));
      const __m256i second = as_bytes(broadcast_bits(load_as<int32_t>(row + places[r] + 4)));
      for (int half = 0; half < 2; ++half)
        sums[r][half] += fours(reinterpret_cast<Ints>(
            _mm256_add_epi16(as_bytes(pairs(lower[half], first)), as_bytes(pairs(upper[half], second)))));
    }
  }

  QUIRE_INLINE Floats as_floats(Ints sum) { return to_floats(sum); }
};

using SingleRowStep = IntegerStep<4>;

}  // namespace integers
