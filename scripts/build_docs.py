"""Builds the documentation's site in `.cache/docs/site`: `python scripts/build_docs.py`.

Collects the repository's Markdown files under `.cache/docs/pages`, in their folders, so that
relative links work on the site as they do on GitHub. Adds the reference of the protos and of the
Python API, and runs Zensical with `mkdocs.yml`. Warnings fail the build.

Zensical runs in `.cache/docs`, because it deletes the folder `.cache` beside its configuration.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from importlib.resources import files
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    SourceCodeInfo,
)
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / ".cache" / "docs"
PAGES = BUILD / "pages"
# Pages, images and the style sheet.
SOURCES = (
    *("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"),
    *("docs/**/*.md", "docs/**/*.svg", "docs/**/*.png", "docs/site.css", "protos/README.md"),
    *("benchmarks/RESULTS.md", "benchmarks/results/*.svg"),
)
# Where files of the repository are on the site.
MOVED = {"README.md": "index.md", "protos/quire/v1": "reference/protos.md"}
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#:\s]+)(#[^)\s]*)?\)")
API = {
    "Generation": ("LLM", "Client", "AsyncClient", "SamplingParams"),
    "Outputs": (
        *("RequestOutput", "CompletionOutput", "RequestDelta", "CompletionDelta"),
        *("Logprob", "Usage", "Model"),
    ),
    "Errors": (
        *("QuireError", "AlreadyExistsError", "CancelledError", "DeadlineExceededError"),
        *("InvalidArgumentError", "NotFoundError", "ResourceExhaustedError"),
        *("UnauthenticatedError", "UnavailableError", "LaunchError"),
    ),
    "Local services": ("LocalStack",),
}
Comments = dict[tuple[int, ...], str]


def main() -> int:
    collect()
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    return subprocess.run(command, cwd=BUILD, check=False).returncode


def collect() -> None:
    """Write the configuration and every page of the site to BUILD."""
    shutil.rmtree(BUILD, ignore_errors=True)
    sources = {
        path.relative_to(ROOT).as_posix() for source in SOURCES for path in ROOT.glob(source)
    }
    for name in sorted(sources):
        target = PAGES / MOVED.get(name, name)
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.suffix == ".md":
            target.write_text(_relinked((ROOT / name).read_text(), Path(name), sources))
        else:
            shutil.copy(ROOT / name, target)
    (PAGES / "reference").mkdir()
    (PAGES / "reference" / "python.md").write_text(python_reference())
    (PAGES / "reference" / "protos.md").write_text(protos_reference())
    shutil.copy(ROOT / "mkdocs.yml", BUILD)


def _relinked(text: str, page: Path, sources: set[str]) -> str:
    """`text` with links that work on the site. A link to a file that is not a page becomes text;
    a link to a file that does not exist stays, and fails the build."""
    up = "../" * (len(page.parts) - 1)

    def relink(match: re.Match[str]) -> str:
        label, target, anchor = match.group(1), match.group(2), match.group(3) or ""
        name = (ROOT / page.parent / target).resolve().relative_to(ROOT).as_posix()
        if name in MOVED:
            return f"[{label}]({up}{MOVED[name]}{anchor})"
        is_source = name not in sources and (ROOT / name).exists()
        return label if is_source else match.group()

    return LINK.sub(relink, text)


def python_reference() -> str:
    parts = ["# Python API\n\nEverything here is imported from `quire`.\n"]
    for title, names in API.items():
        parts.append(f"## {title}\n")
        parts += [f"::: quire.{name}\n" for name in names]
    return "\n".join(parts)


def protos_reference() -> str:
    """The public protos as Markdown, with their comments."""
    return "# gRPC API\n\n" + "\n".join(map(_file, _public_protos()))


def _public_protos() -> Iterator[FileDescriptorProto]:
    protos = ROOT / "protos"
    names = sorted(str(path.relative_to(protos)) for path in protos.glob("quire/v1/*.proto"))
    with tempfile.NamedTemporaryFile() as out:
        flags = ["--include_source_info", f"--descriptor_set_out={out.name}"]
        well_known = files("grpc_tools") / "_proto"
        if protoc.main(["protoc", f"-I{protos}", f"-I{well_known}", *flags, *names]) != 0:
            raise SystemExit("protoc failed")
        yield from FileDescriptorSet.FromString(Path(out.name).read_bytes()).file


def _file(proto: FileDescriptorProto) -> str:
    comments = {tuple(at.path): _comment(at) for at in proto.source_code_info.location}
    lines = [f"## {proto.name}\n", comments.get((2,)) or comments.get((12,), ""), ""]
    for i, service in enumerate(proto.service):
        lines += [f"### {service.name}\n", comments.get((6, i), ""), ""]
        rows = [
            (
                f"`{method.name}`",
                f"{_link(method.input_type)} → "
                f"{'stream of ' if method.server_streaming else ''}{_link(method.output_type)}",
                comments.get((6, i, 2, j), ""),
            )
            for j, method in enumerate(service.method)
        ]
        lines += _table(("method", "messages", "meaning"), rows)
    for i, message in enumerate(proto.message_type):
        lines += _message(message, (4, i), comments)
    for i, enum in enumerate(proto.enum_type):
        lines += _enum(enum, (5, i), comments)
    return "\n".join(lines) + "\n"


def _comment(location: SourceCodeInfo.Location) -> str:
    """The comments before a declaration, with the detached paragraphs of a file's head."""
    texts = [*location.leading_detached_comments, location.leading_comments]
    return "\n\n".join(text.strip().replace("\n ", "\n") for text in texts if text.strip())


def _message(message: DescriptorProto, path: tuple[int, ...], comments: Comments) -> list[str]:
    lines = [f"### {message.name}\n", comments.get(path, ""), ""]
    maps = {entry.name: entry for entry in message.nested_type if entry.options.map_entry}
    rows = [
        (str(field.number), f"`{field.name}`", _type(field, maps), comments.get((*path, 2, i), ""))
        for i, field in enumerate(message.field)
    ]
    return lines + (_table(("", "field", "type", "meaning"), rows) if rows else ["No fields.\n"])


def _enum(enum: EnumDescriptorProto, path: tuple[int, ...], comments: Comments) -> list[str]:
    rows = [
        (str(value.number), f"`{value.name}`", comments.get((*path, 2, i), ""))
        for i, value in enumerate(enum.value)
    ]
    head = [f"### {enum.name}\n", comments.get(path, ""), ""]
    return head + _table(("", "value", "meaning"), rows)


def _type(field: FieldDescriptorProto, maps: Mapping[str, DescriptorProto]) -> str:
    """Of a field of a message whose fields of type map have the entries `maps`, by name."""
    if entry := maps.get(field.type_name.rpartition(".")[2]):
        key, value = (_type(part, {}) for part in entry.field)
        return f"map of {key} to {value}"
    if field.type_name:
        name = _link(field.type_name)
    else:
        name = FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {name}"
    if field.proto3_optional:
        return f"optional {name}"
    return f"{name} (one of)" if field.HasField("oneof_index") else name


def _link(type_name: str) -> str:
    name = type_name.rpartition(".")[2]
    if type_name.startswith(".google."):
        # Of protobuf itself.
        return f"`{type_name[1:]}`"
    return f"[{name}](#{name.lower()})"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    clean: Callable[[str], str] = lambda cell: " ".join(cell.split()).replace("|", "\\|")  # noqa: E731
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    lines += [f"| {' | '.join(map(clean, row))} |" for row in rows]
    return [*lines, ""]


if __name__ == "__main__":
    sys.exit(main())
