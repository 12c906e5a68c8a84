"""API keys, tenants, and what they keep apart."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from gateway_fakes import ask, picture, refused, stack, until

from services.common.errors import ServiceError
from services.gateway.config import GatewayConfig
from services.gateway.profiles import PROFILES
from services.gateway.tenants import EVERYBODY, Tenant, Tenants, credentials, read_tenants
from triptych.gateway.v1 import gateway_pb2

CODE = grpc.StatusCode
Directory = Callable[[str], Path]


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    lines = ["# ours", "", f"one:{digest('k1')}:1", f"one:{digest('k2')}", f"  two:{digest('k3').upper()}:0:500:3  "]
    file.write_text("\n".join(lines))
    return file


@pytest.fixture(autouse=True)
def presented() -> Iterator[Callable[[str], None]]:
    token = credentials.set("")
    yield credentials.set  # type: ignore[misc]
    credentials.reset(token)


def test_keys_name_tenants(keys: Path, presented: Callable[[str], None]) -> None:
    tenants = read_tenants(str(keys))
    for given, tenant in (
        ("Bearer k1", Tenant("one", 1)),
        ("bearer  k2 ", Tenant("one", 1)),
        ("BEARER k3", Tenant("two", 0, 500, 3)),
    ):
        presented(given)
        assert tenants.signed_in() == tenant
    for given, text in (("", "is needed"), ("k1", "is needed"), ("Bearer ", "is needed"), ("Basic k1", "is needed"),
                        ("Bearer k4", "not known"), (f"Bearer {digest('k1')}", "not known")):  # fmt: skip
        presented(given)
        with refused(CODE.UNAUTHENTICATED, text):
            tenants.signed_in()
    assert read_tenants("").signed_in() == EVERYBODY


def test_every_key_is_compared_in_constant_time(
    keys: Path, presented: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = []
    compare = hmac.compare_digest

    def counting(a: bytes, b: bytes) -> bool:
        compared.append(a)
        return compare(a, b)

    monkeypatch.setattr(hmac, "compare_digest", counting)
    tenants = read_tenants(str(keys))
    for key in ("k1", "k3", "wrong"):
        presented(f"Bearer {key}")
        with contextlib.suppress(ServiceError):
            tenants.signed_in()
    assert len(compared) == 9


@pytest.mark.parametrize(
    "lines",
    [
        ["one"],
        ["one:12ab"],
        [f"a b:{digest('k')}"],
        [f"one:{digest('k')}:many"],
        [f"one:{digest('k')}:1:2:3:4"],
        [f"one:{digest('k')}:1:2:0"],
        [f"one:{digest('k')}:1", f"one:{digest('l')}:2"],
        [f"one:{digest('k')}", f"two:{digest('k')}"],
        ["# nothing"],
    ],
    ids=str,
)
def test_files_that_say_nothing_clear(tmp_path: Path, lines: list[str]) -> None:
    file = tmp_path / "keys"
    file.write_text("\n".join(lines))
    with pytest.raises(ValueError, match="--api-keys") as error:
        read_tenants(str(file))
    assert digest("k") not in str(error.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot read"):
        GatewayConfig(llm="h:1", api_keys=str(tmp_path / "none"))


def test_salts_are_a_tenants_own() -> None:
    open_house, keyed = Tenants({}), Tenants({b"": EVERYBODY})
    assert open_house.salt(EVERYBODY, "s") == "s"
    salts = {keyed.salt(Tenant(name), salt) for name in ("a", "b", "a\0") for salt in ("", "b", "s", "\0b")}
    assert len(salts) >= 11 and all(len(salt) == 64 for salt in salts)


@pytest.mark.parametrize("profile", PROFILES)
def test_profiles_are_defaults_that_flags_override(profile: str) -> None:
    config = GatewayConfig(llm="h:1", profile=profile)
    assert {name: getattr(config, name) for name in vars(PROFILES[profile])} == vars(PROFILES[profile])
    config = GatewayConfig(llm="h:1", profile=profile, max_queued_requests=0, limit_mm_per_prompt="image=3", max_num_running=5)
    assert (config.max_queued_requests, config.max_num_running, config.max_passed) == (0, 5, PROFILES[profile].max_passed)
    assert {m.word: n for m, n in config.items_per_prompt.items()} == {"image": 3}


@pytest.mark.asyncio
async def test_no_method_answers_without_a_key(checkpoint_dir: Directory, keys: Path) -> None:
    async with stack(checkpoint_dir("qwen2_vl"), api_keys=str(keys)) as s:
        service = gateway_pb2.DESCRIPTOR.services_by_name["ChatService"]
        for method in service.methods:
            kind = getattr(gateway_pb2, method.input_type.name)
            call = getattr(s.stub, method.name)
            for metadata in ((), (("authorization", "Bearer wrong"),)):
                with refused(CODE.UNAUTHENTICATED):
                    response = call([kind()] if method.client_streaming else kind(), metadata=metadata)
                    _ = [e async for e in response] if method.server_streaming else await response
        assert not s.llm.requests


@pytest.mark.asyncio
async def test_a_tenants_limit_and_its_own_cache(checkpoint_dir: Directory, keys: Path) -> None:
    one, two = ((("authorization", f"Bearer {key}"),) for key in ("k1", "k3"))
    async with stack(checkpoint_dir("qwen2_vl"), api_keys=str(keys)) as s:

        async def answer(request: Any, metadata: Any) -> list[gateway_pb2.ChatResponse]:
            return [event async for event in s.stub.Chat(request, metadata=metadata)]

        s.llm.gate.clear()
        running = s.stub.Chat(ask("x", picture(), max_tokens=9), metadata=one)
        assert (await running.read()).HasField("admitted")
        with refused(CODE.RESOURCE_EXHAUSTED, "your key's limit") as errors:
            await answer(ask("x"), (("authorization", "Bearer k2"),))
        assert errors[0].reason == "TENANT_LIMIT" and errors[0].retry_delay
        with refused(CODE.RESOURCE_EXHAUSTED, "your key's limit"):  # counting is work, too
            await s.stub.EstimateTokens(gateway_pb2.EstimateTokensRequest(messages=ask("x").messages), metadata=one)
        with refused(CODE.INVALID_ARGUMENT, "the limit is 500") as errors:
            await answer(ask("x", max_tokens=500), two)
        assert errors[0].reason == "TENANT_TOKENS_CAPACITY_EXCEEDED"
        s.llm.gate.set()
        await answer(ask("x", picture(), max_tokens=9), two)
        assert len({request.cache_salt for request in s.llm.requests}) == 2
        assert {item.cache_salt for item in s.encoder.items} == {request.cache_salt for request in s.llm.requests}
        running.cancel()
        await until(lambda: not s.service.ledger.running)
