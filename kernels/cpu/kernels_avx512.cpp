// The kernels with AVX-512.
#include "prelude.h"

#ifdef __x86_64__
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#define QUIRE_LANES 16

namespace quire {
namespace avx512 {
#include "vec.h"
#include "formats.h"
#include "tile.h"
#include "finish.h"
#include "item.h"
#include "packed.h"
#include "in_place.h"
#include "attention.h"
#include "kv_write.h"
}  // namespace avx512

const Kernels kAvx512Kernels = {
    avx512::scratch_floats, avx512::attend, avx512::merge, avx512::write};
}  // namespace quire
#endif
