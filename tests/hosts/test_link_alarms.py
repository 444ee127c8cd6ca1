"""If this fails, a cable that carries a tenth of what it did slows a run down, and it takes hours to find."""

from pathlib import Path

import pytest

from hosts import missing
from link_alarms import BROKEN, rehearse
from myriad.faults.injector import plan_rank_faults
from myriad.faults.rank_faults import ARMED
from myriad.faults.scenario import Fault
from myriad.telemetry.links.link_evidence import describe_evidence, list_evidence


def test_the_node_whose_link_is_slowed_in_the_middle_of_a_run_is_named_and_no_other_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It validates and saves before, so that silence and other traffic of these is seen, too. Ranks sleep for
    most of each step."""
    if problem := missing():
        pytest.skip(f"hosts cannot be made: {problem}")
    slow = [Fault(kind="slow", rank=rank, step=2, factor=12.0) for rank in range(2)]
    monkeypatch.setenv(ARMED, str(plan_rank_faults(tmp_path / "faults", slow, None)))
    keys = ("train.validate_every=20", "checkpoint.every=25", "resilience.on_slow=report")
    found = rehearse(tmp_path, "slow", 2, *keys, repairs=False)
    assert {"validation", "checkpoint"} <= {one["event"] for one in found.run.read_events()}
    named = found.named()
    assert found.broken_at and named and {one["node"] for one in named} == {BROKEN} and not found.false()
    assert named[0]["evidence"]["kind"] == "slow" and named[0]["time"] - found.broken_at < 6.0
    kept = list_evidence(found.run.counters_path / "around")
    assert BROKEN in {one.node for one in kept} and any(
        "eth1" in line for line in describe_evidence(kept[0].path)
    )
