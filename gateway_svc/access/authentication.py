"""Authentication: from a header's value to its tenant."""

from collections.abc import Mapping

import grpc

from gateway_svc.access.tenant import ANONYMOUS, Tenant
from quire.service.api_keys import HEADER, SCHEME, hash_key, header_value
from quire.service.errors import failed

_ADMIN_NEEDED = "ADMIN_NEEDED"
_KEY_HEADER = "x-api-key"


class Authentication:
    """Finds the tenant of a call by the key that it presents; every call is anonymous without keys.

    The tenants are replaced when their file changes. Calls in progress keep theirs.
    """

    def __init__(self, tenants: Mapping[bytes, Tenant] | None = None) -> None:
        """`tenants` by the hashes of their keys; None: no keys are needed."""
        self._tenants = tenants

    @property
    def needs_keys(self) -> bool:
        return self._tenants is not None

    def replace(self, tenants: Mapping[bytes, Tenant]) -> None:
        self._tenants = tenants

    def authenticate(self, header: str | bytes | None) -> Tenant:
        """The tenant of a header `authorization`. RequestError UNAUTHENTICATED without one."""
        if self._tenants is None:
            return ANONYMOUS
        key = _key_of(header)
        if not key:
            raise failed(
                grpc.StatusCode.UNAUTHENTICATED,
                "MISSING_KEY",
                f"an API key is needed; send the header 'authorization: {SCHEME} KEY'",
            )
        # Looked up, not compared with each: the time of it may reveal a part of a stored hash at
        # most, which leads to no key.
        found = self._tenants.get(hash_key(key))
        if found is None:
            raise failed(
                grpc.StatusCode.UNAUTHENTICATED,
                "UNKNOWN_KEY",
                "the API key is unknown or was removed",
            )
        return found

    def authenticate_admin(self, header: str | bytes | None) -> Tenant:
        """As `authenticate`; RequestError PERMISSION_DENIED unless the tenant is an administrator.
        Without keys every call is permitted."""
        tenant = self.authenticate(header)
        if self.needs_keys and not tenant.is_admin:
            raise failed(
                grpc.StatusCode.PERMISSION_DENIED,
                _ADMIN_NEEDED,
                "the API key's tenant is not an administrator",
            )
        return tenant


def authorization(headers: Mapping[str, str]) -> str | None:
    """The value of the header `authorization` of an HTTP request. Clients of Anthropic's API send
    the key alone, as `x-api-key`; the header may be for a proxy then."""
    found = headers.get(HEADER)
    if not _key_of(found) and (key := headers.get(_KEY_HEADER)) is not None:
        return header_value(key)
    return found


def _key_of(header: str | bytes | None) -> str:
    """The key of a header's value; empty if there is none, or of another scheme."""
    if isinstance(header, bytes):
        header = header.decode(errors="surrogateescape")
    scheme, _, key = (header or "").strip().partition(" ")
    return key.strip() if scheme.lower() == SCHEME.lower() else ""
