"""The manifests for Kubernetes, rendered by kustomize and Helm: equal, valid, and consistent."""

import json
import re
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from kubernetes_checks import CHECKS, container_of, pod_templates, variables_of
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
        "tracing": {"endpoint": "https://traces.example.com:4000", "port": 4000},
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


def namespace(name: str) -> Object:
    return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}


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


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"worker": {"replica": 3}}, "at '/worker': additional properties 'replica' not allowed"),
    ({"redis": {"maxmemory": 2147483648}}, "at '/redis/maxmemory': got number, want string"),
    ({"worker": {"env": [{"name": "A", "value": 1}]}}, "at '/worker/env/0/value': got number"),
    ({"tls": {"enabled": "false"}}, "at '/tls/enabled': got string, want boolean"),
    ({"redis": {"passwordSecret": ""}}, "at '/redis/passwordSecret': ''"),
    ({"gateway": {"minReplicas": 0}}, "at '/gateway/minReplicas': minimum: got 0, want 1"),
    ({"gateway": {"minReplicas": 9}}, r"gateway.minReplicas \(9\) is above gateway.maxReplicas"),
    ({"worker": {"maxSurge": 0}}, "worker.maxSurge and worker.maxUnavailable are both 0"),
    ({"release": "9lives"}, 'the release "9lives" has to begin with a letter'),
    ({"tls": None}, "nil pointer"),
]


def test_a_chart_that_cannot_be_rendered_is_reported() -> None:
    for values, reason in REFUSED:
        with pytest.raises(ValueError, match=reason):
            render_chart(**values)


def test_variables_of_the_user_replace_those_of_the_chart() -> None:
    variables = {"worker": "THREADS", "scheduler": "DRAIN_GRACE_S", "gateway": "METRICS_LISTEN"}
    env = {
        name: {"env": [{"name": f"QUIRE_{name.upper()}_{variable}", "value": "x"}]}
        for name, variable in variables.items()
    }
    containers = {c["name"]: c for c in map(container_of, pod_templates(render_chart(**env)))}
    for name, variable in variables.items():
        names = [entry["name"] for entry in containers[name]["env"]]
        assert names.count(f"QUIRE_{name.upper()}_{variable}") == 1
        assert containers[name]["env"][-1] == env[name]["env"][0]


@pytest.mark.parametrize(
    ("url", "ports"),
    [
        ("redis://user:a:7@one/1", [6390, 6379]),
        ("redis+sentinel://one:26380,two,[fd00::1]:7/name", [6390, 26380, 26379, 7]),
        ("rediss+cluster://one:6390,two:6391?a=b:1", [6390, 6391]),
    ],
)
def test_schedulers_may_reach_the_ports_in_the_url_of_redis(url: str, ports: list[int]) -> None:
    objects = render_chart(redis={"url": url, "port": 6390})
    [policy] = [item for item in objects if item["metadata"]["name"] == "quire-scheduler-redis"]
    [rule] = policy["spec"]["egress"]
    assert [entry["port"] for entry in rule["ports"]] == ports


@pytest.mark.parametrize(
    ("name", "endpoint", "rule"),
    [
        *(
            (
                f"{renderer}-fleet",
                "http://otel-collector.observability:4317",
                {"to": [namespace("observability")], "ports": [{"protocol": "TCP", "port": 4317}]},
            )
            for renderer in ("kustomize", "helm")
        ),
        (
            "helm-details",
            "https://traces.example.com:4000",
            {"ports": [{"protocol": "TCP", "port": 4000}]},
        ),
    ],
)
def test_gateways_and_schedulers_reach_the_receiver_of_traces(
    name: str, endpoint: str, rule: Object
) -> None:
    containers = {c["name"]: c for c in map(container_of, pod_templates(rendered(name)))}
    for service in ("gateway", "scheduler"):
        variables = variables_of(containers[service])
        assert variables[f"QUIRE_{service.upper()}_OTLP_TRACES_ENDPOINT"] == endpoint
    [policy] = [item for item in rendered(name) if item["metadata"]["name"] == "quire-tracing"]
    assert policy["spec"]["egress"] == [rule]
    [expression] = policy["spec"]["podSelector"]["matchExpressions"]
    assert expression["values"] == ["gateway", "scheduler"]


def test_there_are_no_traces_by_default() -> None:
    objects = rendered("helm-try")
    assert "quire-tracing" not in {item["metadata"]["name"] for item in objects}
    names = {name for pod in pod_templates(objects) for name in variables_of(container_of(pod))}
    assert not [name for name in names if "OTLP" in name]


def test_any_name_of_a_release_gives_names_of_services_and_labels() -> None:
    release = "my.release-" + 42 * "a"
    objects = render_chart(release=release, worker={"ranks": 2})
    names = {item["kind"]: item["metadata"]["name"] for item in objects}
    # The longest label of a pod: the name of a worker's StatefulSet, and the hash of its revision.
    assert len(names["LeaderWorkerSet"] + "-999" + "-0123456789") <= 63
    assert all(re.fullmatch("[a-z][a-z0-9-]{,62}", name) for name in names.values())
