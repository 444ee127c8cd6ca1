"""If these fail, a framework whose backward hides its sums is predicted as one that does not, or as if they
were free."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planned import MODEL, cluster_of

from myriad.planner.cost.layer_costs import LayerTimes, block_times
from myriad.planner.cost.product_costs import LayerContext
from myriad.planner.workload import FrameworkProfile
from myriad.program.config import OverlapConfig


def times(profile: FrameworkProfile, tp: int, overlap_mode: float) -> LayerTimes:
    return block_times(
        MODEL, LayerContext(cluster_of(), profile, float(tp), 4.0, 2, OverlapConfig(), overlap_mode), 1e6
    )


@settings(deadline=None)
@given(st.sampled_from([1, 2, 4, 8]), st.booleans(), st.booleans())
def test_only_the_backwards_sums_hide_and_they_cost_what_they_take_of_compute(
    tp: int, sequence_parallel: bool, overlap: bool
) -> None:
    plain = FrameworkProfile(sequence_parallel=sequence_parallel)
    waits, overlap_mode = (
        times(one, tp, float(overlap)) for one in (plain, replace(plain, hides_input_grad_comm=True))
    )
    assert overlap_mode.forward == waits.forward and overlap_mode.backward_weight == waits.backward_weight
    shown, before = float(overlap_mode.backward_input.tensor), float(waits.backward_input.tensor)
    assert float(overlap_mode.backward_input.total) - shown == pytest.approx(
        float(waits.backward_input.total) - before
    )
    if overlap or tp == 1:
        assert shown == pytest.approx(before)  # cut in parts they hide anyway
    else:
        every = float(waits.forward.tensor)
        least = 0.15 * every if not sequence_parallel else (1 + 0.15) / 2 * every
        assert least * (1 - 1e-9) <= shown < before
