"""A faster interpreter, and one torch thread: models are tiny, and tests share the machine."""

import pytest
import torch
from triton_devices import hasten_interpreter

hasten_interpreter()
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def default_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the size that `tests/conftest.py` sets: these tests look at the default."""
    monkeypatch.delenv("QUIRE_WORKER_KV_CACHE_MEMORY", raising=False)
