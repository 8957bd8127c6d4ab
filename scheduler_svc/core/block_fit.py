"""Whether a demand for blocks fits into a pool. Pure."""

from scheduler_svc.core.view import BlockFit, Limits


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Number of blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)


def fit(num_needed: int, num_free: int, num_usable: int, watermark: int) -> BlockFit:
    """Compare a demand with the pool: `num_usable` blocks in all, `watermark` of them stay free."""
    if num_needed > num_usable - watermark:
        return BlockFit.NEVER
    return BlockFit.OK if num_needed <= num_free - watermark else BlockFit.LATER


def fit_of_prompt(num_tokens: int, limits: Limits, num_usable: int) -> BlockFit:
    """Whether an otherwise empty pool could hold a prompt without cache hits: OK or NEVER."""
    num_slots = min(num_tokens + limits.num_lookahead_slots, limits.max_model_len)
    num_needed = blocks_for(num_slots, limits.block_size)
    return fit(num_needed, num_usable, num_usable, limits.watermark)
