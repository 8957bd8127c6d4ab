// Compiles QUIRE_ISA_INCLUDE once per instruction set, each time in its own namespace within
// QUIRE_NAMESPACE, and defines `functions_of` there (after Google Highway's foreach_target.h).
//
// A .cpp file includes this header once, after it has defined both macros. The header that it names
// defines `constexpr Functions kFunctions`; QUIRE_VNNI_FUNCTIONS, QUIRE_BF16_FUNCTIONS and
// QUIRE_AMX_FUNCTIONS name the tables for these, if they differ from that of AVX-512. Standard headers are included here, before an instruction set is chosen: functions that the
// linker may share with other code must run on every processor.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <limits>
#include <stdexcept>
#include <type_traits>
#include <utility>

#ifdef __x86_64__
#include <immintrin.h>
#endif

#include "isa/isa.h"

// Kernels use some of the functions that they include.
#pragma GCC diagnostic ignored "-Wunused-function"
// The compiler's own AVX-512 header triggers it.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

namespace QUIRE_NAMESPACE {

namespace portable {
#define QUIRE_LANES 4
#include "isa/vec.h"
#include QUIRE_ISA_INCLUDE
#undef QUIRE_LANES
}  // namespace portable

#ifdef __x86_64__

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
namespace avx2 {
#define QUIRE_LANES 8
#include "isa/vec.h"
#include QUIRE_ISA_INCLUDE
#undef QUIRE_LANES
}  // namespace avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c,prefer-vector-width=512")
namespace avx512 {
#define QUIRE_LANES 16
#include "isa/vec.h"
#include QUIRE_ISA_INCLUDE
#undef QUIRE_LANES
}  // namespace avx512
#pragma GCC pop_options

#endif

// The table of `isa`. std::invalid_argument if this process may not use the instruction set.
const Functions& functions_of(Isa isa) {
  if (isa > best_isa()) throw std::invalid_argument("this process may not use the instructions");
#ifdef QUIRE_AMX_FUNCTIONS
  if (isa == Isa::kAmx) return QUIRE_AMX_FUNCTIONS;
#endif
#ifdef QUIRE_BF16_FUNCTIONS
  if (isa >= Isa::kAvx512Bf16) return QUIRE_BF16_FUNCTIONS;
#endif
#ifdef QUIRE_VNNI_FUNCTIONS
  if (isa >= Isa::kAvx512Vnni) return QUIRE_VNNI_FUNCTIONS;
#endif
#ifdef __x86_64__
  if (isa >= Isa::kAvx512) return avx512::kFunctions;
  if (isa == Isa::kAvx2) return avx2::kFunctions;
#endif
  return portable::kFunctions;
}

}  // namespace QUIRE_NAMESPACE
