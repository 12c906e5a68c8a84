"""A PDF's pages as pictures, drawn by PDFium (extra `triptych[pdf]`) one at a time. The gateway never sees the PDF."""

import importlib
import math
import os
import struct
import threading
import zlib
from collections.abc import Iterator
from typing import Any

from triptych.content import MediaPart, Source, read_file
from triptych.errors import InvalidArgument, MediaFileError

DPI = 150.0
MAX_PIXELS = 4_000_000
_POINTS = 72  # an inch; PDF's own unit
_PASSWORD_ERROR = 4  # FPDF_ERR_PASSWORD
_PDFIUM = threading.Lock()  # PDFium may be called by one thread at a time


def pdf(source: Source, *, dpi: float = DPI, max_pixels: int = MAX_PIXELS, password: str | None = None) -> "Pdf":
    """A PDF file's pages, from a path or bytes, for `Client.pages`.

    Args:
        source: the file.
        dpi: how finely pages are drawn: 150 makes 1240 x 1755 pixels of A4.
        max_pixels: pages that would have more, such as posters, are drawn with about as many.
        password: opens an encrypted file.

    Raises:
        MediaFileError: the file is missing, damaged, encrypted or has no pages, or PDFium is not installed.
    """
    return Pdf(source, dpi=dpi, max_pixels=max_pixels, password=password)


class Pdf:
    """Pages in order, one `MediaPart` each; iterating draws them one at a time, and may be done again."""

    def __init__(self, source: Source, *, dpi: float, max_pixels: int, password: str | None) -> None:
        if not (0 < dpi < math.inf and max_pixels >= 1):
            raise InvalidArgument(f"dpi and max_pixels must be more than 0, got {dpi} and {max_pixels}")
        self.name = "the PDF" if isinstance(source, bytes) else os.fspath(source)
        self._scale, self._max_pixels = dpi / _POINTS, max_pixels
        pdfium = _pdfium()
        data = source if isinstance(source, bytes) else read_file(self.name)
        if not data:
            raise MediaFileError(f"cannot use {self.name!r}: it is empty")
        with _PDFIUM:
            try:
                self._document: Any = pdfium.PdfDocument(data, password=password)
                self._document.init_forms()  # what was filled in is drawn, too
                self._count = len(self._document)
            except pdfium.PdfiumError as error:
                raise MediaFileError(f"cannot use {self.name!r}: {_why(error.err_code, password)}") from None

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[MediaPart]:
        for index in range(self._count):
            yield self[index]

    def __getitem__(self, index: int) -> MediaPart:
        """One page, counted from 0, drawn now.

        Raises:
            MediaFileError: the page is damaged.
        """
        if not 0 <= index < self._count:
            raise IndexError(index)
        pdfium = _pdfium()
        with _PDFIUM:
            try:
                page = self._document[index]
                width, height = (max(side, 1.0) for side in page.get_size())  # points
                scale = min(self._scale, math.sqrt(self._max_pixels / (width * height)))
                bitmap = page.render(scale=scale, rev_byteorder=True)
                png = _png(bitmap.width, bitmap.height, bitmap.stride, memoryview(bitmap.buffer).cast("B"))
                bitmap.close()
                page.close()
            except (pdfium.PdfiumError, ValueError):
                raise MediaFileError(f"cannot draw page {index + 1} of {self.name!r}: it is damaged") from None
        return MediaPart("image", data=png)


def _pdfium() -> Any:
    try:
        return importlib.import_module("pypdfium2")
    except ImportError:
        raise MediaFileError("PDF pages are drawn by PDFium: `pip install 'triptych[pdf]'`") from None


def _why(code: int | None, password: str | None) -> str:
    if code == _PASSWORD_ERROR:
        return "it is encrypted; save it without a password, or give it" if password is None else "the password is wrong"
    return "it is no PDF, damaged, or without pages"


def _png(width: int, height: int, stride: int, pixels: memoryview) -> bytes:
    """Red, green and blue bytes, in rows that begin every `stride` bytes, as a PNG."""
    compressor = zlib.compressobj(6)
    rows = [compressor.compress(b"\0" + pixels[y * stride : y * stride + 3 * width]) for y in range(height)]
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", b"".join([*rows, compressor.flush()])), (b"IEND", b""))
    body = b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + body
