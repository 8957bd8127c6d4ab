// Masks, penalties and typical_p of one row. Included once per instruction set, by isa/foreach_isa.h.

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

QUIRE_INLINE void penalize_lanes(float* logits, const int32_t* counts,
                                 const Penalties& penalties) {
  const Ints found = load_as<Ints>(counts), in_output = found >> 1;
  const Floats values = load(logits);
  const Floats repeated =
      values > 0 ? values / penalties.repetition : values * penalties.repetition;
  const Floats kept = found != 0 ? repeated : values;
  const Floats penalized =
      (kept - penalties.frequency * to_floats(in_output)) - penalties.presence;
  store(logits, in_output != 0 ? penalized : kept);
}

void penalize(float* logits, const int32_t* counts, int64_t size, const Penalties& penalties) {
  // Few tokens of a vocabulary occur.
  int64_t first = 0;
  for (; first + kBits <= size; first += kBits) {
    if (!any_count(counts + first)) continue;
#pragma GCC unroll 8
    for (int i = 0; i < kBits; i += kLanes)
      penalize_lanes(logits + first + i, counts + first + i, penalties);
  }
  if (first == size) return;
  float rest[kBits] = {};
  int32_t rest_counts[kBits] = {};
  std::copy(logits + first, logits + size, rest);
  std::copy(counts + first, counts + size, rest_counts);
  for (int i = 0; i < kBits; i += kLanes) penalize_lanes(rest + i, rest_counts + i, penalties);
  std::copy(rest, rest + (size - first), logits + first);
}

// The largest logit; NaN if the row has no distribution: NaN, +inf, or nothing above -inf.
inline float finite_peak(const float* logits, int64_t size) {
  float peak = kImpossible;
  bool wrong = false;
  for (int64_t i = 0; i < size; ++i) {
    wrong |= !(logits[i] < -kImpossible);
    peak = std::max(peak, logits[i]);
  }
  return wrong || peak == kImpossible ? std::numeric_limits<float>::quiet_NaN() : peak;
}

// The distance within which the masses add up to `target`, the nearest tokens first. There is at
// least one token. Reorders them.
inline double distance_of_mass(TypicalToken* tokens, int64_t size, double target) {
  const auto nearer = [](const TypicalToken& a, const TypicalToken& b) {
    return a.distance < b.distance;
  };
  double before = 0;
  // [0, begin) kept and counted in `before`  [begin] kept  [end, size) dropped
  int64_t begin = 0, end = size;
  while (end - begin > kBits) {
    const int64_t middle = begin + (end - begin) / 2;
    std::nth_element(tokens + begin, tokens + middle, tokens + end, nearer);
    double nearest = 0;
    for (int64_t i = begin; i < middle; ++i) nearest += tokens[i].mass;
    if (before + nearest < target) {
      before += nearest;
      begin = middle;
    } else {
      end = middle;
    }
  }
  std::sort(tokens + begin, tokens + end, nearer);
  for (; begin + 1 < end; ++begin) {
    before += tokens[begin].mass;
    if (!(before < target)) break;
  }
  return tokens[begin].distance;
}

// A token's information content differs from the entropy by as much as its scaled logit from the
// expected one.
void keep_typical(float* logits, int64_t size, float temperature, float typical_p,
                  std::vector<TypicalToken>& scratch) {
  const float peak = finite_peak(logits, size);
  if (!(peak < -kImpossible)) return;
  scratch.clear();
  double total = 0, weighted = 0;
  for (int64_t i = 0; i < size; ++i) {
    const float scaled = (logits[i] - peak) / temperature;
    if (!(scaled > kImpossible)) continue;
    const float mass = std::exp(scaled);
    total += mass;
    weighted += static_cast<double>(scaled) * mass;
    scratch.push_back({scaled, mass});
  }
  const double expected = weighted / total;
  for (TypicalToken& token : scratch) token.distance = std::abs(token.distance - expected);
  const double farthest = distance_of_mass(scratch.data(), scratch.size(), typical_p * total);
  for (int64_t i = 0; i < size; ++i) {
    const double scaled = (logits[i] - peak) / temperature;
    if (std::abs(scaled - expected) > farthest) logits[i] = kImpossible;
  }
}

constexpr Functions kFunctions{mask, penalize, keep_typical};
