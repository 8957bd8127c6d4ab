"""Certificates for tests, made by the script that operators use."""

import subprocess
from pathlib import Path

_SCRIPT = Path(__file__).parents[2] / "scripts" / "make-certificates.sh"


def make_certificates(directory: Path, *names: str) -> Path:
    """Make an authority, or renew the certificates of the one in the directory; return it."""
    subprocess.run([_SCRIPT, directory, *names], check=True, capture_output=True)
    return directory
