"""Who asks: API keys, kept as hashes, the limits of each tenant, and what keeps their caches apart.

Doors say what a caller presented (:data:`credentials`); whoever does work for it asks :meth:`Tenants.signed_in`. A door that
forgets to say anything is refused, where keys are required.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

import grpc

from services.common.errors import ServiceError

# The current request's Authorization header or metadata, as it came.
credentials: ContextVar[str] = ContextVar("credentials", default="")
_FORM = "tenant:sha256[:max_requests[:max_tokens[:weight]]]"
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")


@dataclass(frozen=True)
class Tenant:
    """Those who share a key's limits.

    Attributes:
        max_requests: most requests running and waiting; 0 sets no limit.
        max_tokens: most tokens of their prompts and longest answers together; 0 sets no limit.
        weight: share of the queue's turns, relative to others.
    """

    name: str
    max_requests: int = 0
    max_tokens: int = 0
    weight: int = 1


EVERYBODY = Tenant("default")


class Tenants:
    """Tenants by the SHA-256 of their keys; without any, everybody is one tenant and needs no key."""

    def __init__(self, by_digest: Mapping[bytes, Tenant]) -> None:
        self._by_digest = dict(by_digest)

    def signed_in(self) -> Tenant:
        """The tenant of the current request.

        Raises:
            ServiceError: UNAUTHENTICATED.
        """
        if not self._by_digest:
            return EVERYBODY
        kind, _, key = credentials.get().partition(" ")
        if kind.lower() != "bearer" or not key.strip():
            raise _unauthenticated("an API key is needed here; send it as `authorization: Bearer KEY`")
        digest = hashlib.sha256(key.strip().encode()).digest()
        found = None
        for known, tenant in self._by_digest.items():  # all of them, so that time tells nothing
            if hmac.compare_digest(known, digest):
                found = tenant
        if found is None:
            raise _unauthenticated("this API key is not known here; ask whoever runs the service for one")
        return found

    def salt(self, tenant: Tenant, salt: str) -> str:
        """What a request's cached work is found by: nobody finds another tenant's, whatever salt they choose."""
        return hashlib.sha256(f"{tenant.name}\0{salt}".encode()).hexdigest() if self._by_digest else salt


def read_tenants(path: str) -> Tenants:
    """Read a file of API keys; "" stands for no keys. One key a line, empty lines and those that begin with # left out::

        tenant:sha256[:max_requests[:max_tokens[:weight]]]

    Several lines may name one tenant: its keys. Its limits stand in the first of them, and are the same or left out in others.

    Raises:
        ValueError: the file cannot be read, or a line is not of this form; the text never repeats a line.
    """
    if not path:
        return Tenants({})
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--api-keys: cannot read {path}: {type(error).__name__}") from None
    tenants: dict[str, Tenant] = {}
    by_digest: dict[bytes, Tenant] = {}
    for number, line in enumerate(lines, 1):
        if not (line := line.strip()) or line.startswith("#"):
            continue
        where = f"--api-keys: line {number} of {path}"
        name, digest, *rest = (*line.split(":"), "", "")[: max(2, line.count(":") + 1)]
        if not _NAME.fullmatch(name) or not _SHA256.fullmatch(digest) or len(rest) > 3 or not all(map(str.isdecimal, rest)):
            raise ValueError(f"{where} must look like {_FORM}, with the hash from `printf %s KEY | sha256sum`")
        tenant = Tenant(name, *map(int, rest))
        if tenant.weight < 1:
            raise ValueError(f"{where} has weight 0; it must be at least 1")
        if tenants.setdefault(name, tenant) != tenant and rest:
            raise ValueError(f"{where} gives tenant {name} other limits than an earlier line")
        if by_digest.setdefault(bytes.fromhex(digest), tenants[name]) is not tenants[name]:
            raise ValueError(f"{where} gives a key of another tenant to {name}")
    if not by_digest:
        raise ValueError(f"--api-keys: {path} holds no key, so nobody could sign in")
    return Tenants(by_digest)


def _unauthenticated(text: str) -> ServiceError:
    return ServiceError(grpc.StatusCode.UNAUTHENTICATED, text, reason="UNAUTHENTICATED")
