// Masks, penalties and typical_p, compiled once per instruction set.
//
// Products and sums are rounded separately, as torch rounds them, so that a logit has the same bits
// everywhere.
#pragma GCC optimize("fp-contract=off")

#include "logits/logits.h"

#define QUIRE_NAMESPACE quire::logits
#define QUIRE_ISA_INCLUDE "logits/logits_rows.h"
#include "isa/foreach_isa.h"
