// What kernels use of the standard library, to be included before an instruction set is chosen:
// functions that the linker may share with other code must stay such that every processor runs
// them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <limits>
#include <type_traits>
#include <utility>

#ifdef __x86_64__
#include <immintrin.h>
#endif

#include "kernels.h"
