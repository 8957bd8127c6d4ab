"""Local stacks of the benchmarks, and the certificates of those with TLS."""

import subprocess
from pathlib import Path

from benchmarks.engines.models import SMALL, Shape
from benchmarks.engines.systems import Bench
from quire.launcher.stack import LocalStack

ROOT = Path(__file__).parents[2]
_FOLDER = ROOT / ".cache" / "engines"
MAX_NUM_SEQS = 64
_SETTINGS = {
    "QUIRE_WORKER_DTYPE": "float32",
    "QUIRE_WORKER_DEVICE": "cpu",
    "QUIRE_WORKER_MAX_MODEL_LEN": "2048",
    "QUIRE_WORKER_MAX_NUM_SEQS": str(MAX_NUM_SEQS),
    "QUIRE_WORKER_KV_CACHE_MEMORY": str(SMALL.kv_cache_bytes),
    # Repeated work must not become cheaper.
    "QUIRE_SCHEDULER_ENABLE_PREFIX_CACHING": "false",
}


def make_certificates(folder: Path) -> dict[str, str]:
    """Make an authority, `ca.pem`, and the gateway's certificate; return the settings for them."""
    script = ROOT / "scripts" / "make-certificates.sh"
    subprocess.run([script, folder], check=True, capture_output=True)
    return {
        "QUIRE_GATEWAY_TLS_CERT": str(folder / "gateway.pem"),
        "QUIRE_GATEWAY_TLS_KEY": str(folder / "gateway-key.pem"),
    }


def model_folder(model: Shape) -> Path:
    """The folder of the model's files, which are made on the first call."""
    return Bench(_FOLDER, None).model_folder(model)


def real_stack(settings: dict[str, str]) -> LocalStack:
    """A stack with the model, gRPC and HTTP; not started."""
    return LocalStack(
        str(model_folder(SMALL)),
        http_listen="127.0.0.1:0",
        settings={**_SETTINGS, **settings},
    )


def simulated_stack(settings: dict[str, str]) -> LocalStack:
    """A stack with a simulated worker, gRPC and HTTP; not started."""
    return LocalStack(
        "demo/model",
        http_listen="127.0.0.1:0",
        settings={"QUIRE_WORKER_ENGINE": "sim", **settings},
    )
