"""Philox4x32-10 for Triton kernels: the same random bits as `kernels.philox`."""

import triton
import triton.language as tl


@triton.jit
def random_words(seed, position, first_counter, COUNTERS: tl.constexpr):  # type: ignore[no-untyped-def]
    """uint32 `[4 * COUNTERS]`: the words of the tokens from `4 * first_counter` on.

    `seed` and `position` are int64 scalars; the counters are (c, position, 0, 0), with c from
    `first_counter` on.
    """
    k0 = (seed & 0xFFFFFFFF).to(tl.uint32)
    k1 = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c0 = (first_counter + tl.arange(0, COUNTERS)).to(tl.uint32)
    c2 = tl.zeros_like(c0)
    c3 = tl.zeros_like(c0)
    c1 = c2 + (position & 0xFFFFFFFF).to(tl.uint32)
    for _ in tl.static_range(10):
        high0 = tl.umulhi(c0, 0xD2511F53)
        low0 = tl.mul(c0, 0xD2511F53, sanitize_overflow=False)
        high1 = tl.umulhi(c2, 0xCD9E8D57)
        low1 = tl.mul(c2, 0xCD9E8D57, sanitize_overflow=False)
        c0 = high1 ^ c1 ^ k0
        c1 = low1
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False)
        k1 = tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
    # A thread holds the four words of its counter contiguously, like the logits that they are for.
    return tl.interleave(tl.interleave(c0, c2), tl.interleave(c1, c3))
