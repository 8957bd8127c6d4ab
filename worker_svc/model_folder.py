"""Where a model's files are."""

from pathlib import Path

from huggingface_hub import snapshot_download


class ModelError(ValueError):
    """A model that cannot be found or served."""


def find_model(model: str, revision: str | None, files: list[str]) -> Path:
    """The local folder, else the hub's cache with those files that match.

    ModelError if neither is to be had.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_absolute() or model.startswith("."):
        raise ModelError(f"{model}: no such folder")
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=files))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{model}: no such folder, and not to be had from the hub: {error}"
        ) from error
