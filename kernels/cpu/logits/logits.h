// Changes of logits before sampling: masks, penalties and typical_p of one row. Independent of torch.
#pragma once

#include <cstdint>
#include <vector>

#include "isa/isa.h"

namespace quire::logits {

struct Penalties {
  float repetition, frequency, presence;
};

// A token: how far its scaled logit is from the expected one, and e to the power of it.
struct TypicalToken {
  double distance;
  float mass;
};

struct Functions {
  // -inf in place of each of the `size` logits whose bit is 0; the first bit is the lowest one of
  // `words[0]`.
  void (*mask)(float* logits, const int32_t* words, int64_t size);
  // The penalties of `size` tokens by their counts: twice the number in the output, plus 1 if the
  // token is in the prompt.
  void (*penalize)(float* logits, const int32_t* counts, int64_t size, const Penalties& penalties);
  // -inf in place of the logits that typical_p drops, in a whole row. `scratch` may be reused.
  void (*keep_typical)(float* logits, int64_t size, float temperature, float typical_p,
                       std::vector<TypicalToken>& scratch);
};

const Functions& functions_of(Isa isa);

}  // namespace quire::logits
