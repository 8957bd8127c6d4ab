// Products with packed weights, compiled once per instruction set.
#include "linear/linear.h"
#include "linear/prefetch.h"
#include "linear/tiles.h"

#define QUIRE_NAMESPACE quire::linear
#define QUIRE_ISA_INCLUDE "linear/linear_isa.h"
#ifdef QUIRE_HAS_DOT_PRODUCTS
#define QUIRE_VNNI_FUNCTIONS avx512::kVnniFunctions
#define QUIRE_BF16_FUNCTIONS avx512::kBFloat16Functions
#endif
#ifdef QUIRE_HAS_AMX
#define QUIRE_AMX_FUNCTIONS avx512::kAmxFunctions
#endif
#include "isa/foreach_isa.h"
