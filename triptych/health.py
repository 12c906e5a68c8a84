"""grpc.health.v1 by hand, which spares the SDK a dependency. It knows two fields of two messages."""

CHECK = "/grpc.health.v1.Health/Check"


def request(service: str) -> bytes:
    """A HealthCheckRequest; the name may have 127 bytes."""
    name = service.encode()
    return bytes([0x0A, len(name)]) + name


def is_serving(response: bytes) -> bool:
    """Whether a HealthCheckResponse says SERVING."""
    return response[:2] == b"\x08\x01"
