// Fused elementwise operations, compiled once per instruction set.
#include "fused/fused.h"

#define QUIRE_NAMESPACE quire::fused
#define QUIRE_ISA_INCLUDE "fused/fused_rows.h"
#include "isa/foreach_isa.h"
