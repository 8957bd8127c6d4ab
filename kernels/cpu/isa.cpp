// Which instruction sets this processor has.
#include "kernels.h"

#include <stdexcept>

namespace quire {

#ifdef __x86_64__

Isa best_isa() {
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return Isa::kPortable;
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return avx512 ? Isa::kAvx512 : Isa::kAvx2;
}

const Kernels& kernels_of(Isa isa) {
  if (isa > best_isa()) throw std::invalid_argument("this processor lacks the instructions");
  switch (isa) {
    case Isa::kAvx512: return kAvx512Kernels;
    case Isa::kAvx2: return kAvx2Kernels;
    default: return kPortableKernels;
  }
}

#else

Isa best_isa() { return Isa::kPortable; }

const Kernels& kernels_of(Isa isa) {
  if (isa > best_isa()) throw std::invalid_argument("this processor lacks the instructions");
  return kPortableKernels;
}

#endif

}  // namespace quire
