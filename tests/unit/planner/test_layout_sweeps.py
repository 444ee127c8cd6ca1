"""If these fail, the planner's choice among published layouts is graded by rows that do not belong together,
or by differences that are noise."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from myriad.cli.main import main
from myriad.planner.validation.layout_sweeps import LayoutSweep, layout_sweeps, summarize_sweeps
from myriad.planner.validation.prediction_errors import ErrorScore, PredictedRow, TableResult
from myriad.planner.validation.published_tables import PublishedTable, parse_table
from myriad.recipes.framework import ReadyRecipes

RECIPES = ReadyRecipes()
HEADER = (
    "source,framework,model,layers,hidden,heads,vocab,seq,global_batch,gpus,gpu_type,tp,pp,micro_batch,vpp,"
)
HEADER += "recompute,dtype,iteration_s\n"


def line(
    seconds: float,
    tp: int = 1,
    *,
    source: str = "paper",
    framework: str = "nanotron",
    layers: int = 4,
    batch: int = 64,
    gpus: int = 8,
    kind: str = "H100",
    micro_batch: int | str = 1,
    recompute: str = "none",
    dtype: str = "bf16",
    name: str = "small",
) -> str:
    model = f"{name},{layers},1024,8,32000,1024"
    layout = f"{tp},1,{micro_batch},1,{recompute}"
    return f"{source},{framework},{model},{batch},{gpus},{kind},{layout},{dtype},{seconds}"


def table_of(*lines: str) -> PublishedTable:
    return parse_table("t.csv", HEADER + "\n".join(lines) + "\n", RECIPES)


def run(*arguments: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert not ended.value.code


def swept(predicted: Sequence[float], *lines: str) -> list[LayoutSweep]:
    """Return the sweeps of a table with these predictions of its rows."""
    table = table_of(*lines)
    rows = [PredictedRow(row, row.works[0], own, ()) for row, own in zip(table.rows, predicted, strict=True)]
    score = ErrorScore(tuple(one.error for one in rows), None)
    return layout_sweeps([TableResult(table, tuple(rows), score, None, None, ())])


def test_the_regret_is_what_the_choice_loses_against_the_best() -> None:
    (one,) = swept([1.0, 2.0, 3.0], line(1.1, 1), line(1.0, 2), line(3.0, 4))
    assert (one.chosen.seconds, one.best.seconds, one.num_rows) == (1.1, 1.0, 3)
    assert one.regret == pytest.approx(0.1)
    assert one.tau == pytest.approx(1 / 3)
    assert one.name == "small, 8 H100 SXM 80 GB, batch 64, s1024"


def test_pairs_within_three_percent_are_in_no_order() -> None:
    (one,) = swept([3.0, 2.0, 1.0], line(1.0, 1), line(1.029, 2), line(1.2, 4))
    assert one.ordered_pairs == (-2, 2) and one.tau == -1
    (alike,) = swept([3.0, 2.0, 1.0], line(1.0, 1), line(1.01, 2), line(1.02, 4))
    assert alike.tau is None and alike.regret == pytest.approx(0.02)


def test_equal_predictions_are_no_order_and_the_slowest_of_them_is_the_choice() -> None:
    (one,) = swept([1.0, 1.0, 2.0], line(1.0, 1), line(1.5, 2), line(2.0, 4))
    assert one.ordered_pairs == (2, 3)
    assert one.regret == pytest.approx(0.5)


def test_runs_of_one_layout_count_as_one() -> None:
    lines = line(1.0, 1), line(1.2, 1), line(1.3, 2), line(1.4, 4)
    (one,) = swept([1.0, 1.0, 1.1, 1.2], *lines)
    assert one.num_rows == 4 and len(one.layouts) == 3
    assert one.best.seconds == pytest.approx(1.1) and one.tau == 1
    assert swept([1.0, 1.0, 1.1], *lines[:3]) == []


@pytest.mark.parametrize(
    "other",
    [
        {"source": "another"},
        {"framework": "maxtext"},
        {"layers": 8},
        {"batch": 128},
        {"gpus": 16},
        {"kind": "A100"},
        {"dtype": "fp32"},
        {"dtype": "fp8"},
    ],
)
def test_rows_that_differ_in_more_than_the_layout_are_no_sweep(other: dict[str, int | str]) -> None:
    alone = line(3.0, 4, **other)  # type: ignore[arg-type]
    assert swept([1.0, 2.0, 3.0], line(1.0, 1), line(2.0, 2), alone) == []
    assert len(swept([1.0, 2.0, 3.0], line(1.0, 1), line(2.0, 2), line(3.0, 4))) == 1


def test_micro_batch_and_recomputation_are_parts_of_a_layout() -> None:
    lines = line(1.0), line(2.0, micro_batch=2), line(3.0, recompute="full"), line(4.0, micro_batch="")
    (one,) = swept([1.0, 2.0, 3.0, 4.0], *lines)
    assert len(one.layouts) == 4 and one.tau == 1


def test_a_layout_in_the_name_of_a_model_does_not_part_a_sweep() -> None:
    names = ("small / 1F1B", "small / ZB-1p", "small / ZB-2p")
    lines = (line(2.0**n, 2**n, name=name) for n, name in enumerate(names))
    (one,) = swept([1.0, 2.0, 3.0], *lines)
    assert one.name == "small, 8 H100 SXM 80 GB, batch 64, s1024"


def test_a_summary_weighs_sweeps_alike() -> None:
    right = swept([1.0, 2.0, 3.0], line(1.0, 1), line(2.0, 2), line(3.0, 4))
    wrong = swept([3.0, 2.0, 1.0], line(1.0, 1), line(1.02, 2), line(1.2, 4))
    alike = swept([3.0, 2.0, 1.0], line(1.0, 1), line(1.01, 2), line(1.02, 4))
    found = summarize_sweeps([*right, *wrong, *alike])
    assert (found.num_sweeps, found.num_close_regrets, found.num_taus, found.num_close_taus) == (3, 2, 2, 1)
    assert found.median_regret == pytest.approx(0.02) and found.worst_regret == pytest.approx(0.2)
    assert found.median_tau == 0 and found.all_pairs_tau == pytest.approx(1 / 5)


def test_validate_reports_the_choice_in_text_and_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t.csv"
    path.write_text(HEADER + "\n".join((line(0.2, 1), line(0.4, 2), line(0.9, 4))) + "\n")
    run("validate", str(path), "--json")
    found = json.loads(capsys.readouterr().out)
    assert [len(table["rows"]) for table in found["tables"]] == [3]
    (one,) = found["sweeps"]
    assert (one["name"], one["rows"]) == ("small, 8 H100 SXM 80 GB, batch 64, s1024", 3)
    assert one["regret"] == 0 and one["tau"] == 1
    assert found["sweeps_summary"]["worst_regret"] == 0
    run("validate", str(path))
    assert "Choice in 1 sweep: regret 0.0% in the median" in " ".join(capsys.readouterr().out.split())


def test_a_table_without_a_sweep_has_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.csv"
    path.write_text(HEADER + line(0.2, 1) + "\n")
    run("validate", str(path), "--json")
    found = json.loads(capsys.readouterr().out)
    assert found["sweeps"] == [] and found["sweeps_summary"] is None
