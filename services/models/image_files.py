"""Which picture files are taken. One list: what the gateway's probe lets in, the encoder must be able to decode."""

from PIL import features

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", *(("AVIF",) if features.check("avif") else ()))  # Pillow's names
ACCEPTED = f"{', '.join(FORMATS[:-1])} and {FORMATS[-1]}"
