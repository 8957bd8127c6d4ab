// The kernels with four floats at a time, as every processor of the family can.
#include "prelude.h"

#define QUIRE_LANES 4

namespace quire {
namespace portable {
#include "vec.h"
#include "formats.h"
#include "tile.h"
#include "finish.h"
#include "item.h"
#include "packed.h"
#include "in_place.h"
#include "attention.h"
#include "kv_write.h"
}  // namespace portable

const Kernels kPortableKernels = {
    portable::scratch_floats, portable::attend, portable::merge, portable::write};
}  // namespace quire
