"""Flags of encoders and language models by what a stack is mostly used for; docs/profiles.md says why."""

ENCODER = {
    "chat": ("--max-num-batched-patches", "8192"),
    "document": ("--max-num-batched-patches", "32768"),
    "video": ("--max-num-batched-patches", "32768"),
    "mixed": ("--max-num-batched-patches", "16384"),
}
LLM = {
    "chat": ("--max-num-batched-tokens", "2048", "--max-num-seqs", "64", "--decode-stretch", "1.25", "--nice", "0"),
    "document": ("--max-num-batched-tokens", "8192", "--max-num-seqs", "32"),
    "video": ("--max-num-batched-tokens", "8192", "--max-num-seqs", "16"),
    "mixed": ("--max-num-batched-tokens", "2048", "--max-num-seqs", "64"),
}
