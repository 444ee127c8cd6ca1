"""A memory budget takes the least recomputation that fits, and refuses what nothing makes fit; a run that was
settled once is not settled otherwise when it goes on."""

import pytest

from myriad.comm.layout import Layout
from myriad.errors import BadInputError
from myriad.job import load_job
from myriad.planner.cost.layout_costs import Costs
from myriad.planner.memory.recompute_budget import layout_within, needed_bytes
from myriad.planner.workload import Workload
from myriad.recipes.cluster import load_cluster

JOB = load_job("llama3-8b", ["model.layers=6", "model.sequence=2048"])
WORK = Workload(JOB.model, Layout(micro_batch=8), 16)


def with_layout(**changes: object) -> Workload:
    return Workload(JOB.model, WORK.layout.model_copy(update=changes), 16)


def test_less_memory_is_more_recomputation_and_never_more_than_the_budget() -> None:
    everything = needed_bytes(WORK, on_cpu=False)
    least = needed_bytes(with_layout(recompute="full"), on_cpu=False)
    found = []
    for step in range(9):
        budget = everything - (everything - least) * step / 8
        layout = layout_within(WORK, budget, on_cpu=False)
        assert needed_bytes(with_layout(**layout.model_dump()), on_cpu=False) <= budget
        found.append((layout.recompute, layout.recompute_ratio))
        again = layout_within(with_layout(**layout.model_dump()), budget, on_cpu=False)
        assert again == layout
    assert found[0] == ("none", 1.0) and found[-1][0] == "full"
    assert len(set(found)) >= 4
    with pytest.raises(BadInputError, match=r"train.memory_budget.*at least"):
        layout_within(WORK, 0.9 * least, on_cpu=False)


def test_moments_go_to_host_memory_before_layers_are_recomputed_and_only_as_many_as_must() -> None:
    everything = needed_bytes(WORK, on_cpu=False)
    offloaded = needed_bytes(with_layout(offload_optimizer=True), on_cpu=False)
    least = needed_bytes(with_layout(offload_optimizer=True, recompute="full"), on_cpu=False)
    shares, chunks = [], 8  # of six layers, the embedding and the head
    for step in range(6):
        budget = everything - (everything - offloaded) * step / 5
        layout = layout_within(WORK, budget, on_cpu=False, offloads=True)
        settled = with_layout(**layout.model_dump())
        assert layout.recompute == "none" and needed_bytes(settled, on_cpu=False) <= budget
        share = layout.offload_optimizer_ratio if layout.offload_optimizer else 0.0
        if share:
            less = share - 1 / chunks
            one_less = {"offload_optimizer": less > 0, "offload_optimizer_ratio": less or 1.0}
            assert needed_bytes(with_layout(**one_less), on_cpu=False) > budget
        assert layout_within(settled, budget, on_cpu=False, offloads=True) == layout
        shares.append(share)
    assert shares[0] == 0 and shares == sorted(shares) and len(set(shares)) >= 4
    tight = layout_within(WORK, (offloaded + least) / 2, on_cpu=False, offloads=True)
    assert tight.offload_optimizer and tight.recompute != "none"
    barely = needed_bytes(with_layout(recompute="full"), on_cpu=False)
    alone, both = (layout_within(WORK, barely, on_cpu=False, offloads=one) for one in (False, True))
    assert alone.recompute == "full" and both.offload_optimizer
    assert both.recompute != "full" or both.recompute_ratio < alone.recompute_ratio, "less is computed again"


def test_a_share_of_the_layers_costs_a_share_of_the_time() -> None:
    cluster = load_cluster("one-node-8xh100")
    seconds = [
        sum(stage.backward for stage in Costs(with_layout(**changes), cluster).stages)
        for changes in ({}, {"recompute": "full", "recompute_ratio": 0.5}, {"recompute": "full"})
    ]
    assert seconds[0] < seconds[1] < seconds[2]
    assert seconds[1] - seconds[0] == pytest.approx((seconds[2] - seconds[0]) / 2, rel=0.25)


def test_a_budget_that_nothing_fits_is_refused_before_ranks_start() -> None:
    with pytest.raises(BadInputError, match=r"train.memory_budget = \"40.0 MiB\": at least"):
        load_job("tiny", ["train.memory_budget=40 MiB"])
    assert load_job("tiny", ["train.memory_budget=2 GiB"]).train.memory_budget == 2**31


def test_a_ratio_without_full_recomputation_is_refused() -> None:
    with pytest.raises(BadInputError, match=r"layout.recompute_ratio"):
        load_job("tiny", ["layout.recompute_ratio=0.5"])
