"""What transformers answers greedily, in float32, to the prompts of the parity test.

    python -m tests.e2e.parity_answers          writes parity_answers.json again; takes minutes

The file holds the answers to all prompts, since transformers takes too long for each run of the tests; two prompts are
asked live there. It names the prompts and the model by their digests: whoever changes either has to write it again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoTokenizer, GgufConfig

from biphase.model.source import resolve_model

FILE = Path(__file__).with_suffix(".json")
MAX_TOKENS = 12
# Around block and chunk borders (16 and 512), one token, and long.
LENGTHS = (1, 2, 15, 16, 17, 31, 33, 64, 100, 127, 200, 256, 300, 511, 512, 513, 700, 1025, 1800, 3000)


def parity_prompts() -> list[list[int]]:
    """Real text: its greedy continuations have clear margins. Half of them share their beginning."""
    source = resolve_model("")
    tokenizer: Any = AutoTokenizer.from_pretrained(source.path.parent, gguf_file=source.path.name)
    text = Path(__file__).parents[2].joinpath("LICENSE").read_text()
    ids: list[int] = tokenizer(text * 3)["input_ids"]
    return [ids[(0 if number % 2 else 137 * number) :][:length] for number, length in enumerate(LENGTHS)]


def transformers_answers(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Greedy continuations of MAX_TOKENS tokens, by transformers on the dequantised weights in float32."""
    source = resolve_model("")
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(
        source.path.parent,
        gguf_file=source.path.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    answers = []
    with torch.inference_mode():
        for prompt in prompts:
            output = model.generate(
                torch.tensor([prompt]), do_sample=False, max_new_tokens=MAX_TOKENS, min_new_tokens=MAX_TOKENS
            )
            answers.append(output[0, len(prompt) :].tolist())
    return answers


def stored_answers(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """The answers in the file.

    Raises:
        AssertionError: they are to other prompts, or of another model.
    """
    stored = json.loads(FILE.read_text())
    again = "write it again: python -m tests.e2e.parity_answers"
    assert stored["model"] == resolve_model("").weights_digest(), f"{FILE.name} is of another model; {again}"
    assert [entry["prompt"] for entry in stored["answers"]] == [_digest(p) for p in prompts], (
        f"{FILE.name} answers other prompts; {again}"
    )
    return [entry["token_ids"] for entry in stored["answers"]]


def _digest(prompt: Sequence[int]) -> str:
    return hashlib.sha256(" ".join(map(str, prompt)).encode()).hexdigest()


def main() -> None:
    prompts = parity_prompts()
    answers = transformers_answers(prompts)
    content = {
        "made by": "python -m tests.e2e.parity_answers",
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "model": resolve_model("").weights_digest(),
        "answers": [
            {"num_tokens": len(prompt), "prompt": _digest(prompt), "token_ids": answer}
            for prompt, answer in zip(prompts, answers, strict=True)
        ],
    }
    FILE.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
