"""The body of ``/v1/chat/completions``: a ``ChatRequest``, and how its answer is to be shown.

Names that neither OpenAI nor vLLM knows are refused, and so are options that this service could only ignore: nothing that would
change the answer is dropped silently. Names with the value null count as left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from services.gateway.http import tools
from services.gateway.http.conversation import read_messages
from services.gateway.http.paths import Paths
from services.gateway.http.sampling_body import NAMES, read_sampling
from services.gateway.http.values import Value
from triptych.gateway.v1 import gateway_pb2

_OWN = frozenset(
    ("model", "messages", "stream", "stream_options", "tools", "tool_choice", "cache_salt", "mm_processor_kwargs",
     "return_token_ids")
)  # fmt: skip
# For bookkeeping at a provider, or hints: they have no effect on what is answered.
_WITHOUT_EFFECT = frozenset(
    ("user", "safety_identifier", "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_retention",
     "parallel_tool_calls", "reasoning_effort", "verbosity", "request_id")
)  # fmt: skip
# Options with one value that asks for what is done anyway; any other is refused.
_FIXED: Mapping[str, object] = {
    "modalities": ["text"],
    "echo": False,
    "add_generation_prompt": True,
    "continue_final_message": False,
    "add_special_tokens": False,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False,
    "use_beam_search": False,
}
_NAMES = NAMES | _OWN | _WITHOUT_EFFECT | _FIXED.keys()
_PIXELS = ("min_pixels", "max_pixels")


@dataclass(frozen=True)
class ChatBody:
    """What was asked.

    Attributes:
        request: for the gateway.
        paths: from its fields to the body's.
        stream: whether the answer comes in pieces.
        usage_chunk: whether the last of them says what it cost.
        running_usage: whether all others say what it cost so far, as vLLM's do.
        token_ids: whether tokens are shown beside the text.
    """

    request: gateway_pb2.ChatRequest
    paths: Paths
    stream: bool
    usage_chunk: bool
    running_usage: bool
    token_ids: bool


def read_chat_body(body: Value) -> ChatBody:
    """Read it.

    Raises:
        ServiceError: INVALID_ARGUMENT about a path in the body.
    """
    members = body.members(_NAMES)
    for name in members.keys() & _FIXED.keys():
        if members[name].raw != _FIXED[name]:
            raise members[name].refuse(f"can only be {Value(_FIXED[name]).json()} here; leave it out")
    if "messages" not in members:
        raise body.refuse("needs messages")
    paths = Paths()
    request = gateway_pb2.ChatRequest(
        model=members["model"].text() if "model" in members else "",
        sampling=read_sampling(members, paths),
        cache_salt=members["cache_salt"].text() if "cache_salt" in members else "",
    )
    read_messages(members["messages"], _offered(members), _pixels(members), request, paths)
    stream = _flag(members, "stream")
    usage_chunk = running_usage = False
    if "stream_options" in members:
        if not stream:
            raise members["stream_options"].refuse("needs stream to be true")
        options = members["stream_options"].members(("include_usage", "continuous_usage_stats", "include_obfuscation"))
        usage_chunk = _flag(options, "include_usage")
        running_usage = usage_chunk and _flag(options, "continuous_usage_stats")
    return ChatBody(request, paths, stream, usage_chunk, running_usage, _flag(members, "return_token_ids"))


def _flag(members: Mapping[str, Value], name: str) -> bool:
    return name in members and members[name].flag()


def _offered(members: Mapping[str, Value]) -> str:
    """What the model is told of tools."""
    choice = members.get("tool_choice")
    if choice is not None and choice.raw not in ("auto", "none"):
        raise choice.refuse("can be auto or none: that a tool is called cannot be enforced here")
    described = tools.describe(members["tools"]) if "tools" in members else ""
    return "" if choice is not None and choice.raw == "none" else described


def _pixels(members: Mapping[str, Value]) -> dict[str, int]:
    """Limits of every picture and video, as vLLM spells them for the whole request."""
    if "mm_processor_kwargs" not in members:
        return {}
    given = members["mm_processor_kwargs"].members(_PIXELS)
    return {name: value.whole(0, 2**64 - 1) for name, value in given.items()}
