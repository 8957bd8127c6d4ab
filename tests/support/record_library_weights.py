"""`python tests/support/record_library_weights.py FOLDER LIBRARY` records what a library wrote.

FOLDER is that of `write_with_gptqmodel.py` or `write_with_autoawq.py`, LIBRARY the name and version
to be noted. For each case a few outputs of one layer are recorded in
`tests/worker/library_weights`, together with the weights that the library computes from them.
"""

import json
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

_RECORDS = Path(__file__).parents[1] / "worker" / "library_weights"
_LAYER = "model.layers.1.self_attn.o_proj"
# A multiple of those that an int32 holds.
_NUM_OUTPUTS = 8


def record(folder: Path, library: str) -> None:
    expected = load_file(folder / "library" / "expected.safetensors")[f"{_LAYER}.weight"]
    stored = load_file(folder / "model.safetensors")
    tensors = {"expected": expected[:_NUM_OUTPUTS].contiguous()}
    for name in ("qweight", "qzeros", "scales", "g_idx"):
        if (tensor := stored.get(f"{_LAYER}.{name}")) is not None:
            tensors[f"layer.{name}"] = _cut(tensor, len(expected))
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    config.pop("meta", None)  # how the library was used
    notes = {"library": library, "quantization_config": json.dumps(config)}
    save_file(tensors, _RECORDS / f"{folder.name}.safetensors", notes)


def _cut(tensor: Tensor, num_outputs: int) -> Tensor:
    """Without the other outputs, which are in the last dimension, one or several in an integer."""
    if tensor.dim() == 1:
        return tensor
    return tensor[:, : tensor.shape[1] * _NUM_OUTPUTS // num_outputs].contiguous()


def main(folder: Path, library: str) -> None:
    _RECORDS.mkdir(exist_ok=True)
    for path in sorted(folder.glob("*/library/expected.safetensors")):
        record(path.parents[1], library)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
