"""One torch thread: the models are tiny, and the tests share the machine."""

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def default_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the size that `tests/conftest.py` sets: these tests look at the default."""
    monkeypatch.delenv("QUIRE_WORKER_KV_CACHE_MEMORY", raising=False)
