// The sampling kernels, compiled once per instruction set. The standard headers come first: what
// they define must stay such that every processor runs it.
#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <stdexcept>

#ifdef __x86_64__
#include <immintrin.h>
#endif

// The compiler's own header of AVX-512 sets it off.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

namespace quire::sampling {

namespace portable {
#define QUIRE_LANES 4
#include "vec.h"

#include "sampling_blocks.h"
#include "sampling_rows.h"
#undef QUIRE_LANES
}  // namespace portable

#ifdef __x86_64__

#pragma GCC push_options
#pragma GCC target("avx2,fma")
namespace avx2 {
#define QUIRE_LANES 8
#include "vec.h"

#include "sampling_blocks.h"
#include "sampling_rows.h"
#undef QUIRE_LANES
}  // namespace avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma")
namespace avx512 {
#define QUIRE_LANES 16
#include "vec.h"

#include "sampling_blocks.h"
#include "sampling_rows.h"
#undef QUIRE_LANES
}  // namespace avx512
#pragma GCC pop_options

#endif

const RowFunctions& row_functions(Isa isa) {
  if (isa > best_isa()) throw std::invalid_argument("this process may not use the instructions");
#ifdef __x86_64__
  if (isa >= Isa::kAvx512) return avx512::kRowFunctions;
  if (isa == Isa::kAvx2) return avx2::kRowFunctions;
#endif
  return portable::kRowFunctions;
}

}  // namespace quire::sampling
