"""If these fail, a cluster that was calibrated with a user's own runs predicts their next layout worse than
its data sheets, or promises an interval that does not hold."""

from dataclasses import replace

import numpy as np
import pytest

from myriad.errors import BadInputError
from myriad.planner import (
    ClusterFactors,
    PublishedRow,
    TableOptions,
    describe_interval,
    fit_cluster,
    parse_table,
    scaled_cluster,
    steps_of,
)
from myriad.planner.cluster_config import Calibration
from myriad.planner.validation.prediction_errors import predict_rows
from myriad.recipes.cluster import load_cluster
from myriad.recipes.framework import ReadyRecipes

LAYOUTS = (
    (64, 1, 1, 1, 64),
    (64, 8, 1, 4, 512),
    (128, 4, 4, 1, 512),
    (256, 1, 1, 1, 256),
    (16, 1, 2, 1, 16),
    (32, 8, 4, 2, 512),
)
"""GPUs, tp, pp, micro-batch, global batch."""


def table(
    framework: str = "megatron-core", layouts: tuple[tuple[int, ...], ...] = LAYOUTS
) -> list[PublishedRow]:
    lines = ["framework,model,gpus,tp,pp,micro_batch,global_batch,recompute,iteration_s"]
    lines += [
        f"{framework},llama3-8b,{gpus},{tp},{pp},{micro_batch},{batch},none,1"
        for gpus, tp, pp, micro_batch, batch in layouts
    ]
    options = TableOptions(cluster="eos-3072xh100")
    return list(parse_table("own.csv", "\n".join(lines), ReadyRecipes(), options).rows)


def measured(rows: list[PublishedRow], factors: ClusterFactors) -> list[PublishedRow]:
    """Give the rows the times of a cluster whose rates are not those of its data sheets."""
    moved = [replace(row, cluster=scaled_cluster(row.cluster, factors)) for row in rows]
    return [replace(row, seconds=one.seconds) for row, one in zip(rows, predict_rows(moved), strict=True)]


@pytest.mark.parametrize("true", [ClusterFactors(products=0.8), ClusterFactors(node=0.4)], ids=str)
def test_rates_are_found_from_their_iterations(true: ClusterFactors) -> None:
    calls: list[int] = []
    rows = measured(table(), true)
    found = fit_cluster(rows, lambda: calls.append(1))
    assert found.before.worst > 0.1
    assert found.after.worst < 0.05
    assert found.interval >= found.left_out.mean
    moved = np.log(found.factors) / np.log(min(true))
    assert moved[np.argmin(true)] > 0.7 and max(np.delete(moved, np.argmin(true))) < 0.4, found.factors
    assert len(calls) == steps_of(len(rows))


def test_factors_at_their_bound_are_named() -> None:
    rows = measured(table(), ClusterFactors())
    assert fit_cluster(rows).at_bound == ()
    slower = [replace(row, seconds=30 * row.seconds) for row in rows]
    found = fit_cluster(slower)
    assert "products" in found.at_bound and found.factors.products == pytest.approx(1 / 4)


def test_one_odd_row_does_not_decide() -> None:
    rows = measured(table(), ClusterFactors())
    found = fit_cluster([replace(rows[0], seconds=4 * rows[0].seconds), *rows[1:]])
    assert sorted(abs(one) for one in found.after.errors)[-2] < 0.1


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (table(layouts=LAYOUTS[:2]), "at least 3 rows"),
        ([*table(layouts=LAYOUTS[:2]), *table("nanotron", LAYOUTS[:2])], "rows of one framework"),
    ],
)
def test_rows_that_cannot_be_fitted_are_refused(rows: list[PublishedRow], says: str) -> None:
    with pytest.raises(BadInputError, match=says):
        fit_cluster(rows)


def test_the_interval_is_named_for_what_was_calibrated_only() -> None:
    plain = load_cluster("eos-3072xh100")
    own = Calibration(framework="nanotron", rows=5, interval_ratio=0.06)
    cluster = plain.model_copy(update={"calibration": own})
    says = describe_interval(cluster, "nanotron", has_experts=False)
    assert "within 6%: nanotron, calibrated with 5" in says
    for framework, has_experts in (("megatron-core", False), ("nanotron", True)):
        others = {"framework": framework, "has_experts": has_experts}
        assert describe_interval(cluster, **others) == describe_interval(plain, **others)


def test_every_share_of_a_rate_is_scaled_and_none_that_is_off() -> None:
    factors = ClusterFactors(products=0.5, streams=0.8)
    own = load_cluster("gb200-576xgb200")
    before, after = own.accelerator, scaled_cluster(own, factors).accelerator
    for key, factor in (("float8_achievable_ratio", 0.5), ("flash_ratio", 0.8), ("flash3_ratio", 0.8)):
        assert getattr(after, key) == pytest.approx(factor * getattr(before, key))
    selene = load_cluster("selene-2520xa100")
    assert scaled_cluster(selene, factors).accelerator.flash3_ratio is None
