"""The manifest for Kubernetes: what it starts exists, and its parts refer to each other."""

import re
from pathlib import Path
from typing import Any

import yaml

from worker_svc.ranks.rendezvous import VARIABLES
from worker_svc.settings import WorkerSettings

ROOT = Path(__file__).resolve().parent.parent
MANIFEST = ROOT / "deploy" / "kubernetes" / "leaderworkerset.yaml"
WORKERS, SERVICE = yaml.safe_load_all(MANIFEST.read_text())
TEMPLATE: dict[str, Any] = WORKERS["spec"]["leaderWorkerTemplate"]
PODS: list[dict[str, Any]] = [
    TEMPLATE[name]["spec"] for name in ("leaderTemplate", "workerTemplate")
]


def container_of(pod: dict[str, Any]) -> dict[str, Any]:
    [container] = pod["containers"]
    return dict(container)


def test_the_command_has_flags_that_exist_and_the_variables_of_ranks() -> None:
    [command] = container_of(PODS[0])["args"]
    flags = re.findall(r"--([a-z-]+)=", command)
    assert {"model", "tensor-parallel-size"} <= set(flags)
    assert {flag.replace("-", "_") for flag in flags} <= WorkerSettings.model_fields.keys()
    assigned = set(re.findall(r"([A-Z_]+)=", command))
    assert {*VARIABLES, "LOCAL_WORLD_SIZE"} <= assigned
    # LeaderWorkerSet sets no others.
    assert set(re.findall(r"\$\{?([A-Z_]+)", command)) <= {
        "LWS_WORKER_INDEX",
        "LWS_GROUP_SIZE",
        "LWS_LEADER_ADDRESS",
    }


def test_all_ranks_run_the_same_and_the_first_serves() -> None:
    leader, follower = map(container_of, PODS)
    probe = leader.pop("readinessProbe")
    assert probe["exec"]["command"][:2] == ["quire", "health"]
    assert follower.pop("readinessProbe") is None
    assert leader == follower
    labels = TEMPLATE["leaderTemplate"]["metadata"]["labels"]
    assert SERVICE["spec"]["selector"].items() <= labels.items()
    assert "metadata" not in TEMPLATE["workerTemplate"]
    assert TEMPLATE["restartPolicy"] == "RecreateGroupOnPodRestart"


def test_ports_are_those_of_the_image() -> None:
    image = (ROOT / "Dockerfile").read_text()
    ports = {port["name"]: port["containerPort"] for port in container_of(PODS[0])["ports"]}
    [served] = SERVICE["spec"]["ports"]
    assert served["targetPort"] in ports
    assert served["port"] == ports["worker"]
    assert f"QUIRE_WORKER_LISTEN=0.0.0.0:{ports['worker']}" in image
    assert f"MASTER_PORT={ports['ranks']}" in container_of(PODS[0])["args"][0]


def test_volumes_are_mounted_where_they_are_declared() -> None:
    for pod in PODS:
        mounted = {mount["name"] for mount in container_of(pod)["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
