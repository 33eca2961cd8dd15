"""What the launcher makes of children's lines."""

from __future__ import annotations

import io
import json

from services.launcher.output import ChildOutput


def written(log_format: str, *lines: str) -> list[str]:
    stream = io.StringIO()
    output = ChildOutput(log_format, stream)
    for line in lines:
        output.write("decode-0", line)
    return stream.getvalue().splitlines()


def test_events_pass_as_they_are() -> None:
    event = "08:01:02.003 INFO    decode-0 ready address=127.0.0.1:4000"
    assert written("text", event) == [event]
    event = '{"time": 1.0, "event": "ready"}'
    assert written("json", event) == [event]


def test_other_text_gets_the_childs_name() -> None:
    assert written("text", "Traceback (most recent call last):") == ["decode-0 | Traceback (most recent call last):"]


def test_json_output_is_json_on_every_line() -> None:
    for line in ("Segmentation fault", "{broken", '{"no": "name"}', "[1]"):
        (parsed,) = [json.loads(text) for text in written("json", line)]
        assert parsed["component"] == "decode-0"
        assert parsed["event"] == "output"
        assert parsed["line"] == line
