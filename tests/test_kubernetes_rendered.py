"""The manifests for Kubernetes, rendered by kustomize and Helm: equal, valid, and consistent."""

import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from kubernetes_checks import CHECKS
from kubernetes_manifests import (
    CHART,
    HELM,
    KUBECTL,
    KUBERNETES,
    TOOLS,
    Object,
    call_helm,
    normalized,
    render_chart,
    render_overlay,
)
from referencing import Registry, Resource

SCHEMAS = TOOLS / "kubernetes_validate" / "kubernetes-json-schema"
# The oldest version that the manifests are for, and the newest that the package knows.
VERSIONS = ("1.27", "1.37")
# Of operators: Kubernetes' schemas do not have them.
CUSTOM_KINDS = {"LeaderWorkerSet", "PodMonitor", "ScaledObject"}
OVERLAYS = sorted(path.name for path in (KUBERNETES / "overlays").iterdir())
# Each option of the chart that no example has, with others that it meets.
OPTIONS: dict[str, dict[str, Any]] = {
    "ranks-tls-keda": {
        "worker": {"ranks": 4, "runtimeClassName": "x", "nodeSelector": {"pool": "a"}},
        "tls": {"enabled": True},
        "autoscaling": {"enabled": True},
    },
    "details": {
        "image": {"tag": "x", "pullPolicy": "Always", "pullSecrets": [{"name": "registry"}]},
        "gateway": {
            "service": {"type": "NodePort", "annotations": {"a": "b"}},
            "tolerations": [{"key": "a", "operator": "Exists"}],
        },
        "redis": {"storageClassName": "fast"},
        "model": {"path": "/models/a"},
    },
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(tool.exists() for tool in (KUBECTL, HELM, SCHEMAS)),
        reason="the tools are not installed: make kubernetes-tools",
    ),
]


def is_service(item: Object, name: str) -> bool:
    return bool(item["kind"] == "Service" and item["metadata"]["name"] == name)


def example(name: str) -> Path:
    return CHART / "examples" / f"{name}.yaml"


RENDERED: dict[str, Callable[[], list[Object]]] = {
    **{f"kustomize-{name}": partial(render_overlay, name) for name in OVERLAYS},
    **{f"helm-{name}": partial(render_chart, example(name)) for name in OVERLAYS},
    **{f"helm-{name}": partial(render_chart, **values) for name, values in OPTIONS.items()},
}


@cache
def rendered(name: str) -> list[Object]:
    return RENDERED[name]()


def test_each_overlay_has_an_example() -> None:
    assert sorted(path.stem for path in (CHART / "examples").iterdir()) == OVERLAYS


@pytest.mark.parametrize("name", OVERLAYS)
def test_overlay_and_chart_render_the_same(name: str) -> None:
    overlay, chart = normalized(rendered(f"kustomize-{name}")), normalized(rendered(f"helm-{name}"))
    assert overlay.keys() == chart.keys()
    for key, item in overlay.items():
        assert item == chart[key]


@pytest.mark.parametrize("name", RENDERED)
def test_objects_agree(name: str) -> None:
    for check in CHECKS:
        check(rendered(name))


@cache
def validator(version: str, kind: str, api_version: str) -> Draft202012Validator:
    folder = SCHEMAS / f"v{version}.0-local-strict"
    group = api_version.split("/")[0].split(".")[0]
    file = f"{kind.lower()}-{'-'.join([group, *api_version.split('/')[1:]])}.json"
    registry = Resource.from_contents(_read(folder / "_definitions.json")) @ Registry()
    return Draft202012Validator(_read(folder / file), registry=registry)


@cache
def _read(file: Path) -> Any:
    return json.loads(file.read_text())


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", RENDERED)
def test_objects_are_valid(name: str, version: str) -> None:
    for item in rendered(name):
        if item["kind"] not in CUSTOM_KINDS:
            validator(version, item["kind"], item["apiVersion"]).validate(item)


def test_the_schemas_refuse_what_is_not_in_them() -> None:
    [service] = [item for item in rendered("helm-try") if is_service(item, "quire-worker")]
    check = validator(VERSIONS[0], "Service", "v1")
    assert check.is_valid(service)
    assert not check.is_valid({**service, "spec": {**service["spec"], "clusterIp": "None"}})


def test_helm_lint() -> None:
    assert json.loads(call_helm("helm_lint", paths=[str(CHART)], strict=True))["passed"] is True


def test_a_chart_that_cannot_be_rendered_is_reported() -> None:
    with pytest.raises(ValueError, match="nil pointer"):
        render_chart(tls=None)
