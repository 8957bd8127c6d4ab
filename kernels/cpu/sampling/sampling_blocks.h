// Blocks of 64 logits and their random words. Included once per instruction set, after vec.h.

using Words = uint32_t __attribute__((vector_size(kLanes * 4)));
using Wide = uint64_t __attribute__((vector_size(kLanes * 4)));

constexpr int kBlock = 64;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Calls `visit(block, first)` for blocks of 64 logits; the last one is padded with -inf.
template <typename Visit>
QUIRE_INLINE void for_blocks(const float* logits, int64_t size, Visit visit) {
  int64_t first = 0;
  for (; first + kBlock <= size; first += kBlock) visit(logits + first, first);
  if (first == size) return;
  float padded[kBlock];
  std::fill(padded, padded + kBlock, -kInfinity);
  std::copy(logits + first, logits + size, padded);
  visit(padded, first);
}

// NaN is never the largest.
QUIRE_INLINE float block_largest(const float* block) {
  Floats best = broadcast(-kInfinity);
#pragma GCC unroll 16
  for (int i = 0; i < kBlock; i += kLanes) best = larger(load(block + i), best);
  return largest(best);
}

// The sum of e^(value - shift); no value is above `shift`.
QUIRE_INLINE double exp_sum(const float* values, int64_t size, float shift) {
  double total = 0;
  for_blocks(values, size, [&](const float* block, int64_t) {
    Floats sums{};
    for (int i = 0; i < kBlock; i += kLanes) sums += exponential(load(block + i) - shift);
    total += sum(sums);
  });
  return total;
}

// The products of the even lanes.
QUIRE_INLINE Wide multiply_even(Wide x, uint32_t factor) {
#if QUIRE_LANES == 8
  return reinterpret_cast<Wide>(
      _mm256_mul_epu32(reinterpret_cast<__m256i>(x), _mm256_set1_epi64x(factor)));
#elif QUIRE_LANES == 16
  return reinterpret_cast<Wide>(
      _mm512_mul_epu32(reinterpret_cast<__m512i>(x), _mm512_set1_epi64(factor)));
#else
  return (x & 0xFFFFFFFF) * factor;
#endif
}

struct WideProduct {
  Words high, low;
};

QUIRE_INLINE WideProduct multiply(Words x, uint32_t factor) {
  const Wide pairs = reinterpret_cast<Wide>(x);
  const Wide even = multiply_even(pairs, factor), odd = multiply_even(pairs >> 32, factor);
  constexpr uint64_t kLow = 0xFFFFFFFF;
  return {reinterpret_cast<Words>((even >> 32) | (odd & ~kLow)),
          reinterpret_cast<Words>((even & kLow) | (odd << 32))};
}

// Philox4x32-10 of Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011), under
// the counters (first / 4, position, 0, 0) and up: the words of the 64 tokens from `first`.
QUIRE_INLINE void random_block(uint64_t seed, uint32_t position, int64_t first, uint32_t* words) {
  constexpr int kCounters = kBlock / 4;
  uint32_t numbers[kCounters];
  for (int i = 0; i < kCounters; ++i) numbers[i] = static_cast<uint32_t>(first / 4) + i;
#pragma GCC unroll 4
  for (int i = 0; i < kCounters; i += kLanes) {
    Words c0 = load_as<Words>(numbers + i), c1 = position - Words{}, c2{}, c3{};
    uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < 10; ++round) {
      const WideProduct a = multiply(c0, 0xD2511F53), b = multiply(c2, 0xCD9E8D57);
      c0 = b.high ^ c1 ^ k0;
      c1 = b.low;
      c2 = a.high ^ c3 ^ k1;
      c3 = a.low;
      k0 += 0x9E3779B9;
      k1 += 0xBB67AE85;
    }
    uint32_t planes[4][kLanes];
    store_as(planes[0], c0);
    store_as(planes[1], c1);
    store_as(planes[2], c2);
    store_as(planes[3], c3);
    for (int j = 0; j < kLanes; ++j)
      for (int word = 0; word < 4; ++word) words[4 * (i + j) + word] = planes[word][j];
  }
}

// Gumbel noise from a random word. The probability of larger noise is v.
inline float gumbel(uint32_t word) {
  constexpr float kBelowOne = 1.0f - 0x1p-24f;
  const float v = std::min((static_cast<float>(word) + 0.5f) * 0x1p-32f, kBelowOne);
  return -std::log(-std::log1p(-v));
}

// Upper bounds of `gumbel` of each word, at most 0.1 too large where the noise is large. The noise is
// at most -ln v. A float's bits, read as a number, are a lower bound of its logarithm.
QUIRE_INLINE Floats gumbel_bounds(const uint32_t* words) {
  constexpr float kLn2 = 0.6931472f, kRounding = 1e-4f;
  const Floats halves = to_floats(reinterpret_cast<Ints>(load_as<Words>(words) >> 1));
  const Floats log2_of_halves = to_floats(bits(halves)) * 0x1p-23f - 127.0f;
  return (31.0f - log2_of_halves) * kLn2 + kRounding;
}

// An upper bound of all noise: that of the word 0 is 22.87.
constexpr float kMostNoise = 22.9f;
