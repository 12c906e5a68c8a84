"""Parts of the encoder's towers in compiled code, each checked against the part that it replaces."""
