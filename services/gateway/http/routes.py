"""What stands at each path: translates between JSON and ``ChatService``, whose servicer answers both doors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from importlib import resources
from time import time
from typing import Any, cast

import prometheus_client

from services.common.channel import time_left
from services.common.errors import ServiceError, invalid
from services.gateway.chat import Chat
from services.gateway.http.chat_body import ChatBody, read_chat_body
from services.gateway.http.completion import Completion, modalities
from services.gateway.http.door import Route
from services.gateway.http.exchange import Exchange
from services.gateway.http.paths import Paths
from services.gateway.http.values import Value
from services.gateway.model import ServedModel
from services.gateway.servicer import ChatServicer, Context
from triptych.common.v1 import media_pb2
from triptych.gateway.v1 import gateway_pb2

_MODEL_PATH = "/v1/models/"
_TOKENIZED = ("model", "messages", "add_special_tokens")  # what a conversation to tokenise has of a chat's body
# The page talks to its own server only, and nothing may frame it.
_PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data: blob:; "
    "media-src data: blob:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)


class Routes:
    """The door's routes.

    Args:
        model: that is served.
        chat: what answers.
        servicer: gRPC's way to it, which gets an :class:`Exchange` for a context.
        max_text_bytes: longest text to tokenise.
        is_ready: whether requests can be answered.
    """

    def __init__(
        self, model: ServedModel, chat: Chat, servicer: ChatServicer, max_text_bytes: int, is_ready: Callable[[], bool]
    ) -> None:
        self._model, self._chat, self._servicer = model, chat, servicer
        self._max_text_bytes, self._is_ready = max_text_bytes, is_ready
        self._page = (resources.files(__package__ or "") / "playground.html").read_bytes()
        self._started = int(time())

    @property
    def table(self) -> Mapping[str, Route]:
        """By path."""
        return {
            "/v1/chat/completions": Route("POST", self._completions),
            "/v1/estimate": Route("POST", self._estimate),
            "/tokenize": Route("POST", self._tokenize),
            "/v1/models": Route("GET", self._models),
            f"{_MODEL_PATH}*": Route("GET", self._named_model),
            "/health": Route("GET", self._health, quiet=True, open=True),
            "/metrics": Route("GET", self._metrics, quiet=True),
            "/": Route("GET", self._playground, open=True),
        }

    async def _completions(self, exchange: Exchange, body: Value) -> None:
        asked = await exchange.aside(read_chat_body, body)
        del body
        completion = Completion(asked, exchange.request_id, self._model.name)
        stream = self._servicer.Chat(asked.request, _context(exchange))
        with _in_the_client_s_words(asked.paths):
            async with aclosing(stream) as responses:  # type: ignore[type-var]
                async for response in responses:
                    if asked.stream:
                        await exchange.events(completion.chunks(response))
                    else:
                        completion.take(response)
        if asked.stream:
            await exchange.events(completion.last_chunk())
            await exchange.end_events()
        else:
            await exchange.reply_json(completion.whole())

    async def _estimate(self, exchange: Exchange, body: Value) -> None:
        asked = await exchange.aside(read_chat_body, body)
        del body
        with _in_the_client_s_words(asked.paths):
            estimate = await self._servicer.EstimateTokens(asked.request, _context(exchange))
        await exchange.reply_json(_estimate_json(estimate, asked))

    async def _tokenize(self, exchange: Exchange, body: Value) -> None:
        """vLLM's: tokens of a text, or of a conversation as the model gets it."""
        members = body.members((*_TOKENIZED, "prompt", "return_token_strs"))
        if ("prompt" in members) == ("messages" in members):
            raise body.refuse("needs either prompt or messages")
        seconds = time_left(_context(exchange))
        if "messages" in members:
            chat = Value({name: members[name].raw for name in _TOKENIZED if name in members})
            asked = await exchange.aside(read_chat_body, chat)
            with _in_the_client_s_words(asked.paths):
                tokens = (await self._chat.prompt(asked.request, seconds)).token_ids
        else:
            if "model" in members:
                self._model.check_called(members["model"].text())
            special = "add_special_tokens" not in members or members["add_special_tokens"].flag()
            async with asyncio.timeout(seconds):
                tokens = await self._tokens(members["prompt"].text(), special)
        strings = "return_token_strs" in members and members["return_token_strs"].flag()
        await exchange.reply_json(
            {
                "count": len(tokens),
                "max_model_len": self._chat.max_model_len,
                "tokens": tokens,
                "token_strs": [self._model.tokenizer.id_to_token(token) for token in tokens] if strings else None,
            }
        )

    async def _tokens(self, text: str, add_special_tokens: bool) -> list[int]:
        if (size := len(text.encode())) > self._max_text_bytes:
            limit = self._max_text_bytes
            text = f"{size} bytes of text, the limit is {limit}; send less"
            raise invalid("prompt", text, reason="TOO_MANY", limit=limit, requested=size)
        encode = self._model.tokenizer.encode_batch_fast
        [encoding] = await asyncio.to_thread(encode, [text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    async def _models(self, exchange: Exchange, body: Value) -> None:
        await exchange.reply_json({"object": "list", "data": await self._served(exchange)})

    async def _named_model(self, exchange: Exchange, body: Value) -> None:
        served, name = await self._served(exchange), exchange.path.removeprefix(_MODEL_PATH)
        self._model.check_called(name)
        await exchange.reply_json(served[0])

    async def _served(self, exchange: Exchange) -> list[dict[str, Any]]:
        listed = await self._servicer.ListModels(gateway_pb2.ListModelsRequest(), _context(exchange))
        return [
            {
                "id": model.name,
                "object": "model",
                "created": self._started,
                "owned_by": "triptych",
                "max_model_len": model.max_model_len,
                "family": model.family,
                "modalities": ["text", *map(_modality_word, model.modalities)],
            }
            for model in listed.models
        ]

    async def _health(self, exchange: Exchange, body: Value) -> None:
        ready = self._is_ready()
        await exchange.reply_json({"status": "ok" if ready else "not ready"}, 200 if ready else 503)

    async def _metrics(self, exchange: Exchange, body: Value) -> None:
        await exchange.reply(200, prometheus_client.generate_latest(), prometheus_client.CONTENT_TYPE_LATEST)

    async def _playground(self, exchange: Exchange, body: Value) -> None:
        headers = {"content-security-policy": _PAGE_POLICY, "x-content-type-options": "nosniff"}
        await exchange.reply(200, self._page, "text/html; charset=utf-8", headers)

    async def check_caller(self, exchange: Exchange) -> None:
        """Who may not list the models may not ask for anything else either.

        Raises:
            ServiceError: as ``ListModels`` does.
        """
        await self._servicer.ListModels(gateway_pb2.ListModelsRequest(), _context(exchange))


def _context(exchange: Exchange) -> Context:
    """An exchange has what the servicer asks of a call's context: the time left and the metadata."""
    return cast(Context, exchange)


@contextmanager
def _in_the_client_s_words(paths: Paths) -> Iterator[None]:
    try:
        yield
    except ServiceError as error:
        raise paths.translate(error) from None


def _estimate_json(estimate: gateway_pb2.EstimateTokensResponse, asked: ChatBody) -> dict[str, Any]:
    media = [
        {
            "modality": _modality_word(item.modality),
            "tokens": item.tokens,
            "width": item.width if item.HasField("width") else None,
            "height": item.height if item.HasField("height") else None,
            "grid": {"t": item.grid.t, "h": item.grid.h, "w": item.grid.w},
            "field": asked.paths.of(item.field),
        }
        for item in estimate.media
    ]
    return {
        "usage": {
            "prompt_tokens": estimate.prompt_tokens,
            "prompt_tokens_details": modalities(estimate.prompt_tokens_details),
        },
        "media": media,
        "cost": {budget.name: getattr(estimate.cost, budget.name) for budget in estimate.cost.DESCRIPTOR.fields},
        "max_model_len": estimate.max_model_len,
        "expected_wait_seconds": estimate.expected_wait_seconds,
    }


def _modality_word(modality: media_pb2.Modality.ValueType) -> str:
    return media_pb2.Modality.Name(modality).removeprefix("MODALITY_").lower()
