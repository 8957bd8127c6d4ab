// Sampling of one row. Included once per instruction set, by isa/foreach_isa.h.
#include "sampling/sampling_blocks.h"

struct Peak {
  float logit;
  int64_t token;  // -1 where no token is possible
};

// The largest logit, and the first token that has it.
inline Peak find_peak(const float* logits, int64_t vocab_size) {
  float peak = -kInfinity;
  int64_t block_of_peak = 0;
  Ints wrong{};
  for_blocks(logits, vocab_size, [&](const float* block, int64_t first) {
    for (int i = 0; i < kBlock; i += kLanes) wrong |= ~(load(block + i) < kInfinity);
    const float candidate = block_largest(block);
    if (candidate > peak) {
      peak = candidate;
      block_of_peak = first;
    }
  });
  for (int i = 0; i < kLanes; ++i)
    if (wrong[i]) return {peak, -1};
  if (peak == -kInfinity) return {peak, -1};
  int64_t token = block_of_peak;
  while (logits[token] != peak) ++token;
  return {peak, token};
}

// Moves the `count` largest finite values to the front of `kept`, in any order; returns their number.
inline int64_t keep_largest(const float* logits, int64_t vocab_size, int64_t count,
                            std::vector<float>& kept) {
  const int64_t room = std::max<int64_t>(2 * count, 4 * kBlock);
  kept.resize(room + kBlock);
  float threshold = -kInfinity;
  int64_t size = 0;
  const auto shrink = [&] {
    if (size < count) return;
    std::nth_element(kept.begin(), kept.begin() + count - 1, kept.begin() + size,
                     std::greater<float>());
    size = count;
    threshold = kept[count - 1];
  };
  for_blocks(logits, vocab_size, [&](const float* block, int64_t) {
    if (!(block_largest(block) > threshold)) return;
    for (int i = 0; i < kBlock; ++i) {
      kept[size] = block[i];
      size += block[i] > threshold;
    }
    if (size > room) shrink();
  });
  shrink();
  return size;
}

// Values from 0 down to `last` in buckets of equal width, the largest in bucket 0; smaller values are
// in one more bucket.
struct Buckets {
  static constexpr int kCount = 512;
  float scale;

  explicit Buckets(float last) : scale(kCount / last) {}

  __attribute__((always_inline)) Ints of(Floats values) const {
    const Floats places = values * scale;
    const Floats end = broadcast(static_cast<float>(kCount));
    const Floats bounded = places < end ? places : end;
    return __builtin_convertvector(bounded, Ints);
  }
};

// The sum of the exponentials of each bucket's values.
inline void add_up(const float* values, int64_t size, const Buckets& buckets, double* sums) {
  std::fill(sums, sums + Buckets::kCount + 1, 0.0);
  for_blocks(values, size, [&](const float* block, int64_t) {
    float exponentials[kBlock];
    int32_t places[kBlock];
    for (int i = 0; i < kBlock; i += kLanes) {
      store(exponentials + i, exponential(load(block + i)));
      store_as(places + i, buckets.of(load(block + i)));
    }
    for (int i = 0; i < kBlock; ++i) sums[places[i]] += exponentials[i];
  });
}

// Moves the values of one bucket to the front, in any order; returns their number.
inline int64_t keep_bucket(float* values, int64_t size, const Buckets& buckets, int bucket) {
  int64_t kept = 0;
  for_blocks(values, size, [&](const float* block, int64_t) {
    int32_t places[kBlock];
    for (int i = 0; i < kBlock; i += kLanes)
      store_as(places + i, buckets.of(load(block + i)));
    for (int i = 0; i < kBlock; ++i)
      if (places[i] == bucket) values[kept++] = block[i];
  });
  return kept;
}

// The smallest of the fewest values, from the largest down, whose exponentials add up to `target`
// with the sum `before`. There is at least one value. Reorders the values.
inline float last_of_sum(float* values, int64_t size, double before, double target) {
  // [0, begin) kept and counted in `before`  [begin] kept  [end, size) dropped
  int64_t begin = 0, end = size;
  while (end - begin > kBlock) {
    const int64_t middle = begin + (end - begin) / 2;
    std::nth_element(values + begin, values + middle, values + end, std::greater<float>());
    const double upper = exp_sum(values + begin, middle - begin, 0.0f);
    if (before + upper < target) {
      before += upper;
      begin = middle;
    } else {
      end = middle;
    }
  }
  std::sort(values + begin, values + end, std::greater<float>());
  for (; begin + 1 < end; ++begin) {
    before += std::exp(values[begin]);
    if (!(before < target)) break;
  }
  return values[begin];
}

// The smallest of the fewest values, from the largest down, whose share of the exponentials'
// sum reaches `top_p`. The largest is 0. Reorders the values.
inline float top_p_floor(float* values, int64_t size, float top_p) {
  const double total = exp_sum(values, size, 0.0f);
  const double target = top_p * total;
  // Below the last bucket, all values together are negligible; the factor 0.5 allows for rounding.
  const Buckets buckets(static_cast<float>(std::log(0.5 * (1.0 - top_p) * total / size)));
  double sums[Buckets::kCount + 1];
  add_up(values, size, buckets, sums);
  int bucket = 0, last_in_use = 0;
  double before = 0, passed = 0;
  for (; bucket < Buckets::kCount && passed + sums[bucket] < target; ++bucket) {
    if (sums[bucket] > 0) {
      last_in_use = bucket;
      before = passed;
    }
    passed += sums[bucket];
  }
  // Only rounding can exhaust all buckets.
  if (bucket == Buckets::kCount)
    bucket = last_in_use;
  else
    before = passed;
  return last_of_sum(values, keep_bucket(values, size, buckets, bucket), before, target);
}

// The floor of top_k and top_p: the smallest scaled logit that they keep.
inline float filter_floor(const float* logits, int64_t vocab_size, const RowParams& params,
                          float largest, std::vector<float>& scratch) {
  const bool bounded = params.top_k > 0 && params.top_k < vocab_size;
  if (!bounded && params.top_p >= 1.0f) return -kInfinity;
  const int64_t count = bounded ? params.top_k : vocab_size;
  int64_t size = count;
  if (bounded)
    size = keep_largest(logits, vocab_size, count, scratch);
  else
    scratch.assign(logits, logits + vocab_size);
  for (int64_t i = 0; i < size; ++i) scratch[i] = (scratch[i] - largest) / params.temperature;
  if (params.top_p < 1.0f) return top_p_floor(scratch.data(), size, params.top_p);
  return size < count ? -kInfinity : *std::min_element(scratch.begin(), scratch.begin() + size);
}

// The token with the largest sum of scaled logit and noise, the first one of equals. A block draws no
// random words if its logits would lose even with the largest noise; a token's noise is computed only
// if its bound could win.
inline int64_t gumbel_argmax(const float* logits, int64_t vocab_size, const RowParams& params,
                             float largest, float floor) {
  float best = -kInfinity;
  int64_t token = -1;
  for_blocks(logits, vocab_size, [&](const float* block, int64_t first) {
    float scaled[kBlock], bounds[kBlock];
    uint32_t words[kBlock];
    for (int i = 0; i < kBlock; i += kLanes) {
      const Floats values = (load(block + i) - largest) / params.temperature;
      store(scaled + i, values >= floor ? values : broadcast(-kInfinity));
    }
    if (!(block_largest(scaled) + kMostNoise > best)) return;
    random_block(params.seed, params.position, first, words);
    for (int i = 0; i < kBlock; i += kLanes)
      store(bounds + i, load(scaled + i) + gumbel_bounds(words + i));
    if (!(block_largest(bounds) > best)) return;
    for (int i = 0; i < kBlock; ++i) {
      if (!(bounds[i] > best)) continue;
      const float score = scaled[i] + gumbel(words[i]);
      if (score > best) {
        best = score;
        token = first + i;
      }
    }
  });
  return token;
}

int64_t sample(const float* logits, int64_t vocab_size, const RowParams& params,
               std::vector<float>& scratch) {
  const Peak peak = find_peak(logits, vocab_size);
  if (peak.token < 0 || !(params.temperature > 0.0f)) return peak.token;
  const float floor = filter_floor(logits, vocab_size, params, peak.logit, scratch);
  return gumbel_argmax(logits, vocab_size, params, peak.logit,
                       std::max(floor, std::log(params.min_p)));
}

// The rank of `chosen`, from 1.
inline int64_t rank(const float* logits, int64_t vocab_size, int64_t chosen) {
  const float logit = logits[chosen];
  int64_t before = 0;
  for (int64_t i = 0; i < chosen; ++i) before += logits[i] >= logit;
  for (int64_t i = chosen + 1; i < vocab_size; ++i) before += logits[i] > logit;
  return before + 1;
}

// The `count` most likely tokens in order, by insertion.
inline void most_likely(const float* logits, int64_t vocab_size, int64_t count,
                        int64_t* token_ids) {
  int64_t size = 0;
  for_blocks(logits, vocab_size, [&](const float* block, int64_t first) {
    if (size == count && (!count || !(block_largest(block) > logits[token_ids[count - 1]]))) return;
    const int64_t last = std::min<int64_t>(first + kBlock, vocab_size);
    for (int64_t token = first; token < last; ++token) {
      if (size == count && !(logits[token] > logits[token_ids[count - 1]])) continue;
      int64_t place = size < count ? size++ : count - 1;
      for (; place > 0 && logits[token] > logits[token_ids[place - 1]]; --place)
        token_ids[place] = token_ids[place - 1];
      token_ids[place] = token;
    }
  });
}

void logprobs(const float* logits, int64_t vocab_size, int64_t chosen, int64_t num_top,
              int64_t* token_ids, float* logprobs, int64_t* ranks) {
  const float largest = find_peak(logits, vocab_size).logit;
  const float log_sum = static_cast<float>(std::log(exp_sum(logits, vocab_size, largest)));
  token_ids[0] = chosen;
  ranks[0] = rank(logits, vocab_size, chosen);
  most_likely(logits, vocab_size, num_top, token_ids + 1);
  std::iota(ranks + 1, ranks + 1 + num_top, int64_t{1});
  for (int64_t i = 0; i <= num_top; ++i) logprobs[i] = (logits[token_ids[i]] - largest) - log_sum;
}

constexpr Functions kFunctions{sample, logprobs};
