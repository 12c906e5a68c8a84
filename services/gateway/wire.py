"""Words that the gateway's own protocol and those of its backends share, from the domain to protobuf."""

from __future__ import annotations

import hashlib

from services.gateway.prompt import Item
from services.gateway.sampling import Sampling
from services.models import media
from triptych.common.v1 import media_pb2, sampling_pb2
from triptych.encoder.v1 import encoder_pb2


def modality_to_proto(modality: media.Modality) -> media_pb2.Modality.ValueType:
    """The same number in the protocol's enum."""
    return media_pb2.Modality.ValueType(modality.value)


def grid_to_proto(grid: media.Grid) -> media_pb2.Grid:
    """The same grid."""
    return media_pb2.Grid(t=grid.t, h=grid.h, w=grid.w)


def spans_to_proto(item: Item, ref: media_pb2.EmbeddingRef) -> list[media_pb2.Span]:
    """Where an item's runs stand in the prompt, and where their rows come from."""
    return [
        media_pb2.Span(
            modality=modality_to_proto(item.plan.modality),
            offset=place.offset,
            rows=place.rows,
            grid=grid_to_proto(place.grid),
            digest=_content(item),
            ref=ref,
            seconds_per_grid=item.plan.seconds_per_grid,
            first_row=place.first_row,
            whole_rows=item.plan.whole_rows,
        )
        for place in item.placements
    ]


def _content(item: Item) -> bytes:
    """Names what an item's rows show: equal bytes may be looked at in other ways from one request to the next."""
    plan = item.plan
    how = (plan.rows, plan.tiles, plan.frames, plan.masked, plan.look)
    return hashlib.sha256(item.digest + repr(how).encode()).digest()


def encode_to_proto(item: Item, request_id: str) -> encoder_pb2.EncodeRequest:
    """An item as its encoder gets it: the bytes, and of the plan what decoding and the towers need."""
    plan = item.plan
    return encoder_pb2.EncodeRequest(
        request_id=request_id,
        modality=modality_to_proto(plan.modality),
        data=item.data,
        expected_rows=plan.rows,
        expected_grid=grid_to_proto(plan.grid),
        field=item.field,
        patches=plan.patches,
        tiles=plan.tiles,
        frames=plan.frames,
        times=plan.times,
        samples=plan.samples,
        masked=plan.masked,
        whole_rows=plan.whole_rows,
        cache_salt=item.cache_salt,
        low_detail=plan.look.low,
        min_pixels=plan.look.min_pixels,
        max_pixels=plan.look.max_pixels,
    )


def sampling_to_proto(sampling: Sampling, max_tokens: int) -> sampling_pb2.SamplingParams:
    """What the language model needs to know; stop strings stay with the gateway."""
    return sampling_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=sampling.logit_bias,
        seed=sampling.seed,
        max_tokens=max_tokens,
        min_tokens=sampling.min_tokens,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        include_first_logits=sampling.include_first_logits,
        priority=sampling.priority,
        visual_token_keep=sampling.visual_token_keep,
        n=sampling.n if sampling.n > 1 else None,
        logprobs=sampling.logprobs,
        **sampling.constraint,
    )
