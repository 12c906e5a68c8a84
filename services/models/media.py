"""Words for media that all services share. No torch."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Modality(enum.IntEnum):
    """Kinds of media; the numbers are those of ``triptych.common.v1.Modality``."""

    IMAGE = 1
    AUDIO = 2
    VIDEO = 3

    @property
    def word(self) -> str:
        """As users write it: ``image``."""
        return self.name.lower()


@dataclass(frozen=True)
class Grid:
    """Shape of an item's rows: temporal extent, then height and width in the family's own unit."""

    t: int
    h: int
    w: int


@dataclass(frozen=True)
class Look:
    """How closely a picture or a video is looked at, where a caller says so.

    Attributes:
        low: with few tokens; see ``Family.low``.
        min_pixels: a picture or frame is enlarged to at least so many, as far as its shape allows; None: as the files say.
        max_pixels: and made smaller to at most so many.
    """

    low: bool = False
    min_pixels: int | None = None
    max_pixels: int | None = None


AS_SET = Look()  # as the checkpoint's files say


@dataclass(frozen=True)
class Picture:
    """A still picture's size in pixels, turned as EXIF says, and how closely it is looked at."""

    width: int
    height: int
    look: Look = AS_SET


@dataclass(frozen=True)
class Recording:
    """A sound's length in samples of one channel, at the rate that the model hears."""

    samples: int


@dataclass(frozen=True)
class Clip:
    """What the headers say of a video.

    Attributes:
        width, height: of a frame in pixels, turned as a player shows it.
        frames: how many there are, at least one.
        fps: frames a second, on average.
        times: when each frame is shown, in seconds from the first; empty where the rate is constant.
        look: how closely it is looked at.
    """

    width: int
    height: int
    frames: int
    fps: float
    times: tuple[float, ...] = ()
    look: Look = AS_SET

    def __post_init__(self) -> None:
        assert self.frames > 0 and self.fps > 0, f"{self.frames} frames at {self.fps} a second"
        assert not self.times or len(self.times) == self.frames, f"{len(self.times)} times for {self.frames} frames"


@dataclass(frozen=True)
class Sampling:
    """Which frames of a video are looked at: so many a second, or so many in all; all of them where neither is said."""

    fps: float | None = None
    frames: int | None = None


ALL_FRAMES = Sampling()
Medium = Picture | Recording | Clip


@dataclass(frozen=True)
class ItemPlan:
    """What one media item will cost and how the prompt spells it, known before it is decoded.

    Attributes:
        modality: what the item is.
        rows: embedding rows.
        grid: how the rows are arranged: what positions are made of in families that need it. Elsewhere ``t`` is the number
            of runs, each of ``h x w`` rows; where rows are read by cross-attention, ``t`` tiles of ``h`` hold picture and
            each has ``w`` rows.
        patches: patches that go through the tower; of a recording, its positions.
        runs: what the prompt holds in place of the item: texts, and lengths of runs of placeholder tokens. As many
            placeholders as rows, but for cross-attention, where one token stands for all. Empty: a single run.
        tiles: pictures that the tower sees: tiles, frames or windows.
        seconds_per_grid: video time between two steps of ``grid.t`` in families whose positions follow it, else 0.
        frames: of a video, indices of the frames looked at, in order; one may come twice.
        times: when those are shown, in seconds.
        samples: of a recording, how many samples the model hears; the rest is cut off.
        whole_rows: of a pruned video, rows before pruning, which is what ``grid`` says; else 0.
        masked: of a picture, that some picture of the request is padded, where the tower sees all of them otherwise then.
        look: how closely it is looked at, where the family heeds that.
    """

    modality: Modality
    rows: int
    grid: Grid
    patches: int
    runs: tuple[str | int, ...] = ()
    tiles: int = 1
    seconds_per_grid: float = 0.0
    frames: tuple[int, ...] = ()
    times: tuple[float, ...] = ()
    samples: int = 0
    whole_rows: int = 0
    masked: bool = False
    look: Look = AS_SET

    @property
    def spelling(self) -> tuple[str | int, ...]:
        """``runs``, with a single one spelled out."""
        return self.runs or (self.rows,)
