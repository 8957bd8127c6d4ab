"""C++ implementations to be tested."""

from typing import Final

from kernels.dispatch import Implementation, cpp_implementations

# Of all operations but products and attention: those beyond AVX-512 have its functions.
WITHOUT_PRODUCTS: Final = cpp_implementations()[:3]
# Of products of weights that are not quantised.
OF_PRODUCTS: Final = tuple(
    one for one in cpp_implementations() if one != Implementation.CPP_AVX512_VNNI
)
# Their products of quantised weights round rows to 8 bits where they may.
ROUNDING: Final = tuple(
    one
    for one in cpp_implementations()
    if one == Implementation.CPP_AVX2 or one.isa >= Implementation.CPP_AVX512_VNNI.isa
)
# Of attention.
OF_ATTENTION: Final = tuple(
    one
    for one in cpp_implementations()
    if one in WITHOUT_PRODUCTS or one == Implementation.CPP_AVX512_BF16
)
