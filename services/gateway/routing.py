"""Which server gets what. Pure functions of addresses and figures: no channel, no clock.

An item goes to the encoder that its content names, so that a second look at it finds the first one's embeddings; a prompt goes to
the language model that has read the most of it. Either gives way where that server has much more to do than the others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

FACTOR = 1.25  # of the mean load; whoever has more is passed over
SPARE_PATCHES = 16_384  # an encoder's batch: with less to do than that, nobody is passed over
SPARE_REQUESTS = 4  # the same of a language model, which computes that many together


@dataclass(frozen=True)
class Load:
    """What a server has to do, and how often it was chosen before."""

    now: int
    served: int = 0


def by_rendezvous(key: bytes, addresses: Iterable[str]) -> list[str]:
    """All addresses in the order that is the key's own. One that goes or comes moves only the keys that it is first for."""

    def weight(address: str) -> bytes:
        return hashlib.blake2b(address.encode(), key=key[:64], digest_size=8).digest()

    return sorted(addresses, key=weight)


def order_encoders(key: bytes, loads: Mapping[str, Load], holding: Collection[str] = ()) -> list[str]:
    """Encoders for an item, best first: those that hold it, then by rendezvous; those with too much to do come last.

    Args:
        key: names the item's content.
        loads: patches on their way through each encoder.
        holding: encoders that have the item or are about to; it costs them nothing.
    """
    bound = _bound(loads, SPARE_PATCHES)
    place = {address: at for at, address in enumerate(by_rendezvous(key, loads))}

    def rank(address: str) -> tuple[bool, bool, int, int]:
        busy = loads[address].now > bound
        return address not in holding, busy, loads[address].now if busy else 0, place[address]

    return sorted(loads, key=rank)


def order_llms(loads: Mapping[str, Load], matched: Mapping[str, int]) -> list[str]:
    """Language models for a prompt, best first: the longest known prefix, then the least to do; the busiest come last.

    Args:
        loads: requests of each; among equals they take turns.
        matched: how many tokens of the prompt each has read before.
    """
    bound = _bound(loads, SPARE_REQUESTS)

    def rank(address: str) -> tuple[bool, int, int, int, str]:
        load = loads[address]
        busy = load.now > bound
        return busy, 0 if busy else -matched.get(address, 0), load.now, load.served, address

    return sorted(loads, key=rank)


def _bound(loads: Mapping[str, Load], spare: int) -> float:
    return max(spare, FACTOR * sum(load.now for load in loads.values()) / max(1, len(loads)))
