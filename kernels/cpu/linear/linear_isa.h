// Products with packed weights. Included once per instruction set, by isa/foreach_isa.h.
#include "isa/formats.h"

#include "isa/activations.h"
#include "linear/inner_tile.h"
#include "linear/outputs.h"
#include "linear/linear_tile.h"
#include "linear/blocked.h"
#include "linear/converting.h"

#if QUIRE_LANES == 8
#include "linear/quantized/grouped.h"
#include "linear/quantized/byte_products.h"
#include "linear/quantized/integers.h"
#include "linear/quantized/widened.h"

constexpr Functions kFunctions{.panel_width = kPanelWidth,
                               .plain = kPlain,
                               .converting = &kConverting,
                               .widened = &kWidened,
                               .integers = &kIntegers<grouped::FewRows::kPrefetch>};
#else
constexpr Functions kFunctions{
    .panel_width = kPanelWidth, .plain = kPlain, .converting = &kConverting};
#endif

#if defined(QUIRE_HAS_DOT_PRODUCTS) && QUIRE_LANES == 16
#include "linear/bfloat16.h"
#include "linear/quantized/grouped.h"
#include "linear/quantized/dot_products.h"
#include "linear/quantized/integers.h"
#include "linear/quantized/nibbles.h"

constexpr Functions kVnniFunctions{.panel_width = kPanelWidth,
                                   .plain = kPlain,
                                   .converting = &kConverting,
                                   .integers = &kIntegers<grouped::FewRows::kPlain>};
constexpr Functions kBFloat16Functions{.panel_width = kPanelWidth,
                                       .plain = kPlain,
                                       .converting = &kConverting,
                                       .paired = &bfloat16::kPaired,
                                       .converting_to_pairs = &bfloat16::kConvertingToPairs,
                                       .nibbles = &kNibbles<grouped::FewRows::kPlain>,
                                       .integers = &kIntegers<grouped::FewRows::kPlain>};
#endif

#if defined(QUIRE_HAS_AMX) && QUIRE_LANES == 16
#include "linear/amx/tiles.h"

#include "linear/amx/scratch.h"
#include "linear/amx/split.h"
#include "linear/amx/step.h"
#include "linear/amx/multiply.h"

// Panels of bfloat16 are paired by AMX itself. The processors that have it gain from prefetching for
// few rows; without it a Zen 4 was measured to lose.
constexpr Functions kAmxFunctions{.panel_width = kPanelWidth,
                                  .plain = amx::kPlain,
                                  .converting = &kConverting,
                                  .converting_to_pairs = &bfloat16::kConvertingToPairs,
                                  .nibbles = &kNibbles<grouped::FewRows::kPrefetch>,
                                  .integers = &kIntegers<grouped::FewRows::kPrefetch>};
#endif
