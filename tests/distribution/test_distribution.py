"""The built wheel and source distribution, installed into environments that have nothing else."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytestmark = [pytest.mark.dist, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
TYPED = """
from quire import AsyncClient, Client, RequestOutput, SamplingParams
from quire.v1 import inference_pb2

def first(client: Client) -> str:
    output: RequestOutput = client.generate("Hi", SamplingParams(max_tokens=4))
    return output.outputs[0].text

reveal_type(AsyncClient("localhost:50051").stream_generate("Hi"))
reveal_type(inference_pb2.GenerateRequest().request_id)
"""


class Environment:
    """A virtual environment, and commands of it that see nothing of the source tree."""

    def __init__(self, folder: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
        self.folder = folder
        self.bin = folder / "venv" / "bin"

    def run(self, program: str, *arguments: str, check: bool = True) -> str:
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        done = subprocess.run(
            [str(self.bin / program), *arguments],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def install(self, *requirements: str) -> None:
        options = os.environ.get("PIP_ARGS", "").split()
        self.run("python", "-m", "pip", "install", "--quiet", *options, *requirements)


def _built(pattern: str) -> Path:
    found = list((ROOT / "dist").glob(pattern))
    assert len(found) == 1, f"make dist builds one {pattern}; found {found}"
    return found[0]


@pytest.fixture(scope="module")
def from_sdist(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The client alone, built from the source distribution."""
    environment = Environment(tmp_path_factory.mktemp("sdist"))
    environment.install(str(_built("quire-*.tar.gz")))
    return environment


@pytest.fixture(scope="module")
def from_wheel(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Everything, from the wheel."""
    environment = Environment(tmp_path_factory.mktemp("wheel"))
    index = os.environ.get("TORCH_INDEX", "")
    environment.install(
        *(["--index-url", index] if index else []), os.environ.get("TORCH", "torch")
    )
    environment.install(f"{_built('quire-*.whl')}[all]")
    return environment


def test_both_have_the_project_s_version(from_sdist: Environment, from_wheel: Environment) -> None:
    for environment in (from_sdist, from_wheel):
        assert environment.run("quire", "--version") == f"quire {VERSION}\n"
        environment.run("python", "-m", "pip", "check")


def test_the_client_needs_no_extra(from_sdist: Environment) -> None:
    environment = from_sdist
    environment.run("python", "-c", "import quire; quire.Client('localhost:1').close()")
    assert "pip install 'quire[all]'" in environment.run(
        "python", "-c", "import quire; quire.LLM('model')", check=False
    )


def test_types_are_published(from_sdist: Environment) -> None:
    from_sdist.install("mypy", "types-protobuf")
    (from_sdist.folder / "typed.py").write_text(TYPED)
    said = from_sdist.run("mypy", "--strict", "typed.py")
    assert "Success" in said
    assert "quire.client.outputs.RequestDelta" in said
    assert 'type is "str"' in said


def test_a_model_is_served(from_wheel: Environment) -> None:
    model = ROOT / "demo" / "model"
    program = (
        "import quire\n"
        f"with quire.LLM({str(model)!r}, dtype='float32') as llm:\n"
        "    greedy = quire.SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)\n"
        "    (output,) = llm.generate(['Once'], greedy)\n"
        "    print(len(output.outputs[0].token_ids))\n"
    )
    assert from_wheel.run("python", "-c", program).splitlines()[-1] == "8"
