"""If this fails, a cable that carries a tenth of what it did slows a run down, and it takes hours to find."""

from pathlib import Path

import pytest

from hosts import missing
from link_alarms import BROKEN, rehearse
from myriad.telemetry.links.link_evidence import describe_evidence, list_evidence


def test_the_node_whose_link_is_slowed_in_the_middle_of_a_run_is_named_and_no_other_ever(
    tmp_path: Path,
) -> None:
    """It validates and saves before, so that silence and other traffic of these is seen, too."""
    if problem := missing():
        pytest.skip(f"hosts cannot be made: {problem}")
    found = rehearse(tmp_path, "slow", 2, repairs=False)
    named = found.named()
    assert found.broken_at and named and {one["node"] for one in named} == {BROKEN} and not found.false()
    assert named[0]["evidence"]["kind"] == "slow" and named[0]["time"] - found.broken_at < 6.0
    kept = list_evidence(found.run.counters_path / "around")
    assert BROKEN in {one.node for one in kept} and any(
        "eth1" in line for line in describe_evidence(kept[0].path)
    )
