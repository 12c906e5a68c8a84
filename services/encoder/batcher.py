"""Groups pieces of the items of all requests into batches for the towers, up to a budget of patches.

Items stand in line. A batch takes the next piece of each, from the front, as far as the budget goes; an item that has more
goes to the end of the line. So whoever joins the line waits for the batch that runs and then for at most one piece of each
item in front, however large those are; that holds for the next piece of a large item just as well. A batch starts as soon as
the towers are free; there is no waiting for more items. Knows nothing of refs or requests.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

from services.common import logs
from services.encoder import metrics
from services.encoder.features import Features
from services.encoder.preprocess import Prepared

logger = logging.getLogger(__name__)
Encode = Callable[[Sequence[Prepared]], list[Features]]


@dataclass(eq=False)
class Turn:
    """One item's place with a batcher. Only the batcher changes it.

    Attributes:
        patches: of the whole item.
        left: patches that have not reached the towers.
        pieces: those that stand in line, once they are made.
    """

    patches: int
    left: int
    pieces: deque[Prepared] = field(default_factory=deque)
    outcomes: asyncio.Queue[Features | Exception] = field(default_factory=asyncio.Queue)


class Batcher:
    """Runs ``encode`` in one thread of its own.

    Attributes:
        max_patches: the budget of a batch.
        encoded_patches: that have been through the towers.
    """

    def __init__(self, encode: Encode, max_patches: int) -> None:
        self._encode = encode
        self.max_patches = max_patches
        self.encoded_patches = self._running = 0
        self._turns: dict[Turn, None] = {}  # in the order of arrival
        self._line: deque[Turn] = deque()  # those with pieces
        self._joined = asyncio.Event()
        self._moved = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "towers")
        self._loop = asyncio.create_task(self._run(), name="batcher")

    @property
    def pending_patches(self) -> int:
        """Patches of items that have not been through the towers."""
        return self._running + sum(turn.left for turn in self._turns)

    @contextmanager
    def turn(self, patches: int) -> Iterator[Turn]:
        """An item of so many patches arrives; when the block ends, what has not reached the towers never does."""
        turn = Turn(patches, patches)
        self._turns[turn] = None
        try:
            yield turn
        finally:
            self._leave(turn)
            del self._turns[turn]

    async def room(self, turn: Turn) -> None:
        """Wait until less than a full batch is in front of an item: nothing is prepared further ahead than that.

        In front is of every earlier item as much as can come before this one's last piece, which is no more than this one
        has itself. So a small item does not wait for a large one to be through, and later items never count.
        """
        while self._batch_before(turn):
            self._moved.clear()
            await self._moved.wait()

    async def encode(self, turn: Turn, pieces: Sequence[Prepared]) -> AsyncGenerator[Features, None]:
        """The features of an item's pieces, in order, each as soon as it is through.

        Raises:
            Exception: what the towers raised for a piece when it ran alone; later pieces are not encoded.
        """
        turn.pieces.extend(pieces)
        turn.left = sum(piece.patches for piece in pieces)
        self._line.append(turn)
        self._joined.set()
        for _ in pieces:
            outcome = await turn.outcomes.get()
            if isinstance(outcome, Exception):
                raise outcome
            yield outcome

    async def stop(self) -> None:
        """End the loop and the thread; a batch in the towers is finished first."""
        self._loop.cancel()
        await asyncio.gather(self._loop, return_exceptions=True)
        await asyncio.to_thread(self._thread.shutdown)

    async def _run(self) -> None:
        while True:
            while not self._line:
                self._joined.clear()
                await self._joined.wait()
            await self._finish(self._take())

    def _take(self) -> list[tuple[Turn, Prepared]]:
        """The next piece of every item from the front of the line that fits the budget; one that exceeds it goes alone."""
        batch: list[tuple[Turn, Prepared]] = []
        patches = 0
        while self._line and (not batch or patches + self._line[0].pieces[0].patches <= self.max_patches):
            turn = self._line.popleft()
            piece = turn.pieces.popleft()
            turn.left -= piece.patches
            patches += piece.patches
            batch.append((turn, piece))
        self._line.extend(turn for turn, _ in batch if turn.pieces)
        self._moved.set()
        return batch

    async def _finish(self, batch: list[tuple[Turn, Prepared]]) -> None:
        """Give every piece's item its features, or the error that it causes alone."""
        batch = [(turn, piece) for turn, piece in batch if turn in self._turns]
        if not batch:
            return
        metrics.batch_items.observe(len(batch))
        patches = sum(piece.patches for _, piece in batch)
        self._running = patches
        try:
            loop = asyncio.get_running_loop()
            features = await loop.run_in_executor(self._thread, self._encode, [piece for _, piece in batch])
            assert len(features) == len(batch), f"{len(features)} results for {len(batch)} items"
        except Exception as error:
            self._running = 0
            if len(batch) > 1:
                cause = type(error).__name__
                logs.event(logger, "batch failed, its items run alone", logging.WARNING, items=len(batch), error=cause)
                for one in batch:
                    await self._finish([one])
            else:
                turn, _ = batch[0]
                self._leave(turn)
                turn.outcomes.put_nowait(error)
            return
        self._running, self.encoded_patches = 0, self.encoded_patches + patches
        for (turn, _), piece_features in zip(batch, features, strict=True):
            turn.outcomes.put_nowait(piece_features)

    def _leave(self, turn: Turn) -> None:
        """Take what is left of an item out of the line."""
        if turn.pieces:
            turn.pieces.clear()
            self._line.remove(turn)
        turn.left = 0
        self._moved.set()

    def _batch_before(self, turn: Turn) -> bool:
        patches = 0
        for other in itertools.takewhile(lambda other: other is not turn, self._turns):
            patches += min(other.left, turn.patches)
            if patches >= self.max_patches:
                return True
        return False
