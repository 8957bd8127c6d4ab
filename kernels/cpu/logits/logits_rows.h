// Masks and penalties of one row. Included once per instruction set, by isa/foreach_isa.h.

constexpr int kBits = 32;  // of a word
constexpr float kImpossible = -std::numeric_limits<float>::infinity();

void mask(float* logits, const int32_t* words, int64_t size) {
  Ints bits_of_lanes[kBits / kLanes];
  for (int i = 0; i < kBits; ++i)
    bits_of_lanes[i / kLanes][i % kLanes] = static_cast<int32_t>(uint32_t{1} << i);
  int64_t first = 0;
  for (; first + kBits <= size; first += kBits) {
    const int32_t word = words[first / kBits];
    if (word == -1) continue;
    const Ints all = broadcast_bits(word);
#pragma GCC unroll 8
    for (int i = 0; i < kBits / kLanes; ++i) {
      float* place = logits + first + i * kLanes;
      const Floats values = load(place);
      store(place, (all & bits_of_lanes[i]) != 0 ? values : broadcast(kImpossible));
    }
  }
  for (int64_t i = first; i < size; ++i)
    if (!(words[i / kBits] >> (i % kBits) & 1)) logits[i] = kImpossible;
}

// Whether any of 32 counts is not 0.
QUIRE_INLINE bool any_count(const int32_t* counts) {
  Ints found{};
#pragma GCC unroll 8
  for (int i = 0; i < kBits; i += kLanes) found |= load_as<Ints>(counts + i);
  int32_t lanes[kLanes];
  store_as(lanes, found);
  int32_t any = 0;
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) any |= lanes[i];
  return any != 0;
}

void penalize(float* logits, const int32_t* counts, int64_t size, const Penalties& penalties) {
  const auto penalize_one = [&](int64_t i) {
    const int32_t count = counts[i];
    if (count == 0) return;
    float logit = logits[i];
    logit = logit > 0 ? logit / penalties.repetition : logit * penalties.repetition;
    if (const int32_t in_output = count >> 1) {
      logit -= penalties.frequency * static_cast<float>(in_output);
      logit -= penalties.presence;
    }
    logits[i] = logit;
  };
  // Few tokens of a vocabulary occur.
  int64_t first = 0;
  for (; first + kBits <= size; first += kBits) {
    if (!any_count(counts + first)) continue;
    for (int64_t i = first; i < first + kBits; ++i) penalize_one(i);
  }
  for (int64_t i = first; i < size; ++i) penalize_one(i);
}

constexpr Functions kFunctions{mask, penalize};
