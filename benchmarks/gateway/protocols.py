"""The same load by gRPC and by HTTP, with and without TLS, in random order."""

import asyncio
import random
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.engines.models import SMALL
from benchmarks.gateway.stack import make_certificates, real_stack
from benchmarks.report import Cell, Column, Part, Target
from benchmarks.scheduler.proc import cpu_s
from quire.bench.lengths import lengths
from quire.bench.load import run_load
from quire.bench.objectives import ServiceLevelObjectives
from quire.bench.openai_server import OpenAIServer, served_model
from quire.bench.quire_server import QuireServer
from quire.bench.report import Report
from quire.bench.request_timings import RequestTimings
from quire.bench.server import Server
from quire.bench.workload import Workload
from quire.launcher.stack import LocalStack
from quire.service.tls import TLS

_AT_ONCE = 64
_SINGLES = 20
_FIRST_TOKEN_ID = 300
_GRPC, _HTTP, _GRPC_TLS, _HTTPS = "gRPC", "HTTP", "gRPC, TLS", "HTTPS"
_MIN_HTTP_SHARE = 0.93
_MAX_ADDED_S = 0.002
_MIN_TLS_SHARE = 0.95


@dataclass(frozen=True)
class _Protocol:
    name: str
    stack: LocalStack
    ca: Path | None = None

    @property
    def server(self) -> Server:
        """A new server, because a client belongs to one event loop."""
        if self.name in (_GRPC, _GRPC_TLS):
            tls = None if self.ca is None else TLS(self.ca)
            return QuireServer(self.stack.address, None, 0.0, True, tls=tls)
        scheme = "http" if self.ca is None else "https"
        url = f"{scheme}://{self.stack.http_addresses[0]}"
        return OpenAIServer(url, served_model(url, None, self.ca), 0.0, True, None, self.ca)

    @property
    def gateway_pid(self) -> int:
        return self.stack.processes("gateway")[0].pid


@dataclass(frozen=True)
class _Measurement:
    """One protocol in one round."""

    tokens_per_s: float
    # Of requests that are alone, median.
    first_token_s: float
    gap_s: float
    gateway_cpu_s: float


def protocols(num_rounds: int) -> Part:
    """Measure each protocol once per round, in random order."""
    measured: dict[str, list[_Measurement]] = {}
    with ExitStack() as undo:
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory()))
        tls = make_certificates(folder)
        plain = undo.enter_context(real_stack({}))
        encrypted = undo.enter_context(real_stack(tls))
        ca = folder / "ca.pem"
        all_protocols = [
            *(_Protocol(name, plain) for name in (_GRPC, _HTTP)),
            *(_Protocol(name, encrypted, ca) for name in (_GRPC_TLS, _HTTPS)),
        ]
        rng = random.Random(0)
        # The first round warms up.
        for round_number in range(num_rounds + 1):
            for protocol in rng.sample(all_protocols, len(all_protocols)):
                measurement = asyncio.run(_measure(protocol, round_number))
                if round_number:
                    measured.setdefault(protocol.name, []).append(measurement)
    return _part({protocol.name: measured[protocol.name] for protocol in all_protocols}, num_rounds)


async def _measure(protocol: _Protocol, seed: int) -> _Measurement:
    server = protocol.server
    singles = _workload(_SINGLES, "32", "2", seed).requests()
    alone = [(await run_load(server, [request], [0.0]))[0] for request in singles]
    load = _workload(_AT_ONCE, "64-256", "32-96", seed).requests()
    before_s = cpu_s(protocol.gateway_pid)
    together = await run_load(server, load, [0.0] * len(load))
    used_s = cpu_s(protocol.gateway_pid) - before_s
    await server.close()
    report = Report.of(protocol.name, [*alone, *together][_SINGLES:], ServiceLevelObjectives())
    if report.errors or report.itl is None:
        raise RuntimeError(f"{protocol.name}: {report.errors}")
    return _Measurement(report.output_tokens_per_s, _first_token(alone), report.itl.p50, used_s)


def _first_token(timings: list[RequestTimings]) -> float:
    return median(one.first_token_s for one in timings if one.first_token_s is not None)


def _workload(count: int, prompts: str, outputs: str, seed: int) -> Workload:
    return Workload(
        num_requests=count,
        prompt_lengths=lengths(prompts),
        output_lengths=lengths(outputs),
        token_ids=range(_FIRST_TOKEN_ID, SMALL.vocab_size),
        seed=seed,
    )


def _part(measured: Mapping[str, list[_Measurement]], num_rounds: int) -> Part:
    def paired(name: str, other: str) -> float:
        """The median, over the rounds, of the ratio of tokens per second."""
        pairs = zip(measured[name], measured[other], strict=True)
        return median(one.tokens_per_s / two.tokens_per_s for one, two in pairs)

    rows: list[dict[str, Cell]] = [
        {
            "protocol": name,
            "tokens": median(x.tokens_per_s for x in runs),
            "share": paired(name, _GRPC),
            "first": 1e3 * median(x.first_token_s for x in runs),
            "gap": 1e3 * median(x.gap_s for x in runs),
            "cpu": median(x.gateway_cpu_s for x in runs),
        }
        for name, runs in measured.items()
    ]
    pairs = list(zip(measured[_HTTP], measured[_GRPC], strict=True))
    added_s = median(http.first_token_s - grpc.first_token_s for http, grpc in pairs)
    http, tls, https = paired(_HTTP, _GRPC), paired(_GRPC_TLS, _GRPC), paired(_HTTPS, _HTTP)
    least, most = f"at least {_MIN_HTTP_SHARE}", f"at most {1e3 * _MAX_ADDED_S:g} ms"
    return Part(
        name="protocols",
        title="HTTP, gRPC and TLS",
        notes=[
            f"{SMALL.size}, float32 on CPU. Tokens per second and gaps: {_AT_ONCE} streams at "
            "once, prompts of 64 to 256 tokens, outputs of 32 to 96. First token: requests of 32 "
            f"tokens, one at a time. Medians of {num_rounds} rounds, each with all protocols in "
            "random order; shares are medians of the ratios within rounds. The client is a process "
            "on the same cores.",
        ],
        columns=[
            Column("protocol", "protocol"),
            Column("tokens", "tokens/s", ",.0f"),
            Column("share", "of gRPC", ".3f"),
            Column("first", "first token alone, ms", ".2f"),
            Column("gap", "gap, ms", ".1f"),
            Column("cpu", "gateway's CPU, s", ".2f"),
        ],
        rows=rows,
        targets=[
            Target("tokens per second, HTTP / gRPC", least, f"{http:.3f}", http >= _MIN_HTTP_SHARE),
            Target(
                "first token, HTTP - gRPC", most, f"{1e3 * added_s:.2f} ms", added_s <= _MAX_ADDED_S
            ),
            *(
                Target(what, f"at least {_MIN_TLS_SHARE}", f"{x:.3f}", x >= _MIN_TLS_SHARE)
                for what, x in (("gRPC with TLS / gRPC", tls), ("HTTPS / HTTP", https))
            ),
        ],
    )
