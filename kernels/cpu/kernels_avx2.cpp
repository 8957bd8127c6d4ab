// The kernels with AVX2.
#include "prelude.h"

#ifdef __x86_64__
#pragma GCC target("avx2,fma,f16c")
#define QUIRE_LANES 8

namespace quire {
namespace avx2 {
#include "vec.h"
#include "formats.h"
#include "tile.h"
#include "finish.h"
#include "item.h"
#include "packed.h"
#include "in_place.h"
#include "attention.h"
#include "kv_write.h"
}  // namespace avx2

const Kernels kAvx2Kernels = {
    avx2::scratch_floats, avx2::attend, avx2::merge, avx2::write};
}  // namespace quire
#endif
