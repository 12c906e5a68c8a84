"""How many samples a Vorbis packet decodes to, from its first byte and what the stream's headers say of block sizes.

Vorbis I specification, sections 4.2 and 4.3. Modes stand at the end of the setup header, behind code books whose length only
decoding tells; they are read backwards from there, as ``vorbis_parser.c`` of libavcodec does.
"""

from __future__ import annotations

from dataclasses import dataclass

_MODE_BITS = 41  # whether the block is long, two types that are 0, and a mapping below 64
_MOST_MODES = 64


class NoModes(ValueError):
    """Headers that are damaged."""


@dataclass
class VorbisBlocks:
    """Counts packet by packet, in their order.

    Attributes:
        sizes: of a short and a long block, in samples.
        long: for each mode, whether its blocks are long.
    """

    sizes: tuple[int, int]
    long: tuple[bool, ...]
    _previous: int = 0  # size of the block before; the first one yields nothing

    @classmethod
    def of(cls, headers: bytes) -> VorbisBlocks:
        """For a stream with these three headers, laced as Matroska and libavcodec have them.

        Raises:
            NoModes: they make no sense.
        """
        identification, _, setup = _unlaced(headers)
        if len(identification) < 30 or not setup.startswith(b"\x05vorbis"):
            raise NoModes
        return cls((1 << (identification[28] & 15), 1 << (identification[28] >> 4)), _modes(setup))

    def samples(self, packet: bytes) -> int:
        """Half of its block overlaps with half of the one before: samples that are complete with it."""
        if packet[0] & 1:  # a header
            return 0
        mode_bits = (len(self.long) - 1).bit_length()
        mode = packet[0] >> 1 & (1 << mode_bits) - 1
        if mode >= len(self.long):
            return 0
        before, size = self._previous, self.sizes[self.long[mode]]
        self._previous = size
        if before and self.long[mode] and mode_bits < 7:
            before = self.sizes[packet[0] >> 1 + mode_bits & 1]
        return (before + size) // 4 if before else 0


def _unlaced(headers: bytes) -> list[bytes]:
    """The three of them: their number less one, the lengths of two in units of 255, all bytes."""
    if not headers or headers[0] != 2:
        raise NoModes
    at, lengths = 1, []
    for _ in range(2):
        length = 0
        while at < len(headers) and headers[at] == 255:
            length, at = length + 255, at + 1
        if at >= len(headers):
            raise NoModes
        lengths.append(length + headers[at])
        at += 1
    first, second = at + lengths[0], at + sum(lengths)
    return [headers[at:first], headers[first:second], headers[second:]]


def _modes(setup: bytes) -> tuple[bool, ...]:
    bits = int.from_bytes(setup, "little")  # the first bit of the packet is the lowest
    end = bits.bit_length() - 1  # of the modes; the highest bit that is set is the framing flag
    long: list[bool] = []
    found: tuple[bool, ...] = ()
    while end >= _MODE_BITS + 6 and len(long) < _MOST_MODES:
        mode = bits >> end - _MODE_BITS & (1 << _MODE_BITS) - 1
        if mode >> 33 > 63 or mode >> 1 & 0xFFFFFFFF:
            break
        long.insert(0, bool(mode & 1))
        end -= _MODE_BITS
        if bits >> end - 6 & 63 == len(long) - 1:  # how many there are stands before the first; may also look like it by chance
            found = tuple(long)
    if not found:
        raise NoModes
    return found
