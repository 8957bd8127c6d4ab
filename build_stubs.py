"""`python build_stubs.py FOLDER` generates the protobuf and gRPC stubs from `protos/`."""

import os
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent


def build_stubs(out: Path) -> None:
    """Write `quire/v1` and `quire/internal/v1` to `out`, with type stubs."""
    from grpc_tools import protoc

    protos = ROOT / "protos"
    sources = sorted(str(path.relative_to(protos)) for path in protos.rglob("*.proto"))
    out.mkdir(parents=True, exist_ok=True)
    # protoc finds its plug-ins (mypy-protobuf) on PATH.
    os.environ["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    kinds = ["python", "grpc_python", "mypy", "mypy_grpc"]
    flags = [f"--{kind}_out={'quiet:' if 'mypy' in kind else ''}{out}" for kind in kinds]
    well_known = str(Path(protoc.__file__).parent / "_proto")
    if protoc.main(["protoc", f"-I{protos}", f"-I{well_known}", *flags, *sources]) != 0:
        raise SystemExit("protoc failed")
    for package in ("v1", "internal", "internal/v1"):
        (out / "quire" / package / "__init__.py").touch()


if __name__ == "__main__":
    build_stubs(Path(sys.argv[1]))
