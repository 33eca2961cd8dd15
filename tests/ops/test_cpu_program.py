"""The native program against the eager executor, per instruction set; and its promise that batches do not matter."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import quantize
from torch import Tensor

from biphase.model.eager import EagerForward
from biphase.model.forward import ForwardBatch
from biphase.model.quantised import QuantisedMatrix
from biphase.model.shapes import weight_shapes
from biphase.model.spec import ModelSpec, MoESpec, RopeSpec
from biphase.ops.cpu_program import CpuProgram
from kernels.cpu.library import Isa, LibraryUnavailableError, available_isas
from kernels.reference_fp8 import FP8
from tests.stepping import poisoned_cache

try:
    ISAS = available_isas()
except LibraryUnavailableError as error:
    pytest.skip(str(error), allow_module_level=True)

BLOCK_SIZE = 16
MAX_TOKENS = 160

LLAMA = ModelSpec(
    architecture="LlamaForCausalLM",
    vocab_size=203,
    hidden_size=72,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=136,
    max_position_embeddings=512,
    norm_eps=1e-5,
    rope=RopeSpec(theta=10000.0, rotary_dim=16),
    attention_scale=16**-0.5,
)
SPECS = {
    "llama": LLAMA,
    "untied, llama3 rope, wide group": dataclasses.replace(
        LLAMA,
        tie_word_embeddings=False,
        num_heads=8,
        num_kv_heads=1,
        rope=RopeSpec(
            10000.0,
            16,
            "llama3",
            (
                ("factor", 8.0),
                ("high_freq_factor", 4.0),
                ("low_freq_factor", 1.0),
                ("original_max_position_embeddings", 64.0),
            ),
        ),
    ),
    "qwen2": dataclasses.replace(LLAMA, qkv_bias=True, o_bias=True, num_heads=4, num_kv_heads=4),
    "qwen3, partial rotary": dataclasses.replace(
        LLAMA, qk_norm=True, head_dim=32, rope=RopeSpec(1e6, 16), attention_scale=32**-0.5
    ),
    "mistral": dataclasses.replace(LLAMA, sliding_windows=(20, 20)),
    "gemma": dataclasses.replace(
        LLAMA,
        activation="gelu_tanh",
        norm_weight_offset=1.0,
        post_norms=True,
        qk_norm=True,
        embedding_scale=72**0.5,
        attention_softcap=5.0,
        final_softcap=7.0,
        sliding_windows=(20, None),
        local_rope=RopeSpec(500.0, 16),
    ),
}
# Largest difference of a logit, relative to the largest logit.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 3e-2}


def random_weights(spec: ModelSpec, dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in weight_shapes(spec).items():
        values = torch.randn(shape, generator=generator)
        if name.endswith("norm"):
            weights[name] = 1.0 - spec.norm_weight_offset + 0.1 * values
        else:
            weights[name] = (values * (shape[-1] ** -0.5 if len(shape) == 2 else 0.1)).to(dtype)
    return weights


def empty_cache(spec: ModelSpec, dtype: torch.dtype, num_blocks: int = 64) -> Tensor:
    return poisoned_cache(spec, num_blocks, BLOCK_SIZE, dtype)


@dataclass
class Sequence_:
    """A sequence under way: its tokens, its blocks, how far it has been computed."""

    tokens: list[int]
    blocks: list[int]
    computed: int = 0


class Driver:
    """Feeds sequences to a Forward, in any cut."""

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        isa: Isa | None,
        num_threads: int = 2,
        weights: Mapping[str, Tensor | QuantisedMatrix] | None = None,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.spec = spec
        self.cache = empty_cache(spec, kv_dtype or dtype)
        self.forward: CpuProgram | EagerForward
        if isa is None:
            self.forward = EagerForward(spec, random_weights(spec, dtype), self.cache, max_model_len=512)
        else:
            self.forward = CpuProgram(
                spec,
                weights or random_weights(spec, dtype),
                self.cache,
                block_size=BLOCK_SIZE,
                max_num_batched_tokens=MAX_TOKENS,
                max_num_seqs=8,
                max_model_len=512,
                dtype=dtype,
                num_threads=num_threads,
                isa=isa,
            )
        self._free = torch.randperm(64, generator=torch.Generator().manual_seed(1)).tolist()

    def sequence(self, num_tokens: int, seed: int = 0) -> Sequence_:
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(self.spec.vocab_size, (num_tokens,), generator=generator).tolist()
        return Sequence_(tokens, [self._free.pop() for _ in range(-(-num_tokens // BLOCK_SIZE))])

    def step(self, parts: Sequence[tuple[Sequence_, int]]) -> Tensor:
        """Runs the next n tokens of each sequence; float32 logits of all of them, [num_tokens, vocab_size]."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        width = max(len(sequence.blocks) for sequence, _ in parts) + 1
        tables = torch.full((len(parts), width), 2**30, dtype=torch.int32)
        for i, (sequence, count) in enumerate(parts):
            at = range(sequence.computed, sequence.computed + count)
            tokens += [sequence.tokens[p] for p in at]
            positions += at
            slots += [sequence.blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in at]
            tables[i, : len(sequence.blocks)] = torch.tensor(sequence.blocks, dtype=torch.int32)
            sequence.computed += count
            starts.append(len(tokens))
        batch = ForwardBatch(
            token_ids=torch.tensor(tokens, dtype=torch.int32),
            positions=torch.tensor(positions, dtype=torch.int32),
            slot_mapping=torch.tensor(slots, dtype=torch.int64),
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor([sequence.computed for sequence, _ in parts], dtype=torch.int32),
            block_tables=tables,
            logits_indices=torch.arange(len(tokens), dtype=torch.int32),
        )
        return self.forward(batch).clone()


def run_mixed(driver: Driver) -> Tensor:
    """Prefill in chunks, decodes and a second prompt, batched; all logits in the order computed."""
    first, second, third = driver.sequence(131, 1), driver.sequence(75, 2), driver.sequence(19, 3)
    logits = [driver.step([(first, 90)]), driver.step([(first, 38), (second, 70)])]
    logits.append(driver.step([(first, 1), (second, 1), (third, 17)]))
    logits += [driver.step([(first, 1), (second, 1), (third, 1)]) for _ in range(2)]
    return torch.cat(logits)


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_logits_agree_with_eager(name: str, dtype: torch.dtype, isa: Isa) -> None:
    spec = SPECS[name]
    # Eager float32 on the same weights is the truth for both dtypes.
    native = Driver(spec, dtype, isa)
    eager = Driver(spec, torch.float32, None)
    eager.forward = EagerForward(
        spec, {k: w.float() for k, w in random_weights(spec, dtype).items()}, eager.cache, max_model_len=512
    )
    actual, expected = run_mixed(native), run_mixed(eager)
    assert (actual - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()


# A key or value that is within rounding of a tie may become another code, 1/16 of it away: in bfloat16 many are.
FP8_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 6e-2}


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen3, partial rotary", "gemma"])
def test_logits_over_a_cache_in_fp8_agree_with_eager(name: str, dtype: torch.dtype, isa: Isa) -> None:
    spec = SPECS[name]
    native = Driver(spec, dtype, isa, kv_dtype=FP8)
    eager = Driver(spec, torch.float32, None, kv_dtype=FP8)
    eager.forward = EagerForward(
        spec, {k: w.float() for k, w in random_weights(spec, dtype).items()}, eager.cache, max_model_len=512
    )
    actual, expected = run_mixed(native), run_mixed(eager)
    assert (actual - expected).abs().max() <= FP8_TOLERANCE[dtype] * expected.abs().max()


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "kv_dtype"), [("llama", None), ("mistral", None), ("gemma", None), ("gemma", FP8)])
def test_batch_invariance(name: str, kv_dtype: torch.dtype | None, dtype: torch.dtype, isa: Isa) -> None:
    """The same bits alone, batched, chunked, token by token, and with another number of threads."""
    spec = SPECS[name]
    driver = Driver(spec, dtype, isa, kv_dtype=kv_dtype)
    whole = driver.sequence(131, 1)
    expected = driver.step([(whole, 131)])

    chunked = Driver(spec, dtype, isa, num_threads=3, kv_dtype=kv_dtype)
    other, company = chunked.sequence(131, 1), chunked.sequence(90, 9)
    pieces = [chunked.step([(other, 7)]), chunked.step([(company, 50), (other, 64)])[50:]]
    pieces += [chunked.step([(other, 1), (company, 1)])[:1] for _ in range(30)]
    pieces.append(chunked.step([(other, 30), (company, 10)])[:30])
    assert torch.equal(torch.cat(pieces), expected)


# Q5_0 has no kernel: such matrices are dequantised at load.
BLOCKS = {
    "Q8_0": ("Q8_0",),
    "Q4_0": ("Q4_0",),
    "Q4_1": ("Q4_1",),
    "mixed": ("Q8_0", "Q4_0", "Q4_1", "Q5_0", ""),
}


def quantise(weights: dict[str, Tensor], encodings: Sequence[str]) -> dict[str, Tensor | QuantisedMatrix]:
    """Matrices in GGUF blocks, the encodings in turn; "" leaves one as it is."""
    out: dict[str, Tensor | QuantisedMatrix] = dict(weights)
    for i, name in enumerate(name for name, weight in weights.items() if weight.dim() == 2):
        encoding, columns = encodings[i % len(encodings)], weights[name].shape[1]
        if encoding:
            blocks = quantize(weights[name].float().numpy(), GGMLQuantizationType[encoding])
            out[name] = QuantisedMatrix(encoding, torch.from_numpy(blocks), columns)
    return out


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("tied", [True, False])
def test_quantised_weights_give_the_bits_of_dequantised_ones(
    tied: bool, blocks: str, dtype: torch.dtype, isa: Isa
) -> None:
    spec = dataclasses.replace(LLAMA, hidden_size=96, intermediate_size=160, tie_word_embeddings=tied)
    packed = quantise(random_weights(spec, torch.float32), BLOCKS[blocks])
    plain = {
        name: weight.dequantise(dtype) if isinstance(weight, QuantisedMatrix) else weight
        for name, weight in packed.items()
    }
    expected = Driver(spec, dtype, isa, weights=plain)
    actual = Driver(spec, dtype, isa, weights=packed)
    assert torch.equal(run_mixed(actual), run_mixed(expected))


def test_fewer_logits_rows() -> None:
    driver = Driver(LLAMA, torch.float32, ISAS[-1])
    sequence = driver.sequence(30)
    all_rows = driver.step([(sequence, 30)])
    sequence.computed = 0
    forward = driver.forward
    batch = ForwardBatch(
        token_ids=torch.tensor(sequence.tokens, dtype=torch.int32),
        positions=torch.arange(30, dtype=torch.int32),
        slot_mapping=torch.tensor([sequence.blocks[p // 16] * 16 + p % 16 for p in range(30)], dtype=torch.int64),
        query_start_loc=torch.tensor([0, 30], dtype=torch.int32),
        seq_lens=torch.tensor([30], dtype=torch.int32),
        block_tables=torch.tensor([sequence.blocks], dtype=torch.int32),
        logits_indices=torch.tensor([29, 3], dtype=torch.int32),
    )
    assert torch.equal(forward(batch), all_rows[[29, 3]])


@pytest.mark.parametrize(
    "spec, dtype",
    [
        (dataclasses.replace(LLAMA, moe=MoESpec(4, 2, 32, True)), torch.float32),
        (LLAMA, torch.float16),
        (dataclasses.replace(LLAMA, activation="relu"), torch.float32),
    ],
)
def test_refuses_what_it_cannot_run(spec: ModelSpec, dtype: torch.dtype) -> None:
    with pytest.raises(NotImplementedError, match="do not support"):
        CpuProgram(
            spec,
            {},
            empty_cache(spec, dtype),
            block_size=BLOCK_SIZE,
            max_num_batched_tokens=8,
            max_num_seqs=1,
            max_model_len=8,
            dtype=dtype,
        )


def test_too_many_tokens_is_an_error() -> None:
    driver = Driver(LLAMA, torch.float32, ISAS[-1])
    with pytest.raises(ValueError, match="161 tokens"):
        driver.step([(driver.sequence(161), 161)])


def test_wrong_cache_is_refused() -> None:
    with pytest.raises(ValueError, match="KV cache"):
        CpuProgram(
            LLAMA,
            random_weights(LLAMA, torch.float32),
            empty_cache(LLAMA, torch.bfloat16),
            block_size=BLOCK_SIZE,
            max_num_batched_tokens=8,
            max_num_seqs=1,
            max_model_len=8,
            dtype=torch.float32,
        )
