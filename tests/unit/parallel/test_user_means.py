"""If these break: a name that a user logs late pushes others out, or names without end fill each line."""

import pytest
import torch

import myriad
from myriad.comm.grid import RankGrid
from myriad.comm.groups import Groups
from myriad.comm.layout import Layout
from myriad.parallel.user_means import UserMeans
from myriad.system.user_metrics import take_logged


def test_the_first_names_of_a_run_are_kept_and_the_others_are_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    take_logged()
    own = UserMeans(Groups(RankGrid(Layout(), 0)))

    def step() -> dict[str, float | None]:
        message = torch.zeros(own.num_sums, dtype=torch.float64)
        own.write_sums(message)
        return own.means(message.tolist())

    for names in (range(60), range(50, 80), range(40, 104)):
        myriad.log({str(name): name for name in names})
        assert step() == {str(name): name for name in names if name < 64}
    assert step() == {}
    assert caplog.text.count("dropped") == 1 and "'64'" in caplog.text
