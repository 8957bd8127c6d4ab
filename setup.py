"""Generates the stubs during a build: into the wheel, or into the tree of an editable install."""

import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from build_stubs import build_stubs  # noqa: E402


class BuildWithStubs(build_py):
    def run(self) -> None:
        build_stubs(ROOT if self.editable_mode else Path(self.build_lib))
        super().run()


setup(cmdclass={"build_py": BuildWithStubs})
