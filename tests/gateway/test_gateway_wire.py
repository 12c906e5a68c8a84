"""What encoders and language models are told of an item's plan."""

from __future__ import annotations

import dataclasses
import hashlib

from services.gateway.prompt import Item
from services.gateway.wire import encode_to_proto, spans_to_proto
from services.models.layout import Placement
from services.models.media import Grid, ItemPlan, Look, Modality, Picture
from triptych.common.v1 import media_pb2

DIGEST = hashlib.sha256(b"bytes").digest()
PICTURE = ItemPlan(Modality.IMAGE, 12, Grid(3, 1, 4), 300, runs=("a", 4, "b", 8), tiles=3)
VIDEO = ItemPlan(Modality.VIDEO, 12, Grid(1, 3, 4), 48, tiles=1, frames=(0, 5, 5), times=(0.0, 0.2, 0.2))


def item(plan: ItemPlan) -> Item:
    placements = tuple(Placement(at, plan, 0, tokens, first, tokens) for at, tokens, first in ((1, 4, 0), (7, 8, 4)))
    return Item("messages[0].parts[0].image", b"bytes", DIGEST, Picture(60, 40), plan, placements, "tenant")


def test_an_encoder_is_told_what_the_towers_need() -> None:
    plan = dataclasses.replace(VIDEO, samples=7, masked=True, whole_rows=20, look=Look(True, 100, 900))
    request = encode_to_proto(item(plan), "req-1")
    assert (request.request_id, request.field, request.data) == ("req-1", "messages[0].parts[0].image", b"bytes")
    assert request.modality == media_pb2.MODALITY_VIDEO and request.expected_grid == media_pb2.Grid(t=1, h=3, w=4)
    assert (request.expected_rows, request.patches, request.tiles, request.samples, request.masked) == (12, 48, 1, 7, True)
    assert (request.whole_rows, request.cache_salt) == (20, "tenant")
    assert (request.low_detail, request.min_pixels, request.max_pixels) == (True, 100, 900)
    plain = encode_to_proto(item(PICTURE), "req-1")
    assert not (plain.low_detail or plain.HasField("min_pixels") or plain.HasField("max_pixels"))
    assert (tuple(request.frames), tuple(request.times)) == (plan.frames, plan.times)


def test_an_item_has_a_span_for_each_run() -> None:
    spans = spans_to_proto(item(PICTURE), media_pb2.EmbeddingRef(id="r"))
    assert [(s.offset, s.rows, s.first_row, s.ref.id) for s in spans] == [(1, 4, 0, "r"), (7, 8, 4, "r")]
    assert len({span.digest for span in spans}) == 1


def test_equal_bytes_looked_at_otherwise_have_another_digest() -> None:
    """Or a language model would take up the keys and values of other rows."""
    plans = [
        PICTURE, dataclasses.replace(PICTURE, masked=True), dataclasses.replace(PICTURE, tiles=1),
        dataclasses.replace(PICTURE, look=Look(low=True)), dataclasses.replace(PICTURE, look=Look(max_pixels=9)), VIDEO,
        dataclasses.replace(VIDEO, frames=(0, 4, 5)),
        dataclasses.replace(VIDEO, rows=11, whole_rows=12),
    ]  # fmt: skip
    digests = [spans_to_proto(item(plan), media_pb2.EmbeddingRef())[0].digest for plan in plans]
    assert len(set(digests)) == len(plans) and all(len(digest) == 32 for digest in digests)
    again = spans_to_proto(item(dataclasses.replace(VIDEO)), media_pb2.EmbeddingRef())[0].digest
    assert again == digests[5]
