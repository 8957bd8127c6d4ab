"""How many blocks a pool must have."""

from worker_svc.settings import WrongSettingError


def require_room(num_blocks: int, block_size: int, max_model_len: int) -> None:
    """WrongSettingError, with both numbers, if the longest sequence does not fit beside the null
    block."""
    usable = max(num_blocks - 1, 0)
    needed = -(-max_model_len // block_size)
    if usable < needed:
        raise WrongSettingError(
            f"a sequence of {max_model_len} tokens needs {needed} blocks, but only {usable} can be "
            "used; raise --kv-cache-memory or --num-blocks, or lower --max-model-len"
        )
