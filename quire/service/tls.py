"""TLS of servers and channels. A server reads its certificates again when their files change."""

import math
import os
import re
import ssl
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias

import grpc
import structlog

from quire.service.files import FileVersion, check_regular, file_version

log = structlog.get_logger()

_Options: TypeAlias = Sequence[tuple[str, Any]]
# A certificate is reported from two weeks before its end on, or in the last fifth of its life, as
# one that is renewed every day, and at most once an hour.
_EXPIRES_SOON_S: Final = 14 * 86400.0
_EXPIRES_SOON_SHARE: Final = 0.2
_WARN_EVERY_S: Final = 3600.0
_PEM: Final = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
# Tags of DER.
_VERSION: Final = 0xA0
_TIME_FORMATS: Final = {0x17: "%y%m%d%H%M%SZ", 0x18: "%Y%m%d%H%M%SZ"}


class TLSError(ValueError):
    """Certificates that cannot be used; the message names the files and the reason."""


@dataclass(frozen=True)
class ServerTLS:
    """The files of a server's identity, in PEM."""

    # The server's certificate, followed by intermediate ones.
    cert: Path
    key: Path
    # Certificates of the authorities whose clients may connect; None: clients need no certificate.
    client_ca: Path | None = None


@dataclass(frozen=True)
class TLS:
    """How a client verifies a server, and proves its own identity. All files are in PEM."""

    # Certificates of the authorities that servers are verified by; None: the system's.
    ca: str | Path | None = None
    # The client's certificate and key, for servers that ask for one.
    cert: str | Path | None = None
    key: str | Path | None = None
    # The name that the server's certificate must have, if it is not the target's host.
    server_name: str | None = None

    def __post_init__(self) -> None:
        """TLSError for a certificate without its key, or files that cannot be read."""
        if (self.cert is None) != (self.key is None):
            raise TLSError("tls: a client's certificate and its key go together")
        self.ssl_context()

    def ssl_context(self) -> ssl.SSLContext:
        """A context that has loaded the files, which checks them better than gRPC does."""
        # `create_default_context` without a file would trust the system's authorities as well.
        context = (
            ssl.create_default_context()
            if self.ca is None
            else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        )
        if self.ca is not None:
            _load_ca(context, Path(self.ca))
        if self.cert is not None and self.key is not None:
            _load_identity(context, Path(self.cert), Path(self.key))
        return context

    def credentials(self) -> grpc.ChannelCredentials:
        """Credentials of channels, with the files as they are now. TLSError if they cannot be used,
        as between two writes: a channel would keep them, and fail without a reason."""
        contents = [_bytes(file) for file in (self.ca, self.key, self.cert)]
        self.ssl_context()
        return grpc.ssl_channel_credentials(*contents)


class ServerCertificates:
    """The certificates of one process's servers. Each handshake has those of the files' last valid
    contents. Thread-safe."""

    def __init__(self, tls: ServerTLS, protocol: str = "http/1.1") -> None:
        """`protocol` is what servers of the standard library speak, as ALPN names it. TLSError if
        the files cannot be used."""
        self._tls = tls
        self._protocol = protocol
        self._lock = threading.Lock()
        self._version = self._current_version()
        # Why the files were not read the last time; empty if they were.
        self._failure = ""
        self._warned_at = -_WARN_EVERY_S
        self._context = self._read()
        # When the certificate is valid, in seconds since the epoch; None if that cannot be read.
        self._validity = _validity(tls.cert)

    def ssl_context(self) -> ssl.SSLContext:
        """A context for servers of the standard library. It replaces itself at each handshake."""
        context = self._current()
        context.sni_callback = self._replace_context
        return context

    def expires_at(self) -> float:
        """When the certificate that is served expires, in seconds since the epoch; not a number if
        that cannot be read."""
        self._current()
        return math.nan if self._validity is None else self._validity[1]

    def _replace_context(
        self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext
    ) -> None:
        connection.context = self._current()

    def _current(self) -> ssl.SSLContext:
        """A context with the files' contents. Files that are invalid, as between two writes, are
        logged once, and the former contents stay."""
        with self._lock:
            version = self._current_version()
            # Again after a failure: the process may have had no file left to open.
            if version != self._version or self._failure:
                # Before the files are read: a change during the reading is seen by the next call.
                self._version = version
                self._reload()
            self._warn_of_validity()
            return self._context

    def _reload(self) -> None:
        last_failure, self._failure = self._failure, ""
        try:
            self._context = self._read()
            self._validity = _validity(self._tls.cert)
            log.info("certificate reloaded", file=str(self._tls.cert))
            self._warned_at = -_WARN_EVERY_S
        except TLSError as error:
            self._failure = str(error)
            if self._failure != last_failure:
                log.error("certificate not reloaded", reason=self._failure)

    def _warn_of_validity(self) -> None:
        """Log a certificate that clients refuse, or will refuse soon."""
        if self._validity is None or time.monotonic() - self._warned_at < _WARN_EVERY_S:
            return
        begin, end = self._validity
        now, soon_s = time.time(), min(_EXPIRES_SOON_S, _EXPIRES_SOON_SHARE * (end - begin))
        if begin <= now < end - soon_s:
            return
        self._warned_at = time.monotonic()
        if now < begin:
            log.error("certificate not valid yet", file=str(self._tls.cert), begin=_date(begin))
        elif now >= end:
            log.error("certificate has expired", file=str(self._tls.cert), end=_date(end))
        else:
            log.warning("certificate expires soon", file=str(self._tls.cert), end=_date(end))

    def _read(self) -> ssl.SSLContext:
        tls = self._tls
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols([self._protocol])
        _load_identity(context, tls.cert, tls.key)
        if tls.client_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            # A session that is resumed is not verified again, also if its authority was removed.
            context.options |= ssl.OP_NO_TICKET
            context.num_tickets = 0
            _load_ca(context, tls.client_ca)
        return context

    def _current_version(self) -> tuple[FileVersion, ...]:
        files = (self._tls.cert, self._tls.key, self._tls.client_ca)
        return tuple(file_version(file) for file in files if file is not None)


def open_channel(target: str, options: _Options, tls: TLS | None) -> grpc.Channel:
    """Open a channel. A unix socket has no TLS. TLSError if files cannot be used."""
    if tls is None or target.startswith("unix:"):
        return grpc.insecure_channel(target, options=options)
    return grpc.secure_channel(target, _credentials(tls), options=_with_name(options, tls))


def open_aio_channel(
    target: str, options: _Options, tls: TLS | None, name: str | None = None
) -> grpc.aio.Channel:
    """Open a channel of the running event loop, as `open_channel` does. `name` is the name that a
    target with an IP address stands for. TLSError if files cannot be used."""
    if tls is None or target.startswith("unix:"):
        return grpc.aio.insecure_channel(target, options=options)
    return grpc.aio.secure_channel(
        target, _credentials(tls), options=_with_name(options, tls, name)
    )


def _credentials(tls: object) -> grpc.ChannelCredentials:
    if not isinstance(tls, TLS):
        raise TypeError(f"tls: must be a quire.TLS (got {tls!r:.100})")
    return tls.credentials()


def _with_name(options: _Options, tls: TLS, name: str | None = None) -> _Options:
    name = tls.server_name or name
    return options if name is None else [*options, ("grpc.ssl_target_name_override", name)]


def _load_identity(context: ssl.SSLContext, cert: Path, key: Path) -> None:
    for file in (cert, key):
        _check_file(file)
    try:
        context.load_cert_chain(cert, key, password=partial(_refuse_password, key))
    except ssl.SSLError as error:
        raise TLSError(f"{cert} and {key} are no certificate and its key: {_why(error)}") from error
    except OSError as error:
        missing = cert if not os.access(cert, os.R_OK) else key
        raise TLSError(f"{missing} cannot be read: {error.strerror}") from error


def _load_ca(context: ssl.SSLContext, ca: Path) -> None:
    _check_file(ca)
    try:
        context.load_verify_locations(ca)
    except ssl.SSLError as error:
        raise TLSError(f"{ca} has no certificates of authorities: {_why(error)}") from error
    except OSError as error:
        raise TLSError(f"{ca} cannot be read: {error.strerror}") from error


def _check_file(file: Path) -> None:
    try:
        check_regular(file)
    except OSError as error:
        raise TLSError(f"{file} cannot be read: {error.strerror}") from error


def _refuse_password(key: Path) -> str:
    raise TLSError(
        f"{key} has a password, with which a service could not restart alone; "
        "'openssl pkey' writes the key without one"
    )


def _validity(cert: Path) -> tuple[float, float] | None:
    """From when and until when the first certificate of a file is valid (RFC 5280, 4.1), in seconds
    since the epoch. The standard library reads them of a peer's certificate alone."""
    try:
        pem = _PEM.search(cert.read_text(encoding="utf-8", errors="replace"))
        if pem is None:
            return None
        der = ssl.PEM_cert_to_DER_cert(pem[0])
        _, at, _ = _element(der, 0)
        _, at, _ = _element(der, at)
        tag, _, end = _element(der, at)
        if tag == _VERSION:
            at = end
        # The serial number, the algorithm, and the issuer.
        for _ in range(3):
            _, _, at = _element(der, at)
        _, at, _ = _element(der, at)
        first_tag, first_at, first_end = _element(der, at)
        last_tag, last_at, last_end = _element(der, first_end)
        begin = _seconds(first_tag, der[first_at:first_end])
        return begin, _seconds(last_tag, der[last_at:last_end])
    except (OSError, ValueError, LookupError):
        return None


def _element(der: bytes, at: int) -> tuple[int, int, int]:
    """The tag of an element of DER, and where its contents begin and end."""
    tag, size, at = der[at], der[at + 1], at + 2
    if size & 0x80:
        num_bytes = size & 0x7F
        size, at = int.from_bytes(der[at : at + num_bytes], "big"), at + num_bytes
    return tag, at, at + size


def _seconds(tag: int, text: bytes) -> float:
    parsed = datetime.strptime(text.decode("ascii"), _TIME_FORMATS[tag])
    return parsed.replace(tzinfo=UTC).timestamp()


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _why(error: ssl.SSLError) -> str:
    # The standard library has no reason for what OpenSSL's reader of PEM files refuses.
    return "not valid PEM" if error.reason is None else error.reason.lower().replace("_", " ")


def _bytes(path: str | Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        contents = Path(path).read_bytes()
    except OSError as error:
        raise TLSError(f"{path} cannot be read: {error.strerror}") from error
    if not contents:
        # gRPC ends the process for an empty certificate or key.
        raise TLSError(f"{path} is empty")
    return contents
