// Pairs of bfloat16 numbers, and their dot products. Included once, with AVX-512 and its dot products
// of bfloat16, after tile_shapes.h.

// Numbers in a vector of pairs.
constexpr int kPairedLanes = 2 * kLanes;

using Words = uint16_t __attribute__((vector_size(2 * kPairedLanes)));

// sums += products of pairs. By assembly, as functions for AVX-512 cannot inline those for
// instructions beyond it; so are the other instructions below.
QUIRE_INLINE void add_dots(Floats& sums, Ints a, Ints b) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(sums) : "v"(a), "v"(b));
}

QUIRE_INLINE Halves rounded_to_bfloat16(Floats x) {
  Halves rounded;
  asm("vcvtneps2bf16 %1, %0" : "=v"(rounded) : "v"(x));
  return rounded;
}

// Stores rounded weights, and returns them.
QUIRE_INLINE Floats store_weights(BFloat16* to, Floats weights) {
  const Halves rounded = rounded_to_bfloat16(weights);
  store_as(&to->raw, rounded);
  return from_bits(widen_integers(rounded) << 16);
}

// Numbers of a cache that are loaded at a time, and their vectors.
template <typename T>
constexpr int kLoadedNumbers = 64 / sizeof(T);
template <typename T>
constexpr int kLoadedVectors = kLoadedNumbers<T> / kPairedLanes;

QUIRE_INLINE void load_pairs(const BFloat16* from, Ints (&to)[1]) { to[0] = load_as<Ints>(from); }

// bfloat16 of the 128 magnitudes of an 8-bit format: the upper bytes, then the lower ones.
struct MagnitudeTable {
  alignas(64) uint8_t bytes[2][128];

  template <typename Format>
  static constexpr MagnitudeTable of() {
    MagnitudeTable table{};
    for (int i = 0; i < 128; ++i) {
      const int wide = wide_bits<Format>(i);
      table.bytes[0][i] = static_cast<uint8_t>(wide >> 8);
      table.bytes[1][i] = static_cast<uint8_t>(wide & 0xFF);
    }
    return table;
  }

 private:
  template <typename Format>
  static constexpr int wide_bits(int magnitude) {
    if (magnitude > Format::kLargest) {
      const bool is_infinite = Format::kFirstSpecial == Format::kTopExponent &&
                               magnitude == Format::kTopExponent;
      return is_infinite ? 0x7F80 : 0x7FC0;
    }
    int exponent = (magnitude >> Format::kMantissaBits) - Format::kBias;
    int mantissa = magnitude & ((1 << Format::kMantissaBits) - 1);
    if (magnitude < 1 << Format::kMantissaBits) {
      if (magnitude == 0) return 0;
      for (++exponent; !(mantissa >> Format::kMantissaBits); mantissa <<= 1) --exponent;
      mantissa &= (1 << Format::kMantissaBits) - 1;
    }
    return (exponent + 127) << 7 | mantissa << (7 - Format::kMantissaBits);
  }
};

template <typename T>
constexpr MagnitudeTable kMagnitudes = MagnitudeTable::of<
    std::conditional_t<std::is_same_v<T, E4M3>, SmallFloat<4, 3, false>, SmallFloat<5, 2, true>>>();

QUIRE_INLINE Ints permute_bytes(Ints indices, Ints first, Ints second) {
  asm("vpermi2b %2, %1, %0" : "+v"(indices) : "v"(first), "v"(second));
  return indices;
}

// 64 numbers of 8 bits, in order.
template <typename T>
QUIRE_INLINE void load_pairs(const T* from, Ints (&to)[2]) {
  const uint8_t(&upper)[128] = kMagnitudes<T>.bytes[0];
  const uint8_t(&lower)[128] = kMagnitudes<T>.bytes[1];
  // Unpacking takes the first and the last eight bytes of each 16.
  const __m512i numbers = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7),
                                                   _mm512_loadu_si512(from));
  const Ints x = reinterpret_cast<Ints>(numbers);
  const Ints high = permute_bytes(x, load_as<Ints>(upper), load_as<Ints>(upper + 64)) |
                    (x & static_cast<int32_t>(0x80808080));
  const Ints low = permute_bytes(x, load_as<Ints>(lower), load_as<Ints>(lower + 64));
  to[0] = reinterpret_cast<Ints>(
      _mm512_unpacklo_epi8(reinterpret_cast<__m512i>(low), reinterpret_cast<__m512i>(high)));
  to[1] = reinterpret_cast<Ints>(
      _mm512_unpackhi_epi8(reinterpret_cast<__m512i>(low), reinterpret_cast<__m512i>(high)));
}

// The first `count` numbers, zeros in the rest.
template <typename T>
QUIRE_INLINE void load_pairs_first(const T* from, int64_t count,
                                   Ints (&to)[kLoadedVectors<T>]) {
  alignas(64) T padded[kLoadedNumbers<T>];
  const uint64_t bytes = (uint64_t{1} << count * sizeof(T)) - 1;
  store_as(padded, _mm512_maskz_loadu_epi8(bytes, from));
  load_pairs(padded, to);
}

// As many numbers of a row from `d` on as are loaded at a time; zeros beyond `dim`.
template <typename T>
QUIRE_INLINE void load_pairs_within(const T* row, int64_t d, int64_t dim,
                                    Ints (&to)[kLoadedVectors<T>]) {
  if (d + kLoadedNumbers<T> <= dim) {
    load_pairs(row + d, to);
  } else {
    load_pairs_first(row + d, dim - d, to);
  }
}

// Pairs of a number of a and one of b: from each eight numbers, the first four or the last four.
QUIRE_INLINE Ints pair_first(Ints a, Ints b) {
  return reinterpret_cast<Ints>(
      _mm512_unpacklo_epi16(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
}
QUIRE_INLINE Ints pair_last(Ints a, Ints b) {
  return reinterpret_cast<Ints>(
      _mm512_unpackhi_epi16(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
}

// Puts numbers in the order that such pairs had before: `first` and `last` become the first and the
// last 16.
QUIRE_INLINE void order_paired(Floats& first, Floats& last) {
  const Floats a = first, b = last;
  first = __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  last = __builtin_shufflevector(a, b, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
}
