"""The language model: merges embeddings with text and decodes, with continuous batching on a paged KV pool."""
