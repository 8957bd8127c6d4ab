// Rows of float32 times quantised values, which are widened in registers. Included once per instruction
// set, after grouped.h.

namespace widened {

using Words = uint32_t __attribute__((vector_size(kLanes * 4)));

// Values of 8 bits are made signed first: sums of large products that cancel each other would be less
// exact. Most weights are symmetric, so that their offsets leave nothing to subtract then.
struct ByteStep {
  using Sum = Floats;
  static constexpr int64_t kInputs = 4, kNumberBytes = sizeof(float);
  static constexpr float kCentre = 128.0f;

  QUIRE_INLINE Ints prepared(Ints values) { return values ^ static_cast<int>(0x80808080); }

  QUIRE_INLINE Floats number_of(Ints values, int i) {
    return to_floats((values << (24 - 8 * i)) >> 24);
  }

  // What the number of an input is divided by in rows.
  static constexpr float factor_of(int) { return 1.0f; }
};

// Values of 4 bits are converted where they are in their 32 bits, and the row has the powers of two by
// which they are too large: it takes an instruction less than a shift. Only the last one is shifted, as
// its first bit would be a sign.
struct NibbleStep {
  using Sum = Floats;
  static constexpr int64_t kInputs = 8, kNumberBytes = sizeof(float);
  static constexpr float kCentre = 0.0f;

  QUIRE_INLINE Ints prepared(Ints values) { return values; }

  QUIRE_INLINE Floats number_of(Ints values, int i) {
    if (i == kLast) return to_floats(reinterpret_cast<Ints>(reinterpret_cast<Words>(values) >> 28));
    return to_floats(values & (0xF << place_of(i)));
  }

  static constexpr float factor_of(int i) { return i == kLast ? 1.0f : 1 << place_of(i); }

 private:
  static constexpr int kLast = kInputs - 1;

  static constexpr int place_of(int i) { return 8 * (i % 4) + 4 * (i / 4); }
};

template <typename Values>
struct WideStep : Values {
  template <int kRows>
  QUIRE_INLINE void add(const char* row, const int64_t* places, const char* values,
                        Floats (&sums)[kRows][2]) {
    const Ints left = Values::prepared(load_weights<kRows, Ints>(values));
    const Ints right = Values::prepared(load_weights<kRows, Ints>(values + sizeof(Ints)));
#pragma GCC unroll 8
    for (int i = 0; i < Values::kInputs; ++i) {
      const Floats first = Values::number_of(left, i), second = Values::number_of(right, i);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const Floats x = broadcast(load_as<float>(row + places[r] + i * Values::kNumberBytes));
        sums[r][0] += x * first;
        sums[r][1] += x * second;
      }
    }
  }

  QUIRE_INLINE Floats as_floats(Floats sum) { return sum; }
};

template <typename Values>
static void convert_row(const float* numbers, const Quantization& quantization, char* to) {
  const grouped::RowLayout layout(quantization, Values::kNumberBytes);
  const int64_t group_size = quantization.group_size, padded = quantization.padded_group();
  float* const sums = reinterpret_cast<float*>(to + layout.sums_at);
  float* place = reinterpret_cast<float*>(to);
  for (int64_t group = 0; group < quantization.num_groups; ++group) {
    float total = 0.0f;
    for (int64_t k = 0; k < padded; k += Values::kInputs)
      for (int i = 0; i < Values::kInputs; ++i) {
        const float number = k + i < group_size ? numbers[k + i] : 0.0f;
        total += number;
        *place++ = number * (1.0f / Values::factor_of(i));
      }
    sums[group] = total;
    numbers += group_size;
  }
  *reinterpret_cast<float*>(to + layout.scale_at) = 1.0f;
}

struct WideRows {
  static constexpr int64_t kNumberBytes = sizeof(float);

  template <grouped::FewRows kFew>
  static grouped::MultiplyGroups multiply_of(int64_t bits, int64_t num_rows) {
    return bits == 8 ? grouped::multiply_of<WideStep<ByteStep>, kFew>(num_rows)
                     : grouped::multiply_of<WideStep<NibbleStep>, kFew>(num_rows);
  }

  static void convert(const float* numbers, const Quantization& quantization, char* to) {
    quantization.bits == 8 ? convert_row<ByteStep>(numbers, quantization, to)
                           : convert_row<NibbleStep>(numbers, quantization, to);
  }
};

}  // namespace widened

constexpr const Multiplier& kWidened =
    grouped::kMultiplier<widened::WideRows, grouped::FewRows::kPlain>;
