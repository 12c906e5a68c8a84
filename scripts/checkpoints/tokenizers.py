"""Trains the two kinds of tokenizer that the families need, on the built-in corpus.

Both cover all of Unicode: the byte-level one by construction, the SentencePiece-like one by byte fallback. Nothing here
knows a family; special tokens, classes and templates come from the caller.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AddedToken, GemmaTokenizer, Qwen2Tokenizer, TokenizersBackend
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX as QWEN2_WORDS

from scripts.checkpoints.corpus import SENTENCES

LLAMA3_WORDS = QWEN2_WORDS.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
# Words start at a change from lower to upper case too, and digits stand alone.
TEKKEN_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
UNKNOWN, BOS, EOS = "<unk>", "<s>", "</s>"
GEMMA_FIRST = ["<pad>", "<eos>", "<bos>", UNKNOWN, "<mask>"]


class Pieces(NamedTuple):
    """A trained BPE model without special tokens."""

    vocab: dict[str, int]
    merges: list[tuple[str, str]]


def byte_level_splitter(words: str) -> pre_tokenizers.PreTokenizer:
    """Words by a regular expression, then bytes as printable characters."""
    split = pre_tokenizers.Split(Regex(words), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def train(splitter: pre_tokenizers.PreTokenizer, size: int, alphabet: list[str], first: list[str]) -> Pieces:
    """BPE pieces over the corpus: ``first`` takes the lowest ids, then ``alphabet``, then merges up to ``size``.

    Raises:
        ValueError: ``size`` leaves no room for merges.
    """
    single = len(first) + len(alphabet)
    if size <= single:
        raise ValueError(f"vocabulary too small: room for {size} ordinary tokens, of which single ones take {single}")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = splitter
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        special_tokens=first,
        show_progress=False,
    )
    bpe.train_from_iterator(SENTENCES, trainer)
    model = json.loads(bpe.to_str())["model"]
    return Pieces(model["vocab"], [(left, right) for left, right in model["merges"]])


def train_byte_level(words: str, size: int, first: Sequence[str] = ()) -> Pieces:
    """Pieces of a byte-level BPE whose words are split by the regular expression ``words``."""
    return train(byte_level_splitter(words), size, sorted(pre_tokenizers.ByteLevel.alphabet()), list(first))


def train_sentencepiece(size: int, named: list[str]) -> Pieces:
    """Pieces as SentencePiece makes them: ``named``, 256 byte tokens, then characters and merges, ``▁`` for a space."""
    first = [*named, *(f"<0x{byte:02X}>" for byte in range(256))]
    alphabet = ["▁", *(chr(code) for code in range(0x21, 0x7F))]
    return train(pre_tokenizers.Metaspace(prepend_scheme="always", split=True), size, alphabet, first)


def added(pieces: Pieces, special: list[str], visible: Sequence[str] = ()) -> dict[int, AddedToken]:
    """Tokens that text is never merged into, by id, right after the ordinary ones: special ones, then ``visible`` ones.

    Special ones are left out of decoded text; visible ones are not.
    """
    tokens = [(token, True) for token in special] + [(token, False) for token in visible]
    return {
        id: AddedToken(token, special=hidden, normalized=False) for id, (token, hidden) in enumerate(tokens, len(pieces.vocab))
    }


def bos_first(bos: str, bpe: Tokenizer) -> processors.PostProcessor:
    """Puts ``bos`` before every text of a tokenizer that already knows it."""
    return processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, bpe.token_to_id(bos))]
    )


def qwen2_tokenizer(size: int, special: list[str], visible: Sequence[str] = (), **kwargs: Any) -> Qwen2Tokenizer:
    """A tokenizer of about ``size`` tokens of the kind that every Qwen2 and Qwen3 model uses.

    ``extra_special_tokens`` may give special tokens names that processors look for; else they go without.
    """
    pieces = train_byte_level(QWEN2_WORDS, size - len(special) - len(visible))
    own: dict[str, Any] = dict(vocab=pieces.vocab, merges=pieces.merges, unk_token=None)
    own |= {"extra_special_tokens": special, **kwargs}
    return Qwen2Tokenizer(**own, added_tokens_decoder=added(pieces, special, visible))


def llama3_tokenizer(size: int, special: list[str], bos: str | None, **kwargs: Any) -> TokenizersBackend:
    """A tokenizer of about ``size`` tokens of Llama 3's kind: byte-level, digits in threes, ``bos`` before every text."""
    pieces = train_byte_level(LLAMA3_WORDS, size - len(special))
    bpe = Tokenizer(models.BPE(vocab=pieces.vocab, merges=pieces.merges, ignore_merges=True))
    bpe.pre_tokenizer = byte_level_splitter(LLAMA3_WORDS)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(list(added(pieces, special).values()))
    if bos is not None:
        bpe.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), bos_first(bos, bpe)])
        kwargs["bos_token"] = bos
    return TokenizersBackend(tokenizer_object=bpe, clean_up_tokenization_spaces=False, **kwargs)


def tekken_tokenizer(size: int, special: list[str], bos_token: str, **kwargs: Any) -> TokenizersBackend:
    """A tokenizer of ``size`` tokens of Mistral's newer kind: byte-level, special tokens have the lowest ids, BOS first."""
    pieces = train_byte_level(TEKKEN_WORDS, size, special)
    bpe = Tokenizer(models.BPE(vocab=pieces.vocab, merges=pieces.merges, ignore_merges=True))
    bpe.pre_tokenizer = byte_level_splitter(TEKKEN_WORDS)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    bpe.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), bos_first(bos_token, bpe)])
    return TokenizersBackend(tokenizer_object=bpe, bos_token=bos_token, clean_up_tokenization_spaces=False, **kwargs)


def llama2_tokenizer(size: int, special: list[str], eos_token: str = EOS, **kwargs: Any) -> TokenizersBackend:
    """A tokenizer of about ``size`` tokens of Llama 2's kind: ``▁`` for spaces, byte fallback, BOS first."""
    pieces = train_sentencepiece(size - len(special), [UNKNOWN, BOS, EOS])
    bpe = Tokenizer(models.BPE(vocab=pieces.vocab, merges=pieces.merges, unk_token=UNKNOWN, fuse_unk=True, byte_fallback=True))
    bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bpe.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1)]
    )
    own = [AddedToken(token, special=True, normalized=False) for token in (UNKNOWN, BOS, EOS)]
    bpe.add_special_tokens([*own, *added(pieces, special).values()])
    bpe.post_processor = bos_first(BOS, bpe)
    return TokenizersBackend(
        tokenizer_object=bpe,
        unk_token=UNKNOWN,
        bos_token=BOS,
        eos_token=eos_token,
        clean_up_tokenization_spaces=False,
        **kwargs,
    )


def gemma_tokenizer(size: int, special: list[str], **kwargs: Any) -> GemmaTokenizer:
    """A tokenizer of about ``size`` tokens of Gemma's kind: ``▁`` for spaces and none before a text, byte fallback, BOS first."""
    pieces = train_sentencepiece(size - len(special), GEMMA_FIRST)
    own: dict[str, Any] = dict(vocab=pieces.vocab, merges=pieces.merges)
    return GemmaTokenizer(**own, added_tokens_decoder=added(pieces, special), add_bos_token=True, **kwargs)
