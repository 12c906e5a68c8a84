"""The encoder service: turns media into projected embeddings and streams them. Knows nothing of prompts or of text."""
