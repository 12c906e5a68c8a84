"""A checkpoint on disk: where it is, what its JSON files say, and a fingerprint. Torch-free; weights are not read."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from services.models.image_sizes import UnsupportedSize
from services.models.media import AS_SET, Clip, ItemPlan, Look, Medium, Modality, Picture, Recording, Sampling
from services.models.registry import Family, UnsupportedModel, family_of, text_config

EMBEDDED = Path(__file__).parent / "embedded"
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
_SAMPLE = 64 * 1024  # bytes hashed at each sampled place of a weight file


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint.

    Attributes:
        path: folder that holds it.
        name: what clients call it by default.
        config: config.json.
        generation: generation_config.json, or empty.
        settings: what the processor of each modality is set to: names of special tokens, then the processor's own keys, then
            those of the part that prepares this modality. The later win.
        family: its entry in the registry.
    """

    path: Path
    name: str
    config: dict[str, Any]
    generation: dict[str, Any]
    settings: Mapping[Modality, Mapping[str, Any]]
    family: Family

    @property
    def max_position_embeddings(self) -> int:
        """Longest context that the checkpoint was made for, in tokens."""
        return int(text_config(self.config).get("max_position_embeddings") or 4096)

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer."""
        end = self.generation.get("eos_token_id", text_config(self.config).get("eos_token_id"))
        return () if end is None else tuple(end) if isinstance(end, list) else (int(end),)

    def placeholder_id(self, modality: Modality) -> int:
        """The token that stands for one embedding row."""
        key = self.family.placeholders[modality]
        *path, key = key.split(".")
        holder = functools.reduce(lambda config, name: config.get(name) or {}, path, self.config)
        value = next((holder[k] for k in (key, key.replace("_index", "_id"), key.replace("_id", "_index")) if k in holder), None)
        if value is None:
            raise UnsupportedModel(f"config.json has no {key}, which a {self.family.model_type} checkpoint needs")
        return int(value)

    @property
    def sampling(self) -> Sampling:
        """Which frames of a video are looked at, where the caller says nothing."""
        video = self.settings[Modality.VIDEO]
        if video.get("num_frames"):
            return Sampling(frames=int(video["num_frames"]))
        return Sampling(fps=float(video["fps"])) if video.get("fps") else self.family.sampling

    def plan(self, media: Sequence[Medium], sampling: Sampling | None = None) -> list[ItemPlan]:
        """What the media of one request cost, in their order; with some families it depends on how many there are.

        Args:
            media: of the modalities that the family takes.
            sampling: which frames of videos are looked at; None leaves it to the checkpoint.

        Raises:
            image_sizes.UnsupportedSize: the family cannot take one of them; ``item`` says which.
        """
        pictures = [(i, medium) for i, medium in enumerate(media) if isinstance(medium, Picture)]
        plans: dict[int, ItemPlan] = {}
        try:
            if pictures:
                assert self.family.image is not None, f"{self.family.model_type} takes no images"
                settings = [self._settings_for(Modality.IMAGE, picture.look) for _, picture in pictures]
                planned = self.family.image([p for _, p in pictures], self.config, settings)
                plans |= zip((i for i, _ in pictures), planned, strict=True)
        except UnsupportedSize as error:
            error.item = pictures[error.item][0]
            raise
        for i, medium in enumerate(media):
            try:
                if not isinstance(medium, Picture):
                    plans[i] = self._plan_timed(medium, self.sampling if sampling is None else sampling)
            except UnsupportedSize as error:
                error.item = i
                raise
        looks = [AS_SET if isinstance(medium, Recording) else self.family.heeded(medium.look) for medium in media]
        return [plans[i] if look == AS_SET else replace(plans[i], look=look) for i, look in enumerate(looks)]

    def _settings_for(self, modality: Modality, look: Look) -> Mapping[str, Any]:
        """The processor's, with what is set otherwise for who looks so."""
        own, look = self.settings[modality], self.family.heeded(look)
        return own if look == AS_SET else {**own, **(self.family.low or {} if look.low else {}), "look": look}

    def _plan_timed(self, medium: Recording | Clip, sampling: Sampling) -> ItemPlan:
        if isinstance(medium, Recording):
            assert self.family.audio is not None, f"{self.family.model_type} takes no audio"
            return self.family.audio(medium.samples, self.config, self.settings[Modality.AUDIO])
        assert self.family.video is not None, f"{self.family.model_type} takes no video"
        return self.family.video(medium, sampling, self.config, self._settings_for(Modality.VIDEO, medium.look))

    def plan_image(self, width: int, height: int) -> ItemPlan:
        """Tokens of an image of this size, turned as EXIF says, that is the only one of its request.

        Raises:
            image_sizes.UnsupportedSize: the family cannot take this size.
        """
        return self.plan([Picture(width, height)])[0]

    @cached_property
    def fingerprint(self) -> str:
        """128 bits over the JSON files and samples of every weight file: equal for copies, different after training."""
        digest = hashlib.sha256()
        for file in sorted(p for p in self.path.iterdir() if p.suffix in (".json", ".safetensors", ".jinja") and p.is_file()):
            size = file.stat().st_size
            digest.update(f"{file.name}:{size};".encode())
            with file.open("rb") as stream:
                for offset in sorted({0, size // 3, 2 * size // 3, max(0, size - _SAMPLE)}):
                    stream.seek(offset)
                    digest.update(stream.read(_SAMPLE))
        return digest.hexdigest()[:32]


def open_checkpoint(model: str) -> Checkpoint:
    """Open a local folder, a hub id, or (for "") the embedded model.

    Raises:
        UnsupportedModel: it is not there, is incomplete, or is of a family that is not served.
    """
    path = EMBEDDED if not model else Path(model)
    if not path.is_dir():
        path = _from_hub(model)
    config = _read_json(path / "config.json")
    if config is None:
        raise UnsupportedModel(f"{path} holds no config.json; give --model a folder with a Hugging Face checkpoint")
    if config.get("model_type") == "qwen2_5_omni":  # as published: what thinks, and what talks beside it
        config = config["thinker_config"]
    if not any(path.glob("*.safetensors")):
        raise UnsupportedModel(
            f"{path} holds no .safetensors files; other weight formats are not read, convert the checkpoint first"
        )
    name = "triptych-embedded" if not model else path.resolve().name if Path(model).is_dir() else model
    generation = _read_json(path / "generation_config.json") or {}
    return Checkpoint(path, name, config, generation, _settings(path), family_of(config))


def named_tokens(tokenizer: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by name (``bos_token``, ``image_token``), from tokenizer_config.json."""
    extra = tokenizer.get("extra_special_tokens")
    entries = {**(extra if isinstance(extra, dict) else {}), **tokenizer}
    return {
        name: value if isinstance(value, str) else value["content"]
        for name, value in entries.items()
        if name.endswith("_token") and (isinstance(value, str) or (isinstance(value, dict) and "content" in value))
    }


def _settings(path: Path) -> dict[Modality, dict[str, Any]]:
    """Each part's settings where transformers looks for them: in the processor's file, else in one of its own."""
    processor = _read_json(path / "processor_config.json") or {}
    shared = named_tokens(_read_json(path / "tokenizer_config.json") or {}) | processor
    older = _read_json(path / "preprocessor_config.json") or {}
    video = _read_json(path / "video_preprocessor_config.json") or older
    parts = {
        Modality.IMAGE: processor.get("image_processor") or older,
        Modality.AUDIO: processor.get("feature_extractor") or older,
        Modality.VIDEO: processor.get("video_processor") or video,
    }
    return {modality: shared | part for modality, part in parts.items()}


def _read_json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UnsupportedModel(f"{path} is not valid JSON: {error}") from error
    return value


def _from_hub(model: str) -> Path:
    if model.count("/") != 1 or model.startswith((".", "/")):
        raise UnsupportedModel(f"{model} is neither a folder nor a hub id of the form owner/name")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=_HUB_FILES))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise UnsupportedModel(
            f"{model} is not a local folder and could not be fetched from the model hub ({type(error).__name__}); "
            "download it where there is a network and give --model its folder"
        ) from error
