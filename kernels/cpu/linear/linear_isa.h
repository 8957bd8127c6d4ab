// Products with packed weights. Included once per instruction set, by isa/foreach_isa.h.
#include "isa/formats.h"

#include "isa/activations.h"
#include "linear/inner_tile.h"
#include "linear/outputs.h"
#include "linear/linear_tile.h"
#include "linear/blocked.h"
#include "linear/converting.h"

#if QUIRE_LANES == 8
#include "linear/grouped.h"
#include "linear/byte_products.h"
#include "linear/integers.h"

constexpr Functions kFunctions{kPanelWidth, kPlain,  &kConverting, nullptr,
                               nullptr,     nullptr, &kIntegers<grouped::FewRows::kPlain>};
#else
constexpr Functions kFunctions{kPanelWidth, kPlain, &kConverting, nullptr, nullptr, nullptr, nullptr};
#endif

#if defined(QUIRE_HAS_DOT_PRODUCTS) && QUIRE_LANES == 16
#include "linear/bfloat16.h"
#include "linear/grouped.h"
#include "linear/dot_products.h"
#include "linear/integers.h"
#include "linear/nibbles.h"

constexpr Functions kVnniFunctions{kPanelWidth, kPlain,  &kConverting, nullptr,
                                   nullptr,     nullptr, &kIntegers<grouped::FewRows::kPlain>};
constexpr Functions kBFloat16Functions{kPanelWidth,
                                       kPlain,
                                       &kConverting,
                                       &bfloat16::kPaired,
                                       &bfloat16::kConvertingToPairs,
                                       &kNibbles<grouped::FewRows::kPlain>,
                                       &kIntegers<grouped::FewRows::kPlain>};
#endif

#if defined(QUIRE_HAS_AMX) && QUIRE_LANES == 16
#include "linear/amx/tiles.h"

#include "linear/amx/scratch.h"
#include "linear/amx/split.h"
#include "linear/amx/step.h"
#include "linear/amx/multiply.h"

// Panels of bfloat16 are paired by AMX itself. The processors that have it gain from prefetching for
// few rows; without it a Zen 4 was measured to lose.
constexpr Functions kAmxFunctions{kPanelWidth,
                                  amx::kPlain,
                                  &kConverting,
                                  nullptr,
                                  &bfloat16::kConvertingToPairs,
                                  &kNibbles<grouped::FewRows::kPrefetch>,
                                  &kIntegers<grouped::FewRows::kPrefetch>};
#endif
