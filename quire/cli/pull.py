"""The command that downloads a model: pull."""

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from quire.cli.app import report_errors
from quire.service.model_files import TEXT_FILES, WEIGHTS_FILES

_Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit.")]


@report_errors()
def pull(
    model: Annotated[str, typer.Argument(help="The hub id of the model, such as ORG/NAME.")],
    revision: _Revision = None,
) -> None:
    """Download a model from the hub, and print its folder.

    It is stored in the hub's cache, where `quire serve` finds it under the same id.
    """
    if model and Path(model).is_dir():
        raise ValueError(f"{model}: a folder of this name exists, and would be served in its place")
    if importlib.util.find_spec("huggingface_hub") is None:
        raise ValueError("pull needs huggingface-hub: pip install 'quire[gateway]'")
    # Imported only here, because the client is an optional dependency.
    hub: Any = importlib.import_module("huggingface_hub")
    if not sys.stderr.isatty():
        importlib.import_module("huggingface_hub.utils").disable_progress_bars()
    try:
        patterns = [*WEIGHTS_FILES, *TEXT_FILES]
        folder = Path(hub.snapshot_download(model, revision=revision, allow_patterns=patterns))
    except Exception as error:
        # Anything the hub's client raises: an unknown id, no network, no permission.
        lines = [line for line in str(error).splitlines() if line]
        reason = " ".join(lines) or type(error).__name__
        raise ValueError(f"{model}: not available from the hub: {reason}") from error
    if not list(folder.glob("*.safetensors")):
        raise ValueError(f"{model}: the hub has no *.safetensors file of it")
    typer.echo(folder)
