// Sampling of one row of logits, as every instruction set has it.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"

namespace quire::sampling {

struct RowParams {
  float temperature;  // 0 takes the most likely token
  int64_t top_k;      // 0 considers all
  float top_p;        // 1 considers all
  float min_p;        // 0 considers all
  uint64_t seed;
  uint32_t position;  // the one that the sampled token gets
};

struct RowFunctions {
  // The row's token, or -1 where no token is possible: NaN, +inf, or nothing above -inf.
  // `scratch` is memory that calls share one after the other.
  int64_t (*sample)(const float* logits, int64_t vocab_size, const RowParams& params,
                    std::vector<float>& scratch);
  // Log-probabilities of `chosen` and of the `num_top` most likely tokens, in this order, with
  // ranks that begin at 1; of equal logits the lower token id comes first.
  void (*logprobs)(const float* logits, int64_t vocab_size, int64_t chosen, int64_t num_top,
                   int64_t* token_ids, float* logprobs, int64_t* ranks);
  // The random words of the tokens 0 to num_words - 1.
  void (*random_words)(uint64_t seed, uint32_t position, int64_t num_words, int64_t* words);
};

const RowFunctions& row_functions(Isa isa);

}  // namespace quire::sampling
