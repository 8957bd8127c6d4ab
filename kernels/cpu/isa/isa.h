// Instruction sets that kernels are compiled for.
#pragma once

namespace quire {

// Compilers before gcc 11 may use an assembler that lacks AMX.
#if defined(__x86_64__) && (defined(__clang__) || __GNUC__ >= 11)
#define QUIRE_HAS_AMX
#endif

// kAmx: AVX-512, and matrix products by AMX tiles.
enum class Isa : int { kPortable, kAvx2, kAvx512, kAmx };

// The most capable set that this processor has and that this process may use; requests permission
// for AMX from Linux.
Isa best_isa();

}  // namespace quire
