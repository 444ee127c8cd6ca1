"""If these fail, `myriad plan` answers wrongly, writes a file that cannot be trained, or fails in many
lines."""

import json
import re
import subprocess
import sys
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from myriad.cli.main import main
from myriad.cli.plan.plan_tables import show_waterfalls
from myriad.forecasts.planned_job import planned_precision
from myriad.job import dump_toml, load_job
from myriad.recipes.cluster import load_cluster
from myriad.reports.charts.pareto_chart import pareto_svg

SMALL = ("--what-if", "accelerator.memory_bytes=4GiB")
ON_DEVICE = ("--layout.offload_activations", "0", "--layout.offload_optimizer", "false")


def _plan(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["plan", *arguments])
    return int(ended.value.code or 0)


def _told(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert _plan(*arguments, "--json") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_plan_is_the_job_with_a_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, picture = tmp_path / "plan.toml", tmp_path / "pareto.svg"
    told = _told(capsys, "tiny-3d", "--gpus", "4", "--out", str(out), "--picture", str(picture))
    best = next(plan for plan in told["plans"] if plan["rank"] == "1")
    planned, job = load_job(str(out)), load_job("tiny-3d")
    keys = planned.layout.model_dump(mode="json")
    assert {**keys, **best["keys"]} == keys and planned.layout.world == 4
    assert planned.overlap.model_dump() == {**job.overlap.model_dump(), **best["overlap"]}
    assert planned.model_copy(update={"layout": job.layout, "overlap": job.overlap}) == job
    assert sum(told["waterfall"].values()) == pytest.approx(best["seconds"])
    root = ElementTree.parse(picture).getroot()
    assert len(root.findall(".//{*}circle/{*}title")) == len(told["front"]) + 1


@pytest.mark.parametrize(
    ("memory", "seconds", "capacity"),
    [
        ((6.0, 80.0), (3.07, 6.56), 131.0),
        ((0.161, 0.165), (0.01, 0.15), 4.0),
        ((1.0, 2.0), (3.5, 3.50001), 80.0),
    ],
)
def test_the_axes_of_the_picture_can_be_read(
    memory: tuple[float, float], seconds: tuple[float, float], capacity: float
) -> None:
    """Four numbers at least on each, apart from each other, inside the picture, whatever the ranges are."""
    points = [(size * 2**30, time, "dp 1") for size, time in zip(memory, reversed(seconds), strict=True)]
    root = ElementTree.fromstring(pareto_svg("a job", points, points[1], capacity * 2**30))
    texts = [(float(t.get("x", 0)), float(t.get("y", 0)), t.text or "") for t in root.findall("{*}text")]
    across = sorted(x for x, y, _ in texts if y == 368)
    up = sorted(y for x, y, _ in texts if x == 62)
    for places, low, high, gap in ((across, 70, 700, 20), (up, 80, 360, 10)):
        assert 4 <= len(places) <= 16 and low <= places[0] and places[-1] <= high
        assert all(b - a > gap for a, b in pairwise(places))
    assert len({words for _, _, words in texts}) == len(texts)


def test_a_layout_as_written_is_ranked_among_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "job.toml"
    job.write_text(dump_toml(load_job("tiny", ["layout.tp=4"])))
    told = _told(capsys, str(job), "--gpus", "4", "--top", "3")
    rows = [plan["rank"] for plan in told["plans"]]
    assert rows[-1] == "as written" and rows[:3] == ["1", "2", "3"]
    written = told["plans"][-1]
    assert written["keys"]["tp"] == 4 and written["seconds"] > told["plans"][0]["seconds"]


def test_a_layout_given_on_the_command_line_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    told = _told(capsys, "tiny-3d", "--gpus", "4", "--layout.tp", "2", "--train.global_batch", "6")
    assert {plan["keys"]["tp"] for plan in told["plans"]} == {2}


def test_of_layouts_that_share_the_work_alike_a_few_are_ranked(capsys: pytest.CaptureFixture[str]) -> None:
    told = _told(capsys, "gpt2-124m", "--cluster", "one-node-8xh100", "--top", "10")
    grids = [tuple(plan["keys"][key] for key in ("dp", "tp", "pp", "micro_batch")) for plan in told["plans"]]
    assert len(grids) > 3 and max(grids.count(grid) for grid in grids) <= 3


def test_a_layout_for_another_number_of_accelerators_reports_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "job.toml"
    job.write_text(dump_toml(load_job("tiny", ["layout.dp=2"])))
    assert _plan(str(job), "--gpus", "4", "--top", "1") == 0
    rows = capsys.readouterr().out.splitlines()
    written = next(row for row in rows if row.startswith("as written"))
    assert written.endswith(", on 2") and not any(row.endswith(", on 4") for row in rows)


def test_the_error_names_the_default_cluster_on_which_nothing_fits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert _plan("gpt-13b") == 2
    assert "--cluster was not given, and is laptop" in capsys.readouterr().err


def test_checkpoints_are_shown_where_they_cost_something() -> None:
    for seconds in (0.0, 0.5):
        with StringIO() as text:
            show_waterfalls(Console(file=text), {"matrix products": 2.0, "checkpoints": seconds}, [])
            assert ("checkpoints" in text.getvalue()) == (seconds > 0)


def test_a_faster_network_makes_it_quicker(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("gpt2-124m", "--cluster", "vegiant-32xv100-100g", "--top", "1", "--gpus", "16")
    assert _plan(*arguments) == 2
    assert 'train.precision = "bfloat16": float16, float32 or auto' in capsys.readouterr().err
    told = _told(capsys, *arguments, "--train.precision", "float16", "--what-if", "links.ib=800Gbps")
    assert told["precision"] == "float16"
    before = next(plan for plan in told["plans"] if plan["rank"] == "before")
    assert told["plans"][0]["seconds"] < before["seconds"]


def test_price_and_energy_are_the_recipe_s_until_the_cluster_has_its_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ("gpt2-124m", "--cluster", "eos-3072xh100", "--gpus", "8", "--top", "1", *ON_DEVICE)
    (listed, *_) = _told(capsys, *arguments)["plans"]
    hours = 8 * 24 * listed["days"]
    assert listed["dollars"] == pytest.approx(2.69 * hours)
    assert listed["megawatt_hours"] == pytest.approx(700 * hours / 1e6)
    changed = ("--what-if", "dollars_per_hour=2", "--what-if", "watts_per_accelerator=1300")
    (own, *_) = _told(capsys, *arguments, *changed)["plans"]
    assert own["dollars"] == pytest.approx(2 * hours)
    assert own["megawatt_hours"] == pytest.approx(1300 * hours / 1e6)


@pytest.mark.parametrize(
    ("asked", "cluster", "planned"),
    [
        ([], "vegiant-32xv100-100g", "float16"),
        ([], "megascale-256xa100", "bfloat16"),
        ([], "laptop", "float32"),
        (
            ["overlap.optimizer_in_backward=true", "optimizer.clip_norm=off"],
            "vegiant-32xv100-100g",
            "float32",
        ),
        (["train.precision=float16"], "megascale-256xa100", "float16"),
    ],
)
def test_a_job_is_planned_in_the_type_that_it_would_compute_in(
    asked: list[str], cluster: str, planned: str
) -> None:
    """Ranks choose the type in the same way: see test_precision."""
    job = load_job("tiny", ["train.precision=auto", *asked])
    assert planned_precision(job, load_cluster(cluster)) == planned


def test_a_curve_has_a_row_for_each_number(capsys: pytest.CaptureFixture[str]) -> None:
    told = _told(
        capsys, "gpt2-124m", "--cluster", "megascale-256xa100", "--gpus", "4..16", "--objective", "cost"
    )
    assert [row["accelerators"] for row in told["curve"]] == [4, 6, 8, 16]
    rates = [row["tokens_per_second"] for row in told["curve"] if "seconds" in row]
    assert rates == sorted(rates)
    assert told["cheapest"]["dollars"] == min(row["dollars"] for row in told["curve"] if "dollars" in row)


def test_the_fewest_accelerators_in_time_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("gpt2-124m", "--cluster", "megascale-256xa100")
    few = _told(capsys, *arguments, "--days", "20")
    many = _told(capsys, *arguments, "--days", "2")
    assert few["days"] <= 20 and many["days"] <= 2
    assert few["accelerators"] < many["accelerators"]


def test_what_is_printed_has_every_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("gpt2-124m", "--cluster", "megascale-256xa100", "--gpus", "16")
    assert _plan(*arguments, "--straggler", "node=1:1.2x", "--out", str(tmp_path / "p.toml")) == 0
    text = capsys.readouterr().out
    for words in ("layouts", "MFU", "as written", "pipeline bubble", "its neighbours", "would help", "nodes"):
        assert words in text
    assert str(tmp_path / "p.toml") in text.replace("\n", "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tiny", "--cluster", "nowhere"], "h200-512xh200, laptop"),
        (["tiny", "--gpus", "8"], "at most 4: laptop is one node"),
        (["tiny", "--gpus", "0"], "at least 1, or a range"),
        (["tiny", "--gpus", "1000000000"], "at most 1,048,576"),
        (["tiny", "--gpus", "1..1000000000"], "at most 1,048,576"),
        (["tiny", "--gpus", "9" * 5000], "at most 1,048,576"),
        (["tiny", "--what-if", "nodes=1000000000"], "at most 1,048,576 accelerators"),
        (["tiny", "--straggler", f"node=0:{'9' * 400}x"], "1x to 1000x"),
        (["tiny", "--gpus", "4..2"], "a range rises"),
        (["tiny", "--gpus", "many"], "at least 1, or a range"),
        (["tiny", "--days", "0"], "a finite number above 0"),
        (["tiny", "--days", "nan"], "a finite number above 0"),
        (
            ["tiny", "--what-if", "links.spine=1Gbps"],
            "only links.node; a new one is given whole: links.spine={",
        ),
        (
            ["tiny", "--what-if", "links.knot=1Gbps"],
            "there are links.node, links.network, links.tensor, links.spine",
        ),
        (["tiny", "--what-if", "accelerator.memry_bytes=1"], "did you mean accelerator.memory_bytes?"),
        (["tiny", "--what-if", "node=2"], "laptop: node = 2: unknown key; did you mean nodes?"),
        (["tiny", "--what-if", "links=2"], "is a section; there are links.node"),
        (["tiny", "--what-if", "nodes=0"], "laptop: nodes = 0: must be at least 1"),
        (["tiny", "--what-if", "nodes=2"], "links.network = none: needed: the cluster has 2 nodes"),
        (["tiny", "--days", "1e-9"], "are needed"),
        (["tiny", "--what-if", "links.ib=200Gbps"], "only links.node"),
        (["tiny", "--what-if", "accelerator=abacus"], "one of a100-sxm-40gb"),
        (["tiny", "--straggler", "node=9:2x"], "the nodes 0 to 0"),
        (["tiny", "--straggler", "17"], "node=17:1.1x"),
        (["tiny", "--straggler", "node=0:2x"], "more than one node to order"),
        (["tiny", "--out", "nowhere/plan.toml"], "there is no folder nowhere"),
        (["tiny", "--out", "plan.json"], "ends in .toml"),
        (["tiny", "--picture", "plan.gif"], "ends in .svg"),
        (["tiny", "--days", "2", "--out", "plan.toml"], "needs one number of accelerators"),
        (["tiny", "--days", "2", "--objective", "memory"], "time with --days"),
        (["tiny", "--objective", "cost"], "with a range of --gpus"),
        (["tiny", "--gpus", "1..4", "--objective", "memory"], "time or cost with a range"),
        (["tiny", "--gpus", "1..4", "--picture", "plan.svg"], "needs one number of accelerators"),
        (["llama3-405b", "--cluster", "one-node-8xh100"], "GiB of the 80.0 GiB of H100 SXM 80 GB, "),
        (
            ["gpt2-1558m", "--cluster", "h200-512xh200", "--gpus", "8", *SMALL, *ON_DEVICE],
            "with 32 of them something does (dp",
        ),
        (
            ["gpt2-1558m", "--cluster", "one-node-8xh100", "--gpus", "1..2", *SMALL],
            "also on 2: nothing fits: of ",
        ),
        (
            ["tiny", "--gpus", "4", "--train.global_batch", "1", "--model.heads", "1", "--model.layers", "1"],
            "no layout",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _plan(*arguments) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert words in error[-1] and error[-1].startswith("myriad: error:")


def test_only_an_older_plan_of_the_same_job_is_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.toml"
    assert _plan("tiny", "--gpus", "2", "--out", str(out)) == 0
    first = out.read_text()
    assert _plan("tiny", "--gpus", "4", "--out", str(out)) == 0
    assert out.read_text() != first
    kept = out.read_text()
    assert _plan("tiny", "--gpus", "2", "--out", str(out), "--model.hidden", "32") == 2
    assert "plan of another job" in capsys.readouterr().err
    assert out.read_text() == kept
    out.write_text("name = 'mine'\n")
    assert _plan("tiny", "--gpus", "2", "--out", str(out)) == 2
    assert out.read_text() == "name = 'mine'\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tiny", "--layout.tp", "3"], "layout.tp = 3"),
        (["nothing"], 'job = "nothing"'),
        (["tiny", "--gpus", "x"], "at least 1, or a range"),
        (["tiny", "--days", "-1"], "a finite number above 0"),
        (["tiny", "--straggler", "17"], "node=17:1.1x"),
        (["tiny", "--what-if", "links.ib=1Gbps"], "only links.node"),
        (["tiny", "--cluster", "laptop"], "this-machine, or without --measure"),
        (["tiny", "--out", "there/is/no/such.toml"], "there is no folder"),
        (["--gpus", "2"], "--gpus belongs to a plan"),
        (["--layout.tp", "2"], "--layout.tp belongs to a plan"),
    ],
)
def test_nothing_is_measured_for_a_question_that_makes_no_sense(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes a minute, on all cores."""

    def measured(*_: object, **__: object) -> None:
        pytest.fail("the machine was measured")

    monkeypatch.setattr("myriad.cli.measured_cluster.measure_to_file", measured)
    assert _plan("--measure", *arguments) == 2
    assert words in capsys.readouterr().err


@pytest.mark.slow
def test_a_narrow_spine_costs_and_a_wide_one_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    """Four nodes in two pods, and replicas on all of them."""
    arguments = ("gpt2-124m", "--cluster", "llama3-24576xh100", "--gpus", "32", "--top", "1")
    arguments += ("--layout.dp", "32", "--layout.zero", "1", "--what-if")
    pods = ("nodes_per_switch=2", "--what-if", "accelerator.memory_bytes=10GiB", "--what-if")
    found = [
        _told(capsys, *arguments, *pods, f"links.spine={rate}")["plans"][0]["seconds"]
        for rate in ("1Gbps", "400Gbps")
    ]
    assert found[0] > 1.1 * found[1]


def test_planning_never_imports_torch() -> None:
    code = (
        "import sys; from myriad.cli.main import main\ntry: main(['plan', 'tiny', '--gpus', '2', '--json'])\n"
    )
    code += "except SystemExit as e: assert not e.code, e.code\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=120)


@pytest.mark.parametrize("option", ["--out", "--picture"])
def test_an_output_that_cannot_be_written_is_refused_before_the_search(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / ("x.toml" if option == "--out" else "x.svg")
    path.mkdir()
    assert _plan("tiny", option, str(path)) == 2
    assert f'{option} = "{path}": must be a regular file, or not exist' in capsys.readouterr().err


def test_what_is_printed_has_no_exponents_and_fits_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert _plan("tiny-3d", "--cluster", "megascale-256xa100", "--gpus", "16") == 0
    printed = capsys.readouterr().out
    assert not re.search(r"\d[eE][-+]\d", printed)
    assert max(map(len, printed.splitlines())) <= 80
    assert " 0.0%  " not in printed.partition("where the time goes")[0], "an MFU is not nothing"


def test_plan_and_simulate_take_mfu_of_the_same_peak(capsys: pytest.CaptureFixture[str]) -> None:
    how = ("--cluster", "one-node-8xh100", "--train.precision", "float32", "--layout.dp", "2")
    found = _told(capsys, "gpt2-124m", *how, "--gpus", "2", "--top", "1")
    best = next(plan for plan in found["plans"] if plan["rank"] == "1")
    layout = [
        part
        for key in ("zero", "reduce", "micro_batch", "recompute", "schedule")
        if best["keys"][key] is not None
        for part in (f"--layout.{key}", str(best["keys"][key]))
    ]
    overlap = [
        part for key, value in best["overlap"].items() for part in (f"--overlap.{key}", str(value).lower())
    ]
    with pytest.raises(SystemExit):
        main(["simulate", "gpt2-124m", *how, *layout, *overlap, "--json"])
    simulated = json.loads(capsys.readouterr().out)
    seconds = simulated["iteration_seconds"] + simulated["checkpoint_stall_seconds"]
    assert best["seconds"] == pytest.approx(seconds, rel=1e-3)
    assert best["mfu"] == pytest.approx(simulated["mfu"], rel=1e-2)


def test_a_framework_that_gathers_blocks_gets_no_plan_that_gathers_more(
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = ("llama3-8b", "--cluster", "one-node-8xh100", "--framework", "deepspeed")
    keys = [plan["keys"] for plan in _told(capsys, *job)["plans"]]
    assert keys and {(key["pp"], key["virtual_stages"], key["reduce"]) for key in keys} == {(1, 32, "each")}
    assert _plan(*job, "--layout.pp", "2") == 2
    assert "deepspeed, which has no pipelines with ZeRO 3" in capsys.readouterr().err


def test_a_plan_for_another_framework_has_only_its_layouts(capsys: pytest.CaptureFixture[str]) -> None:
    job = ("llama3-8b", "--cluster", "one-node-8xh100", "--framework", "megatron-core")
    best = _told(capsys, *job)["plans"][0]
    assert best["keys"]["zero"] in (0, 1) and best["keys"]["schedule"] in ("gpipe", "1f1b", "interleaved")
    on = {"tensor": "turns", "pairs": False, "pipeline": True, "data": True, "optimizer": True}
    assert best["overlap"] == on


OWN = """\
framework,model,gpus,tp,pp,micro_batch,global_batch,recompute,iteration_s
myriad,llama3-8b,64,8,1,2,256,none,6.5
myriad,llama3-8b,64,4,2,2,256,none,6.4
myriad,llama3-8b,32,8,1,2,256,none,12.9
"""


def test_a_calibrated_cluster_is_one_to_plan_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, out = tmp_path / "own.csv", tmp_path / "fitted.toml"
    table.write_text(OWN)
    fit = ("--calibrate", str(table), "--cluster", "eos-3072xh100", "--out", str(out))
    told = _told(capsys, *fit)
    fitted, plain = load_cluster(str(out)), load_cluster("eos-3072xh100")
    assert fitted.world == plain.world and fitted.calibration is not None
    ratio = fitted.accelerator.achievable_ratio / plain.accelerator.achievable_ratio
    assert ratio == pytest.approx(told["factors"]["products"]) and ratio != 1
    assert fitted.calibration.interval_ratio == told["interval_ratio"] > 0
    assert _told(capsys, *fit)["factors"] == told["factors"]  # its own file is written again
    out.write_text("name = 'mine'\n")
    assert _plan(*fit) == 2
    assert out.read_text() == "name = 'mine'\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--out", "new.toml"), "needed with --calibrate: the cluster"),
        (("--cluster", "eos-3072xh100"), "needed with --calibrate: the cluster file to write"),
        (("tiny", "--cluster", "eos-3072xh100", "--out", "new.toml"), "without JOB"),
        (("--cluster", "eos-3072xh100", "--out", "new.toml", "--gpus", "4"), "without --gpus"),
        (("--cluster", "eos-3072xh100", "--out", "new.toml", "--layout.tp", "2"), "without --layout.tp"),
        (("--cluster", "eos-3072xh100", "--out", "new.toml", "--top", "3"), "without --top"),
    ],
)
def test_a_calibration_that_makes_no_sense_is_refused(
    arguments: tuple[str, ...],
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.csv").write_text(OWN)
    assert _plan("--calibrate", "own.csv", *arguments) == 2
    assert words in capsys.readouterr().err
    assert not Path("new.toml").exists()


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("megatron_core_h100.csv", "a table in the general form"),
        (OWN.replace("iteration_s", "notes"), "lacks one of iteration_s"),
        ("\n".join(OWN.splitlines()[:3]) + "\n", '"2 rows": at least 3 rows'),
        (OWN.replace("myriad,llama3-8b,32", "nanotron,llama3-8b,32"), '"myriad; nanotron": rows of one'),
        (OWN.replace("6.4", "nan"), "line 3, column 'iteration_s' = \"nan\""),
    ],
)
def test_a_table_that_cannot_be_fitted_is_refused(
    table: str,
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    if "\n" in table:
        (tmp_path / "own.csv").write_text(table)
        table = "own.csv"
    assert _plan("--calibrate", table, "--cluster", "eos-3072xh100", "--out", "new.toml") == 2
    assert words in capsys.readouterr().err
    assert not Path("new.toml").exists()


def test_a_plan_for_another_framework_is_its_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.sh"
    plan = ("llama3-8b", "--cluster", "one-node-8xh100", "--framework", "megatron-core", "--out", str(out))
    told = _told(capsys, *plan)
    best = next(one for one in told["plans"] if one["rank"] == "1")
    text = out.read_text()
    assert f"--tensor-model-parallel-size {best['keys'].get('tp', 1)}\n" in text
    assert {*re.findall(r'"offload_activations": ([\d.]+)', json.dumps(told))} == {"0.0"}
    assert _plan(*plan) == 0  # its own file is written again
    assert _plan("llama2-7b", *plan[1:]) == 2 and "plan of another job" in capsys.readouterr().err
    out.write_text("mine")
    assert _plan(*plan) == 2 and out.read_text() == "mine"
    for wrong, says in (
        ((*plan[:-1], str(tmp_path / "plan.toml")), "ends in .sh"),
        ((*plan[:3], "--framework", "primus", "--out", str(out)), "names a launcher"),
        (("gemma2-2b", *plan[1:]), "Megatron-LM has no arguments"),
        ((*plan[:4], "megatron-cor"), "did you mean megatron-core?"),
    ):
        assert _plan(*wrong) == 2 and says in capsys.readouterr().err
