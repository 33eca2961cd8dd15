"""Workers with --quantization: they hand off among themselves, and never take exact keys for rounded ones."""

from __future__ import annotations

from pathlib import Path

from tests.worker.pair import Client, candidate, running_worker

INT8 = ("--quantization", "int8", "--dtype", "bfloat16")


def prompt(length: int) -> list[int]:
    return [3 + (length * 31 + i * 7) % 200 for i in range(length)]


async def test_a_hand_off_gives_what_one_worker_alone_gives(tiny_llama: Path) -> None:
    async with (
        running_worker("prefill", tiny_llama, "p", *INT8) as prefill,
        running_worker("decode", tiny_llama, "d", *INT8) as decode,
        running_worker("decode", tiny_llama, "alone", *INT8) as alone,
    ):
        for length in (20, 70):
            handed = await Client(decode).generate(prompt(length), [candidate(prefill)])
            assert handed.report.prefill_mode == "remote", handed.report
            own = await Client(alone).generate(prompt(length), [])
            assert handed.token_ids == own.token_ids


async def test_workers_of_different_modes_do_not_share_blocks(tiny_llama: Path) -> None:
    async with (
        running_worker("prefill", tiny_llama, "p", "--dtype", "bfloat16") as prefill,
        running_worker("decode", tiny_llama, "d", *INT8) as decode,
    ):
        answer = await Client(decode).generate(prompt(40), [candidate(prefill)])
        assert (answer.report.prefill_mode, answer.report.reason) == ("local", "prefill_failed")
        assert answer.report.num_transferred_tokens == 0
        assert len(answer.token_ids) == 8
