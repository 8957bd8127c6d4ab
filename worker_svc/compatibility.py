"""What must not be installed beside the worker."""

from importlib import metadata


def refuse_foreign_kernels() -> None:
    """Ends the process beside the distribution `kernels`.

    Its import package has the name of ours, and transformers imports whichever comes first.
    To be called before transformers is imported.
    """
    try:
        version = metadata.version("kernels")
    except metadata.PackageNotFoundError:
        return
    raise SystemExit(
        f"quire-worker: the distribution 'kernels' {version} is installed and collides with "
        "quire's own package of that name; run `pip uninstall kernels` or use another environment"
    )
