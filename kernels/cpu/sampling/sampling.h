// Sampling of one row of logits: the parameters, and the functions that each instruction set has for
// it. Independent of torch.
#pragma once

#include <cstdint>
#include <vector>

#include "isa/isa.h"

namespace quire::sampling {

struct RowParams {
  float temperature;  // 0 takes the most likely token
  int64_t top_k;      // 0 considers all
  float top_p;        // 1 considers all
  float min_p;        // 0 considers all
  uint64_t seed;
  uint32_t position;  // of the sampled token
};

struct Functions {
  // The row's token, or -1 where no token is possible: NaN, +inf, or nothing above -inf.
  // `scratch` may be reused by later calls.
  int64_t (*sample)(const float* logits, int64_t vocab_size, const RowParams& params,
                    std::vector<float>& scratch);
  // Log-probabilities of `chosen` and of the `num_top` most likely tokens, in this order, with
  // ranks that begin at 1; of equal logits the lower token id is first.
  void (*logprobs)(const float* logits, int64_t vocab_size, int64_t chosen, int64_t num_top,
                   int64_t* token_ids, float* logprobs, int64_t* ranks);
};

const Functions& functions_of(Isa isa);

}  // namespace quire::sampling
