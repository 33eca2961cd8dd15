"""Workers with --quantization or --kv-cache-dtype: they hand off among themselves, and never take exact keys for
rounded ones."""

from __future__ import annotations

from pathlib import Path

import pytest

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


FP8 = ("--kv-cache-dtype", "fp8")


@pytest.mark.parametrize("flags", [FP8, (*FP8, "--dtype", "bfloat16"), (*FP8, "--native-kernels", "false")])
async def test_a_hand_off_in_fp8_gives_what_one_worker_alone_gives(tiny_llama: Path, flags: tuple[str, ...]) -> None:
    async with (
        running_worker("prefill", tiny_llama, "p", *flags) as prefill,
        running_worker("decode", tiny_llama, "d", *flags) as decode,
        running_worker("decode", tiny_llama, "alone", *flags) as alone,
    ):
        assert prefill.layout.kv_dtype == "fp8_e4m3"
        client = Client(decode)
        for length in (1, 20, 70):
            handed = await client.generate(prompt(length), [candidate(prefill)])
            assert handed.report.prefill_mode == "remote", handed.report
            own = await Client(alone).generate(prompt(length), [])
            assert handed.token_ids == own.token_ids
        # Once more, from what decode has kept.
        again = await client.generate(prompt(70), [candidate(prefill)])
        assert again.report.num_cached_tokens == 64
        assert again.token_ids == handed.token_ids


async def test_workers_of_different_kv_dtypes_refuse_each_other_by_name(
    tiny_llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        running_worker("prefill", tiny_llama, "p", *FP8) as prefill,
        running_worker("decode", tiny_llama, "d") as decode,
    ):
        answer = await Client(decode).generate(prompt(40), [candidate(prefill)])
        assert (answer.report.prefill_mode, answer.report.reason) == ("local", "prefill_failed")
        assert answer.report.num_transferred_tokens == 0
        assert len(answer.token_ids) == 8
    said = [record.event_fields["error"] for record in caplog.records if record.getMessage() == "handoff_failed"]
    assert len(said) == 1 and "kv_dtype is 'float32' here and 'fp8_e4m3' there" in said[0]


async def test_workers_of_different_modes_do_not_share_blocks(tiny_llama: Path) -> None:
    async with (
        running_worker("prefill", tiny_llama, "p", "--dtype", "bfloat16") as prefill,
        running_worker("decode", tiny_llama, "d", *INT8) as decode,
    ):
        answer = await Client(decode).generate(prompt(40), [candidate(prefill)])
        assert (answer.report.prefill_mode, answer.report.reason) == ("local", "prefill_failed")
        assert answer.report.num_transferred_tokens == 0
        assert len(answer.token_ids) == 8
