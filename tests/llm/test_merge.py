"""Which token ranges must stay whole, by the masks of families that look ahead."""

from __future__ import annotations

import torch

from services.llm.merge import atoms


def causal(length: int, window: int | None = None) -> torch.Tensor:
    places = torch.arange(length)
    behind = places[:, None] - places
    return (behind >= 0) & (behind < (window or length))


def with_picture(mask: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    mask[start:stop, start:stop] = True
    return mask


def test_a_causal_mask_has_no_atoms() -> None:
    assert atoms([causal(9), causal(9, window=3)], 9) == []


def test_each_picture_is_an_atom_and_neighbours_stay_apart() -> None:
    mask = with_picture(with_picture(causal(12, window=2), 1, 4), 4, 9)
    assert atoms([causal(12), mask], 12) == [(1, 4), (4, 9)]


def test_stretches_of_several_masks_that_overlap_are_one_atom() -> None:
    assert atoms([with_picture(causal(12), 1, 5), with_picture(causal(12), 3, 8)], 12) == [(1, 8)]


def test_a_prompt_that_sees_itself_whole_is_one_atom() -> None:
    assert atoms([torch.ones(5, 5, dtype=torch.bool)], 5) == [(0, 5)]


def test_a_token_that_sees_nothing_adds_nothing() -> None:
    mask = with_picture(causal(6), 2, 4)
    mask[0] = mask[5] = False
    assert atoms([mask], 6) == [(2, 4)]
