"""If these fail, `myriad parity` compares something else than what it was asked to, or less than it says."""

import json
import shutil
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from myriad.checkpoint.storage.checkpoint_folder import CheckpointFolder
from myriad.cli import parity_command
from myriad.errors import BadInputError
from myriad.job import load_job
from myriad.run import Run
from myriad.train.checkpoint_tools.compare_runs import Tolerance, compare_runs
from myriad.train.inputs import open_run_inputs

LAYOUTS = ("--layout", "dp=1", "--layout", "pp=2", "--oversubscribe")
TINY = ("--model.layers", "2", "--model.hidden", "32", "--model.heads", "2", "--model.sequence", "32")


def run_parity(*arguments: str) -> tuple[int, str]:
    app = typer.Typer()
    app.callback()(lambda: None)
    parity_command.register(app)
    result = CliRunner().invoke(app, ["parity", "tiny", *arguments])
    if isinstance(result.exception, BadInputError):
        raise result.exception
    return result.exit_code, result.output


def test_bfloat16_is_compared_in_bfloat16_and_every_step_is_stored(tmp_path: Path) -> None:
    options = ("--steps", "5", "--folder", str(tmp_path / "runs"), "--train.precision", "bfloat16", "--json")
    code, output = run_parity(*LAYOUTS, *TINY, *options)
    shown = json.loads(output)
    assert code == 0 and shown["precision"] == "bfloat16"
    assert shown["tolerance"] == {"losses": 1e-3, "parameters": 3e-2}
    compared = shown["comparisons"][0]
    assert compared["num_steps"] == compared["num_kept"] == 5 and not compared["missing"]
    runs = [Run(tmp_path / "runs" / f"layout-{number}") for number in (0, 1)]
    assert all(run.job().train.precision == "bfloat16" for run in runs)

    step_3 = CheckpointFolder(runs[1].checkpoints()).at_step(3).where
    shutil.rmtree(step_3)
    found = compare_runs(*runs, Tolerance(1e-3, 3e-2))
    assert found.missing == (3,) and found.parted_step is None and not found.agrees

    lines = runs[0].metrics_path.read_text().splitlines(keepends=True)
    runs[0].metrics_path.write_text("".join(lines[:3] + lines[4:]))
    assert compare_runs(*runs, Tolerance(1e-3, 3e-2)).missing == (3, 4)

    not_finite = json.loads(lines[1]) | {"loss": None}
    runs[0].metrics_path.write_text(lines[0] + json.dumps(not_finite) + "\n" + "".join(lines[2:]))
    assert compare_runs(*runs, Tolerance(1e-3, 3e-2)).parted_step == 2


def test_chosen_experts_are_compared_and_replayed(tmp_path: Path) -> None:
    """Two replicas of which each has half of the experts: no two ranks hold the same ones."""
    layouts = ("--layout", "dp=2,ep=2", "--layout", "tp=2", "--replay-routing")
    options = ("--steps", "2", "--keep-every", "2", "--folder", str(tmp_path / "runs"), "--json")
    experts = ("--model.experts", "4", "--model.expert_hidden", "16", "--optimizer.warmup_steps", "1")
    code, output = run_parity(*layouts, *TINY, *experts, *options)
    compared = json.loads(output)["comparisons"][0]
    assert code == 0 and compared["agrees"]
    assert compared["num_choices"] == 2 * 8 * 32 * 2 * 2 and compared["other_choices"] == 0
    assert Run(tmp_path / "runs" / "layout-1").job().train.replay_routing
    with pytest.raises(BadInputError, match=r"needs model\.experts"):
        run_parity(*LAYOUTS, "--replay-routing")
    nowhere = load_job("tiny-moe", [f"train.replay_routing={tmp_path}"])
    with pytest.raises(BadInputError, match=r"RUN/routing of a run with telemetry\.routing"):
        open_run_inputs(Run(tmp_path / "new"), nowhere, str)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--train.precision", "float8"), "one of float32, bfloat16"),
        (("--train.precision", "bfloat16", "--steps", "21"), "at most 20 in bfloat16"),
        (("--optimizer.epsilon", "1e-8"), "at least 1e-06"),
        (("--train.steps", "7"), "--steps sets them"),
        (("--overlap.checkpoint", "true"), "are stored before the next step"),
        (("--train.threads", "2"), "differ in their order"),
    ],
)
def test_a_key_that_a_comparison_cannot_honour_is_refused(arguments: tuple[str, ...], says: str) -> None:
    with pytest.raises(BadInputError, match=says):
        run_parity(*LAYOUTS, *arguments)
