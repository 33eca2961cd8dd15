from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from biphase.errors import ModelLoadError
from biphase.model.source import ModelSource, resolve_model
from biphase.tokenizer.gguf_vocab import tokenizer_from_gguf
from biphase.tokenizer.loader import LoadedTokenizer, load_tokenizer

TEXTS = [
    "",
    " ",
    "\n\n\t x",
    "Hello wörld 🦙!",
    "The capital of France is Paris.",
    "It's 'quoted', isn't it? WE'LL see; don't.",
    "  leading and trailing  ",
    "日本語のテキスト、それから한국어",
    "naïve café — “quotes” …",
    "def f(x):\n    return x ** 2  # comment\n",
    "<|im_start|>user\nhi<|im_end|>\n",
    "a<|im_end|>b <|endoftext|>",
    "\u0000\u0001\u2028\u2029",
    "e\u0301 vs \u00e9",
    "👩‍👩‍👧‍👦 🏳️‍🌈",
    "x" * 300,
    "مرحبا بالعالم",
    "http://example.org/a?b=c&d=%20",
]
CORPUS = [*TEXTS, "the quick brown fox jumps over the lazy dog " * 20, "1234 5678 90 the then there other " * 20]


def test_ids_of_the_bundled_model_are_those_of_transformers(bundled_tokenizer: LoadedTokenizer) -> None:
    from transformers import AutoTokenizer

    source = resolve_model("")
    theirs = AutoTokenizer.from_pretrained(source.path.parent, gguf_file=source.path.name)
    for text in TEXTS:
        assert bundled_tokenizer.tokenizer.encode(text) == theirs(text).input_ids, text
    chat = [{"role": "user", "content": "What is the capital of France?"}, {"role": "assistant", "content": "Paris."}]
    assert bundled_tokenizer.chat_template is not None
    rendered = bundled_tokenizer.chat_template.render(chat, add_generation_prompt=True)
    assert rendered == theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)


def test_digits_are_split_before_the_spaces_in_front_of_them(bundled_tokenizer: LoadedTokenizer) -> None:
    """What the model was trained with; transformers' GGUF reader forgets this step."""
    tokenizer = bundled_tokenizer.tokenizer
    ids = tokenizer.encode("x   12")
    assert [tokenizer.token_string(token_id) for token_id in ids] == ["x", "ĠĠĠ", "1", "2"]
    assert tokenizer.token_string(tokenizer.encode("a ½")[1]) == "Ġ"


def test_special_tokens_of_the_bundled_model(bundled_tokenizer: LoadedTokenizer) -> None:
    tokenizer = bundled_tokenizer.tokenizer
    assert tokenizer.eos_token_ids == {2}
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert 1 in tokenizer.special_ids and 2 in tokenizer.special_ids
    assert tokenizer.vocab_size == 49152
    assert tokenizer.encode("hi") == tokenizer.encode("hi", add_special_tokens=False)


def test_token_bytes_put_together_are_the_text(bundled_tokenizer: LoadedTokenizer) -> None:
    tokenizer = bundled_tokenizer.tokenizer
    for text in TEXTS:
        assert b"".join(tokenizer.token_bytes(token_id) for token_id in tokenizer.encode(text)) == text.encode()
    (first, *_) = tokenizer.encode("🦙")
    assert tokenizer.token_text(first).startswith(("\\x", " \\x")) or "\\x" in tokenizer.token_text(first)


def _metadata(tokenizer: Tokenizer, model: str, pre: str) -> dict[str, object]:
    state = json.loads(tokenizer.to_str())["model"]
    vocab = sorted(state["vocab"], key=state["vocab"].__getitem__)
    ranks = {"".join(pair): place for place, pair in enumerate(state["merges"])}
    return {
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": vocab,
        "tokenizer.ggml.token_type": [
            3 if t in ("<s>", "</s>") else 2 if t == "<unk>" else 6 if t.startswith("<0x") else 1 for t in vocab
        ],
        "tokenizer.ggml.scores": [-float(ranks.get(text, 0)) for text in vocab],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in state["merges"]],
        "tokenizer.ggml.bos_token_id": vocab.index("<s>"),
        "tokenizer.ggml.eos_token_id": vocab.index("</s>"),
        "tokenizer.ggml.unknown_token_id": vocab.index("<unk>"),
    }


def _trained_sentencepiece() -> Tokenizer:
    tokenizer = Tokenizer(BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>", *[f"<0x{value:02X}>" for value in range(256)]]
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")  # while training, as SentencePiece does
    trainer = BpeTrainer(vocab_size=700, special_tokens=special, limit_alphabet=60, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.pre_tokenizer = None  # type: ignore[assignment]
    # BpeTrainer marks every byte token special; a SentencePiece model's are plain pieces.
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [entry for entry in state["added_tokens"] if entry["content"] in ("<s>", "</s>")]
    return Tokenizer.from_str(json.dumps(state))


@pytest.mark.parametrize("with_merges", [True, False])
def test_sentencepiece_vocabulary_of_a_gguf_file(with_merges: bool) -> None:
    original = _trained_sentencepiece()
    metadata = _metadata(original, "llama", "default")
    if not with_merges:
        del metadata["tokenizer.ggml.merges"]
    rebuilt, byte_level = tokenizer_from_gguf(metadata)
    assert not byte_level
    for text in TEXTS:
        if not text:
            continue
        expected = original.encode(text, add_special_tokens=False).ids
        assert rebuilt.encode(text, add_special_tokens=False).ids == expected, text
        assert rebuilt.decode(expected) == original.decode(expected)
    assert rebuilt.encode("the fox").ids[0] == metadata["tokenizer.ggml.bos_token_id"]


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "gpt-2", "smollm"])
def test_byte_level_vocabularies_round_trip(pre: str) -> None:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = BpeTrainer(
        vocab_size=600,
        special_tokens=["<s>", "</s>", "<unk>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    rebuilt, byte_level = tokenizer_from_gguf(_metadata(tokenizer, "gpt2", pre))
    assert byte_level
    for text in TEXTS:
        ids = rebuilt.encode(text, add_special_tokens=False).ids
        expected = text.replace("e\u0301", "\u00e9") if pre == "qwen2" else text
        assert rebuilt.decode(ids, skip_special_tokens=False) == expected
    digits = [rebuilt.id_to_token(token_id) for token_id in rebuilt.encode("1234", add_special_tokens=False).ids]
    if pre in ("qwen2", "smollm"):
        assert digits == list("1234")
    assert (rebuilt.encode("fox").ids[0] == 0) is (pre == "llama-bpe")


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({}, "no tokenizer"),
        ({"tokenizer.ggml.model": "bert", "tokenizer.ggml.tokens": ["a"]}, "bert"),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "odd", "tokenizer.ggml.tokens": ["a"]}, "odd"),
        ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["a"]}, "neither merges nor"),
    ],
)
def test_unknown_vocabularies_are_refused(metadata: dict[str, object], words: str) -> None:
    with pytest.raises(ModelLoadError, match=words):
        tokenizer_from_gguf(metadata)


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    tokenizer = _trained_sentencepiece()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2, "vocab_size": 700}))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "bos_token": "<s>",
                "eos_token": {"content": "</s>", "__type": "AddedToken"},
                "add_bos_token": True,
                "add_eos_token": False,
                "added_tokens_decoder": {str(size): {"content": "<|new|>", "special": True, "normalized": False}},
                "chat_template": [
                    {"name": "default", "template": "plain"},
                    {"name": "tool_use", "template": "{{ tools | length }} tools"},
                ],
            }
        )
    )
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"temperature": 0.6, "top_k": 20, "eos_token_id": [2, 5], "do_sample": True, "pad_token_id": 0})
    )
    return tmp_path


def _source(folder: Path) -> ModelSource:
    return ModelSource("safetensors", folder, "tiny")


def test_folder(model_folder: Path) -> None:
    loaded = load_tokenizer(_source(model_folder))
    tokenizer = loaded.tokenizer
    assert tokenizer.encode("the")[0] == 1
    assert tokenizer.encode("the", add_special_tokens=False)[0] != 1
    assert tokenizer.eos_token_ids == {2, 5}
    (new,) = tokenizer.encode("<|new|>", add_special_tokens=False)[-1:]
    assert new == tokenizer.vocab_size - 1 and new in tokenizer.special_ids
    assert loaded.generation_defaults == {"temperature": 0.6, "top_k": 20.0}
    assert loaded.chat_template is not None
    assert loaded.chat_template.render([]) == "plain"
    assert loaded.chat_template.render([], tools=[{}, {}]) == "2 tools"


def test_template_file_wins_and_a_given_one_wins_over_it(model_folder: Path, tmp_path: Path) -> None:
    (model_folder / "chat_template.jinja").write_text("from file")
    loaded = load_tokenizer(_source(model_folder))
    assert loaded.chat_template is not None and loaded.chat_template.render([]) == "from file"
    given = tmp_path / "other.jinja"
    given.write_text("given {{ bos_token }}")
    loaded = load_tokenizer(_source(model_folder), chat_template=str(given))
    assert loaded.chat_template is not None and loaded.chat_template.render([]) == "given <s>"
    loaded = load_tokenizer(_source(model_folder), chat_template="{{ eos_token }}")
    assert loaded.chat_template is not None and loaded.chat_template.render([]) == "</s>"
    with pytest.raises(ModelLoadError, match="cannot read"):
        load_tokenizer(_source(model_folder), chat_template="no-such-file.jinja")
    with pytest.raises(ModelLoadError, match="line 1"):
        load_tokenizer(_source(model_folder), chat_template="{% if %}")


def test_folder_without_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        load_tokenizer(_source(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelLoadError, match="cannot be read"):
        load_tokenizer(_source(tmp_path))


def test_a_saved_tokenizer_gives_the_ids_that_transformers_gives(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    backend = _trained_sentencepiece()
    theirs = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    theirs.add_tokens([AddedToken("<|extra|>", special=True)], special_tokens=True)
    theirs.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    ours = load_tokenizer(_source(tmp_path)).tokenizer
    for text in [*TEXTS, "x<|extra|>y"]:
        assert ours.encode(text) == theirs(text).input_ids, text


def test_loading_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import re, sys\n"
        "from biphase.model.source import resolve_model\n"
        "from biphase.tokenizer.loader import load_tokenizer\n"
        "load_tokenizer(resolve_model('')).tokenizer.encode('hello')\n"
        "bad = {'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
        "assert not bad, bad\n"
        "print(int(re.search(r'VmRSS:\\s+(\\d+)', open('/proc/self/status').read())[1]) // 1024)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 200
