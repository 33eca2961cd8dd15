"""Random faults under load: every answer is the right one or an explicit error, none is late, and no block is lost.

`make test` runs a short share; `make chaos` sets CHAOS_FAULTS and runs it long. CHAOS_SEED repeats a run's faults.
"""

from __future__ import annotations

import os
import secrets

import pytest

from tests.chaos.cluster import ChaosCluster
from tests.chaos.load import Answer, Question, Verdict
from tests.chaos.storm import Storm

NUM_FAULTS = int(os.environ.get("CHAOS_FAULTS", "25"))
SEED = int(os.environ.get("CHAOS_SEED", "0")) or secrets.randbelow(1 << 30)

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(120 + 4 * NUM_FAULTS)]


async def test_random_faults_under_load(
    cluster: ChaosCluster, short_answers: dict[Question, Answer], capsys: pytest.CaptureFixture[str]
) -> None:
    storm = Storm(cluster, short_answers, seed=SEED, num_faults=NUM_FAULTS)
    with capsys.disabled():
        print(f"\nCHAOS_SEED={SEED} CHAOS_FAULTS={NUM_FAULTS}", flush=True)
    try:
        await storm.run()
    finally:
        with capsys.disabled():
            print(f"\n{storm.report()}", flush=True)
    if storm.findings:
        first = "\n".join(str(finding)[:1500] for finding in storm.findings[:5])
        pytest.fail(f"{len(storm.findings)} findings, the first of them:\n{first}", pytrace=False)
    assert storm.totals[Verdict.EQUAL] > NUM_FAULTS // 4
