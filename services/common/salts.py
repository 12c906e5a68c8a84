"""What keeps the cached work of tenants apart."""

from __future__ import annotations

from services.common.errors import invalid

MAX_SALT_BYTES = 128


def check_salt(salt: str) -> bytes:
    """A request's ``cache_salt`` in UTF-8.

    Raises:
        ServiceError: INVALID_ARGUMENT; it is longer than :data:`MAX_SALT_BYTES`.
    """
    data = salt.encode()
    if len(data) > MAX_SALT_BYTES:
        raise invalid("cache_salt", f"must have at most {MAX_SALT_BYTES} bytes, got {len(data)}")
    return data
