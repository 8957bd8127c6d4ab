// Dot products of rows of 8 bits and quantised values. Included once, with AVX-512 and VNNI, after
// grouped.h.

namespace integers {

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
  static constexpr float kCentre = 0.0f;

  template <int kRows>
  QUIRE_INLINE void add(const char* row, const int64_t* places,
                        const char* values, Ints (&sums)[kRows][2]) {
    const Ints left = load_weights<kRows, Ints>(values);
    const Ints right = load_weights<kRows, Ints>(values + sizeof(Ints));
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
  static constexpr float kCentre = 0.0f;

  template <int kRows>
  QUIRE_INLINE void add(const char* row, const int64_t*, const char* values,
                        Sum (&sums)[kRows][2]) {
    static_assert(kRows == 1);
    constexpr int kLower = 0x0F0F0F0F;
    const Ints first = broadcast_bits(load_as<int32_t>(row));
    const Ints second = broadcast_bits(load_as<int32_t>(row + 4));
    for (int half = 0; half < 2; ++half) {
      const Ints both = load_weights<kRows, Ints>(values + half * sizeof(Ints));
      add_products(sums[0][half].lower, first, both & kLower);
      add_products(sums[0][half].upper, second, both & ~kLower);
    }
  }

  QUIRE_INLINE Floats as_floats(const Sum& sum) { return to_floats(sum.lower + (sum.upper >> 4)); }
};

}  // namespace integers
