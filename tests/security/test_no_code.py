"""Data stays data: nothing that is read or received is ever run as code, and the rules for that are switched on."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from biphase.errors import InvalidRequestError
from biphase.tokenizer.chat_template import ChatTemplate

ROOT = Path(__file__).parents[2]
# ruff's rules for what turns data into code or commands.
RULES = {"S102", "S301", "S302", "S307", "S506", "S602", "S604", "S605", "S701"}
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "jsonpickle"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}


def sources() -> Iterator[Path]:
    for folder in ("biphase", "services", "kernels"):
        yield from (ROOT / folder).rglob("*.py")


def test_the_rules_are_on() -> None:
    lint = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]
    assert set(lint["select"]) >= RULES
    for codes in [lint.get("ignore", []), *lint.get("per-file-ignores", {}).values()]:
        assert not RULES & set(codes)


def test_nothing_is_unpickled_or_evaluated() -> None:
    found = []
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                names = [node.func.id] if node.func.id in FORBIDDEN_CALLS else []
            found += [(path, name) for name in names if name.split(".")[0] in FORBIDDEN_MODULES | FORBIDDEN_CALLS]
    assert not found


def test_no_suppression_of_those_rules() -> None:
    for path in sources():
        for line in path.read_text().splitlines():
            assert not (RULES & set(re.findall(r"S\d{3}", line)) and "noqa" in line), path


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os.getcwd() }}",
        "{% extends '/etc/passwd' %}",
    ],
)
def test_a_models_chat_template_reaches_nothing(template: str) -> None:
    """Templates come with models, which come from anywhere."""
    with pytest.raises(InvalidRequestError):
        ChatTemplate({"default": template}, {}).render([{"role": "user", "content": "x"}])
