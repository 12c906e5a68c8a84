"""Which picture files are taken. One list: what the gateway's probe lets in, the encoder must be able to decode."""

import pi_heif
from PIL import features

pi_heif.register_heif_opener(thumbnails=False)
pi_heif.options.DECODE_THREADS = 1
# Pillow's names; HEIF is what phones call HEIC
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", *(("AVIF",) if features.check("avif") else ()), "HEIF")
ACCEPTED = f"{', '.join(FORMATS[:-1])} and {FORMATS[-1]}"
