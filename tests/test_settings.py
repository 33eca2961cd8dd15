"""Flags over environment over defaults, and what is said about values that cannot be used."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from biphase.errors import ConfigError
from biphase.settings import (
    API_FLAGS,
    ENGINE_FLAGS,
    MODEL_FLAGS,
    NODE_FLAGS,
    Flag,
    boolean,
    num_bytes,
    parse_flags,
    positive,
)

FLAGS = (
    Flag("model", str, "", "what to serve"),
    Flag("block-size", positive, 16, "tokens in a block"),
    Flag("caching", boolean, True, "keep blocks"),
    Flag("names", str, (), "names", many=True),
    Flag("size", num_bytes, None, "bytes"),
    Flag("colour", str, "red", "red or blue", choices=("red", "blue")),
)


@dataclass(frozen=True)
class Settings:
    model: str
    block_size: int
    caching: bool
    names: tuple[str, ...]
    size: int | None
    colour: str


def parsed(*argv: str, **environ: str) -> Settings:
    return parse_flags("biphase x", "Tests.", FLAGS, Settings, argv, environ, positional=FLAGS[0])


def test_defaults() -> None:
    assert parsed() == Settings("", 16, True, (), None, "red")


def test_flags_win_over_the_environment_and_that_over_defaults() -> None:
    assert parsed(BIPHASE_BLOCK_SIZE="32").block_size == 32
    assert parsed("--block-size", "64", BIPHASE_BLOCK_SIZE="32").block_size == 64


def test_an_empty_variable_is_none() -> None:
    assert parsed(BIPHASE_BLOCK_SIZE="").block_size == 16


def test_lists_come_by_repetition_and_by_commas() -> None:
    assert parsed("--names", "a,b", "--names", "c").names == ("a", "b", "c")
    assert parsed(BIPHASE_NAMES="a, b,").names == ("a", "b")


def test_a_positional_argument_stands_for_its_flag() -> None:
    assert parsed("here").model == "here"
    assert parsed("here", "--model", "there").model == "there"


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("2GiB", 2 << 30), ("1.5g", 3 << 29), ("512MiB", 512 << 20), ("4kb", 4096), ("1 TiB", 1 << 40)],
)
def test_sizes(text: str, size: int) -> None:
    assert num_bytes(text) == size


@pytest.mark.parametrize("text", ["", "x", "-1", "0", "1.2.3", "GiB"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ValueError):
        num_bytes(text)


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--block-size", "0"], "--block-size: '0' is not usable: must be at least 1"),
        (["--caching", "perhaps"], "--caching: 'perhaps' is not usable: expected true or false"),
        (["--colour", "green"], "--colour: 'green' is not one of red, blue"),
        (["--blok-size", "1"], r"unrecognized arguments: --blok-size \(did you mean --block-size\?\)"),
        (["--block", "1"], r"unrecognized arguments: --block \(see biphase x --help\)"),
        (["--block-size"], "argument --block-size: expected one argument"),
    ],
)
def test_what_cannot_be_used_is_said_with_its_source(argv: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=f"^{sentence}"):
        parsed(*argv)


def test_a_variable_that_cannot_be_used_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^BIPHASE_BLOCK_SIZE: 'many' is not usable"):
        parsed(BIPHASE_BLOCK_SIZE="many")


def test_names_of_the_shared_groups_are_unique() -> None:
    names = [flag.name for flag in (*NODE_FLAGS, *MODEL_FLAGS, *ENGINE_FLAGS, *API_FLAGS)]
    assert len(set(names)) == len(names)
