"""If these fail, predictions have come loose from what was measured, or a table is read as something it is
not."""

import csv
import math
import os
from dataclasses import replace
from functools import cache
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from myriad.errors import BadInputError
from myriad.planner.validation.framework_errors import framework_errors
from myriad.planner.validation.prediction_errors import (
    TableResult,
    intervals,
    predict_table,
    ratios,
)
from myriad.planner.validation.prediction_interval import (
    EXPERTS_RATIO,
    FRAMEWORKS,
    LEAST_RATIO,
    PROFILE_RATIO,
    UNKNOWN_RATIO,
    describe_interval,
    interval_ratio,
    interval_width,
)
from myriad.planner.validation.published_tables import TableOptions, builtin_tables, read_table
from myriad.recipes.cluster import load_cluster
from myriad.recipes.framework import ReadyRecipes

RECIPES = ReadyRecipes()
clusters = RECIPES.cluster


@cache
def result(name: str) -> TableResult:
    return predict_table(read_table(name, RECIPES))


ROWS = {
    "activation_recompute_table5_a100.csv": 4,
    "llama3_405b_table4.csv": 1,
    "megascale_figure9.csv": 6,
    "megascale_table2.csv": 16,
    "megascale_table3.csv": 9,
    "megatron_core_h100.csv": 5,
    "megatron_sc21_table1_a100.csv": 6,
    "vtrain_multi_node_a100.csv": 73,
}


def test_every_published_row_is_predicted() -> None:
    assert builtin_tables() == sorted(ROWS)
    assert {name: len(read_table(name, RECIPES).rows) for name in ROWS} == ROWS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mean", "worst"),
    [
        ("megascale_table2.csv", 0.04, 0.08),
        ("megatron_sc21_table1_a100.csv", 0.06, 0.10),
        ("activation_recompute_table5_a100.csv", 0.03, 0.06),
        ("megatron_core_h100.csv", 0.06, 0.15),
    ],
)
def test_times_are_predicted_from_data_sheets(name: str, mean: float, worst: float) -> None:
    score = result(name).zero_shot
    assert score.mean < mean and score.worst < worst
    assert score.rank_correlation is None or score.rank_correlation > 0.95


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name, rows in ROWS.items() if 1 < rows < 73 and name != "megascale_figure9.csv"]
)
def test_no_table_errs_to_one_side(name: str) -> None:
    """The 530B model of figure 9 does: every row is predicted too fast (docs/benchmarks/validation.md)."""
    assert not result(name).zero_shot.is_one_sided


@pytest.mark.slow
def test_the_mfu_of_llama_3_is_predicted() -> None:
    (one,) = result("llama3_405b_table4.csv").rows
    assert one.row.mfu(one.row.seconds) == pytest.approx(0.43, abs=0.0005)
    assert one.row.mfu(one.seconds) == pytest.approx(0.43, abs=0.02)


@pytest.mark.slow
def test_a_table_that_gives_only_mfu_is_predicted_in_seconds_and_mfu() -> None:
    found = result("megascale_figure9.csv")
    assert found.zero_shot.mean < 0.06 and found.zero_shot.worst < 0.08
    rows = [one.row for one in found.rows]
    published = [0.492, 0.488, 0.482, 0.543, 0.541, 0.543]
    assert [row.mfu(row.seconds) for row in rows] == pytest.approx(published)
    assert {row.works[0].layout.num_stages for row in rows} == {105}


def test_two_systems_of_a_table_are_compared_by_mfu() -> None:
    found = {one.setting: one for one in ratios(result("megascale_table2.csv"))}
    assert len(found) == 8
    largest = found["175B, 12,288 GPUs"]
    assert (largest.system, largest.baseline) == ("MegaScale", "Megatron-LM")
    assert largest.published == pytest.approx(1.34, abs=0.005)
    assert largest.predicted == pytest.approx(1.34, abs=0.05)
    assert ratios(result("megatron_core_h100.csv")) == []


def test_each_technique_of_the_ablation_gains_what_it_gained() -> None:
    rows = result("megascale_table3.csv").rows
    points = np.diff([100 * one.row.mfu(one.row.seconds) for one in rows])
    predicted = np.diff([100 * one.row.mfu(one.seconds) for one in rows])
    assert np.abs(predicted - points).max() < 1.0
    assert abs(predicted.sum() - points.sum()) < 1.5


def test_factors_fitted_to_some_rows_hold_for_the_others() -> None:
    found = result("vtrain_multi_node_a100.csv")
    assert found.calibrated is not None and found.left_out is not None
    assert found.calibrated.mean < 0.08 and found.left_out.mean < 0.10


def test_parts_of_a_prediction_are_all_of_it() -> None:
    for name in ("megascale_table2.csv", "megatron_core_h100.csv"):
        for one in result(name).rows:
            assert sum(one.parts) == pytest.approx(one.seconds)
            assert all(part >= 0 for part in one.parts)


def logarithms(name: str) -> np.ndarray:
    return np.log1p(np.array(result(name).zero_shot.errors))


def test_an_interval_comes_from_other_tables_and_is_wider_the_fewer_there_are() -> None:
    names = ("megascale_table2.csv", "megatron_core_h100.csv")
    found = intervals([result(name) for name in names])
    for (ratio, held), own, other in zip(found, names, reversed(names), strict=True):
        half = 6.3138 * np.sqrt(np.mean(logarithms(other) ** 2))  # Student's t, one degree of freedom
        assert np.log1p(ratio) == pytest.approx(half, rel=1e-3)
        assert held == np.mean(np.abs(logarithms(own)) <= half)
    same = [logarithms("megascale_table2.csv")] * 7
    assert interval_width(same) == pytest.approx(1.8946 * np.sqrt(np.mean(same[0] ** 2)), rel=1e-3)


def test_of_a_table_that_was_not_seen_intervals_hold_nine_rows_of_ten() -> None:
    """Each table counts once. vTrain's are all layouts of a sweep: of the quicker half of each model's, which
    somebody might choose, they hold as many."""
    results = [result(name) for name in ROWS]
    assert np.mean([held for _, held in intervals(results)]) > 0.9
    half = interval_width([logarithms(name) for name in ROWS if not name.startswith("vtrain")])
    sweep, quick = result("vtrain_multi_node_a100.csv").rows, []
    for model in {one.row.model for one in sweep}:
        own = sorted((one for one in sweep if one.row.model == model), key=lambda one: one.row.seconds)
        quick += own[: len(own) // 2]
    assert np.mean([abs(np.log1p(one.error)) <= half for one in quick]) > 0.8


def test_plans_and_forecasts_promise_what_the_tables_do() -> None:
    """Of frameworks whose rows are predicted in a few seconds; `myriad validate` prints the others."""
    options = TableOptions(skip_bad=True)
    table = read_table("iterations.csv", RECIPES, options)
    blackwell = read_table("grace_blackwell.csv", RECIPES, options)
    for name in ("internevo", "maxtext", "megatron-bridge-nvfp4", "nanotron"):
        own = tuple(row for row in (*table.rows, *blackwell.rows) if row.framework == name)
        errors = [abs(np.log1p(one.error)) for one in predict_table(replace(table, rows=own)).rows]
        rows, ratio, _ = FRAMEWORKS[name]
        assert rows == len(own)
        assert np.mean(np.array(errors) <= np.log1p(ratio + 0.005)) == pytest.approx(0.9, abs=0.06)
    seen = [framework_errors([result(name) for name in ROWS])]
    assert all(one.p90 < PROFILE_RATIO for own in seen for one in own if len(one.errors) > 1)


def test_the_promise_names_what_it_is_for() -> None:
    eos = clusters("eos-3072xh100", 64)
    assert interval_ratio(eos) == PROFILE_RATIO
    assert interval_ratio(load_cluster("laptop")) is None
    assert interval_ratio(eos, has_experts=True) == EXPERTS_RATIO
    assert interval_ratio(eos, "unknown") == UNKNOWN_RATIO
    assert interval_ratio(eos, "megascale") == LEAST_RATIO > FRAMEWORKS["megascale"].ratio
    assert "megatron-core on H100" in describe_interval(eos, "megatron-core", has_experts=False)
    assert "without a profile" in describe_interval(eos, "unknown", has_experts=False)
    assert "experts" in describe_interval(eos, has_experts=True)
    assert describe_interval(load_cluster("laptop"), has_experts=False) == ""


def test_any_file_with_the_same_columns_is_taken(tmp_path) -> None:
    other = tmp_path / "mine.csv"
    other.write_text(
        "note,system,gpus,batch_sequences,iteration_seconds\nx,MegaScale,512,768,17.1\n", encoding="utf-8"
    )
    (row,) = read_table(str(other), RECIPES).rows
    assert row.cluster.world == 512 and row.works[0].layout.dp == 8 and row.seconds == 17.1


_HEADER = "system,gpus,batch_sequences,iteration_seconds"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a,b\n1,2\n", "must have the columns of one of these tables"),
        (
            _HEADER + "\nMegaScale,many,768,17.1\n",
            "line 2, column 'gpus' = \"many\": a number above 0",
        ),
        (_HEADER + "\n", "has no rows"),
        *(
            (
                f"{_HEADER}\nMegaScale,256,768,30\nMegaScale,256,768,{bad}\n",
                f"bad.csv, line 3, column 'iteration_seconds' = \"{bad.strip()}\": ",
            )
            for bad in ("0", "-5", "nan", "inf", "", "1e400")
        ),
        (
            _HEADER + "\nMegaScale,100,768,30\n",
            "a multiple of tp x pp = 64",
        ),
        (
            _HEADER + "\nother,256,768,30\n",
            "one of Megatron-LM, MegaScale",
        ),
        (_HEADER + "\nMegaScale,256,768\n", "= none: needed"),
        (_HEADER + "\nMegaScale,256,768,3,4\n", "more cells"),
    ],
)
def test_a_table_that_cannot_be_read_is_refused(tmp_path, text: str, said: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(BadInputError, match=said):
        read_table(str(path), RECIPES)


def test_a_table_that_is_not_there_is_refused() -> None:
    with pytest.raises(BadInputError, match=r"nowhere\.csv"):
        read_table("nowhere.csv", RECIPES)


_CELL = st.one_of(
    st.sampled_from(["0", "1", "2", "8", "-1", "nan", "inf", "1e9", "1e400", "", " ", "0.5", "x", "1_0"]),
    st.integers(1, 4096).map(str),
    st.text(max_size=4),
)


@pytest.mark.slow
@settings(
    derandomize=True,
    deadline=None,
    max_examples=10,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.data())
def test_any_cell_is_read_or_refused_with_its_place(tmp_path: Path, data: st.DataObject) -> None:
    """One row of a published table with a few cells changed: a finite prediction, or one line of error."""
    name = data.draw(
        st.sampled_from(sorted(set(ROWS) - {"megascale_figure9.csv"}))
    )  # read as table 2, but slower
    lines = list(
        csv.DictReader(
            (resources.files("myriad.planner.validation") / "tables" / name).read_text().splitlines()
        )
    )
    cells = dict(data.draw(st.sampled_from(lines)))
    for column in data.draw(st.lists(st.sampled_from(sorted(cells)), min_size=1, max_size=3)):
        cells[column] = data.draw(_CELL)
    path = tmp_path / "fuzzed.csv"
    with path.open("w", encoding="utf-8", errors="replace", newline="") as file:
        writer = csv.DictWriter(file, list(cells))
        writer.writeheader()
        writer.writerow(cells)
    try:
        found = predict_table(read_table(str(path), RECIPES))
    except BadInputError as error:
        assert error.allowed and "\n" not in error.allowed
        return
    for one in found.rows:
        assert 0 < one.seconds < math.inf and 0 < one.row.seconds < math.inf and math.isfinite(one.error)


_TABLE = (resources.files("myriad.planner.validation") / "tables" / "megascale_table2.csv").read_text()


@pytest.mark.parametrize(
    "changed",
    [
        "\ufeff" + _TABLE,
        _TABLE.replace("\n", "\r\n"),
        "\n".join(f'{line},"a, ""b""\n"' for line in _TABLE.splitlines()),
    ],
    ids=["byte order mark", "CRLF", "quoted column of one's own"],
)
def test_a_table_is_read_however_it_was_saved(tmp_path: Path, changed: str) -> None:
    path = tmp_path / "mine.csv"
    path.write_bytes(changed.encode())
    plain = read_table("megascale_table2.csv", RECIPES)
    assert [row.seconds for row in read_table(str(path), RECIPES).rows] == [row.seconds for row in plain.rows]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (_TABLE.replace(",", ";"), "commas"),
        (_TABLE.replace(",", "\t"), "commas"),
        (_TABLE.replace("mfu_percent", "gpus", 1), "gpus occurs twice"),
        (_TABLE + "\udcff", "not UTF-8"),
        ("\x1f\udc8b\x08" + _TABLE, "is compressed"),
        ("", "is empty"),
        (" \n\n", "is empty"),
        ("x" * 2**18 + "\n1\n", "not CSV at line 1"),
        (_TABLE + "x" * 2**18, "not CSV at line 18"),
        ("model,gpus,iteration_s\nllama3-8b,8,4\n", "lacks gpu_type"),
        ("model,gpus,gpu_type\nllama3-8b,8,H100\n", "lacks one of iteration_s, tokens"),
        (_TABLE + '"open', "not CSV"),
    ],
)
def test_a_table_that_is_ambiguous_is_refused(tmp_path: Path, changed: str, said: str) -> None:
    path = tmp_path / "mine.csv"
    path.write_bytes(changed.encode(errors="surrogateescape"))
    with pytest.raises(BadInputError, match=said) as refused:
        read_table(str(path), RECIPES)
    assert "\n" not in str(refused.value)


def test_a_table_that_is_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.csv")
    with pytest.raises(BadInputError, match="regular file"):
        read_table(str(tmp_path / "pipe.csv"), RECIPES)
