"""From a ModelSpec and its weights to a tape of native ops: packs the weights, lays out the buffers, writes the ops.

Owns what is computed and where it lies; `cpu_program` owns running it. Everything lies in one arena of huge pages.

Buffers, rows are tokens:
    x       float32 [hidden_size], the residual stream
    normed  act [hidden_size], also the gathered rows whose logits are wanted
    qkv     float32, q | k | v of all heads
    q       act, after q norm and rotary
    heads   act, what attention returns
    mlp     act [intermediate_size]
    branch  float32 [hidden_size], a block's output where the model norms it before adding it
    integers  int8 in groups, any of the act rows quantised, where weights are multiplied as integers
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from biphase.model.quantised import QuantisedMatrix, Weight
from biphase.model.spec import ModelSpec, RopeSpec
from biphase.ops.cpu_dot8 import dot8_of, pack, packed_bytes, quantised_row_bytes
from kernels.cpu.library import PANEL, Activation, Dtype, Epilogue, Format, Kind, Op, Rows
from kernels.reference import rotary_table

DTYPES = {torch.float32: Dtype.F32, torch.bfloat16: Dtype.BF16, torch.float16: Dtype.F16}
_ACTIVATIONS = {"silu": Activation.SILU, "gelu_tanh": Activation.GELU_TANH}
# Gate and up columns lie side by side in a panel, this many of each.
_HALF_PANEL = PANEL // 2
_LINE = 64


class Arena:
    """One region of memory, handed out from the front. Nothing is given back before `close`."""

    def __init__(self, lib: Any, num_bytes: int) -> None:
        self._lib = lib
        self._num_bytes = num_bytes
        self._base = lib.bp_arena_alloc(num_bytes)
        if not self._base:
            raise MemoryError(f"cannot reserve {num_bytes} bytes for the CPU program")
        self._used = 0

    def take(self, num_bytes: int) -> int:
        """Address of `num_bytes` zeroed bytes, on a cache line of its own."""
        address: int = self._base + self._used
        self._used += -(-num_bytes // _LINE) * _LINE
        assert self._used <= self._num_bytes, "the arena was reckoned too small"
        return address

    @property
    def num_bytes_used(self) -> int:
        return self._used

    def close(self) -> None:
        if self._base:
            self._lib.bp_arena_free(self._base, self._num_bytes)
            self._base = None


@dataclass(frozen=True, slots=True)
class _Buffer:
    address: int
    stride: int  # elements from a row to the next


class TapeBuilder:
    """Builds once: `ops` is the tape, `arena` what it points into, `kept` the tensors that it reads in place."""

    def __init__(
        self,
        lib: Any,
        spec: ModelSpec,
        weights: Mapping[str, Weight],
        dtype: torch.dtype,
        max_tokens: int,
        max_len: int,
        integer_dot: bool = False,
    ) -> None:
        self._lib, self._spec, self._weights, self._dtype = lib, spec, weights, dtype
        self._item = dtype.itemsize
        self._integer_dot = integer_dot
        self.ops: list[Op] = []
        self.kept: list[Tensor] = []
        self.arena = Arena(lib, self._reckon(max_tokens, max_len))
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self._x = self._buffer(max_tokens, spec.hidden_size, 4)
        self._normed = self._buffer(max_tokens, spec.hidden_size, self._item)
        self._qkv = self._buffer(max_tokens, q_size + 2 * kv_size, 4)
        self._q = self._buffer(max_tokens, q_size, self._item)
        self._heads = self._buffer(max_tokens, q_size, self._item)
        self._mlp = self._buffer(max_tokens, spec.intermediate_size, self._item)
        self._branch = self._buffer(max_tokens, spec.hidden_size, 4) if spec.post_norms else None
        row_bytes = quantised_row_bytes(max(spec.hidden_size, q_size, spec.intermediate_size))
        self._integers = _Buffer(self.arena.take(max_tokens * row_bytes), row_bytes) if integer_dot else None
        try:
            self._build(max_len)
        except BaseException:
            self.arena.close()
            raise

    def _reckon(self, max_tokens: int, max_len: int) -> int:
        """Bytes that will do: weights padded to panels, buffers, rotary tables."""
        spec = self._spec
        width = 5 * spec.hidden_size + 4 * spec.num_heads * spec.head_dim + spec.intermediate_size
        buffers = max_tokens * 4 * (width + 2 * spec.num_kv_heads * spec.head_dim + 8 * _LINE)
        if self._integer_dot:
            buffers += max_tokens * quantised_row_bytes(width)
        packed = sum(
            (-(-w.shape[0] // PANEL) + 1) * PANEL * w.shape[1] * self._item
            if len(w.shape) == 2
            else w.shape[0] * 8 + 1024
            for w in self._weights.values()
        )
        tables = 2 * max_len * 4 * max(spec.rope.rotary_dim, spec.local_rope.rotary_dim if spec.local_rope else 0)
        return buffers + packed + tables + (1 << 20)

    def _buffer(self, rows: int, columns: int, item: int) -> _Buffer:
        # An odd number of cache lines in a row: rows walked together do not share a cache set.
        lines = -(-columns * item // _LINE) | 1
        return _Buffer(self.arena.take(rows * lines * _LINE), lines * _LINE // item)

    def _floats(self, values: Tensor, padded: int = 0) -> int:
        """Copies values as float32 into the arena, zero-padded to `padded` elements."""
        wide = values.detach().float().contiguous()
        address = self.arena.take(max(padded, wide.numel()) * 4)
        ctypes.memmove(address, wide.data_ptr(), wide.numel() * 4)
        return address

    def _vector(self, name: str) -> Tensor:
        values = self._weights[name]
        assert isinstance(values, Tensor), f"{name} cannot be quantised"
        return values.float()

    def _norm_weight(self, name: str) -> int:
        return self._floats(self._vector(name) + self._spec.norm_weight_offset)

    def _pack(self, parts: Sequence[Weight], gated: bool = False) -> dict[str, Any]:
        """Packs matrices with equal k one after another, or gate and up side by side; the op's fields for them.

        Blocks stay blocks where all parts are of one kind that there is a kernel for.
        """
        kind = dot8_of(parts) if self._integer_dot else None
        if kind is not None:
            address = self.arena.take(packed_bytes(self._lib, parts, kind, gated))
            pack(self._lib, parts, kind, gated, address)
            return {"weight": address, "dot8": kind}
        k, rows = parts[0].shape[1], sum(part.shape[0] for part in parts)
        if gated:
            rows = -(-parts[0].shape[0] // _HALF_PANEL) * PANEL
        form = self._format(parts)
        block_bytes = self._lib.bp_panel_block_bytes(DTYPES[self._dtype], form)
        address = self.arena.take(-(-rows // PANEL) * (k * block_bytes // 32))
        column = 0
        for part in parts:
            n = part.shape[0]
            run, step = (_HALF_PANEL, PANEL) if gated else (n, n)
            if form != Format.PLAIN:
                assert isinstance(part, QuantisedMatrix)
                blocks = part.blocks.contiguous()
                self._lib.bp_pack_blocks(
                    blocks.data_ptr(), part.encoding.encode(), n, k, blocks.shape[1], address, column, run, step
                )
            else:
                source = part if isinstance(part, Tensor) else part.dequantise(self._dtype)
                if source.dtype not in DTYPES or source.stride(1) != 1:
                    source = source.float().contiguous()
                kinds = DTYPES[source.dtype], DTYPES[self._dtype]
                self._lib.bp_pack(
                    source.data_ptr(), kinds[0], n, k, source.stride(0), address, kinds[1], column, run, step
                )
            column += _HALF_PANEL if gated else n
        return {"weight": address, "format": form}

    def _format(self, parts: Sequence[Weight]) -> Format:
        kinds = {
            self._lib.bp_block_format(part.encoding.encode()) if isinstance(part, QuantisedMatrix) else Format.PLAIN
            for part in parts
        }
        return Format(kinds.pop()) if len(kinds) == 1 and kinds != {-1} else Format.PLAIN

    def _op(self, kind: Kind, source: _Buffer | None, target: _Buffer | None, **fields: Any) -> None:
        op = Op(kind=kind, **fields)
        if source is not None:
            op.input, op.in_stride = source.address, source.stride
        if target is not None:
            op.output, op.out_stride = target.address, target.stride
        self.ops.append(op)

    def _norm(self, name: str, following: dict[str, Any], rows: Rows = Rows.ALL_TOKENS) -> _Buffer:
        """Norms into the buffer that a matrix with the fields `following` reads."""
        spec = self._spec
        kind, target = Kind.NORM, self._normed
        if "dot8" in following:
            assert self._integers is not None
            kind, target = Kind.NORM_DOT8, self._integers
        weight = self._norm_weight(name)
        self._op(kind, self._x, target, weight=weight, n=spec.hidden_size, eps=spec.norm_eps, rows=rows)
        return target

    def _matmul(self, source: _Buffer, target: _Buffer | None, k: int, **fields: Any) -> None:
        if "dot8" not in fields:
            self._op(Kind.GEMM, source, target, k=k, **fields)
            return
        assert self._integers is not None
        if source is not self._integers:
            self._op(Kind.QUANTISE, source, self._integers, n=k)
        self._op(Kind.GEMM_DOT8, self._integers, target, k=k, **fields)

    def _add_branch(self, prefix: str, name: str, source: _Buffer, k: int) -> None:
        """x += W source, through the post norm where the model has one."""
        spec, hidden = self._spec, self._spec.hidden_size
        weight = self._pack([self._weights[f"{prefix}{name}"]])
        bias = None
        if f"{prefix}{name}_bias" in self._weights:
            bias = self._floats(self._vector(f"{prefix}{name}_bias"), hidden + PANEL)
        if self._branch is None:
            self._matmul(source, self._x, k, bias=bias, n=hidden, epilogue=Epilogue.ADD_F32, **weight)
            return
        self._matmul(source, self._branch, k, bias=bias, n=hidden, epilogue=Epilogue.STORE_F32, **weight)
        post = self._norm_weight(f"{prefix}post_{'attn' if name == 'o' else 'mlp'}_norm")
        self._op(Kind.NORM_ADD, self._branch, self._x, weight=post, n=hidden, eps=spec.norm_eps)

    def _build(self, max_len: int) -> None:
        spec, weights, hidden = self._spec, self._weights, self._spec.hidden_size
        head = self._pack([weights["embed" if spec.tie_word_embeddings else "lm_head"]])
        embed: dict[str, Any] = {**head, "packed": 1}
        if not spec.tie_word_embeddings:
            table = weights["embed"]
            table = table if isinstance(table, Tensor) else table.dequantise(self._dtype)
            table = table.to(self._dtype).contiguous()
            self.kept.append(table)
            embed = {"weight": table.data_ptr(), "packed": 0, "in_stride": hidden}
        kind = Kind.EMBED_DOT8 if "dot8" in embed else Kind.EMBED
        self._op(kind, None, self._x, n=hidden, scale=spec.embedding_scale, **embed)
        full = self._rope_table(spec.rope, max_len)
        local = full if spec.local_rope is None else self._rope_table(spec.local_rope, max_len)
        windows = spec.sliding_windows or (None,) * spec.num_layers
        for layer, window in enumerate(windows):
            self._layer(layer, window, full if window is None else local)
        normed = self._norm("final_norm", head, Rows.LOGITS_ROWS)
        self._matmul(
            normed, None, hidden, n=spec.vocab_size,
            epilogue=Epilogue.LOGITS, softcap=spec.final_softcap, rows=Rows.LOGITS_ROWS, **head,
        )  # fmt: skip

    def _rope_table(self, rope: RopeSpec, max_len: int) -> int:
        cos, sin = rotary_table(rope.theta, rope.rotary_dim, max_len, rope.scaling, dict(rope.params))
        return self._floats(torch.cat((cos, sin), dim=1))

    def _layer(self, layer: int, window: int | None, rope: int) -> None:
        spec, weights, prefix = self._spec, self._weights, f"layers.{layer}."
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        qkv = self._pack([weights[f"{prefix}{part}"] for part in "qkv"])
        normed = self._norm(f"{prefix}attn_norm", qkv)
        bias = None
        if spec.qkv_bias:
            joined = torch.cat([self._vector(f"{prefix}{part}_bias") for part in "qkv"])
            bias = self._floats(joined, joined.numel() + PANEL)
        self._matmul(
            normed, self._qkv, spec.hidden_size, bias=bias, n=q_size + 2 * kv_size, epilogue=Epilogue.STORE_F32, **qkv
        )
        norms = {f"{part}_norm": self._norm_weight(f"{prefix}{part}_norm") for part in "qk"} if spec.qk_norm else {}
        self._op(Kind.ROPE_STORE, self._qkv, self._q, layer=layer, rope=rope, **norms)
        self._op(
            Kind.ATTENTION, self._q, self._heads, layer=layer, window=window or 0,
            scale=spec.attention_scale, softcap=spec.attention_softcap,
        )  # fmt: skip
        self._add_branch(prefix, "o", self._heads, q_size)
        gate_up = self._pack([weights[f"{prefix}gate"], weights[f"{prefix}up"]], gated=True)
        self._matmul(
            self._norm(f"{prefix}mlp_norm", gate_up), self._mlp, spec.hidden_size,
            n=2 * spec.intermediate_size, epilogue=Epilogue.GATED,
            activation=_ACTIVATIONS[spec.activation], **gate_up,
        )  # fmt: skip
        self._add_branch(prefix, "down", self._mlp, spec.intermediate_size)


def refusal(spec: ModelSpec, dtype: torch.dtype) -> str | None:
    """Why the native program cannot run this model, or None."""
    if spec.moe is not None:
        return "mixture-of-experts layers"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"dtype {dtype}"
    if spec.head_dim % 2 or spec.head_dim > 1024 or spec.hidden_size % 2 or spec.intermediate_size % 2:
        return "odd sizes or heads over 1,024 wide"
    if spec.activation not in _ACTIVATIONS:
        return f"activation {spec.activation!r}"
    return None
