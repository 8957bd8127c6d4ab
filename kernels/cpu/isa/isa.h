// Instruction sets that kernels are compiled for.
#pragma once

namespace quire {

// Compilers before gcc 11 may use an assembler that lacks AMX.
#if defined(__x86_64__) && (defined(__clang__) || __GNUC__ >= 11)
#define QUIRE_HAS_AMX
#endif

// And those before gcc 10 lack the dot products of AVX-512.
#if defined(__x86_64__) && (defined(__clang__) || __GNUC__ >= 10)
#define QUIRE_HAS_DOT_PRODUCTS
#endif

// Each includes those before it. kAvx512: F, BW, DQ and VL. kAvx512Vnni: dot products of 8-bit
// integers. kAvx512Bf16: dot products of bfloat16, and VBMI, permutations of bytes. kAmx: matrix
// products by AMX tiles.
enum class Isa : int { kPortable, kAvx2, kAvx512, kAvx512Vnni, kAvx512Bf16, kAmx };

// The most capable set that this processor has and that this process may use; requests permission
// for AMX from Linux.
Isa best_isa();

}  // namespace quire
