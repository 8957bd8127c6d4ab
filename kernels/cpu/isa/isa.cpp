// Detects the instruction sets that this process may use.
#include "isa/isa.h"

#ifdef __x86_64__
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace quire {

#ifdef __x86_64__

namespace {

#ifdef QUIRE_HAS_AMX

bool has_amx() {
  unsigned int eax = 0, ebx = 0, ecx = 0, edx = 0;
  constexpr unsigned int kBFloat16Products = 1u << 22, kTiles = 1u << 24;
  constexpr unsigned int kNeeded = kBFloat16Products | kTiles;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (edx & kNeeded) == kNeeded;
}

// Requests permission for tiles, 8 KiB of state per thread (Linux, Documentation/arch/x86/xstate.rst).
bool may_use_tiles() {
#if defined(__linux__) && defined(SYS_arch_prctl)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

bool may_use_amx() { return has_amx() && may_use_tiles(); }

#else

bool may_use_amx() { return false; }

#endif

Isa find_best_isa() {
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  if (!avx2) return Isa::kPortable;
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (!avx512) return Isa::kAvx2;
#ifdef QUIRE_HAS_DOT_PRODUCTS
  if (!__builtin_cpu_supports("avx512vnni")) return Isa::kAvx512;
  const bool bfloat16 =
      __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi");
  if (!bfloat16) return Isa::kAvx512Vnni;
  return may_use_amx() ? Isa::kAmx : Isa::kAvx512Bf16;
#else
  return Isa::kAvx512;
#endif
}

}  // namespace

Isa best_isa() {
  static const Isa best = find_best_isa();
  return best;
}

#else

Isa best_isa() { return Isa::kPortable; }

#endif

}  // namespace quire
