// Attention and cache writes, compiled once per instruction set.
#include "attention/attention.h"

#define QUIRE_NAMESPACE quire::attention
#define QUIRE_ISA_INCLUDE "attention/attention_isa.h"
#ifdef QUIRE_HAS_DOT_PRODUCTS
#define QUIRE_BF16_FUNCTIONS avx512::kBFloat16Functions
#endif
#include "isa/foreach_isa.h"
