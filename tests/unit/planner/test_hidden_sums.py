"""If these fail, a framework whose backward hides its sums is predicted as one that does not, or as if they
were free."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planned import MODEL, cluster_of

from myriad.planner.layers import LayerTimes, Slice, block_times
from myriad.planner.work import Practice
from myriad.program.config import OverlapConfig


def times(practice: Practice, tp: int, hides: float) -> LayerTimes:
    return block_times(MODEL, Slice(cluster_of(), practice, float(tp), 4.0, 2, OverlapConfig(), hides), 1e6)


@settings(deadline=None)
@given(st.sampled_from([1, 2, 4, 8]), st.booleans(), st.booleans())
def test_only_the_backwards_sums_hide_and_they_cost_what_they_take_of_compute(
    tp: int, sequence_parallel: bool, overlap: bool
) -> None:
    plain = Practice(sequence_parallel=sequence_parallel)
    waits, hides = (times(one, tp, float(overlap)) for one in (plain, replace(plain, sums_hide=True)))
    assert hides.forward == waits.forward and hides.backward_weight == waits.backward_weight
    shown, before = float(hides.backward_input.tensor), float(waits.backward_input.tensor)
    assert float(hides.backward_input.total) - shown == pytest.approx(
        float(waits.backward_input.total) - before
    )
    if overlap or tp == 1:
        assert shown == pytest.approx(before)  # cut in parts they hide anyway
    else:
        every = float(waits.forward.tensor)
        least = 0.15 * every if not sequence_parallel else (1 + 0.15) / 2 * every
        assert least * (1 - 1e-9) <= shown < before
