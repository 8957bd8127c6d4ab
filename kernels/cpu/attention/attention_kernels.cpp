// Attention and cache writes, compiled once per instruction set.
#include "attention/attention.h"

#define QUIRE_NAMESPACE quire::attention
#define QUIRE_ISA_INCLUDE "attention/attention_isa.h"
#include "isa/foreach_isa.h"
