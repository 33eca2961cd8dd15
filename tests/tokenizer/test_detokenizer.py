from __future__ import annotations

import random

import pytest

from biphase.tokenizer.detokenizer import IncrementalDecoder, StopStrings
from biphase.tokenizer.loader import LoadedTokenizer

TEXT = "Grüße 🦙😀 日本語 and 👩‍👩‍👧 plain <|im_end|> end. ½"


def test_pieces_put_together_are_the_whole(bundled_tokenizer: LoadedTokenizer) -> None:
    tokenizer = bundled_tokenizer.tokenizer
    ids = tokenizer.encode(TEXT)
    for skip in (True, False):
        for cut in range(0, len(ids), 3):
            decoder = IncrementalDecoder(tokenizer, ids[:cut], skip_special_tokens=skip)
            pieces = [decoder.push(token_id) for token_id in ids[cut:]]
            assert not any("�" in piece for piece in pieces)
            whole = tokenizer.decode(ids, skip_special_tokens=skip)
            before = tokenizer.decode(ids[:cut], skip_special_tokens=skip).rstrip("�")
            assert before + "".join(pieces) == whole


def test_a_character_begun_in_the_prompt_is_completed(bundled_tokenizer: LoadedTokenizer) -> None:
    tokenizer = bundled_tokenizer.tokenizer
    ids = tokenizer.encode("go 🦙")
    decoder = IncrementalDecoder(tokenizer, ids[:-1])
    assert decoder.push(ids[-1]).strip() == "🦙"


def test_nothing_comes_for_an_unfinished_character(bundled_tokenizer: LoadedTokenizer) -> None:
    tokenizer = bundled_tokenizer.tokenizer
    *begin, last = tokenizer.encode("🦙")
    decoder = IncrementalDecoder(tokenizer)
    assert "".join(decoder.push(token_id) for token_id in begin).strip() == ""
    assert decoder.push(last).endswith("🦙")


def test_random_ids_never_raise(bundled_tokenizer: LoadedTokenizer) -> None:
    tokenizer = bundled_tokenizer.tokenizer
    rng = random.Random(7)
    for _ in range(50):
        decoder = IncrementalDecoder(tokenizer, [rng.randrange(tokenizer.vocab_size) for _ in range(5)])
        for _ in range(60):
            decoder.push(rng.randrange(tokenizer.vocab_size))


def test_stop_string_across_pieces() -> None:
    stops = StopStrings(["STOP", "##"])
    assert stops.push("abc S") == "abc "
    assert stops.push("TO") == ""
    assert stops.push("x#") == "STOx"
    assert stops.push("y") == "#y"
    assert stops.push("ST") == ""
    assert stops.push("OP and more") == ""
    assert stops.found == "STOP"
    assert stops.push("later") == "" and stops.flush() == ""


def test_included_stop_string_and_flush() -> None:
    stops = StopStrings(["\n\n"], include=True)
    assert stops.push("a\n\nb") == "a\n\n"
    assert stops.found == "\n\n"
    stops = StopStrings(["\n\n"])
    assert stops.push("a\n") == "a"
    assert stops.found is None and stops.flush() == "\n"


@pytest.mark.parametrize("seed", range(20))
def test_stop_strings_against_searching_the_whole(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(200):
        text = "".join(rng.choice("ab") for _ in range(rng.randrange(1, 25)))
        words = ["".join(rng.choice("ab") for _ in range(rng.randrange(1, 5))) for _ in range(rng.randrange(1, 4))]
        stops = StopStrings(words)
        given, place = "", 0
        while place < len(text) and stops.found is None:
            step = rng.randrange(1, 4)
            given += stops.push(text[place : place + step])
            place += step
        if stops.found is None:
            given += stops.flush()
        if not any(word in text for word in words):
            assert (stops.found, given) == (None, text)
        else:
            assert stops.found is not None and text.startswith(given + stops.found)
            # Nothing handed out holds a whole stop string.
            assert not any(word in given for word in words)
