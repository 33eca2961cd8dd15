"""A byte-level BPE tokenizer of a few hundred tokens, for tiny models that have to write something readable."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from biphase.model.source import resolve_model
from biphase.tokenizer.loader import load_tokenizer
from biphase.tokenizer.tokenizer import ModelTokenizer

# Beginning, end, and the end of a turn.
SPECIALS = ["<pad>", "<s>", "</s>", "<|call|>"]
VOCAB_SIZE = 360
# What a model has that was padded to a round size: the last ids have no token.
MODEL_VOCAB_SIZE = 384
_CORPUS = [
    '{"name": "value", "items": [1, 2, 3], "city": "Rome", "ok": true, "none": null}' * 3,
    "the quick brown fox jumps over the lazy dog alpha beta gamma" * 3,
    "<think> hello world </think> <tool_call> arguments </tool_call>" * 2,
]


def save_tokenizer(folder: Path) -> Path:
    """Writes tokenizer.json and tokenizer_config.json; `</s>` (id 2) is the end of sequence."""
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_CORPUS, trainer)
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return folder


def tiny_tokenizer(folder: Path) -> ModelTokenizer:
    (save_tokenizer(folder) / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    return load_tokenizer(resolve_model(str(folder))).tokenizer
