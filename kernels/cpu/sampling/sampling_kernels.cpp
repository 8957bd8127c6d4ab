// Sampling, compiled once per instruction set.
#include <functional>
#include <numeric>

#include "sampling/sampling.h"

#define QUIRE_NAMESPACE quire::sampling
#define QUIRE_ISA_INCLUDE "sampling/sampling_rows.h"
#include "isa/foreach_isa.h"
