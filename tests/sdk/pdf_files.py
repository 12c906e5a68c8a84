"""Small PDFs, written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import md5

_PAD = bytes.fromhex("28bf4e5e4e758a4164004e56fffa01082e2e00b6d0683e802f0ca9fe6453697a")


def pdf_file(colors: Sequence[tuple[float, float, float]], size: tuple[int, int] = (72, 36), password: str = "") -> bytes:
    """One page for each color, of that color all over; `size` in points. With a password, nothing but blank pages."""
    width, height = size
    kids = " ".join(f"{3 + 2 * n} 0 R" for n in range(len(colors)))
    objects = ["<< /Type /Catalog /Pages 2 0 R >>", f"<< /Type /Pages /Kids [{kids}] /Count {len(colors)} >>"]
    for number, (red, green, blue) in enumerate(colors):
        drawing = "" if password else f"{red} {green} {blue} rg 0 0 {width} {height} re f"
        contents = "" if password else f" /Contents {4 + 2 * number} 0 R"
        objects.append(f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 {width} {height}]{contents} >>")
        objects.append(f"<< /Length {len(drawing)} >>\nstream\n{drawing}\nendstream")
    more = ""
    if password:
        owner, identity = bytes(32), bytes(16)
        key = md5((password.encode() + _PAD)[:32] + owner + (-4).to_bytes(4, "little", signed=True) + identity).digest()[:5]
        user = _rc4(key, _PAD)
        objects.append(f"<< /Filter /Standard /V 1 /R 2 /P -4 /O <{owner.hex()}> /U <{user.hex()}> >>")
        more = f" /Encrypt {len(objects)} 0 R /ID [<{identity.hex()}> <{identity.hex()}>]"
    out, places = b"%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        places.append(len(out))
        out += f"{number} 0 obj\n{body}\nendobj\n".encode()
    table = "".join(f"{place:010} 00000 n \n" for place in places)
    xref = f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}"
    return out + f"{xref}trailer\n<< /Root 1 0 R /Size {len(objects) + 1}{more} >>\nstartxref\n{len(out)}\n%%EOF\n".encode()


def _rc4(key: bytes, data: bytes) -> bytes:
    box, j = list(range(256)), 0
    for i in range(256):
        j = (j + box[i] + key[i % len(key)]) % 256
        box[i], box[j] = box[j], box[i]
    out, i, j = bytearray(), 0, 0
    for byte in data:
        i = (i + 1) % 256
        j = (j + box[i]) % 256
        box[i], box[j] = box[j], box[i]
        out.append(byte ^ box[(box[i] + box[j]) % 256])
    return bytes(out)
