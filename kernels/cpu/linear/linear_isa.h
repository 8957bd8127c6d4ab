// Products with packed weights. Included once per instruction set, by isa/foreach_isa.h.
#include "isa/formats.h"

#include "isa/activations.h"
#include "linear/linear_tile.h"
#if defined(QUIRE_HAS_AMX) && QUIRE_LANES == 16
#include "linear/amx_tiles.h"

#include "linear/amx_scratch.h"
#include "linear/amx_split.h"
#include "linear/amx_step.h"
#include "linear/linear_amx.h"
#endif
