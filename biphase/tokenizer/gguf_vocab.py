"""Builds a tokenizers pipeline from the vocabulary in a .gguf file's metadata.

Covers byte-level BPE (`gpt2` with the pre-tokenizers named below) and SentencePiece BPE with byte fallback (`llama`).
The split patterns are those that the models' own tokenizer.json files carry.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from biphase.errors import ModelLoadError

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"
_GPT2 = frozenset({"default", "gpt-2", "gpt2", "jina-en", "roberta-bpe", "olmo", "phi-2", "gigachat"})
_DIGITS_GPT2 = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})
_LLAMA3_NAMES = frozenset({"llama-bpe", "llama3", "llama-v3", "falcon3", "dbrx", "smaug-bpe"})
_QWEN2_NAMES = frozenset({"qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"})
_NORMAL, _CONTROL, _USER_DEFINED, _BYTE = 1, 3, 4, 6


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> tuple[Tokenizer, bool]:
    """
    Args:
        metadata: the file's key-value pairs, arrays as lists.

    Returns:
        The pipeline, with special tokens added, and whether it is byte-level.

    Raises:
        ModelLoadError: no vocabulary, or a kind that is not known; never a guess that gives other tokens.
    """
    model = metadata.get("tokenizer.ggml.model")
    tokens: Sequence[str] = metadata.get("tokenizer.ggml.tokens") or ()
    if not model or not tokens:
        raise ModelLoadError("The .gguf file holds no tokenizer.")
    if model == "gpt2":
        backend, default_bos = _byte_level(metadata, tokens)
    elif model == "llama":
        backend, default_bos = _sentencepiece(metadata, tokens)
    else:
        raise ModelLoadError(f"The .gguf file's tokenizer is of kind {model!r}; gpt2 and llama can be read.")
    types: Sequence[int] = metadata.get("tokenizer.ggml.token_type") or ()
    special = [text for text, kind in zip(tokens, types, strict=False) if kind == _CONTROL]
    defined = [text for text, kind in zip(tokens, types, strict=False) if kind == _USER_DEFINED]
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    backend.add_tokens([AddedToken(text, normalized=False, special=False) for text in defined])
    backend.post_processor = post_processor(
        backend,
        bos_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_id=metadata.get("tokenizer.ggml.eos_token_id"),
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", default_bos)),
        add_eos=bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
    )
    return backend, bool(model == "gpt2")


def post_processor(backend: Tokenizer, *, bos_id: int | None, eos_id: int | None, add_bos: bool, add_eos: bool) -> Any:
    """What puts BOS before and EOS after an encoded text."""
    named: list[tuple[str, int]] = []
    single = "$A:0"
    bos = None if bos_id is None else backend.id_to_token(bos_id)
    eos = None if eos_id is None else backend.id_to_token(eos_id)
    if add_bos and bos_id is not None and bos is not None:
        single = f"{bos}:0 {single}"
        named.append((bos, bos_id))
    if add_eos and eos_id is not None and eos is not None:
        single = f"{single} {eos}:0"
        named.append((eos, eos_id))
    return processors.TemplateProcessing(single=single, pair=f"{single} $B:1", special_tokens=named)


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str]) -> tuple[Tokenizer, bool]:
    pre = str(metadata.get("tokenizer.ggml.pre", "default"))
    merges = [tuple(pair.split(" ", 1)) for pair in metadata.get("tokenizer.ggml.merges") or ()]
    normalizer = None
    if pre in _GPT2:
        splits: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    elif pre in _DIGITS_GPT2:
        splits = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    elif pre in _LLAMA3_NAMES or pre in _QWEN2_NAMES:
        pattern = _LLAMA3 if pre in _LLAMA3_NAMES else _QWEN2
        splits = [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
        normalizer = normalizers.NFC() if pre == "qwen2" else None
    else:
        raise ModelLoadError(
            f"The .gguf file's pre-tokenizer {pre!r} is not known; serve the model's safetensors folder instead."
        )
    vocab = {text: token_id for token_id, text in enumerate(tokens)}
    backend = Tokenizer(BPE(vocab=vocab, merges=merges, ignore_merges=pre in _LLAMA3_NAMES))
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(splits) if len(splits) > 1 else splits[0]
    backend.decoder = decoders.ByteLevel()
    return backend, pre in _LLAMA3_NAMES


def _sentencepiece(metadata: Mapping[str, Any], tokens: Sequence[str]) -> tuple[Tokenizer, bool]:
    vocab = {text: token_id for token_id, text in enumerate(tokens)}
    given = metadata.get("tokenizer.ggml.merges")
    merges = [tuple(pair.split(" ", 1)) for pair in given] if given else _merges_from_scores(metadata, tokens, vocab)
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    backend = Tokenizer(
        BPE(
            vocab=vocab,
            merges=merges,
            unk_token=tokens[unknown] if unknown is not None else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    spaces = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(content=" ", left=1, right=0))
    backend.decoder = decoders.Sequence(steps)
    return backend, True


def _merges_from_scores(
    metadata: Mapping[str, Any], tokens: Sequence[str], vocab: Mapping[str, int]
) -> list[tuple[str, str]]:
    """SentencePiece stores scores, not merges: a piece may come from any two pieces, the best piece first."""
    scores: Sequence[float] = metadata.get("tokenizer.ggml.scores") or ()
    types: Sequence[int] = metadata.get("tokenizer.ggml.token_type") or (_NORMAL,) * len(tokens)
    if len(scores) != len(tokens):
        raise ModelLoadError("The .gguf file's tokenizer has neither merges nor a score for every token.")
    ranked: list[tuple[float, int, int, str, str]] = []
    for text, score, kind in zip(tokens, scores, types, strict=False):
        if kind in (_CONTROL, _BYTE) or len(text) < 2:
            continue
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in vocab and right in vocab:
                ranked.append((-score, vocab[left], vocab[right], left, right))
    ranked.sort(key=lambda entry: entry[:3])
    return [(left, right) for _, _, _, left, right in ranked]
