"""API keys: how they are made and hashed, and the header that presents them."""

import hashlib
import secrets

HEADER = "authorization"
SCHEME = "Bearer"
# A pattern. Names appear in logs and metrics.
TENANT_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
# Marks a key as one of Quire's, for scanners that search texts for secrets.
_PREFIX = "quire-"
_NUM_RANDOM_BYTES = 32


def new_key() -> str:
    """A random key. It has 256 bits of entropy, so an unsalted hash does not reveal it."""
    return _PREFIX + secrets.token_urlsafe(_NUM_RANDOM_BYTES)


def hash_key(key: str) -> bytes:
    """The SHA-256 hash of a key, as the keys file has it in hexadecimal."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def header_value(key: str) -> str:
    """The value of the header `authorization` that presents a key."""
    return f"{SCHEME} {key}"
