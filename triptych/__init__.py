"""Triptych's SDK: talk to a gateway about text, images, audio and video.

    with triptych.Client() as client:
        print(client.chat([triptych.image("cat.jpg"), "What is this?"]).text)

It needs grpcio and protobuf. It does not know the services, tokenizers or models: counts and limits are the gateway's.
"""

from triptych import errors
from triptych.aio import AsyncClient, AsyncStream
from triptych.answer import ChatResult, Choice, Delta, TokenLogprob
from triptych.client import Client, Stream
from triptych.content import MediaPart, assistant, audio, image, system, user, video
from triptych.pages import PageAnswer, Pages
from triptych.pages_aio import AsyncPageAnswer, AsyncPages
from triptych.pages_request import Page, page
from triptych.pdf import Pdf, pdf
from triptych.reports import Cost, Estimate, Load, MediaEstimate, Model, PromptTokens, StageTimes, Usage

__all__ = [
    "AsyncClient",
    "AsyncPageAnswer",
    "AsyncPages",
    "AsyncStream",
    "ChatResult",
    "Choice",
    "Client",
    "Cost",
    "Delta",
    "Estimate",
    "Load",
    "MediaEstimate",
    "MediaPart",
    "Model",
    "Page",
    "PageAnswer",
    "Pages",
    "Pdf",
    "PromptTokens",
    "StageTimes",
    "Stream",
    "TokenLogprob",
    "Usage",
    "assistant",
    "audio",
    "errors",
    "image",
    "page",
    "pdf",
    "system",
    "user",
    "video",
]
