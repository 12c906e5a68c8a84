"""The media of one request at their encoders: handed over side by side, again where an encoder is lost, given back together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from services.gateway import metrics
from services.gateway.backends import Backends
from services.gateway.peers import BackendLost, Encoder
from services.gateway.prompt import Item
from triptych.common.v1 import media_pb2

RELEASE_SECONDS = 30.0  # nobody waits for it; what an encoder is not told it holds until the lease ends
MAX_MOVES = 2  # times that an item goes to another encoder while it is handed over


class Uploads:
    """Hands over what has no ref when it is asked for refs. The owner must :meth:`drop` it, whatever happens.

    Args:
        seconds_left: of the request's deadline.
    """

    def __init__(self, backends: Backends, items: Sequence[Item], request_id: str, seconds_left: Callable[[], float]) -> None:
        self._backends, self._request_id, self._seconds_left = backends, request_id, seconds_left
        self._uploads = [_Upload(item) for item in items]
        self._avoid: set[str] = set()  # encoders that lost something of this request
        self._dropped = False

    async def refs(self) -> list[media_pb2.EmbeddingRef]:
        """One ref for each item, in order; raises the first failure."""
        if not self._uploads:
            return []
        for upload in self._uploads:
            upload.task = upload.task or asyncio.create_task(self._hand_over(upload))
        tasks = [upload.task for upload in self._uploads if upload.task is not None]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        return [task.result() for task in tasks if task.done()]

    def lose(self, address: str) -> None:
        """An encoder has lost the rows it took: its items are handed over again, to another one where there is one."""
        self._avoid.add(address)
        for upload in self._uploads:
            if not address or upload.at(address):
                upload.task = None
                upload.arrived()

    def arrived(self) -> None:
        """All rows are where they were needed: the encoders have done their work."""
        for upload in self._uploads:
            upload.arrived()

    async def drop(self) -> None:
        """Release every ref. Calls under way are waited for: one that is cancelled could leave a ref that nobody knows."""
        self._dropped = True
        tasks = [task for upload in self._uploads if (task := upload.task) is not None]
        try:
            done, late = await asyncio.wait(tasks, timeout=RELEASE_SECONDS) if tasks else (set(), set())
            for task in late:
                task.cancel()
            for task in done:
                task.exception()  # told by refs() already, or to nobody any more
            held: dict[Encoder, list[str]] = {}
            for upload in self._uploads:
                for encoder, ref_id in upload.refs:
                    held.setdefault(encoder, []).append(ref_id)
            await asyncio.gather(*(encoder.release(ids, RELEASE_SECONDS) for encoder, ids in held.items()))
        finally:
            self.arrived()
            for upload in self._uploads:
                upload.users.close()

    async def _hand_over(self, upload: _Upload) -> media_pb2.EmbeddingRef:
        for move in range(MAX_MOVES + 1):
            encoder = self._backends.encoder_for(upload.item, self._avoid)
            if move or upload.refs:
                metrics.failovers.labels("encoder").inc()
            upload.begin(encoder)
            try:
                ref_id = await encoder.encode(upload.item, self._request_id, self._seconds_left())
            except BackendLost:
                upload.arrived()
                self._avoid.add(encoder.address)
                if move == MAX_MOVES or self._dropped:
                    raise
                continue
            upload.refs.append((encoder, ref_id))
            return media_pb2.EmbeddingRef(id=ref_id, encoder_address=encoder.address)
        raise AssertionError("the last try returns or raises")


class _Upload:
    """One item, and what encoders have of it.

    Attributes:
        refs: every ref that was issued for it, lost ones included: an encoder may live that others cannot reach.
        users: keeps the encoders that it is at in use.
    """

    def __init__(self, item: Item) -> None:
        self.item = item
        self.task: asyncio.Task[media_pb2.EmbeddingRef] | None = None
        self.refs: list[tuple[Encoder, str]] = []
        self.users = ExitStack()
        self._pending: Encoder | None = None

    def at(self, address: str) -> bool:
        """Whether its ref is of that encoder."""
        return bool(self.refs) and self.refs[-1][0].address == address

    def begin(self, encoder: Encoder) -> None:
        """It goes to an encoder, and costs it work unless the encoder has it."""
        self.users.enter_context(encoder.in_use())
        self.users.callback(encoder.let_go, self.item.digest)
        self._pending = None if encoder.held[self.item.digest] else encoder
        encoder.held[self.item.digest] += 1
        if self._pending is not None:
            self._pending.patches += self.item.plan.patches

    def arrived(self) -> None:
        """It costs its encoder nothing more."""
        if self._pending is not None:
            self._pending.patches -= self.item.plan.patches
            self._pending = None
