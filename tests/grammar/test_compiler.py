"""What each kind of grammar accepts, what is refused by name, and how long any of it may take."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from biphase.errors import InvalidRequestError, UnsupportedError
from biphase.grammar import spec
from biphase.grammar.compiler import GrammarCompiler
from biphase.grammar.vocabulary import Vocabulary, longest_match_encoder
from biphase.request import StructuredOutput
from biphase.tokenizer.tokenizer import ModelTokenizer
from tests.grammar.walking import refusal

POINT = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 9}, "s": {"type": "string", "maxLength": 4}},
    "required": ["n"],
    "additionalProperties": False,
}
EXPRESSION = 'root ::= term ("+" term)*\nterm ::= "(" root ")" | num # a comment\nnum ::= [0-9]{1,3}\n'
TAGS = {
    "structures": [
        {"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"},
        {"begin": "<f=b>", "schema": {"type": "boolean"}, "end": "</f>"},
    ],
    "triggers": ["<f="],
}
CALLS = [
    spec.ToolCallForm('{"name": "f", "arguments": ', {"type": "object", "properties": {}}, "}"),
    spec.ToolCallForm('{"name": "g", "arguments": ', POINT, "}"),
]


@pytest.fixture
def accepts(grammar_compiler: GrammarCompiler, grammar_tokenizer: ModelTokenizer) -> Any:
    """Whether a text is one that the grammar describes, whole."""

    def check(asked: StructuredOutput, text: str) -> bool:
        matcher = grammar_compiler.compile(asked).deep_copy()
        tokens = grammar_tokenizer.encode(text, add_special_tokens=False)
        return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())

    return check


@pytest.mark.parametrize(
    ("asked", "good", "bad"),
    [
        (spec.json_schema(POINT), ['{"n": 3}', '{"n": 3, "s": "abc"}'], ['{"n": 0}', "{}", '{"n": 3}x']),
        (spec.json_schema(POINT), [], ['{"n":  3}', '{\n"n": 3}', ' {"n": 3}', '{"n":3}']),
        (spec.json_schema(POINT, whitespace=""), ['{"n":3}'], ['{"n": 3}']),
        (spec.json_schema(POINT, whitespace=r"[ ]{0,9}"), ['{"n":   3}'], ['{"n":\n3}']),
        (spec.json_schema(True), ["1", "[]", '{"a": null}'], ["", "nul"]),
        (spec.json_object(), ["{}", '{"a": {"b": [1]}}'], ["[]", "1"]),
        (spec.regex("[ab]+c?"), ["a", "abac"], ["", "c", "acc"]),
        (spec.regex("^ab$|^c$"), ["ab", "c"], ["abc"]),
        (spec.regex("a/b\nc"), ["a/b\nc"], ["a/bc"]),
        (spec.regex(r"\d{2}/\w"), ["12/x"], ["1/x"]),
        (spec.regex("(a+)+b"), ["aaaab"], ["aaaa"]),
        (spec.choice(["alpha", "beta", "al", 'q"\n\\', "é😀"]), ["al", 'q"\n\\', "é😀"], ["", "alp", "alphabeta"]),
        (spec.grammar(EXPRESSION), ["1", "(1+22)+3"], ["", "1+", "(1", "1234"]),
        (spec.grammar('root ::= w "x"\nw ::= [a-z]+'), ["abx", "xx"], ["x", "ab"]),
        (spec.grammar('root ::= "a" |\n  "b-c" [-0-9\\]]'), ["a", "b-c]", "b-c-"], ["b-c"]),
        (spec.grammar('root ::= [^"\\n]* "\\u00e9\\x41"'), ["éA", "héA"], ['"éA']),
        (spec.grammar('Root-Rule ::= "x"\nroot ::= Root-Rule root | ""'), ["", "xx"], ["y"]),
        (spec.grammar('start: "a" x\nx: /[0-9]+/'), ["a1"], ["a"]),
        (spec.grammar('start: %json {"type": "integer"} "."'), ["-5."], ["5", "a."]),
        (spec.structural_tag(TAGS), ["", "a <f=a>5</f> <f=b>true</f>.", "a < b"], ["<f=a>x</f>", "<f=c", "<f=a>5"]),
        (
            spec.tool_calls(CALLS, prefix="", suffix="", separator="\n", many=True),
            ['{"name": "f", "arguments": {}}', '{"name": "f", "arguments": {}}\n{"name": "g", "arguments": {"n": 1}}'],
            ["", '{"name": "h", "arguments": {}}', '{"name": "g", "arguments": {}}'],
        ),
        (
            spec.tool_calls(CALLS, prefix="<|call|>[", suffix="]", separator=", ", many=False),
            ['<|call|>[{"name": "f", "arguments": {}}]'],
            ['[{"name": "f", "arguments": {}}]', '<|call|>[{"name": "f", "arguments": {}}, {"name": "f"'],
        ),
    ],
)  # fmt: skip
def test_what_a_grammar_accepts(accepts: Any, asked: StructuredOutput, good: list[str], bad: list[str]) -> None:
    assert {text: accepts(asked, text) for text in good} == dict.fromkeys(good, True)
    assert {text: accepts(asked, text) for text in bad} == dict.fromkeys(bad, False)


def test_after_reasoning(accepts: Any) -> None:
    open_one = StructuredOutput("choice", '["a","b"]', reasoning_end="</think>")
    assert accepts(open_one, 'well, "c" </think>\n\nb')
    assert accepts(open_one, "</think>a")
    assert not accepts(open_one, "b")
    assert not accepts(open_one, "</think>c")
    optional = StructuredOutput("choice", '["a","b"]', reasoning_start="<think>", reasoning_end="</think>")
    assert accepts(optional, "<think>hm</think>b")
    assert accepts(optional, "b")
    assert not accepts(optional, "hm</think>b")
    # A mark that is a special token of the model.
    by_token = StructuredOutput("regex", "[ab]", reasoning_end="<|call|>")
    assert accepts(by_token, "hm<|call|>b")
    assert not accepts(by_token, "b")
    for asked in (spec.json_object(), spec.grammar(EXPRESSION), spec.structural_tag(TAGS)):
        wrapped = StructuredOutput(asked.kind, asked.spec, reasoning_end="</think>")
        assert accepts(wrapped, "x</think>\n" + {"json_object": "{}", "grammar": "1"}.get(asked.kind, "text"))


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (spec.json_schema({"type": "nonsense"}), "nonsense"),
        (spec.json_schema({"type": "object", "properties": "no"}), "properties"),
        (spec.json_schema({"type": "string", "pattern": "^(?=a)(?!a)[z$"}), "look-around"),
        (spec.json_schema({"not": {}, "if": {}}), 'unsupported keywords: "if", "not"'),
        (spec.json_schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (spec.json_schema({"type": "string", "format": "nonsense"}), "nonsense"),
        (spec.json_schema({"$ref": "#/$defs/none"}), "none"),
        (spec.json_schema({"$ref": "http://example.com/x"}), "example.com"),
        (spec.json_schema({"$ref": "#"}), "no end"),
        (spec.json_schema(False), "nothing matches"),
        (spec.json_schema({"allOf": [{"type": "string"}, {"type": "integer"}]}), "incompatible types"),
        # The compiler's own switch, in a client's hand.
        (spec.json_schema({"not": {}, "x-guidance": {"lenient": True}}), "not"),
        (spec.json_schema({"properties": {"a": {"not": {}, "x-guidance": {"lenient": True}}}}), "not"),
        (spec.json_schema({}, whitespace="("), "unclosed group"),
        (spec.regex("foo[["), "unclosed character class"),
        (spec.regex("(?=a)b"), "look-ahead"),
        (spec.regex(r"(a)\1"), "backreferences"),
        (spec.regex(r"\ba"), "lookarounds"),
        (spec.grammar('root ::= ("a" | '), "line 1: expected '\\)'"),
        (spec.grammar('root ::= "a'), "line 1"),
        (spec.grammar("root ::= other"), "'other'"),
        (spec.grammar('a ::= "x"'), "root"),
        (spec.grammar('root ::= "a"\nroot ::= "b"'), "twice"),
        (spec.grammar('root ::= "\\q"'), "escape"),
        (spec.grammar('root ::= "\\ud800"'), "digits"),
        (spec.grammar("root ::= []"), "empty set"),
        (spec.grammar("root ::= root"), "no end"),
        (spec.grammar("start: start"), "no end"),
        (spec.grammar('start: "a" | unknown'), "unknown"),
        (spec.grammar("root ::= " + "(" * 5000 + '"a"' + ")" * 5000), "nested too deeply"),
        (spec.grammar("start: " + "(" * 50_000 + '"a"' + ")" * 50_000), "nested"),
        (StructuredOutput("nonsense", ""), "unknown kind"),
    ],
)  # fmt: skip
def test_refusals_name_the_reason(grammar_compiler: GrammarCompiler, asked: StructuredOutput, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        grammar_compiler.probe(asked)
    assert len(caught.value.message) < 500
    assert "\n" not in caught.value.message


HOSTILE: dict[str, StructuredOutput] = {
    "choices": spec.choice([f"choice number {i}" for i in range(40_000)]),
    "enum": spec.json_schema({"enum": [f"value {i}" for i in range(30_000)]}),
    "catastrophic": spec.regex("(a+)+$"),
    "catastrophic alternatives": spec.regex("(a|a)*" * 30 + "b"),
    "repetitions": spec.regex("((a{0,1000}){0,1000}){0,1000}"),
    "blow-up": spec.regex("[ab]*a[ab]{200}"),
    "any repetitions": spec.regex("(.{1,5000}){1,5000}x"),
    "unicode repetitions": spec.regex(r"\w{1,2000}\p{L}{1,2000}"),
    "brackets": spec.regex("(" * 50_000 + "a" + ")" * 50_000),
    "long array": spec.json_schema({"type": "array", "minItems": 1_000_000}),
    "long string": spec.json_schema({"type": "string", "maxLength": 10**9}),
    "multiple": spec.json_schema({"type": "integer", "multipleOf": 999_999_937}),
    "all of any": spec.json_schema(
        {"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {}}} for j in range(6)]} for i in range(8)]}
    ),
    "fields": spec.json_schema({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(5000)}}),
    "cycle": spec.json_schema({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
    "ambiguous": spec.grammar('start: start start | "x" | ""\n'),
    "exponential": spec.grammar(
        "root ::= r30\n" + "\n".join(f"r{i} ::= r{i - 1} r{i - 1}" for i in range(1, 31)) + '\nr0 ::= "a"'
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_end_soon(grammar_compiler: GrammarCompiler, name: str) -> None:
    """Each is compiled or refused, in bounded time; none crashes, and none is let through to run slowly."""
    began = time.thread_time()
    message = refusal(grammar_compiler, HOSTILE[name])
    assert time.thread_time() - began < 10.0
    assert not message or message.startswith("Invalid ")


def test_a_grammar_whose_steps_are_slow_is_refused(grammar_compiler: GrammarCompiler) -> None:
    ticks = iter(range(1000))
    with pytest.raises(InvalidRequestError, match="too complex: which tokens may follow takes 1000 ms"):
        grammar_compiler.probe(spec.regex("[a-z]+"), clock=lambda: float(next(ticks)))


def test_a_vocabulary_travels_whole(grammar_vocabulary: Vocabulary) -> None:
    assert Vocabulary.unpack(grammar_vocabulary.pack()) == grammar_vocabulary
    assert grammar_vocabulary.special_tokens["<|call|>"] == 3


def test_longest_matches_make_the_same_bytes(grammar_vocabulary: Vocabulary) -> None:
    encode = longest_match_encoder(grammar_vocabulary.tokens, grammar_vocabulary.special_ids)
    for text in (b'{"name": "caf\xc3\xa9"}', b"\xff\x00", b"</s>"):
        token_ids = encode(text)
        assert b"".join(grammar_vocabulary.tokens[token_id] for token_id in token_ids) == text
        assert not grammar_vocabulary.special_ids & set(token_ids)


def test_a_model_without_an_end_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="end-of-sequence"):
        GrammarCompiler(Vocabulary((b"a", b"b"), frozenset(), frozenset()), lambda text: [])


def test_schemas_of_common_libraries(grammar_compiler: GrammarCompiler) -> None:
    pydantic = pytest.importorskip("pydantic")

    class Place(pydantic.BaseModel):  # type: ignore[name-defined,misc]
        city: str = pydantic.Field(max_length=8)
        zip: str | None = None

    class Person(pydantic.BaseModel):  # type: ignore[name-defined,misc]
        name: str
        places: list[Place]
        friend: Person | None = None
        scores: dict[str, float]

    Person.model_rebuild(_types_namespace={"Person": Person, "Place": Place})
    grammar_compiler.probe(spec.json_schema(json.loads(json.dumps(Person.model_json_schema()))))
