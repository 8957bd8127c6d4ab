"""The manifests for Kubernetes as they are written, without the tools that render them."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator
from kubernetes_checks import CHECKS, SETTINGS, Check, container_of, pod_templates, variables_of
from kubernetes_manifests import CHART, KUBERNETES, ROOT
from redis_groups import Server

from benchmarks.redis_cluster import wait_until
from quire.launcher.redis import find_redis_server
from worker_svc.ranks.rendezvous import VARIABLES

DEPLOY = ROOT / "deploy"
KUSTOMIZATIONS = sorted(KUBERNETES.rglob("kustomization.yaml"))
RANKS = KUBERNETES / "components" / "ranks" / "leaderworkerset.yaml"
# Parts whose objects are complete without patches of others.
COMPONENTS = ("redis", "ranks")


def load(file: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(file.read_text()))


def objects_of(folder: Path) -> list[dict[str, Any]]:
    files = [file for file in folder.glob("*.yaml") if file.name != "kustomization.yaml"]
    return [item for file in sorted(files) for item in load(file)]


def base_objects() -> list[dict[str, Any]]:
    """With the labels that its kustomization gives them."""
    objects = objects_of(KUBERNETES / "base")
    kustomization = yaml.safe_load((KUBERNETES / "base" / "kustomization.yaml").read_text())
    [labels] = kustomization["labels"]
    for pod in pod_templates(objects):
        pod["metadata"]["labels"].update(labels["pairs"])
    return objects


def is_service(item: dict[str, Any], name: str) -> bool:
    return bool(item["kind"] == "Service" and item["metadata"]["name"] == name)


OBJECTS = [
    *base_objects(),
    *(item for name in COMPONENTS for item in objects_of(KUBERNETES / "components" / name)),
]


@pytest.mark.parametrize("check", CHECKS)
def test_objects_agree(check: Check) -> None:
    check(OBJECTS)


def test_kustomizations_have_all_files() -> None:
    listed = {
        (file.parent / name).resolve()
        for file in KUSTOMIZATIONS
        for name in [*yaml.safe_load(file.read_text()).get("resources", [])]
    }
    parts = {path if path.is_file() else path / "kustomization.yaml" for path in listed}
    assert all(path.is_file() for path in parts)
    written = set(KUBERNETES.rglob("*.yaml")) - set(KUSTOMIZATIONS)
    assert written == {path for path in listed if path.is_file()}
    components = {
        (file.parent / name / "kustomization.yaml").resolve()
        for file in KUSTOMIZATIONS
        for name in yaml.safe_load(file.read_text()).get("components", [])
    }
    assert components == set((KUBERNETES / "components").rglob("kustomization.yaml"))


def test_variables_exist_wherever_they_are_written() -> None:
    """In patches and in templates of the chart, too."""
    files = [file for file in DEPLOY.rglob("*") if file.is_file()]
    names = {name for file in files for name in re.findall(r"\bQUIRE_[A-Z_]+", file.read_text())}
    settings = {
        f"{kind.model_config['env_prefix']}{field}".upper()
        for kind in SETTINGS.values()
        for field in kind.model_fields
    }
    assert len(names) > 25
    assert names <= settings


def test_variables_of_tls_are_those_of_compose() -> None:
    pattern = r"QUIRE_[A-Z]+_[A-Z_]*TLS_[A-Z_]+"
    compose = set(re.findall(pattern, (ROOT / "docker-compose.tls.yml").read_text()))
    # Clients need no certificate. Schedulers have none for their pod's address, by which standbys
    # connect to the leader.
    peer = {f"QUIRE_SCHEDULER_PEER_TLS_{name}" for name in ("CA", "CERT", "KEY")}
    expected = compose - {"QUIRE_GATEWAY_TLS_CLIENT_CA"} - peer
    component = KUBERNETES / "components" / "tls" / "kustomization.yaml"
    assert set(re.findall(pattern, component.read_text())) == expected
    templates = "".join(file.read_text() for file in (CHART / "templates").iterdir())
    assert set(re.findall(pattern, templates)) == expected


def test_traces_have_the_same_variables_in_the_component_and_in_the_chart() -> None:
    """Those of the services that export traces, to which a policy applies."""
    pattern = r"QUIRE_([A-Z]+)_OTLP_TRACES_ENDPOINT"
    component = KUBERNETES / "components" / "tracing"
    services = re.findall(pattern, (component / "kustomization.yaml").read_text())
    templates = "".join(file.read_text() for file in (CHART / "templates").iterdir())
    assert sorted(re.findall(pattern, templates)) == services
    tracing = {
        name for name, kind in SETTINGS.items() if "otlp_traces_endpoint" in kind.model_fields
    }
    assert {name.lower() for name in services} == tracing
    [policy] = load(component / "network.yaml")
    [expression] = policy["spec"]["podSelector"]["matchExpressions"]
    assert set(expression["values"]) == tracing
    [rule] = policy["spec"]["egress"]
    endpoint = re.findall(r"value: (http\S+)", (component / "kustomization.yaml").read_text())
    [namespace] = [peer["namespaceSelector"]["matchLabels"] for peer in rule["to"]]
    [port] = [port["port"] for port in rule["ports"]]
    address = f"http://otel-collector.{namespace['kubernetes.io/metadata.name']}:{port}"
    assert endpoint == [address] * len(services)


def test_queries_are_of_metrics_that_exist() -> None:
    collector = (ROOT / "scheduler_svc" / "operations" / "collector.py").read_text()
    files = [*KUBERNETES.rglob("*.yaml"), *(CHART / "templates").iterdir()]
    names = {name for file in files for name in re.findall(r"quire:[a-z_]+", file.read_text())}
    assert len(names) == 3
    assert all(f'"{name}"' in collector for name in names)


def test_queries_for_the_number_of_workers_are_those_that_promtool_tests() -> None:
    [scaled] = load(KUBERNETES / "components" / "keda" / "scaledobject.yaml")
    queries = [trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"]]
    rules = yaml.safe_load((DEPLOY / "observability" / "rules_test.yml").read_text())
    checks = [check for test in rules["tests"] for check in test.get("promql_expr_test", [])]
    assert set(queries) <= {check["expr"] for check in checks}
    template = (CHART / "templates" / "scaledobject.yaml").read_text()
    values = yaml.safe_load((CHART / "values.yaml").read_text())["autoscaling"]
    for name, value in {
        "$labels": '{namespace="quire"}',
        "int .waitingTokens": values["waitingTokens"],
        ".sequences": values["sequences"],
    }.items():
        template = template.replace(f"{{{{ {name} }}}}", str(value))
    assert all(query in " ".join(template.split()) for query in queries)


def test_probes_ask_for_checks_that_exist() -> None:
    assert '_REDIS, _LEAD, _WORKER = "redis",' in (ROOT / "scheduler_svc/server.py").read_text()


def test_images_are_targets_of_the_dockerfile_with_the_version_of_the_project() -> None:
    [version] = re.findall(
        r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )
    targets = re.findall(r"^FROM \S+ AS (\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    images = {container_of(pod)["image"] for pod in pod_templates(OBJECTS)} - {"redis:7"}
    assert len(images) == 3
    for image in images:
        name, tag = image.removeprefix("quire-").split(":")
        assert name in targets
        assert tag == version
    gpu = yaml.safe_load((KUBERNETES / "components" / "gpu" / "kustomization.yaml").read_text())
    assert gpu["images"][0]["newName"].removeprefix("quire-") in targets
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == version


def test_the_schema_of_the_chart_has_all_values() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    assert defaults.keys() == schema["properties"].keys() - {"global"}
    for name, value in defaults.items():
        if isinstance(value, dict):
            assert value.keys() == schema["properties"][name]["properties"].keys()
    validator = Draft7Validator(schema)
    for file in [CHART / "values.yaml", *(CHART / "examples").iterdir()]:
        validator.validate(yaml.safe_load(file.read_text()))


def test_ports_are_those_of_the_image() -> None:
    image = (ROOT / "Dockerfile").read_text()
    for pod in pod_templates(OBJECTS):
        container = container_of(pod)
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        name = container["name"]
        if name in SETTINGS:
            assert f"QUIRE_{name.upper()}_LISTEN=0.0.0.0:{ports['grpc']}" in image
        if "http" in ports:
            assert f"QUIRE_GATEWAY_HTTP_LISTEN=0.0.0.0:{ports['http']}" in image


def test_redis_is_that_of_compose() -> None:
    """Its configuration, but for the place of the password and what compose has as a variable."""
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["redis"]
    [redis] = [pod for pod in pod_templates(OBJECTS) if container_of(pod)["name"] == "redis"]
    [script] = container_of(redis)["args"]
    expected = compose["command"][2].replace("$$", "$").replace("${REDIS_MAXMEMORY:-1gb}", "1gb")
    assert script == expected.replace("/run/secrets/redis-password", "/run/secrets/redis/password")
    assert f"{redis['spec']['securityContext']['runAsUser']}:999" == compose["user"]
    template = (CHART / "templates" / "redis.yaml").read_text()
    for line in script.splitlines():
        assert line in template.replace("{{ $values.maxmemory }}", "1gb")


Probe = Callable[[str], int]


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    server.do("CONFIG", "SET", "requirepass", "old")
    yield server
    server.kill()


@pytest.fixture
def probe(redis: Server, tmp_path: Path) -> Probe:
    """Run a probe of Redis' pod against `redis`, and return its status: 124 after a second. The
    password's file has the one that Redis was started with."""
    client = find_redis_server().with_name("redis-cli")
    if not client.exists():
        pytest.skip("redis-cli is not installed")
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "redis-cli").write_text(f'#!/bin/sh\nexec {client} -p {redis.port} "$@"\n')
    (programs / "redis-cli").chmod(0o755)
    (tmp_path / "password").write_text("old\n")
    [pod] = [pod for pod in pod_templates(OBJECTS) if container_of(pod)["name"] == "redis"]

    def run(kind: str) -> int:
        *shell, script = container_of(pod)[f"{kind}Probe"]["exec"]["command"]
        script = script.replace("/run/secrets/redis/password", str(tmp_path / "password"))
        env = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
        return subprocess.run(["timeout", "1", *shell, script], env=env).returncode

    return run


def test_redis_is_not_restarted_because_its_password_has_changed(
    probe: Probe, tmp_path: Path
) -> None:
    assert (probe("liveness"), probe("readiness")) == (0, 0)
    (tmp_path / "password").write_text("new\n")
    assert probe("liveness") == 0
    assert probe("readiness") != 0


def test_redis_is_not_restarted_because_it_cannot_write(
    redis: Server, probe: Probe, tmp_path: Path
) -> None:
    # A snapshot fails without its folder, as on a full disk, and then Redis refuses writes.
    redis.do("CONFIG", "SET", "save", "3600 1")
    (tmp_path / str(redis.port)).rename(tmp_path / "gone")
    shutil.rmtree(tmp_path / "gone")
    redis.do("BGSAVE")
    wait_until(lambda: redis.info("persistence")["rdb_last_bgsave_status"] == "err", "an error")
    assert probe("liveness") == 0
    assert probe("readiness") != 0


def test_a_redis_that_hangs_or_has_ended_is_restarted(redis: Server, probe: Probe) -> None:
    redis.suspend()
    assert probe("liveness") == 124
    redis.kill()
    assert probe("liveness") == 1


def test_all_ranks_run_the_same_and_the_first_serves() -> None:
    leader, follower = map(container_of, pod_templates(load(RANKS)))
    assert "readinessProbe" in leader
    del leader["readinessProbe"]
    assert leader == follower
    [workers] = load(RANKS)
    template = workers["spec"]["leaderWorkerTemplate"]
    assert template["restartPolicy"] == "RecreateGroupOnPodRestart"
    first, other = (
        template[name]["metadata"]["labels"] for name in ("leaderTemplate", "workerTemplate")
    )
    assert first == {**other, "quire-rank": "0"}
    patches = yaml.safe_load((RANKS.parent / "kustomization.yaml").read_text())["patches"]
    service = yaml.safe_load(patches[1]["patch"])
    assert service["spec"]["selector"] == {"quire-rank": "0"}
    [service] = [item for item in OBJECTS if is_service(item, "quire-worker")]
    # The others resolve the first one's address before it is ready, as it waits for them.
    assert service["spec"]["publishNotReadyAddresses"] is True


def test_the_command_of_ranks_has_flags_that_exist_and_the_variables_of_ranks() -> None:
    leader = container_of(next(pod_templates(load(RANKS))))
    [command] = leader["args"]
    flags = re.findall(r"--([a-z-]+)=", command)
    assert flags == ["tensor-parallel-size"]
    assert "QUIRE_WORKER_KV_CACHE_MEMORY" in variables_of(leader)
    assert "tensor_parallel_size" in SETTINGS["worker"].model_fields
    assigned = set(re.findall(r"([A-Z_]+)=", command))
    assert {*VARIABLES, "LOCAL_WORLD_SIZE"} <= assigned
    # LeaderWorkerSet sets no others.
    assert set(re.findall(r"\$\{?([A-Z_]+)", command)) <= {
        "LWS_WORKER_INDEX",
        "LWS_GROUP_SIZE",
        "LWS_LEADER_ADDRESS",
    }
    [port] = [port["containerPort"] for port in leader["ports"] if port["name"] == "ranks"]
    assert f"MASTER_PORT={port}" in command
