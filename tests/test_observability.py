"""Rules, alerts and dashboards: all that they name exists, and the compose file provides them."""

import asyncio
import json
import re
import shutil
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client import CollectorRegistry, Metric
from scripted_engine import FREE, ScriptedEngine

from gateway_svc.metrics.objectives import parse_objectives
from gateway_svc.metrics.request_metrics import GatewayMetrics
from quire.service.errors import RequestError, unavailable
from quire.service.metrics.server import export_expiry, export_process
from scheduler_svc.core.limits import Reservation
from scheduler_svc.core.stats import LaneStats, StepTiming
from scheduler_svc.operations.collector import EngineCollector
from scheduler_svc.operations.step_histograms import StepHistograms
from scheduler_svc.settings import SchedulerSettings

ROOT = Path(__file__).resolve().parent.parent
FILES = ROOT / "deploy" / "observability"
RULE_FILES = sorted((FILES / "rules").glob("*.yml"))
DASHBOARDS = sorted((FILES / "grafana" / "dashboards").glob("*.json"))
# Prometheus adds these to every series that it scrapes, the last one on Kubernetes.
TARGET_LABELS = {"job", "instance", "namespace"}

Series = dict[str, set[str]]


def gateway_metrics() -> list[Metric]:
    metrics = GatewayMetrics(parse_objectives("default=1:1"))
    with pytest.raises(RequestError), metrics.request():
        raise unavailable("NO_WORKER", "none")
    return list(metrics.registry.collect())


def scheduler_metrics() -> list[Metric]:
    """Those of an engine with a worker, a tenant, and one of everything that has a label."""

    async def collect() -> list[Metric]:
        steps = StepHistograms()
        engine: Any = ScriptedEngine()
        collector = EngineCollector(steps, lambda: {0: engine}, lambda _: True)
        drafts = Counter({0: 1})
        engine.add(10, FREE).stats = LaneStats(draft_tokens=drafts, accepted_tokens=drafts)
        steps.observe(StepTiming(10, 0.1, 0.1, 0.1, 1))
        engine.stats.end("length")
        engine.shares.of("t")
        engine.stats.accept("t", 1)
        engine.stats.refuse("t", "QUEUE_FULL")
        engine.quotas.reserve(Reservation("t", 1, is_resumable=False))
        registry = CollectorRegistry()
        await asyncio.to_thread(registry.register, collector)
        return await asyncio.to_thread(lambda: list(registry.collect()))

    return asyncio.run(collect())


def certificate_metrics() -> list[Metric]:
    certificates: Any = SimpleNamespace(expires_at=lambda: 0.0)
    registry = CollectorRegistry()
    export_expiry(registry, certificates)
    return list(registry.collect())


def process_metrics() -> list[Metric]:
    registry = CollectorRegistry()
    export_process(registry)
    return list(registry.collect())


@cache
def exported() -> Series:
    """The labels of each sample's name, as the services export them."""
    found: Series = defaultdict(set)
    for metric in chain(
        gateway_metrics(), scheduler_metrics(), certificate_metrics(), process_metrics()
    ):
        assert metric.samples, metric.name
        for sample in metric.samples:
            found[sample.name] |= {*sample.labels, *TARGET_LABELS}
    return {**found, "up": set(TARGET_LABELS)}


@cache
def rules() -> list[dict[str, Any]]:
    groups = [group for file in RULE_FILES for group in yaml.safe_load(file.read_text())["groups"]]
    return [rule for group in groups for rule in group["rules"]]


@cache
def known() -> Series:
    """Exported series, and those that rules record, with the labels that may be in them."""
    recorded = {
        rule["record"]: labels_of(rule["expr"], exported()) for rule in rules() if "record" in rule
    }
    return exported() | recorded


def alerts() -> dict[str, dict[str, Any]]:
    return {rule["alert"]: rule for rule in rules() if "alert" in rule}


def labels_of(expression: str, series: Series) -> set[str]:
    """The labels that the result of a query may have. AssertionError if the query names a series,
    or a label, that does not exist."""
    # Values in the place of Grafana's variables.
    return result_labels(promql_parser.parse(re.sub(r"\$\w+", "1m", expression)), series)


def result_labels(node: Any, series: Series) -> set[str]:
    match node:
        case promql_parser.VectorSelector():
            assert node.name in series, node.name
            assert {matcher.name for matcher in node.matchers.matchers} <= series[node.name]
            return series[node.name]
        case promql_parser.MatrixSelector():
            return result_labels(node.vector_selector, series)
        case promql_parser.ParenExpr() | promql_parser.SubqueryExpr():
            return result_labels(node.expr, series)
        case promql_parser.AggregateExpr():
            labels = result_labels(node.expr, series)
            kept = set(node.modifier.labels) if node.modifier else set()
            assert kept <= labels, f"{kept - labels} in {node.prettify()}"
            return kept
        case promql_parser.Call():
            labels = set().union(*(result_labels(one, series) for one in node.args))
            if node.func.name != "histogram_quantile":
                return labels
            assert "le" in labels, node.prettify()
            return labels - {"le"}
        case promql_parser.BinaryExpr():
            left, right = (result_labels(side, series) for side in (node.lhs, node.rhs))
            # A number has no labels; otherwise both sides have the same.
            return left or right
        case promql_parser.NumberLiteral():
            return set()
    raise AssertionError(f"unknown node: {node}")


def aggregations(node: Any) -> Iterator[Any]:
    """Those of a query, wherever they are in it."""
    if isinstance(node, promql_parser.AggregateExpr):
        yield node
    inner = [getattr(node, name, None) for name in ("expr", "lhs", "rhs")]
    for one in (*filter(None, inner), *getattr(node, "args", ())):
        yield from aggregations(one)


def test_rules_do_not_mix_the_installations_of_a_prometheus() -> None:
    for rule in rules():
        assert "namespace" in labels_of(rule["expr"], known()), rule
        for aggregation in aggregations(promql_parser.parse(rule["expr"])):
            assert aggregation.modifier is not None, aggregation.prettify()
            assert "namespace" in aggregation.modifier.labels, aggregation.prettify()


def test_a_stuck_worker_raises_its_alert_before_its_series_end() -> None:
    alert = alerts()["QuireWorkerStuck"]
    [seconds] = re.findall(r"offset (\d+)s$", alert["expr"])
    assert "for" not in alert
    groups = [group for file in RULE_FILES for group in yaml.safe_load(file.read_text())["groups"]]
    [interval] = [group.get("interval") for group in groups if alert in group["rules"]]
    monitor = FILES.parent / "kubernetes" / "components" / "monitoring" / "podmonitor.yaml"
    [endpoint] = yaml.safe_load(monitor.read_text())["spec"]["podMetricsEndpoints"]
    # The first scrape after the last step, and the first evaluation after that.
    longest_s = int(seconds) + sum(
        int(one.removesuffix("s")) for one in (endpoint["interval"], interval)
    )
    assert longest_s < SchedulerSettings.model_fields["step_timeout_s"].default


def targets(dashboard: Path) -> Iterator[tuple[str, str]]:
    """Queries of a dashboard's panels, each with the format of its legend."""
    for panel in json.loads(dashboard.read_text())["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"], target["legendFormat"]


def test_rules_name_series_and_labels_that_exist() -> None:
    for rule in rules():
        labels = labels_of(rule["expr"], known())
        used = re.findall(r"\$labels\.(\w+)", rule.get("annotations", {}).get("summary", ""))
        assert set(used) <= labels, rule


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda path: path.stem)
def test_dashboards_name_series_and_labels_that_exist(dashboard: Path) -> None:
    queries = list(targets(dashboard))
    assert len(queries) >= 10
    for expression, legend in queries:
        labels = labels_of(expression, known())
        assert set(re.findall(r"\{\{(\w+)\}\}", legend)) <= labels, expression


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda path: path.stem)
def test_variables_of_dashboards_are_declared(dashboard: Path) -> None:
    content = json.loads(dashboard.read_text())
    variables = {variable["name"]: variable for variable in content["templating"]["list"]}
    used = {name for query, _ in targets(dashboard) for name in re.findall(r"\$(\w+)", query)}
    assert used - {"__rate_interval"} == set(variables)
    for name, variable in variables.items():
        [(series, label)] = re.findall(r"^label_values\(([\w:]+), (\w+)\)$", variable["query"])
        assert label == name
        assert label in known()[series]


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda path: path.stem)
def test_panels_do_not_overlap_and_read_the_provisioned_source(dashboard: Path) -> None:
    panels = json.loads(dashboard.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = Counter(
        (x, y)
        for panel in panels
        for place in [panel["gridPos"]]
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    )
    assert max(cells.values()) == 1
    assert max(x for x, _ in cells) < 24
    provisioned = FILES / "grafana" / "provisioning" / "datasources" / "prometheus.yml"
    [source] = yaml.safe_load(provisioned.read_text())["datasources"]
    used = {panel["datasource"]["uid"] for panel in panels if "datasource" in panel}
    assert used == {source["uid"]}


def test_the_three_dashboards_have_names_of_their_own() -> None:
    contents = [json.loads(dashboard.read_text()) for dashboard in DASHBOARDS]
    assert [dashboard.stem for dashboard in DASHBOARDS] == ["scheduler", "service", "worker"]
    for field in ("uid", "title"):
        assert len({content[field] for content in contents}) == 3


def test_every_alert_has_a_runbook() -> None:
    page = (ROOT / "docs" / "runbooks.md").read_text()
    sections = re.findall(r"^## (Quire\w+)\n+(\S)", page, re.MULTILINE)
    assert [name for name, _ in sections] == list(alerts())
    for name, alert in alerts().items():
        assert alert["annotations"]["runbook"] == f"docs/runbooks.md#{name.lower()}"
        assert alert["labels"]["severity"] in {"critical", "warning"}
        assert alert["annotations"]["summary"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
@pytest.mark.parametrize(
    "command",
    [
        ["check", "config", FILES / "prometheus.yml"],
        ["check", "rules", *RULE_FILES],
        ["test", "rules", FILES / "rules_test.yml"],
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_promtool_accepts_the_rules(command: list[str | Path]) -> None:
    checked = subprocess.run(["promtool", *command], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@cache
def compose() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    return content


def test_prometheus_scrapes_every_service_that_has_metrics() -> None:
    services = compose()["services"]
    listening = {
        f"{name}:{value.rpartition(':')[2].rstrip('}')}"
        for name, service in services.items()
        for variable, value in service.get("environment", {}).items()
        if variable.endswith("METRICS_LISTEN")
    }
    config = yaml.safe_load((FILES / "prometheus.yml").read_text())
    scraped = [
        target
        for job in config["scrape_configs"]
        for group in job["static_configs"]
        for target in group["targets"]
    ]
    assert sorted(scraped) == sorted(listening)
    assert config["rule_files"] == ["rules/*.yml"]
    # The alert on targets that do not respond names the jobs.
    jobs = [job["job_name"] for job in config["scrape_configs"]]
    assert f'job=~"{"|".join(jobs)}"' in alerts()["QuireTargetDown"]["expr"]


@pytest.mark.parametrize("name", ["prometheus", "grafana"])
def test_the_profile_mounts_files_that_exist(name: str) -> None:
    service = compose()["services"][name]
    assert service["profiles"] == ["observability"]
    # A tag, so that two machines run the same version.
    assert re.fullmatch(r"\$\{\w+:-[\w/]+:v?\d+\.\d+\.\d+\}", service["image"])
    assert service["user"].split(":")[0] != "0"
    files = [volume for volume in service["volumes"] if volume.startswith("./")]
    assert len(files) == 2
    for file in files:
        source, _, mode = file.split(":")
        assert (ROOT / source).exists()
        assert mode == "ro"


def test_grafana_finds_what_is_mounted() -> None:
    grafana = compose()["services"]["grafana"]
    mounted = dict(volume.split(":")[1::-1] for volume in grafana["volumes"])
    provisioning = FILES / "grafana" / "provisioning" / "dashboards" / "quire.yml"
    [provider] = yaml.safe_load(provisioning.read_text())["providers"]
    assert mounted[provider["options"]["path"]].endswith("grafana/dashboards")
    assert mounted["/etc/grafana/provisioning"].endswith("grafana/provisioning")
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert Path(home).name in {dashboard.name for dashboard in DASHBOARDS}
