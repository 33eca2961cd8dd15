"""Loads the compiled kernels: the C structures and functions of src/abi.h as ctypes sees them. Owns no policy: which
tape runs, and what happens where there is no library, is biphase.ops.cpu_program's business.
"""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_double, c_float, c_int32, c_int64, c_size_t, c_void_p
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any

from kernels.cpu.build import LIBRARY

ABI_VERSION = 5
# Columns of a weight panel (BP_PANEL).
PANEL = 32


class LibraryUnavailableError(Exception):
    """There is no usable compiled library; the text says why and what to do."""


class Dtype(IntEnum):
    F32 = 0
    BF16 = 1
    F16 = 2
    # Of a KV cache only.
    FP8 = 3


class Format(IntEnum):
    """How packed weights lie: numbers of the program's dtype, or GGUF blocks of 32."""

    PLAIN = 0
    Q8 = 1
    Q4 = 2


class Isa(IntEnum):
    """Instruction sets with kernels of their own, worst first."""

    GENERIC = 0
    AVX2 = 1
    AVX512 = 2
    AVX512_BF16 = 3
    AMX = 4


class Kind(IntEnum):
    EMBED = 0
    NORM = 1
    NORM_ADD = 2
    GEMM = 3
    ROPE_STORE = 4
    ATTENTION = 5
    QUANTISE = 6
    NORM_DOT8 = 7
    GEMM_DOT8 = 8
    EMBED_DOT8 = 9


class Dot8(IntEnum):
    """How weights lie that are multiplied as small integers: GGUF's blocks of 4 or 8 bits, or int8 by channel."""

    Q4 = 1
    Q8 = 2
    INT8 = 3


class Epilogue(IntEnum):
    STORE_F32 = 0
    ADD_F32 = 1
    GATED = 2
    LOGITS = 3


class Activation(IntEnum):
    SILU = 0
    GELU_TANH = 1


class Rows(IntEnum):
    ALL_TOKENS = 0
    LOGITS_ROWS = 1


class Op(ctypes.Structure):
    """bp_op: one op of a tape. Pointers are addresses; what they point at must outlive the program."""

    _fields_ = (
        ("kind", c_int32),
        ("epilogue", c_int32),
        ("activation", c_int32),
        ("rows", c_int32),
        ("layer", c_int32),
        ("window", c_int32),
        ("n", c_int32),
        ("k", c_int32),
        ("in_stride", c_int32),
        ("out_stride", c_int32),
        ("packed", c_int32),
        ("dot8", c_int32),
        ("format", c_int32),
        ("eps", c_float),
        ("scale", c_float),
        ("softcap", c_float),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("input", c_void_p),
        ("output", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("rope", c_void_p),
    )


class Model(ctypes.Structure):
    """bp_model: what every op of a program shares."""

    _fields_ = (
        ("dtype", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("rotary_dim", c_int32),
        ("num_layers", c_int32),
        ("block_size", c_int32),
        ("max_tokens", c_int32),
        ("max_seqs", c_int32),
        ("norm_eps", c_float),
        ("kv_cache", c_void_p),
        ("kv_dtype", c_int32),
    )


class Step(ctypes.Structure):
    """bp_step: one ragged batch."""

    _fields_ = (
        ("num_tokens", c_int32),
        ("num_seqs", c_int32),
        ("num_logits", c_int32),
        ("block_table_stride", c_int32),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("slot_mapping", c_void_p),
        ("query_start_loc", c_void_p),
        ("seq_lens", c_void_p),
        ("block_tables", c_void_p),
        ("logits_indices", c_void_p),
        ("logits", c_void_p),
    )


@cache
def load(path: Path = LIBRARY) -> Any:
    """The loaded library, its functions typed. Calls release the GIL.

    Raises:
        LibraryUnavailableError: not built, not loadable, or built from other sources than this file's.
    """
    rebuild = "run `python -m kernels.cpu.build`"
    if not path.exists():
        raise LibraryUnavailableError(f"the CPU kernels are not compiled ({path} is missing): {rebuild}")
    try:
        lib = ctypes.CDLL(str(path))
        lib.bp_abi_version.restype = c_int32
        version = lib.bp_abi_version()
    except (OSError, AttributeError) as error:
        raise LibraryUnavailableError(f"the compiled CPU kernels do not load ({error}): {rebuild}") from error
    if version != ABI_VERSION:
        raise LibraryUnavailableError(f"the compiled CPU kernels are of ABI {version}, not {ABI_VERSION}: {rebuild}")
    lib.bp_best_isa.restype = c_int32
    lib.bp_arena_alloc.restype = c_void_p
    lib.bp_arena_alloc.argtypes = (c_size_t,)
    lib.bp_arena_free.restype = None
    lib.bp_arena_free.argtypes = (c_void_p, c_size_t)
    lib.bp_pack.restype = None
    lib.bp_pack.argtypes = (
        c_void_p, c_int32, c_int64, c_int64, c_int64, c_void_p, c_int32, c_int64, c_int64, c_int64,
    )  # fmt: skip
    lib.bp_block_format.restype = c_int32
    lib.bp_block_format.argtypes = (c_char_p,)
    lib.bp_panel_block_bytes.restype = c_int64
    lib.bp_panel_block_bytes.argtypes = (c_int32, c_int32)
    lib.bp_pack_blocks.restype = None
    lib.bp_pack_blocks.argtypes = (
        c_void_p, c_char_p, c_int64, c_int64, c_int64, c_void_p, c_int64, c_int64, c_int64,
    )  # fmt: skip
    lib.bp_pack_dot8.restype = None
    lib.bp_pack_dot8.argtypes = (
        c_void_p, c_void_p, c_int32, c_int32, c_int64, c_int64, c_int64, c_void_p, c_int64, c_int64, c_int64,
    )  # fmt: skip
    lib.bp_dot8_panel_bytes.restype = c_int64
    lib.bp_dot8_panel_bytes.argtypes = (c_int32, c_int64)
    lib.bp_program_create.restype = c_void_p
    lib.bp_program_create.argtypes = (c_void_p, c_void_p, c_int32, c_int32, c_int32, c_int32)
    lib.bp_program_run.restype = None
    lib.bp_program_run.argtypes = (c_void_p, c_void_p)
    lib.bp_program_profile.restype = None
    lib.bp_program_profile.argtypes = (c_void_p, c_int32)
    lib.bp_program_times.restype = None
    lib.bp_program_times.argtypes = (c_void_p, ctypes.POINTER(c_double), c_int32)
    lib.bp_program_destroy.restype = None
    lib.bp_program_destroy.argtypes = (c_void_p,)
    lib.bp_sum_blocks.restype = None
    lib.bp_sum_blocks.argtypes = (c_void_p, c_int64, c_void_p, c_int32, c_void_p)
    lib.bp_draw_tokens.restype = None
    lib.bp_draw_tokens.argtypes = (c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int32, c_void_p)
    return lib


def best_isa() -> Isa:
    """The best instruction set that this machine runs."""
    return Isa(load().bp_best_isa())


def available_isas() -> list[Isa]:
    return [isa for isa in Isa if isa <= best_isa()]
