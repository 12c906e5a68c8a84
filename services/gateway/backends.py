"""Everything behind the gateway: which servers there are, and which of them a request goes to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Generic, TypeVar

from services.common.errors import unavailable
from services.gateway.addresses import Directory
from services.gateway.peers import BackendLost, Encoder, LanguageModel
from services.gateway.prefix_affinity import PrefixAffinity
from services.gateway.prompt import Item, Prompt
from services.gateway.routing import Load, order_encoders, order_llms

LOOKUP_SECONDS = 3.0  # between two looks at what a name stands for
B = TypeVar("B", Encoder, LanguageModel)


class Fleet(Generic[B]):
    """All servers of one kind, wherever the operator's list leads.

    Attributes:
        members: by address. One that no entry leads to any more is not ready; it stays for a poll and as long as it is in use.
    """

    def __init__(self, kind: type[B], entries: Sequence[str], fingerprint: str, directory: Directory | None = None) -> None:
        self._make: Callable[[str], B] = lambda address: kind(address, fingerprint)
        self._directory = directory or Directory(entries)
        self._looked_up: float | None = None
        self.members: dict[str, B] = {}

    @property
    def ready(self) -> list[B]:
        """Those that take requests; late ones only where there are no others."""
        ready = [member for member in self.members.values() if member.ready]
        return [member for member in ready if not member.late] or ready

    async def refresh(self) -> None:
        """Look names up again if it is time, and poll every member once, all at the same time."""
        unused = [member for member in self.members.values() if member.leaving and not member.active]
        if self._looked_up is None or (self._directory.changes and time.monotonic() - self._looked_up >= LOOKUP_SECONDS):
            self._looked_up = time.monotonic()
            self._join(await self._directory.addresses())
        gone = [self.members.pop(member.address) for member in unused if member.leaving]
        await asyncio.gather(*(member.refresh() for member in self.members.values()), *(member.close() for member in gone))

    async def close(self) -> None:
        """Close every channel."""
        await asyncio.gather(*(member.close() for member in self.members.values()))

    def _join(self, addresses: Collection[str]) -> None:
        for address in addresses:
            if address not in self.members:
                self.members[address] = self._make(address)
        for address, member in self.members.items():
            member.leaving = address not in addresses


class Backends:
    """Everything behind the gateway."""

    def __init__(self, encoders: Sequence[str], llms: Sequence[str], fingerprint: str) -> None:
        self.encoder_fleet = Fleet(Encoder, encoders, fingerprint)
        self.llm_fleet = Fleet(LanguageModel, llms, fingerprint)
        self._affinity = PrefixAffinity()

    @property
    def encoders(self) -> list[Encoder]:
        """Every encoder, ready or not."""
        return list(self.encoder_fleet.members.values())

    @property
    def llms(self) -> Mapping[str, LanguageModel]:
        """Every language model by address, ready or not."""
        return self.llm_fleet.members

    @property
    def ready(self) -> bool:
        """Whether text can be answered; encoders are the business of requests that need one."""
        return bool(self.llm_fleet.ready)

    async def refresh(self) -> None:
        """Poll every server once, at the same time."""
        before = {llm.address for llm in self.llm_fleet.ready}
        await asyncio.gather(self.encoder_fleet.refresh(), self.llm_fleet.refresh())
        for address in before - {llm.address for llm in self.llm_fleet.ready}:
            self._affinity.forget(address)

    def encoder_for(self, item: Item, avoid: Collection[str] = ()) -> Encoder:
        """The encoder for an item; one of ``avoid`` only where there is no other.

        Raises:
            ServiceError: UNAVAILABLE: none is ready.
        """
        ready = {encoder.address: encoder for encoder in self.encoder_fleet.ready}
        if not ready:
            raise unavailable("no encoder is answering, so only text is answered; try again, or look at its logs")
        usable = {address: encoder for address, encoder in ready.items() if address not in avoid} or ready
        loads = {address: Load(encoder.pending, encoder.served) for address, encoder in usable.items()}
        holding = [address for address, encoder in usable.items() if encoder.held[item.digest]]
        return usable[order_encoders(item.digest, loads, holding)[0]]

    def llms_for(self, prompt: Prompt, avoid: Collection[str] = ()) -> list[str]:
        """Addresses of the language models that are ready: the best for a prompt first, those of ``avoid`` last."""
        loads = {llm.address: Load(llm.pending, llm.served) for llm in self.llm_fleet.ready}
        return sorted(order_llms(loads, self._affinity.matched(prompt.beginnings)), key=lambda address: address in avoid)

    def cached_tokens(self, prompt: Prompt) -> dict[str, int]:
        """How many tokens of a prompt each language model should have in its prefix cache, as far as it uses one: by its own
        count, it has looked something up there."""
        read = self._affinity.matched(prompt.beginnings)
        return {llm.address: read.get(llm.address, 0) for llm in self.llm_fleet.ready if llm.load.prefix_query_tokens}

    def llm(self, address: str) -> LanguageModel:
        """The language model there.

        Raises:
            BackendLost: there is none any more.
        """
        if address not in self.llms:
            raise BackendLost("the language model went away; try again, or look at its logs")
        return self.llms[address]

    def lost(self, address: str) -> None:
        """A language model could not reach this encoder."""
        if (encoder := self.encoder_fleet.members.get(address)) is not None:
            encoder.eject()

    def note_sent(self, prompt: Prompt, llm: LanguageModel) -> None:
        """A prompt was sent to a language model: what begins like it is best sent there, too."""
        self._affinity.note(prompt.beginnings, llm.address, llm.load.total_blocks * llm.load.block_size)

    async def close(self) -> None:
        """Close every channel."""
        await asyncio.gather(self.encoder_fleet.close(), self.llm_fleet.close())
