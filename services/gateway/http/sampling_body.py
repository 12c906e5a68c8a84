"""From the sampling options of a chat body, spelled as OpenAI and vLLM do, to ``SamplingParams``. Ranges are the validator's."""

from __future__ import annotations

from collections.abc import Mapping

from services.common.sampling_ranges import MAX_ANSWERS, MAX_LOGPROBS
from services.gateway.http.paths import Paths
from services.gateway.http.values import Value, whole_of
from triptych.common.v1 import sampling_pb2

_NUMBERS = (
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "visual_token_keep",
)  # fmt: skip
_UINT32, _INT32 = (0, 2**32 - 1), (-(2**31), 2**31 - 1)
_WHOLE = {"min_tokens": _UINT32, "n": (1, MAX_ANSWERS), "priority": _INT32}
_LENGTHS = ("max_tokens", "max_completion_tokens")
_GUIDED = {
    "guided_json": "json_schema", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar",
}  # fmt: skip
_STRUCTURED = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar", "json_object": "json_object"}
NAMES = frozenset(
    (*_NUMBERS, *_WHOLE, *_LENGTHS, *_GUIDED, "seed", "top_k", "ignore_eos", "stop", "stop_token_ids", "logit_bias", "logprobs",
     "top_logprobs", "response_format", "structured_outputs")
)  # fmt: skip


def read_sampling(members: Mapping[str, Value], paths: Paths) -> sampling_pb2.SamplingParams:
    """The options among a body's members; ``paths`` learns where those stand whose name differs.

    Raises:
        ServiceError: INVALID_ARGUMENT about a path in the body.
    """
    params = sampling_pb2.SamplingParams()
    for name in members.keys() & set(_NUMBERS):
        setattr(params, name, members[name].number())
    for name in members.keys() & _WHOLE.keys():
        setattr(params, name, members[name].whole(*_WHOLE[name]))
    if "seed" in members:
        params.seed = members["seed"].whole(-(2**63), 2**64 - 1) % 2**64
    if "top_k" in members:
        params.top_k = max(0, members["top_k"].whole(-1, _UINT32[1]))  # -1 is vLLM's word for all
    if "ignore_eos" in members:
        params.ignore_eos = members["ignore_eos"].flag()
    _read_length(members, params, paths)
    _read_stops(members, params, paths)
    if "logit_bias" in members:
        _read_bias(members["logit_bias"], params)
    _read_logprobs(members, params, paths)
    _read_constraint(members, params, paths)
    return params


def _read_length(members: Mapping[str, Value], params: sampling_pb2.SamplingParams, paths: Paths) -> None:
    given = {name: members[name].whole(*_UINT32) for name in _LENGTHS if name in members}
    if len(set(given.values())) > 1:
        raise members[_LENGTHS[1]].refuse("differs from max_tokens, which is its older name; send one of them")
    for name, tokens in given.items():
        params.max_tokens = tokens
        paths.put("sampling.max_tokens", name)


def _read_stops(members: Mapping[str, Value], params: sampling_pb2.SamplingParams, paths: Paths) -> None:
    if "stop" in members:
        stop = members["stop"]
        if isinstance(stop.raw, str):
            params.stop.append(stop.text())
            paths.put("sampling.stop[0]", "stop")
        else:
            params.stop.extend(item.text() for item in stop.items())
    if "stop_token_ids" in members:
        params.stop_token_ids.extend(item.whole(*_UINT32) for item in members["stop_token_ids"].items())


def _read_bias(bias: Value, params: sampling_pb2.SamplingParams) -> None:
    for name, value in bias.mapping().items():
        token = whole_of(name)
        if token is None or not 0 <= token <= _UINT32[1]:
            raise bias.refuse('its names must be token ids, as in {"1234": -100}')
        params.logit_bias[token] = Value(value, f"{bias.path}[{token}]").number()


def _read_logprobs(members: Mapping[str, Value], params: sampling_pb2.SamplingParams, paths: Paths) -> None:
    asked = "logprobs" in members and members["logprobs"].flag()
    if "top_logprobs" in members:
        top = members["top_logprobs"]
        count = top.whole(0, MAX_LOGPROBS)
        if count and not asked:
            raise top.refuse("needs logprobs to be true")
        if asked:
            params.logprobs = count
            paths.put("sampling.logprobs", top.path)
    elif asked:
        params.logprobs = 0


def _read_constraint(members: Mapping[str, Value], params: sampling_pb2.SamplingParams, paths: Paths) -> None:
    found = [(_GUIDED[name], members[name]) for name in members.keys() & _GUIDED.keys()]
    if "structured_outputs" in members:
        found += [(_STRUCTURED[name], value) for name, value in members["structured_outputs"].members(_STRUCTURED).items()]
    if "response_format" in members:
        found += _response_format(members["response_format"])
    found = [(name, value) for name, value in found if name != "json_object" or value.raw is not False]
    if len(found) > 1:
        raise found[1][1].refuse(f"cannot go with {found[0][1].path}: an answer has one constraint at most")
    for name, value in found:
        paths.put(f"sampling.{name}", value.path)
        if name == "choice":
            params.choice.texts.extend(item.text() for item in value.items())
        elif name == "json_object":
            params.json_object = True
        elif name == "json_schema" and not isinstance(value.raw, str):
            value.mapping()
            params.json_schema = Value(value.json(), value.path).text()
        else:
            setattr(params, name, value.text())


def _response_format(given: Value) -> list[tuple[str, Value]]:
    members = given.members(("type", "json_schema"))
    if "type" not in members:
        raise given.refuse("needs a type: text, json_object or json_schema")
    kind = members["type"].text()
    if kind == "text":
        return []
    if kind == "json_object":
        return [("json_object", given)]
    if kind != "json_schema":
        raise members["type"].refuse("must be text, json_object or json_schema")
    if "json_schema" not in members:
        raise given.refuse("needs json_schema, an object with a name and a schema")
    schema = members["json_schema"].members(("name", "schema", "strict", "description"))
    if "schema" not in schema:
        raise members["json_schema"].refuse("needs a schema")
    return [("json_schema", schema["schema"])]
