// Splits numbers into bfloat16 parts, in the layout of AMX tiles. Included once, after tiles.h.

namespace amx {

using Words = uint32_t __attribute__((vector_size(kLanes * 4)));

constexpr int32_t kUpper = static_cast<int32_t>(0xFFFF0000);

// The upper halves of b's numbers in the upper halves, those of a's in the lower.
QUIRE_INLINE Ints upper_halves(Ints a, Ints b) {
  const Ints shifted = reinterpret_cast<Ints>(reinterpret_cast<Words>(a) >> 16);
  constexpr int kFirstOrBothOthers = 0xF8;
  return reinterpret_cast<Ints>(_mm512_ternarylogic_epi32(
      reinterpret_cast<__m512i>(shifted), reinterpret_cast<__m512i>(broadcast_bits(kUpper)),
      reinterpret_cast<__m512i>(b), kFirstOrBothOthers));
}

// x minus the bfloat16 number in the upper half of `near`.
QUIRE_INLINE Ints rest(Ints x, Ints near) {
  return bits(from_bits(x) - from_bits(near & kUpper));
}

// Added before truncation, it makes that round to nearest; 0 where the result would be infinite.
QUIRE_INLINE Ints half_a_unit(Ints x) {
  constexpr int32_t kTooLarge = 0x7F7F8000;
  return (x & 0x7FFFFFFF) < kTooLarge ? broadcast_bits(0x8000) : Ints{};
}

// Stores the parts of pairs, `kStride` bytes apart. Each part is the upper half of the remainder: with
// kRounded rounded to nearest, except the last, which holds all of the remainder, and NaN.
template <int kParts, int kStride, bool kRounded>
QUIRE_INLINE void split(Floats first, Floats second, char* to) {
  Ints a = bits(first), b = bits(second);
#pragma GCC unroll 3
  for (int part = 0; part < kParts; ++part) {
    const bool rounds = kRounded && part + 1 < kParts;
    const Ints near_a = rounds ? a + half_a_unit(a) : a, near_b = rounds ? b + half_a_unit(b) : b;
    store_as(to + part * kStride, upper_halves(near_a, near_b));
    a = rest(a, near_a), b = rest(b, near_b);
  }
}

// A pair of inputs is one of a step's first half and one of its second, which are in the same lanes of
// two vectors.

// The rows' side: [tiles, steps, parts, 16 rows, 16 pairs of inputs, 2].

template <typename T>
QUIRE_INLINE void load_inputs(const T* from, int64_t count, Floats& first, Floats& second) {
  if (count >= kStepInputs) return load_pair(from, first, second);
  first = count >= kLanes ? load(from) : load_first(from, count);
  second = count > kLanes ? load_first(from + kLanes, count - kLanes) : Floats{};
}

// One tile after another, so that writes are sequential.
template <typename T>
static void split_rows(const LinearCall& call, int64_t first_row, int64_t end_row, char* to) {
  constexpr int kParts = kPartsOf<T>;
  const T* const rows = static_cast<const T*>(call.rows);
  for (int64_t top = first_row; top < end_row; top += kSide) {
    const int64_t bottom = std::min<int64_t>(top + kSide, end_row);
    for (int64_t k = 0; k < call.weight.num_inputs; k += kStepInputs, to += kParts * kTileBytes) {
      for (int64_t row = top; row < bottom; ++row) {
        Floats first, second;
        load_inputs(rows + row * call.row_stride + k, call.weight.num_inputs - k, first, second);
        split<kParts, kTileBytes, true>(first, second, to + (row - top) * 64);
      }
    }
  }
}

// The weight's side: steps of a panel, one of which is multiplied while the next is split:
// [parts, 2 x 16 outputs, 16 pairs of inputs, 16 outputs, 2].

// The distance between the inputs of a pair.
constexpr int kToOther = kPairs * kPanelWidth;

// Splits a pair of inputs, for all outputs.
template <typename W>
QUIRE_INLINE void split_pair(const W* inputs, char* to) {
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    const W* const first = inputs + half * kLanes;
    split<kPartsOf<W>, 2 * kTileBytes, false>(load(first), load(first + kToOther),
                                              to + half * kTileBytes);
  }
}

// Even outputs first, then odd ones: no number changes its lane.
QUIRE_INLINE void split_pair(const BFloat16* inputs, char* to) {
  const auto a = load_as<Words>(inputs), b = load_as<Words>(inputs + kToOther);
  store_as(to, (a & 0xFFFF) | (b << 16));
  store_as(to + kTileBytes, (a >> 16) | (b & 0xFFFF0000));
}

}  // namespace amx
