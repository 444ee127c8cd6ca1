"""What breaks for the user: a checkpoint that is gone when it is needed, or is not what was saved. In small;
`benchmarks/checkpoint/checkpoint_faults.py` does it ten thousand times."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "checkpoint"))

from checkpoint_faults import PLAIN, all_damage, failures
from fault_kills import KILLS, kill_often


def test_a_run_killed_at_random_instants_resumes_from_the_newest_durable_step(tmp_path: Path) -> None:
    outcomes, midst = kill_often(2 * len(KILLS), 4, tmp_path)
    assert failures(outcomes) == []
    assert [one.tried for one in outcomes.values()] == [2] * len(KILLS)
    assert sum(midst.values()) - midst["else"] - midst["loading"] > 0, "something was being saved"


def test_no_damaged_byte_is_ever_loaded(tmp_path: Path) -> None:
    outcomes = all_damage(300, 2, tmp_path)
    assert failures(outcomes) == []
    assert len(outcomes) >= 13 and all(one.tried for one in outcomes.values())
    assert sum(one.tried for one in outcomes.values()) > 330
    assert outcomes[PLAIN].wrong > outcomes[PLAIN].tried / 2, "what the hashes are for"
