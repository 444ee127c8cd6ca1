"""If these break: values of a user's own code are wrong in metrics.jsonl, or one of them
breaks every step's line."""

import pytest

import myriad
from myriad.system.user_metrics import UserMetrics, take_logged


def test_a_step_has_the_sum_of_all_calls() -> None:
    own = UserMetrics()
    own.add({"a": 1, "b": 3})
    own.add({"a": 4.0})
    assert own.take() == {"a": (5.0, 2), "b": (3.0, 1)}
    assert own.take() == {}
    myriad.log({"here": 3})
    assert take_logged() == {"here": (3.0, 1)} and take_logged() == {}


@pytest.mark.parametrize("name", ["", "x" * 81, 3, "two\nlines", "\ud800"])
def test_a_name_that_no_chart_can_have_is_refused_and_nothing_is_recorded(name: object) -> None:
    own = UserMetrics()
    with pytest.raises(ValueError, match="1 to 80 printable characters"):
        own.add({"right": 1.0, name: 1.0})  # type: ignore[dict-item]
    assert own.take() == {}


def test_a_name_for_each_sample_is_refused() -> None:
    own = UserMetrics()
    with pytest.raises(ValueError, match="at most 64 names"):
        for sample in range(100):
            own.add({f"sample {sample}": 1.0})
