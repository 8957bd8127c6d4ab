"""What a worker without a GPU imports before it knows whether the weights are packed."""

import os
import subprocess
import sys

import pytest
import torch

_IMPORTED = """
import sys
import worker_svc.loading.runner_loading
print(*{name.partition(".")[0] for name in sys.modules})
"""


@pytest.mark.slow
@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this torch may use a GPU")
def test_a_worker_on_a_cpu_imports_neither_triton_nor_transformers() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", _IMPORTED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    imported = set(done.stdout.split())
    assert "torch" in imported
    assert not imported & {"triton", "transformers"}
