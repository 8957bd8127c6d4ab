// Products with packed weights. Included once per instruction set, by isa/foreach_isa.h.
#include "isa/formats.h"

#include "isa/activations.h"
#include "linear/inner_tile.h"
#include "linear/outputs.h"
#include "linear/linear_tile.h"
#include "linear/blocked.h"
#include "linear/converting.h"

constexpr Functions kFunctions{kPanelWidth, kPlain, nullptr, &kConverting};

#if defined(QUIRE_HAS_DOT_PRODUCTS) && QUIRE_LANES == 16
#include "linear/bfloat16.h"
#endif

#if defined(QUIRE_HAS_AMX) && QUIRE_LANES == 16
#include "linear/amx_tiles.h"

#include "linear/amx_scratch.h"
#include "linear/amx_split.h"
#include "linear/amx_step.h"
#include "linear/linear_amx.h"
#endif
