"""Reads a model's tokenizer files, or a .gguf file's metadata, into a ModelTokenizer and a ChatTemplate.

Owns which file wins where several say something, following transformers, so that ids are those the model was trained
with.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from biphase.errors import ModelLoadError
from biphase.model.source import ModelSource
from biphase.tokenizer.chat_template import ChatTemplate
from biphase.tokenizer.gguf_vocab import post_processor, tokenizer_from_gguf
from biphase.tokenizer.tokenizer import ModelTokenizer


@dataclass(frozen=True, slots=True)
class LoadedTokenizer:
    """`chat_template` is None for a base model; `generation_defaults` are the sampling values of
    generation_config.json (temperature, top_p, top_k, min_p, repetition_penalty), where given."""

    tokenizer: ModelTokenizer
    chat_template: ChatTemplate | None
    generation_defaults: dict[str, float]


_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def load_tokenizer(source: ModelSource, *, chat_template: str = "") -> LoadedTokenizer:
    """
    Args:
        chat_template: a file or the template's own text, in place of the model's.

    Raises:
        ModelLoadError: no tokenizer, one that cannot be read, or a template with a syntax error.
    """
    if source.kind == "gguf":
        tokenizer, templates = _from_gguf(source)
    else:
        tokenizer, templates = _from_folder(source)
    if chat_template:
        templates = {"default": _given_template(chat_template)}
    defaults = {
        name: float(value)
        for name, value in source.generation_config().items()
        if name in _DEFAULTS and isinstance(value, int | float) and not isinstance(value, bool)
    }
    template = ChatTemplate(templates, tokenizer.special_tokens_map) if templates else None
    return LoadedTokenizer(tokenizer, template, defaults)


def _given_template(text: str) -> str:
    if "{" in text or "\n" in text:
        return text
    try:
        return Path(text).read_text(encoding="utf-8")
    except OSError as error:
        raise ModelLoadError(f"--chat-template: cannot read {text}: {error.strerror or error}") from error


def _from_gguf(source: ModelSource) -> tuple[ModelTokenizer, dict[str, str]]:
    metadata = source.gguf().metadata
    backend, byte_level = tokenizer_from_gguf(metadata)

    def text_of(name: str) -> str | None:
        token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
        return None if token_id is None else backend.id_to_token(token_id)

    eos = {metadata[key] for kind in ("eos", "eot", "eom") if (key := f"tokenizer.ggml.{kind}_token_id") in metadata}
    tokenizer = ModelTokenizer(
        backend,
        byte_level=byte_level,
        eos_token_ids=frozenset(int(token_id) for token_id in eos),
        bos_token=text_of("bos"),
        eos_token=text_of("eos"),
        pad_token=text_of("padding"),
        unk_token=text_of("unknown"),
    )
    templates = {}
    for key, value in metadata.items():
        if key == "tokenizer.chat_template":
            templates["default"] = value
        elif key.startswith("tokenizer.chat_template."):
            templates[key.removeprefix("tokenizer.chat_template.")] = value
    return tokenizer, templates


def _from_folder(source: ModelSource) -> tuple[ModelTokenizer, dict[str, str]]:
    path = source.path / "tokenizer.json"
    if not path.is_file():
        raise ModelLoadError(f"{source.path} holds no tokenizer.json; save the model's fast tokenizer there.")
    try:
        backend = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ModelLoadError(f"{path} cannot be read as a tokenizer: {error}") from error
    settings = _json(source.path / "tokenizer_config.json")
    _add_tokens(backend, settings)
    named = _json(source.path / "special_tokens_map.json") | settings
    texts = {name: _token_text(named.get(f"{name}_token")) for name in ("bos", "eos", "pad", "unk")}
    if "add_bos_token" in settings or "add_eos_token" in settings or backend.post_processor is None:
        backend.post_processor = post_processor(
            backend,
            bos_id=_id_of(backend, texts["bos"]),
            eos_id=_id_of(backend, texts["eos"]),
            add_bos=bool(settings.get("add_bos_token")),
            add_eos=bool(settings.get("add_eos_token")),
        )
    tokenizer = ModelTokenizer(
        backend,
        byte_level="ByteLevel" in str(backend.decoder),
        eos_token_ids=_eos_ids(source, backend, texts["eos"]),
        bos_token=texts["bos"],
        eos_token=texts["eos"],
        pad_token=texts["pad"],
        unk_token=texts["unk"],
    )
    return tokenizer, _folder_templates(source.path, settings)


def _add_tokens(backend: Tokenizer, settings: dict[str, Any]) -> None:
    """Tokens that only tokenizer_config.json names, in the order of their ids."""
    known = backend.get_added_tokens_decoder()
    entries = settings.get("added_tokens_decoder")
    for token_id, entry in sorted(
        ((int(key), value) for key, value in (entries or {}).items()), key=lambda item: item[0]
    ):
        if token_id in known or not isinstance(entry, dict):
            continue
        flags = {name: bool(entry.get(name)) for name in ("single_word", "lstrip", "rstrip", "normalized", "special")}
        backend.add_tokens([AddedToken(entry["content"], **flags)])


def _eos_ids(source: ModelSource, backend: Tokenizer, eos_token: str | None) -> frozenset[int]:
    given: Any = source.generation_config().get("eos_token_id")
    own = _id_of(backend, eos_token)
    if given is None and own is None:
        given = source.config().get("eos_token_id")
    listed = given if isinstance(given, list) else [] if given is None else [given]
    return frozenset(int(token_id) for token_id in [*listed, *([] if own is None else [own])])


def _folder_templates(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """chat_template.jinja, then tokenizer_config.json, then chat_template.json; further named ones beside them."""
    templates: dict[str, str] = {}
    given = settings.get("chat_template") or _json(folder / "chat_template.json").get("chat_template")
    if isinstance(given, str):
        templates["default"] = given
    elif isinstance(given, list):
        templates.update({entry["name"]: entry["template"] for entry in given})
    elif isinstance(given, dict):
        templates.update(given)
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = path.read_text(encoding="utf-8")
    if (folder / "chat_template.jinja").is_file():
        templates["default"] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    return templates


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelLoadError(f"{path} is not JSON: {error}") from error
    return value if isinstance(value, dict) else {}


def _token_text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _id_of(backend: Tokenizer, text: str | None) -> int | None:
    return None if text is None else backend.token_to_id(text)
