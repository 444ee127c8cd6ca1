"""What breaks for the user: pictures of iterations that were not trained, or of other ranks' clocks."""

import pytest

from gpt_ranks import Setup, make_job, train
from plain_operators import plain_operators
from timeline import CASES, panel_of


@pytest.mark.parametrize(
    "setup", [Setup(), Setup(loader_ahead=True, around=plain_operators)], ids=["in step", "ahead"]
)
def test_both_ranks_train_and_their_spans_lie_in_the_iteration_that_is_drawn(hosts, setup):
    job = make_job({"layout.pp": 2, "train.global_batch": 4})
    ranks = train(hosts(2), job, 3, setup)
    assert [run.losses for run in ranks] == [ranks[0].losses] * 2
    assert all(len(run.step_seconds) == 3 and min(run.step_seconds) > 0 for run in ranks)
    panel = panel_of("true", [ranks], CASES[0])
    for lane in panel.lanes:
        inside = [s for s in lane.spans if panel.start_seconds <= s.start_seconds < panel.stop_seconds]
        assert {(s.name, s.micro_batch) for s in inside} >= {
            (name, batch) for name in ("forward", "backward") for batch in range(4)
        }
