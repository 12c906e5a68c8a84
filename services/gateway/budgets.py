"""What requests share, and who holds how much of it: limits that backends published, and reservations against them.

There are two kinds of budgets. What a request keeps for its whole life (KV blocks, places in the batch) is a hard limit: a
request that needs more than there is can never run. What only flows through (patches, prefill tokens) is how much work may be
let in ahead of the backends, who take it piece by piece: a request larger than all of it runs when nobody else holds any.

Requests with media leave a share of what texts need to texts. They wait for rows and hold blocks meanwhile, so that without it a
text would find every place taken by requests that compute nothing.

Pure: no clock, no waiting, no gRPC.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from services.gateway.cost import Cost

BATCHES_AHEAD = 4  # let in before the first of them is through: enough that backends never wait, little enough to stay fair
PLACES_AHEAD = 1.25  # a quarter more texts than a step holds sequences: those that are on their way


class NeverFits(Exception):
    """The request needs more than there is even when idle."""

    def __init__(self, budget: str, requested: int, limit: int) -> None:
        super().__init__(f"{requested} of {budget} needed, the limit is {limit}")
        self.budget, self.requested, self.limit = budget, requested, limit


class NoPool(Exception):
    """No pool is open."""


@dataclass(eq=False)
class Budget:
    """One figure that requests share.

    Attributes:
        name: in metrics and errors.
        limit: how much there is; None where nobody said.
        flow: see the module.
        kept: what requests with media leave of it; one that needs more than the rest runs when nobody else holds any.
    """

    name: str
    limit: int | None = None
    flow: bool = False
    kept: int = 0
    reserved: int = 0

    @property
    def free(self) -> int:
        """What is left; negative where the limit shrank under its reservations."""
        assert self.limit is not None
        return self.limit - self.reserved

    def has(self, amount: int, media: bool) -> bool:
        """Whether so much may be reserved now, by a request with or without media."""
        if amount == 0 or self.limit is None:
            return True
        return amount <= self.free - (self.kept if media else 0) or (self.reserved == 0 and self.could_have(amount))

    def could_have(self, amount: int) -> bool:
        """Whether so much could be reserved if nobody else held any."""
        return self.flow or self.limit is None or amount <= self.limit


Amounts = Mapping[Budget, int]


@dataclass(eq=False)
class Pool:
    """One language model server, named by its address; a closed pool takes nothing new."""

    name: str
    block_size: int = 1
    open: bool = True
    kv_blocks: Budget = field(default_factory=lambda: Budget("kv_blocks", 0))
    prefill_tokens: Budget = field(default_factory=lambda: Budget("prefill_tokens", flow=True))
    sequences: Budget = field(default_factory=lambda: Budget("sequences"))

    @property
    def total(self) -> int:
        """KV blocks."""
        assert self.kv_blocks.limit is not None
        return self.kv_blocks.limit

    @property
    def free(self) -> int:
        """KV blocks that may be reserved."""
        return self.kv_blocks.free

    @property
    def budgets(self) -> tuple[Budget, ...]:
        """All of them."""
        return self.kv_blocks, self.prefill_tokens, self.sequences

    def amounts(self, cost: Cost) -> dict[Budget, int]:
        """What a request takes here."""
        return {
            self.kv_blocks: cost.blocks(self.block_size),
            self.prefill_tokens: cost.prefill_tokens(self.name),
            self.sequences: cost.answers,
        }


Prefer = Callable[[Sequence[Pool]], Sequence[Pool]]  # open pools, the best first; pools that are left out are not taken


def most_free_first(pools: Sequence[Pool]) -> Sequence[Pool]:
    """The order that is taken where a request prefers none."""
    return sorted(pools, key=lambda pool: -pool.free)


@dataclass(eq=False)
class Reservation:
    """What one request holds. Only :class:`Budgets` changes that.

    Attributes:
        completion_tokens: of all its answers so far; its holder keeps that up to date.
    """

    pool: Pool
    cost: Cost
    held: dict[Budget, int]
    completion_tokens: int = 0

    @property
    def blocks(self) -> int:
        """KV blocks held."""
        return self.held.get(self.pool.kv_blocks, 0)


class Budgets:
    """The language models' pools, and what all requests share whatever pool they are in."""

    def __init__(self, max_running: int, kept_for_text: float) -> None:
        self._kept = kept_for_text
        self.requests = Budget("requests", max_running, kept=int(max_running * kept_for_text))
        self.patches = Budget("encoder_patches", flow=True)
        self.items = Budget("encoder_items", flow=True)
        self.encoder_bytes = Budget("encoder_bytes")
        self.pools: dict[str, Pool] = {}
        self.reservations: set[Reservation] = set()

    @property
    def open_pools(self) -> list[Pool]:
        """Pools that take requests."""
        return [pool for pool in self.pools.values() if pool.open]

    def __iter__(self) -> Iterator[Budget]:
        yield from (self.requests, self.patches, self.items, self.encoder_bytes)
        for pool in self.pools.values():
            yield from pool.budgets

    def update_pool(self, name: str, *, total: int, block_size: int, batch_tokens: int = 0, max_sequences: int = 0) -> None:
        """Open a pool, or correct its figures; 0 stands for one that was not published."""
        pool = self.pools.setdefault(name, Pool(name))
        pool.block_size, pool.kv_blocks.limit, pool.open = block_size, total, True
        pool.kv_blocks.kept = int(total * self._kept)
        pool.prefill_tokens.limit = BATCHES_AHEAD * batch_tokens or None
        pool.prefill_tokens.kept = int(BATCHES_AHEAD * batch_tokens * self._kept)
        pool.sequences.limit = math.ceil(max_sequences * PLACES_AHEAD) or None
        pool.sequences.kept = math.ceil(max_sequences * PLACES_AHEAD) - math.ceil(max_sequences * (1 - self._kept))

    def close_pool(self, name: str) -> None:
        """Let nothing more into a pool; what it holds stays until it is given back."""
        if name in self.pools:
            self.pools[name].open = False

    def update_encoders(self, *, batch_patches: int, max_items: int, max_bytes: int) -> None:
        """Correct what all encoders take together; 0 stands for a figure that was not published."""
        self.patches.limit = BATCHES_AHEAD * batch_patches or None
        self.items.limit = max_items or None
        self.encoder_bytes.limit = max_bytes or None

    def place(self, cost: Cost, prefer: Prefer | None = None) -> Pool | frozenset[str]:
        """The first pool in order of preference that has room, or the names of the budgets that have none.

        Raises:
            NoPool: no pool is open.
            NeverFits: no open pool could take the request even when idle.
        """
        pools = self.open_pools
        if not pools:
            raise NoPool
        shared = self._shared(cost)
        self._check_fits(pools, cost, shared)
        media = cost.encoder_items > 0
        missing = _missing(shared, media)
        lacking = set(missing)
        for pool in (prefer or most_free_first)(pools):
            lacks = _missing(pool.amounts(cost), media)
            if not missing and not lacks:
                return pool
            lacking |= lacks
        return frozenset(lacking)

    @property
    def full(self) -> bool:
        """Whether there is no room for anybody, as far as that can be told at a glance."""
        pools = self.open_pools
        return bool(pools) and (
            not self.requests.has(1, False) or all(_missing(dict.fromkeys(pool.budgets, 1), False) for pool in pools)
        )

    def takes(self, cost: Cost) -> frozenset[str]:
        """The names of the budgets that a request takes anything of."""
        pool = next(iter(self.pools.values()))
        return frozenset(budget.name for budget, amount in {**self._shared(cost), **pool.amounts(cost)}.items() if amount)

    def take(self, pool: Pool, cost: Cost) -> Reservation:
        """Reserve; :meth:`place` said that there is room."""
        reservation = Reservation(pool, cost, {})
        self._hold(reservation, {**self._shared(cost), **pool.amounts(cost)})
        self.reservations.add(reservation)
        return reservation

    def flowed(self, reservation: Reservation) -> None:
        """Give back what has flowed through: everything is encoded and the prompt is computed."""
        self._free(reservation, [budget for budget in reservation.held if budget.flow])

    def move(self, reservation: Reservation, name: str) -> None:
        """The request goes on in another pool, whether that has room or not: it takes precedence over whoever comes next."""
        self._free(reservation, list(reservation.pool.budgets))
        reservation.pool = self.pools[name]
        self._hold(reservation, reservation.pool.amounts(reservation.cost))

    def give_back(self, reservation: Reservation) -> None:
        """The request is over."""
        self._free(reservation, list(reservation.held))
        self.reservations.remove(reservation)

    def check_integrity(self) -> None:
        """Assert that what every budget counts as reserved is what requests hold of it."""
        for budget in self:
            held = sum(reservation.held.get(budget, 0) for reservation in self.reservations)
            assert budget.reserved == held, f"{budget} does not match its reservations, which hold {held}"

    def _shared(self, cost: Cost) -> dict[Budget, int]:
        return {
            self.requests: 1,
            self.patches: cost.encoder_patches,
            self.items: cost.encoder_items,
            self.encoder_bytes: cost.media_bytes,
        }

    def _check_fits(self, pools: Sequence[Pool], cost: Cost, shared: Amounts) -> None:
        for budget, amount in shared.items():
            if not budget.could_have(amount):
                assert budget.limit is not None
                raise NeverFits(budget.name, amount, budget.limit)
        amounts = [pool.amounts(cost) for pool in pools]
        if not any(all(budget.could_have(amount) for budget, amount in of_pool.items()) for of_pool in amounts):
            short = [(b.limit or 0, n, b.name) for of_pool in amounts for b, n in of_pool.items() if not b.could_have(n)]
            limit, amount, name = max(short)
            raise NeverFits(name, amount, limit)

    def _hold(self, reservation: Reservation, amounts: Amounts) -> None:
        for budget, amount in amounts.items():
            budget.reserved += amount
            reservation.held[budget] = reservation.held.get(budget, 0) + amount

    def _free(self, reservation: Reservation, budgets: Sequence[Budget]) -> None:
        for budget in budgets:
            budget.reserved -= reservation.held.pop(budget, 0)


def _missing(amounts: Amounts, media: bool) -> set[str]:
    return {budget.name for budget, amount in amounts.items() if not budget.has(amount, media)}
