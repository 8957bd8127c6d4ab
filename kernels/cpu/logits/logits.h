// Changes of logits before sampling: masks and penalties of one row. Independent of torch.
#pragma once

#include <cstdint>

#include "isa/isa.h"

namespace quire::logits {

struct Penalties {
  float repetition, frequency, presence;
};

struct Functions {
  // -inf in place of each of the `size` logits whose bit is 0; the first bit is the lowest one of
  // `words[0]`.
  void (*mask)(float* logits, const int32_t* words, int64_t size);
  // The penalties of `size` tokens by their counts: twice the number in the output, plus 1 if the
  // token is in the prompt.
  void (*penalize)(float* logits, const int32_t* counts, int64_t size, const Penalties& penalties);
};

const Functions& functions_of(Isa isa);

}  // namespace quire::logits
