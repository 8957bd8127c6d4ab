"""The number of threads for tests of kernels, independent of other tests in the process, and a
faster interpreter."""

from collections.abc import Iterator

import pytest
import torch
from triton_devices import hasten_interpreter

hasten_interpreter()


@pytest.fixture(autouse=True)
def num_threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Two: alone, a thread shares no work and cuts no long sequence. But one where Triton is
    interpreted: its products are small, and threads would mostly wait for each other, at full
    speed."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if request.path.name.startswith(("test_triton", "test_flash")) else 2)
    yield
    torch.set_num_threads(before)
