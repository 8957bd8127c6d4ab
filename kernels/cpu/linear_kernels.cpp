// Products with packed weights, compiled once per instruction set.
#include "fetching.h"
#include "linear.h"
#include "prelude.h"

#include <stdexcept>

// Not every function of formats.h is needed here.
#pragma GCC diagnostic ignored "-Wunused-function"

namespace quire::linear {

namespace portable {
#define QUIRE_LANES 4
#include "vec.h"

#include "formats.h"
#include "activations.h"
#include "linear_tile.h"
#undef QUIRE_LANES
}  // namespace portable

#ifdef __x86_64__

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
namespace avx2 {
#define QUIRE_LANES 8
#include "vec.h"

#include "formats.h"
#include "activations.h"
#include "linear_tile.h"
#undef QUIRE_LANES
}  // namespace avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")
namespace avx512 {
#define QUIRE_LANES 16
#include "vec.h"

#include "formats.h"
#include "activations.h"
#include "linear_tile.h"
#ifdef QUIRE_HAS_AMX
#include "linear_amx.h"
#endif
#undef QUIRE_LANES
}  // namespace avx512
#pragma GCC pop_options

#endif

const Functions& functions_of(Isa isa) {
  if (isa > best_isa()) throw std::invalid_argument("this process may not use the instructions");
#ifdef QUIRE_HAS_AMX
  if (isa == Isa::kAmx) return avx512::amx::kFunctions;
#endif
#ifdef __x86_64__
  if (isa == Isa::kAvx512) return avx512::kFunctions;
  if (isa == Isa::kAvx2) return avx2::kFunctions;
#endif
  return portable::kFunctions;
}

}  // namespace quire::linear
