// Vectors of floats, as wide as the current instruction set allows, on the compiler's vector
// extensions. Included once per instruction set, by foreach_isa.h, with QUIRE_LANES defined.

constexpr int kLanes = QUIRE_LANES;

#define QUIRE_INLINE static inline __attribute__((always_inline))

using Floats = float __attribute__((vector_size(kLanes * 4)));
using Ints = int32_t __attribute__((vector_size(kLanes * 4)));
using Halves = uint16_t __attribute__((vector_size(kLanes * 2)));
using Bytes = uint8_t __attribute__((vector_size(kLanes)));
using Four = float __attribute__((vector_size(16)));

template <typename V, typename T>
QUIRE_INLINE V load_as(const T* from) {
  V v;
  __builtin_memcpy(&v, from, sizeof v);
  return v;
}

template <typename V, typename T>
QUIRE_INLINE void store_as(T* to, V v) {
  __builtin_memcpy(to, &v, sizeof v);
}

QUIRE_INLINE Floats broadcast(float x) { return x - Floats{}; }
QUIRE_INLINE Ints broadcast_bits(int32_t x) { return x - Ints{}; }
QUIRE_INLINE Ints bits(Floats x) { return reinterpret_cast<Ints>(x); }
QUIRE_INLINE Floats from_bits(Ints x) { return reinterpret_cast<Floats>(x); }
QUIRE_INLINE Floats to_floats(Ints x) { return __builtin_convertvector(x, Floats); }
QUIRE_INLINE Floats load(const float* from) { return load_as<Floats>(from); }
QUIRE_INLINE void store(float* to, Floats x) { store_as(to, x); }
QUIRE_INLINE Floats larger(Floats a, Floats b) { return a > b ? a : b; }

// 0, 1, 2, …
QUIRE_INLINE Floats lane_numbers() {
  Floats x;
  for (int i = 0; i < kLanes; ++i) x[i] = static_cast<float>(i);
  return x;
}

// x in the lanes [begin, end), `other` in the rest.
QUIRE_INLINE Floats within(Floats x, int64_t begin, int64_t end, float other) {
  const Floats lanes = lane_numbers();
  const auto inside = (lanes >= static_cast<float>(begin)) & (lanes < static_cast<float>(end));
  return inside ? x : broadcast(other);
}

QUIRE_INLINE float largest(Floats x) {
  Four parts[kLanes / 4];
  __builtin_memcpy(parts, &x, sizeof x);
  Four most = parts[0];
  for (int i = 1; i < kLanes / 4; ++i) most = parts[i] > most ? parts[i] : most;
  const float a = most[0] > most[1] ? most[0] : most[1];
  const float b = most[2] > most[3] ? most[2] : most[3];
  return a > b ? a : b;
}

// The sum of the vector's parts of four lanes.
QUIRE_INLINE Four sum_of_fours(Floats x) {
  Four parts[kLanes / 4];
  __builtin_memcpy(parts, &x, sizeof x);
  Four sum = parts[0];
  for (int i = 1; i < kLanes / 4; ++i) sum += parts[i];
  return sum;
}

QUIRE_INLINE float sum(Floats x) {
  const Four four = sum_of_fours(x);
  return (four[0] + four[1]) + (four[2] + four[3]);
}

// From each four lanes, the first two or the last two of a and of b, interleaved.
template <bool kHigh, std::size_t... kLane>
QUIRE_INLINE Floats zip(Floats a, Floats b, std::index_sequence<kLane...>) {
  return __builtin_shufflevector(
      a, b, (kLane / 4 * 4 + kLane % 4 / 2 + (kHigh ? 2 : 0) + (kLane & 1 ? kLanes : 0))...);
}

// From each four lanes, the first two or the last two of a, then those of b.
template <bool kHigh, std::size_t... kLane>
QUIRE_INLINE Floats join(Floats a, Floats b, std::index_sequence<kLane...>) {
  return __builtin_shufflevector(
      a, b, (kLane / 4 * 4 + kLane % 2 + (kHigh ? 2 : 0) + (kLane & 2 ? kLanes : 0))...);
}

// The sum of each of four vectors.
QUIRE_INLINE Four sums(Floats a, Floats b, Floats c, Floats d) {
  constexpr auto kAll = std::make_index_sequence<kLanes>();
  const Floats ab = zip<false>(a, b, kAll) + zip<true>(a, b, kAll);
  const Floats cd = zip<false>(c, d, kAll) + zip<true>(c, d, kAll);
  return sum_of_fours(join<false>(ab, cd, kAll) + join<true>(ab, cd, kAll));
}

// e^x with a relative error of 2e-7; 0 below -87, NaN for NaN. For x up to 88.
//
// Cody and Waite's reduction: e^x = 2^n e^r with |r| <= ln(2) / 2, and Taylor's series for e^r.
QUIRE_INLINE Floats exponential(Floats x) {
  constexpr float kLog2E = 1.44269504089f, kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
  // Adding it leaves the nearest integer, plus the exponent's bias, in the last bits of a float.
  constexpr float kRounder = 0x1.8p23f + 127.0f;
  const Floats shifted = x * kLog2E + kRounder;
  const Floats n = shifted - kRounder;
  const Floats r = (x - n * kLn2High) - n * kLn2Low;
  Floats series = broadcast(1.0f / 720) * r + 1.0f / 120;
  series = series * r + 1.0f / 24;
  series = series * r + 1.0f / 6;
  series = series * r + 0.5f;
  series = series * r + 1.0f;
  series = series * r + 1.0f;
  const Floats power = from_bits(bits(shifted) << 23);
  return x < -87.0f ? Floats{} : series * power;
}

// With an absolute error of 2e-7.
QUIRE_INLINE Floats hyperbolic_tangent(Floats x) {
  // Beyond 15 it is 1 in single precision.
  const Floats bounded = x > 15.0f ? broadcast(15.0f) : (x < -15.0f ? broadcast(-15.0f) : x);
  const Floats e = exponential(bounded * 2.0f);
  return 1.0f - 2.0f / (e + 1.0f);
}

// Half of one stage of `transpose`: every other run of kStep lanes of a and of b.
template <int kStep, bool kHigh, std::size_t... kLane>
QUIRE_INLINE Floats interleave(Floats a, Floats b, std::index_sequence<kLane...>) {
  return __builtin_shufflevector(
      a, b,
      (kLane & kStep ? kLanes + kLane - (kHigh ? 0 : kStep) : kLane + (kHigh ? kStep : 0))...);
}

// Transposes a square of kLanes x kLanes floats in place: each stage exchanges the off-diagonal
// quarters of squares of twice the size.
template <int kStep = 1>
QUIRE_INLINE void transpose(Floats* rows) {
  constexpr auto kAll = std::make_index_sequence<kLanes>();
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    if (i & kStep) continue;
    const Floats a = rows[i], b = rows[i + kStep];
    rows[i] = interleave<kStep, false>(a, b, kAll);
    rows[i + kStep] = interleave<kStep, true>(a, b, kAll);
  }
  if constexpr (2 * kStep < kLanes) transpose<2 * kStep>(rows);
}
