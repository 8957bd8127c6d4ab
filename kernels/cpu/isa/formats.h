// Converts numbers of all formats to floats and back. Included once per instruction set, after vec.h.

// IEEE-like numbers of a sign, kExponent bits of exponent and kMantissa bits of mantissa.
template <int kExponent, int kMantissa, bool kHasInfinity>
struct SmallFloat {
  static constexpr int kMantissaBits = kMantissa;
  static constexpr int kBias = (1 << (kExponent - 1)) - 1;
  static constexpr int kShift = 23 - kMantissa;
  static constexpr int kSignShift = 31 - kExponent - kMantissa;
  static constexpr int kMagnitude = (1 << (kExponent + kMantissa)) - 1;
  static constexpr int kTopExponent = ((1 << kExponent) - 1) << kMantissa;
  // The magnitude of the first infinity or NaN, and that of the largest number.
  static constexpr int kFirstSpecial = kHasInfinity ? kTopExponent : kMagnitude;
  static constexpr int kLargest = kFirstSpecial - 1;

  static constexpr float power_of_two(int n) { return n < 0 ? 0.5f * power_of_two(n + 1)
                                                     : n > 0 ? 2.0f * power_of_two(n - 1) : 1.0f; }

  QUIRE_INLINE Floats widen(Ints x) {
    const Ints magnitude = x & kMagnitude;
    const Ints normal = (magnitude << kShift) + ((127 - kBias) << 23);
    const Ints tiny = bits(to_floats(magnitude) * power_of_two(1 - kBias - kMantissa));
    Ints wide = magnitude < (1 << kMantissa) ? tiny : normal;
    // Infinity stays infinity in formats that have it; all else is NaN.
    const Ints special = kHasInfinity ? (magnitude << kShift) | 0x7F800000
                                      : broadcast_bits(0x7FC00000);
    wide = magnitude >= kFirstSpecial ? special : wide;
    return from_bits(wide | (x & ~kMagnitude) << kSignShift);
  }

  // Rounds to nearest, ties to even. What is too large becomes the largest number with `kSaturate`,
  // else infinity. NaN stays NaN.
  template <bool kSaturate>
  QUIRE_INLINE Ints narrow(Floats x) {
    const Ints wide = bits(x) & 0x7FFFFFFF;
    const Ints odd = (wide >> kShift) & 1;
    const Ints rounded =
        (wide - ((127 - kBias) << 23) + ((1 << (kShift - 1)) - 1) + odd) >> kShift;
    // Adding this number aligns the last bit of the small format with the last bit of the float.
    constexpr float kAligner = power_of_two(1 - kBias - kMantissa + 23);
    const Ints tiny = bits(from_bits(wide) + kAligner) - bits(broadcast(kAligner));
    Ints magnitude = wide < ((128 - kBias) << 23) ? tiny : rounded;
    const int over = kSaturate ? kLargest : kTopExponent;
    magnitude = magnitude > kLargest ? broadcast_bits(over) : magnitude;
    magnitude = wide > 0x7F800000 ? broadcast_bits(kMagnitude) : magnitude;
    return magnitude | ((bits(x) >> kSignShift) & (1 << (kExponent + kMantissa)));
  }
};

struct Float16 { uint16_t raw; };
struct BFloat16 { uint16_t raw; };
struct E4M3 { uint8_t raw; };
struct E5M2 { uint8_t raw; };

#if QUIRE_LANES == 4

QUIRE_INLINE Ints load_halves(const void* from) {
  return __builtin_convertvector(load_as<Halves>(static_cast<const uint8_t*>(from)), Ints);
}

QUIRE_INLINE Ints load_bytes(const void* from) {
  return __builtin_convertvector(load_as<Bytes>(static_cast<const uint8_t*>(from)), Ints);
}

QUIRE_INLINE Floats load(const BFloat16* from) { return from_bits(load_halves(from) << 16); }

QUIRE_INLINE Floats load(const Float16* from) {
  return SmallFloat<5, 10, true>::widen(load_halves(from));
}

QUIRE_INLINE Floats load(const E4M3* from) {
  return SmallFloat<4, 3, false>::widen(load_bytes(from));
}

QUIRE_INLINE Floats load(const E5M2* from) {
  return SmallFloat<5, 2, true>::widen(load_bytes(from));
}

#else

// The 16-bit numbers of two vectors.
using TwoHalves = uint16_t __attribute__((vector_size(kLanes * 4)));

// Widening by intrinsics: the compiler's own code for it is slower.
#if QUIRE_LANES == 8
QUIRE_INLINE Halves load_bytes(const void* from) {
  return reinterpret_cast<Halves>(
      _mm_cvtepu8_epi16(_mm_loadl_epi64(static_cast<const __m128i*>(from))));
}
QUIRE_INLINE TwoHalves load_two_bytes(const void* from) {
  return reinterpret_cast<TwoHalves>(
      _mm256_cvtepu8_epi16(_mm_loadu_si128(static_cast<const __m128i*>(from))));
}
QUIRE_INLINE Ints widen_integers(Halves x) {
  return reinterpret_cast<Ints>(_mm256_cvtepu16_epi32(reinterpret_cast<__m128i>(x)));
}
QUIRE_INLINE Floats widen_halves(Halves x) {
  return reinterpret_cast<Floats>(_mm256_cvtph_ps(reinterpret_cast<__m128i>(x)));
}
#else
QUIRE_INLINE Halves load_bytes(const void* from) {
  return reinterpret_cast<Halves>(
      _mm256_cvtepu8_epi16(_mm_loadu_si128(static_cast<const __m128i*>(from))));
}
// The masked forms: the compiler warns about the others.
QUIRE_INLINE TwoHalves load_two_bytes(const void* from) {
  return reinterpret_cast<TwoHalves>(_mm512_maskz_cvtepu8_epi16(
      0xFFFFFFFF, _mm256_loadu_si256(static_cast<const __m256i*>(from))));
}
QUIRE_INLINE Ints widen_integers(Halves x) {
  return reinterpret_cast<Ints>(
      _mm512_maskz_cvtepu16_epi32(0xFFFF, reinterpret_cast<__m256i>(x)));
}
QUIRE_INLINE Floats widen_halves(Halves x) {
  return reinterpret_cast<Floats>(_mm512_maskz_cvtph_ps(0xFFFF, reinterpret_cast<__m256i>(x)));
}
#endif

QUIRE_INLINE Floats load(const BFloat16* from) {
  return from_bits(widen_integers(load_as<Halves>(&from->raw)) << 16);
}

QUIRE_INLINE Floats load(const Float16* from) { return widen_halves(load_as<Halves>(&from->raw)); }

// Converts 8-bit numbers, one per 16-bit lane, to half precision. An E5M2 number is the upper byte of
// one.
template <typename V>
QUIRE_INLINE V to_halves(V x, const E5M2*) {
  return x << 8;
}

// The exponent's bias grows by 8, so the results must be multiplied by 256.
template <typename V>
QUIRE_INLINE V to_halves(V x, const E4M3*) {
  const V half = (x + (x & 0x80)) << 7;
  const V nan = reinterpret_cast<V>((x | 0x80) == 0xFF);
  return half | nan;
}

QUIRE_INLINE Floats load(const E5M2* from) {
  return widen_halves(to_halves(load_bytes(from), from));
}

QUIRE_INLINE Floats load(const E4M3* from) {
  return widen_halves(to_halves(load_bytes(from), from)) * 256.0f;
}

template <typename T>
QUIRE_INLINE void widen_pair(const T* from, Floats& first, Floats& second) {
  Halves halves[2];
  const TwoHalves both = to_halves(load_two_bytes(from), from);
  __builtin_memcpy(halves, &both, sizeof both);
  first = widen_halves(halves[0]);
  second = widen_halves(halves[1]);
}

QUIRE_INLINE void load_pair(const E5M2* from, Floats& first, Floats& second) {
  widen_pair(from, first, second);
}

QUIRE_INLINE void load_pair(const E4M3* from, Floats& first, Floats& second) {
  widen_pair(from, first, second);
  first *= 256.0f;
  second *= 256.0f;
}

#endif

// Two consecutive vectors.
template <typename T>
QUIRE_INLINE void load_pair(const T* from, Floats& first, Floats& second) {
  first = load(from);
  second = load(from + kLanes);
}

QUIRE_INLINE void store(Float16* to, Floats x) {
  const Ints small = SmallFloat<5, 10, true>::narrow<false>(x);
  store_as(&to->raw, __builtin_convertvector(small, Halves));
}

QUIRE_INLINE void store(BFloat16* to, Floats x) {
  const Ints wide = bits(x);
  const Ints rounded = (wide + 0x7FFF + ((wide >> 16) & 1)) >> 16;
  const Ints nan = broadcast_bits(0x7FC0);
  const Ints small = (wide & 0x7FFFFFFF) > 0x7F800000 ? nan : rounded;
  store_as(&to->raw, __builtin_convertvector(small, Halves));
}

QUIRE_INLINE void store(E4M3* to, Floats x) {
  const Ints small = SmallFloat<4, 3, false>::narrow<true>(x);
  store_as(&to->raw, __builtin_convertvector(small, Bytes));
}

QUIRE_INLINE void store(E5M2* to, Floats x) {
  const Ints small = SmallFloat<5, 2, true>::narrow<true>(x);
  store_as(&to->raw, __builtin_convertvector(small, Bytes));
}

// The first `count` lanes, fewer than a vector; zeros in the rest.
template <typename T>
QUIRE_INLINE Floats load_first(const T* from, int64_t count) {
  T padded[kLanes] = {};
  __builtin_memcpy(padded, from, count * sizeof(T));
  return load(padded);
}

template <typename T>
QUIRE_INLINE void store_first(T* to, Floats x, int64_t count) {
  T padded[kLanes];
  store(padded, x);
  __builtin_memcpy(to, padded, count * sizeof(T));
}

QUIRE_INLINE int64_t padded(int64_t dim) { return (dim + kLanes - 1) / kLanes * kLanes; }

// `dim` numbers times `factor`, and zeros up to a whole vector.
template <typename T>
static void widen_row(const void* from, float* to, int64_t dim, float factor) {
  const T* row = static_cast<const T*>(from);
  int64_t d = 0;
  for (; d + kLanes <= dim; d += kLanes) store(to + d, load(row + d) * factor);
  if (d < dim) store(to + d, load_first(row + d, dim - d) * factor);
}

template <typename T>
static void narrow_row(const float* from, void* to, int64_t dim) {
  T* row = static_cast<T*>(to);
  int64_t d = 0;
  for (; d + kLanes <= dim; d += kLanes) store(row + d, load(from + d));
  if (d < dim) store_first(row + d, load(from + d), dim - d);
}

QUIRE_INLINE int64_t bytes_of(Format format) {
  return format == Format::kFloat32 ? 4 : format <= Format::kBFloat16 ? 2 : 1;
}

// Calls `visit` with a number of a format's type, of 16 or 32 bits.
template <typename Visit>
QUIRE_INLINE void visit_wide(Format format, Visit visit) {
  switch (format) {
    case Format::kFloat16: return visit(Float16{});
    case Format::kBFloat16: return visit(BFloat16{});
    default: return visit(float{});
  }
}

// The same for all formats.
template <typename Visit>
QUIRE_INLINE void visit_any(Format format, Visit visit) {
  switch (format) {
    case Format::kE4M3: return visit(E4M3{});
    case Format::kE5M2: return visit(E5M2{});
    default: return visit_wide(format, visit);
  }
}

static void widen_row(Format format, const void* from, float* to, int64_t dim, float factor) {
  visit_any(format, [=](auto number) { widen_row<decltype(number)>(from, to, dim, factor); });
}

static void narrow_row(Format format, const float* from, void* to, int64_t dim) {
  visit_any(format, [=](auto number) { narrow_row<decltype(number)>(from, to, dim); });
}
