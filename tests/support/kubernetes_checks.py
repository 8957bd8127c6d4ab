"""Checks of manifests for Kubernetes that no schema has: references, drains, privileges.

Each takes objects as they are parsed and fails by an assertion.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from gateway_svc.settings import GatewaySettings
from quire.service.health import READY
from quire.service.settings import ServiceSettings
from scheduler_svc.kubernetes.names import PREFIX
from scheduler_svc.settings import SchedulerSettings
from worker_svc.settings import WorkerSettings

Object = dict[str, Any]
Check = Callable[[list[Object]], None]

SETTINGS: Final[dict[str, type[ServiceSettings]]] = {
    "gateway": GatewaySettings,
    "scheduler": SchedulerSettings,
    "worker": WorkerSettings,
}
_COMPONENT = "app.kubernetes.io/component"
# A stopping service needs a second or two besides its drain.
_STOP_S = 5


def pod_templates(objects: Iterable[Object]) -> Iterator[Object]:
    """Pods' metadata and spec; of a LeaderWorkerSet both."""
    for item in objects:
        spec = item.get("spec", {})
        if "template" in spec:
            yield spec["template"]
        elif item["kind"] == "LeaderWorkerSet":
            for name in ("leaderTemplate", "workerTemplate"):
                yield spec["leaderWorkerTemplate"][name]


def container_of(pod: Object) -> Object:
    [container] = pod["spec"]["containers"]
    return dict(container)


def variables_of(container: Object) -> dict[str, Any]:
    """Values by name; None for those that are taken from elsewhere."""
    return {entry["name"]: entry.get("value") for entry in container.get("env", [])}


def _services(objects: list[Object]) -> Iterator[tuple[str, Object, Object]]:
    """Name, pod and container of each pod of a service of Quire."""
    for pod in pod_templates(objects):
        name = pod["metadata"]["labels"][_COMPONENT]
        if name in SETTINGS:
            yield name, pod, container_of(pod)


def check_privileges(objects: list[Object]) -> None:
    """No process has or gains a privilege, and only volumes can be written to."""
    for pod in pod_templates(objects):
        spec = pod["spec"]
        security = spec["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["runAsUser"] == security["fsGroup"] > 0
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container_of(pod)["securityContext"] == {
            "readOnlyRootFilesystem": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }
        assert "memory" in container_of(pod)["resources"]["limits"]


def check_volumes(objects: list[Object]) -> None:
    """Volumes are mounted where they are declared, and files are read where they are mounted."""
    for item in objects:
        claims = item.get("spec", {}).get("volumeClaimTemplates", [])
        for pod in pod_templates([item]):
            container = container_of(pod)
            declared = {volume["name"] for volume in [*pod["spec"]["volumes"], *claims_of(claims)]}
            mounts = container["volumeMounts"]
            assert {mount["name"] for mount in mounts} == declared
            paths = [mount["mountPath"] for mount in mounts]
            files = [v for v in variables_of(container).values() if str(v).startswith("/")]
            assert all(any(f"{file}/".startswith(f"{path}/") for path in paths) for file in files)
            # A projected file of another user's is readable by the group alone.
            secrets = [volume["secret"] for volume in pod["spec"]["volumes"] if "secret" in volume]
            assert all(secret["defaultMode"] == 0o440 for secret in secrets)


def claims_of(claims: list[Object]) -> list[Object]:
    return [claim["metadata"] for claim in claims]


def check_settings(objects: list[Object]) -> None:
    """Variables are those of the service, and may have their values."""
    for name, _, container in _services(objects):
        settings = SETTINGS[name]
        prefix = settings.model_config["env_prefix"]
        names = [entry["name"] for entry in container["env"]]
        assert len(names) == len(set(names))
        for entry in container["env"]:
            if entry["name"] not in {"POD_IP", "HF_TOKEN"}:
                field = entry["name"].removeprefix(prefix).lower()
                assert field in settings.model_fields, entry["name"]
            for variable in re.findall(r"\$\((\w+)\)", entry.get("value", "")):
                # Kubernetes replaces those that precede it.
                assert variable in names[: names.index(entry["name"])]


def check_ports(objects: list[Object]) -> None:
    """Services, policies and variables name ports that containers have."""
    pods = list(pod_templates(objects))
    ports_of = {
        pod["metadata"]["labels"][_COMPONENT]: {
            port["name"]: port["containerPort"] for port in container_of(pod)["ports"]
        }
        for pod in pods
    }
    for service in _of_kind(objects, "Service"):
        ports = ports_of[service["spec"]["selector"][_COMPONENT]]
        for port in service["spec"]["ports"]:
            assert ports[port["targetPort"]] == port["port"]
    for name, _, container in _services(objects):
        variables = variables_of(container)
        for kind, port in ports_of[name].items():
            if kind in {"metrics", "health"}:
                listen = variables[f"QUIRE_{name.upper()}_{kind.upper()}_LISTEN"]
                assert listen == f"0.0.0.0:{port}"
    # In the order of a connection: from whom, to whom.
    assert variables_of(_container(objects, "gateway"))["QUIRE_GATEWAY_SCHEDULER"] == (
        f"quire-scheduler:{ports_of['scheduler']['grpc']}"
    )
    workers = variables_of(_container(objects, "scheduler"))["QUIRE_SCHEDULER_WORKERS"]
    assert workers.removeprefix(PREFIX) == f"quire-worker:{ports_of['worker']['grpc']}"


def _container(objects: list[Object], name: str) -> Object:
    return next(container for service, _, container in _services(objects) if service == name)


def check_tokens(objects: list[Object]) -> None:
    """Schedulers that watch EndpointSlices may do so and nothing else; no other pod has a token of
    the API server."""
    bindings = _of_kind(objects, "RoleBinding")
    roles = {role["metadata"]["name"]: role["rules"] for role in _of_kind(objects, "Role")}
    accounts = {account["metadata"]["name"] for account in _of_kind(objects, "ServiceAccount")}
    num_tokens = 0
    for pod in pod_templates(objects):
        workers = variables_of(container_of(pod)).get("QUIRE_SCHEDULER_WORKERS") or ""
        asks = workers.startswith(PREFIX)
        num_tokens += asks
        assert pod["spec"]["automountServiceAccountToken"] is asks
        if asks:
            account = pod["spec"]["serviceAccountName"]
            assert account in accounts
            [binding] = bindings
            [subject] = binding["subjects"]
            # An API server refuses one without a namespace.
            assert (subject["name"], "namespace" in subject) == (account, True)
            rule = {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"]}
            assert roles[binding["roleRef"]["name"]] == [{**rule, "verbs": ["list", "watch"]}]
        else:
            assert "serviceAccountName" not in pod["spec"]
    assert len(bindings) == len(roles) == len(accounts) == num_tokens


def check_selectors(objects: list[Object]) -> None:
    """What selects pods selects some, and a workload its own."""
    labels = [pod["metadata"]["labels"] for pod in pod_templates(objects)]

    def selects(selector: dict[str, str]) -> bool:
        return any(selector.items() <= of_pod.items() for of_pod in labels)

    for item in objects:
        spec = item.get("spec", {})
        if item["kind"] == "Service":
            assert selects(spec["selector"])
        elif item["kind"] in {"PodDisruptionBudget", "PodMonitor"}:
            assert selects(spec["selector"]["matchLabels"])
        elif item["kind"] == "NetworkPolicy":
            assert selects(spec["podSelector"].get("matchLabels", {}))
        elif "template" in spec:
            selector = spec["selector"]["matchLabels"]
            assert selector.items() <= spec["template"]["metadata"]["labels"].items()
            for spread in spec["template"]["spec"].get("topologySpreadConstraints", []):
                assert spread["labelSelector"]["matchLabels"] == selector


def check_targets(objects: list[Object]) -> None:
    """Autoscalers scale a workload that exists, whose number is set by nothing else."""
    workloads = {(item["kind"], item["metadata"]["name"]): item for item in objects}
    for item in objects:
        if "scaleTargetRef" in item.get("spec", {}):
            target = item["spec"]["scaleTargetRef"]
            workload = workloads[target["kind"], target["name"]]
            assert workload["apiVersion"] == target["apiVersion"]
            assert "replicas" not in workload["spec"]


def check_drains(objects: list[Object]) -> None:
    """A pod is not killed before its service has drained."""
    for name, pod, container in _services(objects):
        drain_s = float(variables_of(container)[f"QUIRE_{name.upper()}_DRAIN_GRACE_S"])
        command = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command")
        sleep_s = 0.0 if command is None else float(command[1])
        assert command is None or command[0] == "sleep"
        grace_s = pod["spec"]["terminationGracePeriodSeconds"]
        assert grace_s >= sleep_s + drain_s + _STOP_S
        # New calls reach a gateway until load balancers have removed it.
        assert (sleep_s > 0) == (name == "gateway")


def check_probes(objects: list[Object]) -> None:
    """Probes ask for health by gRPC; a gateway outlasts the loss of its scheduler."""
    for name, _, container in _services(objects):
        probes = {kind: probe for kind, probe in container.items() if kind.endswith("Probe")}
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        for kind, probe in probes.items():
            assert probe["grpc"]["port"] == ports["health"]
            if kind != "readinessProbe":
                # The process; a restart repairs nothing else.
                assert "service" not in probe["grpc"]
        readiness = probes.get("readinessProbe")
        if readiness is not None:
            assert readiness["grpc"]["service"] == ("redis" if name == "scheduler" else READY)
        if name == "gateway":
            wait_s = GatewaySettings.model_fields["scheduler_wait_s"].default
            assert readiness is not None
            assert readiness["periodSeconds"] * readiness["failureThreshold"] > wait_s


def check_policies(objects: list[Object]) -> None:
    """A connection that one end may open is accepted by the other, and the reverse."""
    opened: set[tuple[str, str, int]] = set()
    accepted: set[tuple[str, str, int]] = set()
    for policy in _of_kind(objects, "NetworkPolicy"):
        spec = policy["spec"]
        own = spec["podSelector"].get("matchLabels", {}).get(_COMPONENT)
        for rule in spec.get("egress", []):
            opened |= {(own, peer, port) for peer, port in _peers(rule, "to")}
        for rule in spec.get("ingress", []):
            accepted |= {(peer, own, port) for peer, port in _peers(rule, "from")}
    assert opened == accepted
    assert {("gateway", "scheduler", 50052), ("scheduler", "worker", 50053)} <= opened


def _peers(rule: Object, direction: str) -> Iterator[tuple[str, int]]:
    """Components and ports of a rule; port 0 for all."""
    for peer in rule.get(direction, []):
        if "podSelector" in peer:
            for port in rule.get("ports", [{"port": 0}]):
                yield peer["podSelector"]["matchLabels"][_COMPONENT], port["port"]


def _of_kind(objects: Iterable[Object], kind: str) -> list[Object]:
    return [item for item in objects if item["kind"] == kind]


CHECKS: Final[tuple[Check, ...]] = (
    check_privileges,
    check_tokens,
    check_volumes,
    check_settings,
    check_ports,
    check_selectors,
    check_targets,
    check_drains,
    check_probes,
    check_policies,
)
