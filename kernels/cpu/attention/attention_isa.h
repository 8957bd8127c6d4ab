// Attention of one work item, and cache writes. Included once per instruction set, by
// isa/foreach_isa.h.
#include "isa/formats.h"

#include "attention/tile_shapes.h"
#if defined(QUIRE_HAS_DOT_PRODUCTS) && QUIRE_LANES == 16
#include "attention/pairs.h"
#endif
#include "attention/softmax.h"
#include "attention/merge.h"
#include "attention/item_rows.h"
#include "attention/many_rows_tile.h"
#include "attention/many_rows.h"
#include "attention/few_rows_tile.h"
#include "attention/few_rows.h"
#include "attention/kv_write.h"

template <template <typename> typename Products, template <typename> typename Tile, typename T>
static void attend(ItemRows& rows, float* scratch) {
  rows.layout.is_streamed ? FewRowsAttention<Products<T>>(rows, scratch).run()
                          : ManyRowsAttention<Tile<T>>(rows, scratch).run();
}

static void attend(const AttentionCall& call, const WorkItem& item, float* scratch,
                   float* partials) {
  ItemRows rows(call, item, false, scratch, partials);
  visit_any(call.keys.format, [&](auto number) {
    attend<Widened, WidenedTile, decltype(number)>(rows, scratch);
  });
  rows.end_item();
}

constexpr Functions kFunctions{scratch_floats, attend, merge, write};

#if defined(QUIRE_HAS_DOT_PRODUCTS) && QUIRE_LANES == 16
#include "attention/few_rows_pairs.h"
#include "attention/many_rows_pairs.h"
#include "attention/paired.h"
#endif
