"""Workers that are found by the EndpointSlices of a Service, at an API server with TLS."""

import asyncio
import contextlib
import os
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from certificates import make_certificates
from kubernetes_api import NAMESPACE, SERVICE, KubernetesApi, endpoint, serving
from pydantic import ValidationError
from scripted_cluster import ScriptedCluster
from structlog.testing import capture_logs
from waiting import until

from scheduler_svc.cluster.worker_addresses import WorkerAddresses
from scheduler_svc.kubernetes import endpoint_slices, names
from scheduler_svc.kubernetes.endpoint_slices import EndpointSlices
from scheduler_svc.kubernetes.names import ApiServer, ServiceName
from scheduler_svc.settings import SchedulerSettings

NAME = ServiceName(SERVICE, "", 50053)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
async def api(
    certificates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[KubernetesApi]:
    monkeypatch.setattr(endpoint_slices, "RETRY_S", 0.02)
    async with serving(KubernetesApi(certificates, tmp_path)) as api:
        yield api


class Watching:
    """A watch, and what it has found at each change."""

    def __init__(self, api: KubernetesApi, name: ServiceName = NAME) -> None:
        self.found: list[frozenset[str]] = []
        self.slices = EndpointSlices(name, api.server, self._note)

    def _note(self) -> None:
        self.found.append(self.slices.addresses)

    async def until(self, *addresses: str) -> None:
        expected = {f"{address}:50053" for address in addresses}
        await until(lambda: self.slices.addresses == expected, f"{expected}")


@contextlib.asynccontextmanager
async def watching(api: KubernetesApi, name: ServiceName = NAME) -> AsyncIterator[Watching]:
    watch = Watching(api, name)
    task = asyncio.create_task(watch.slices.run())
    try:
        yield watch
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_each_change_arrives(api: KubernetesApi) -> None:
    await api.put("a", endpoint("10.0.0.1", ready=True), endpoint("10.0.0.2", ready=None))
    await api.put("b")
    async with watching(api) as watch:
        await watch.until("10.0.0.1", "10.0.0.2")
        await api.put("b", endpoint("10.0.0.3"))
        await watch.until("10.0.0.1", "10.0.0.2", "10.0.0.3")
        await api.put("a", endpoint("10.0.0.1", ready=False), endpoint("10.0.0.2", ready=True))
        await watch.until("10.0.0.2", "10.0.0.3")
        await api.put("six", endpoint("fd00::7", "fd00::8"), kind="IPv6")
        await watch.until("10.0.0.2", "10.0.0.3", "[fd00::7]")
        await api.put("names", endpoint("a.example.com"), kind="FQDN")
        await api.delete("a")
        await watch.until("10.0.0.3", "[fd00::7]")
        await api.delete("b")
        await api.delete("six")
        await watch.until()
        assert len(watch.found) == 7, "called at changes of the addresses, and then only"
    assert [request.get("watch") for request in api.requests] == [None, "true"]


async def test_a_watch_that_ends_is_continued_where_it_was(api: KubernetesApi) -> None:
    await api.put("a", endpoint("10.0.0.1"))
    async with watching(api) as watch:
        await watch.until("10.0.0.1")
        await api.bookmark()
        for number in range(2, 5):
            await until(lambda: api.num_watches == 1, "a watch")
            await api.end_watches()
            await api.put("a", endpoint(f"10.0.0.{number}"))
            await watch.until(f"10.0.0.{number}")
    listed = [request for request in api.requests if "watch" not in request]
    assert len(listed) == 1


async def test_a_bookmark_moves_the_version(api: KubernetesApi) -> None:
    """Changes between the list's version and this one need not be known any more."""
    await api.put("a", endpoint("10.0.0.1"))
    async with watching(api) as watch:
        await watch.until("10.0.0.1")
        await until(lambda: api.num_watches == 1, "a watch")
        await api.bookmark()
        await api.end_watches()
        version = str(api.version)
        await until(lambda: api.requests[-1].get("resourceVersion") == version, "its version")


async def test_all_are_listed_again_if_changes_are_not_known_any_more(api: KubernetesApi) -> None:
    await api.put("a", endpoint("10.0.0.1"))
    await api.put("b", endpoint("10.0.0.2"))
    async with watching(api) as watch:
        await watch.until("10.0.0.1", "10.0.0.2")
        await until(lambda: api.num_watches == 1, "a watch")
        del api.slices["a"]
        await api.forget()
        await watch.until("10.0.0.2")
        await api.put("b", endpoint("10.0.0.3"))
        await watch.until("10.0.0.3")


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (403, '{"message": "endpointslices is forbidden"}', "403: .*is forbidden"),
        (500, "", "500"),
        (200, "x", "Expecting value"),
        (200, "[]", "no object"),
        (200, "{}", "no list"),
        (200, '{"metadata": {"resourceVersion": "1"}, "items": [{"metadata": {}}]}', "no list"),
    ],
)
async def test_a_failure_keeps_what_is_known_and_is_logged_once(
    api: KubernetesApi, status: int, body: str, reason: str
) -> None:
    await api.put("a", endpoint("10.0.0.1"))
    async with watching(api) as watch:
        await watch.until("10.0.0.1")
        await until(lambda: api.num_watches == 1, "a watch")
        with capture_logs() as logs:
            api.instead = status, body
            num_requests = len(api.requests)
            await api.forget()
            await until(lambda: len(api.requests) > num_requests + 4, "attempts")
            assert watch.slices.addresses == {"10.0.0.1:50053"}
            api.instead = None
            await api.put("a", endpoint("10.0.0.2"))
            await watch.until("10.0.0.2")
            await until(lambda: logs[-1]["event"] == "EndpointSlices are known again", "the log")
    warnings = [entry for entry in logs if entry["log_level"] == "warning"]
    assert 1 <= len(warnings) <= 2, "that of a watch may differ from that of a list"
    assert all(entry["service"] == SERVICE for entry in warnings)
    assert any(re.search(reason, entry["reason"]) for entry in warnings)


async def test_a_token_that_is_replaced_is_read_again(api: KubernetesApi) -> None:
    async with watching(api) as watch:
        await until(lambda: api.num_watches == 1, "a watch")
        api.set_token("second")
        await api.end_watches()
        await api.put("a", endpoint("10.0.0.1"))
        await watch.until("10.0.0.1")


async def test_a_namespace_may_be_named(api: KubernetesApi) -> None:
    (api.account / "namespace").write_text("other\n")
    await api.put("a", endpoint("10.0.0.1"))
    async with watching(api, ServiceName(SERVICE, NAMESPACE, 50053)) as watch:
        await watch.until("10.0.0.1")


async def test_a_server_of_another_authority_is_not_asked(
    api: KubernetesApi, tmp_path: Path
) -> None:
    other = make_certificates(tmp_path / "other")
    (api.account / "ca.crt").write_bytes((other / "ca.pem").read_bytes())
    with capture_logs() as logs:
        async with watching(api):
            await until(lambda: bool(logs), "a failure")
    assert "certificate verify failed" in logs[0]["reason"]
    assert api.requests == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("kubernetes:a:1", ServiceName("a", "", 1)),
        ("kubernetes:quire-worker.ns-2:65535", ServiceName("quire-worker", "ns-2", 65535)),
    ],
)
def test_a_name_of_a_service(text: str, expected: ServiceName) -> None:
    assert ServiceName.parse(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("kubernetes:", "kubernetes:a", "kubernetes:a:0", "kubernetes:a:65536", "kubernetes:A:1"),
        *("kubernetes:a.b.c:1", "kubernetes:a/..:1", "kubernetes:-a:1", "kubernetes:a:1 ", "a:1"),
    ],
)
def test_no_name_of_a_service(text: str) -> None:
    with pytest.raises(ValueError, match="is not kubernetes:SERVICE"):
        ServiceName.parse(text)


@pytest.fixture
def pod(api: KubernetesApi, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubernetesApi]:
    """This process seems to be in a pod."""
    host, _, port = api.url.removeprefix("https://").partition(":")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", port)
    monkeypatch.setattr(names, "ACCOUNT", api.account)
    return api


def settings(workers: str) -> SchedulerSettings:
    return SchedulerSettings(redis_url="redis://localhost", workers=workers)


async def test_pods_are_workers_beside_other_names(pod: KubernetesApi) -> None:
    await pod.put("a", endpoint("10.0.0.1"))
    chosen = settings(f"unix:/w, kubernetes:{SERVICE}:50053,kubernetes:{SERVICE}.{NAMESPACE}:9")
    member = ScriptedCluster().member("unix:/s")
    addresses = WorkerAddresses(chosen.worker_addresses, member, chosen.api_server)
    changes: list[int] = []
    addresses.listen(lambda: changes.append(len(addresses.all)))
    task = asyncio.create_task(addresses.run())
    try:
        expected = {"unix:/w", "10.0.0.1:50053", "10.0.0.1:9"}
        await until(lambda: addresses.of(0) == expected, "the pods")
        assert changes == [2, 3]
        assert addresses.host_of("10.0.0.1:50053") == SERVICE
        assert addresses.host_of("10.0.0.1:9") == f"{SERVICE}.{NAMESPACE}"
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_settings_name_what_a_pod_lacks(
    pod: KubernetesApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = f"kubernetes:{SERVICE}:50053"
    assert settings(workers).api_server == pod.server
    assert settings("host:1").api_server is None
    with pytest.raises(ValidationError, match=r"'kubernetes:x' is not kubernetes:SERVICE"):
        settings("kubernetes:x")
    (pod.account / "token").unlink()
    with pytest.raises(ValidationError, match=r"token: the pod must have a ServiceAccount"):
        settings(workers)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST")
    with pytest.raises(ValidationError, match="works in a pod only"):
        settings(workers)
    monkeypatch.setattr(names, "find_spec", lambda name: None)
    with pytest.raises(ValidationError, match=r"pip install 'quire\[kubernetes\]'"):
        settings(workers)


def test_an_ipv6_server(pod: KubernetesApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    assert ApiServer.of_pod(os.environ).url == "https://[fd00::1]:443"
