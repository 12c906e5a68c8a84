"""Attention of packed steps over the paged KV pool: what a step looks like, where keys and values live, who computes."""

from __future__ import annotations

from services.llm.attention.gathered import GatheredBackend
from services.llm.attention.naive import NaiveBackend
from services.llm.attention.plan import Backend

BACKENDS = ("auto", "naive", "gathered")


def choose_backend(name: str, device: str) -> Backend:
    """The backend that a flag names; ``auto`` is the fastest for the device."""
    if name == "naive":
        return NaiveBackend()
    return GatheredBackend()
