"""Workers load the weights that earlier ones have packed."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def packed_weights(weight_cache: None) -> None:
    """For all tests of this folder."""
