"""Names of Services in Kubernetes, and how a pod reaches the API server."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Self

PREFIX: Final = "kubernetes:"
# Where Kubernetes mounts the token of a pod's ServiceAccount.
ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_LABEL: Final = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_NAME: Final = re.compile(
    rf"{PREFIX}(?P<service>{_LABEL})(\.(?P<namespace>{_LABEL}))?:(?P<port>[0-9]{{1,5}})"
)


@dataclass(frozen=True)
class ServiceName:
    """A Service whose pods are meant, and the port at which each of them listens."""

    service: str
    # Empty: that of the pod which asks.
    namespace: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `kubernetes:SERVICE[.NAMESPACE]:PORT`. ValueError for anything else."""
        match = _NAME.fullmatch(text)
        if match is None or not 0 < int(match["port"]) < 2**16:
            raise ValueError(f"{text!r} is not kubernetes:SERVICE[.NAMESPACE]:PORT")
        return cls(match["service"], match["namespace"] or "", int(match["port"]))

    @property
    def host(self) -> str:
        """The name that the workers' certificates have, as with DNS."""
        return f"{self.service}.{self.namespace}" if self.namespace else self.service


@dataclass(frozen=True)
class ApiServer:
    """Kubernetes' API server."""

    url: str
    # Folder with the files `token`, `ca.crt` and `namespace` of a ServiceAccount.
    account: Path

    @classmethod
    def of_pod(cls, environment: Mapping[str, str]) -> Self:
        """The one of the cluster in which this process runs. ValueError, with what to do, if it
        cannot be asked."""
        if find_spec("httpx2") is None:
            raise ValueError("kubernetes: needs httpx2: pip install 'quire[kubernetes]'")
        host, port = (environment.get(f"KUBERNETES_SERVICE_{x}", "") for x in ("HOST", "PORT"))
        if not host or not port:
            raise ValueError("kubernetes: works in a pod only: KUBERNETES_SERVICE_HOST is not set")
        for name in ("token", "ca.crt", "namespace"):
            if not (ACCOUNT / name).is_file():
                raise ValueError(
                    f"kubernetes: needs {ACCOUNT / name}: the pod must have a ServiceAccount, and "
                    "automountServiceAccountToken"
                )
        return cls(f"https://{f'[{host}]' if ':' in host else host}:{port}", ACCOUNT)

    @property
    def ca(self) -> Path:
        return self.account / "ca.crt"

    def read_token(self) -> str:
        """Kubernetes replaces the token every hour or so. OSError if it cannot be read."""
        return (self.account / "token").read_text(encoding="utf-8").strip()

    def read_namespace(self) -> str:
        """The namespace of this pod. OSError if it cannot be read."""
        return (self.account / "namespace").read_text(encoding="utf-8").strip()
