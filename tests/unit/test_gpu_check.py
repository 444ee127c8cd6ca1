"""If these fail, the first hour on a rented GPU goes by with a wrong key, a hang, or an empty report."""

import json
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import gpu_check
from gpu_check import PLAN, STEPS, Check, Folder, why_skipped

from myriad.job import load_job


def test_each_check_has_a_name_of_its_own_and_keys_that_jobs_have() -> None:
    assert len({check.name for check in PLAN}) == len(PLAN)
    for check in PLAN:
        assert bool(check.keys) != bool(check.command)
        job = load_job("embedded-gpt", [f"{key}={value}" for key, value in check.keys.items()])
        assert job.layout.world <= check.gpus, check.name


INTERRUPTIBLE = "import signal, time; signal.signal(signal.SIGINT, signal.default_int_handler)"
"""Also where the shell that started the tests in the background had it ignored."""


def command(code: str, seconds: float = 20.0) -> Check:
    return Check(PLAN[0].name, "", "", command=(sys.executable, "-c", code), seconds=seconds)


@pytest.mark.parametrize(
    ("check", "outcome", "detail"),
    [
        (command("print('fine')"), "passed", ""),
        (command("print('first'); raise SystemExit('no device')"), "failed", "no device"),
        (
            command(f"{INTERRUPTIBLE}; print('waits', flush=True); time.sleep(60)", 2.0),
            "timed out",
            "KeyboardInterrupt",
        ),
    ],
)
def test_a_command_that_fails_or_hangs_is_reported_with_its_last_line(
    tmp_path: Path, check: Check, outcome: str, detail: str
) -> None:
    folder = Folder(tmp_path / "found", "cpu")
    result = folder.run(check)
    assert (result.outcome, result.detail) == (outcome, detail)
    folder.write([result], {"torch": "2"})
    assert json.loads((folder.path / "report.json").read_text())["checks"][0]["outcome"] == outcome
    assert f"| {check.name} | {outcome} |" in (folder.path / "REPORT.md").read_text()


@pytest.mark.parametrize(
    ("losses", "outcome", "detail"),
    [
        ([4.0 - 0.01 * step for step in range(STEPS)], "passed", "losses within 0.0011 of plain's"),
        ([4.4 - 0.01 * step for step in range(STEPS)], "failed", "at most 0.02 is rounding"),
        ([4.0] * STEPS, "failed", "the loss does not fall"),
        ([4.0, 3.9], "failed", f"2 of {STEPS} steps have a loss"),
        ([float("nan")] * STEPS, "failed", "the loss does not fall"),
    ],
)
def test_a_run_passes_if_its_losses_fall_and_are_those_of_the_plain_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, losses: list[float], outcome: str, detail: str
) -> None:
    def train(words: object, seconds: float, output: object, around: object, place: Path) -> int:
        own = [3.996 - 0.01 * step for step in range(STEPS)] if place.name == "plain" else losses
        (place / "run").mkdir()
        lines = (json.dumps({"step": step, "loss": loss}) + "\n" for step, loss in enumerate(own, 1))
        (place / "run" / "metrics.jsonl").write_text("".join(lines))
        return 0

    monkeypatch.setattr(gpu_check, "_run_for", train)
    folder = Folder(tmp_path, "cpu")
    plan = {check.name: check for check in PLAN}
    assert folder.run(plan["plain"]).outcome == "passed"
    result = folder.run(plan["defaults"])
    assert result.outcome == outcome and detail in result.detail


def test_what_needs_more_gpus_than_there_are_is_skipped_with_the_reason() -> None:
    plan = {check.name: check for check in PLAN}
    assert why_skipped(plan["data-safe"], 1, "cuda") == "needs 2 GPUs, there are 1"
    assert why_skipped(plan["data-safe"], 2, "cuda") == "" == why_skipped(plan["data-safe"], 0, "cpu")
    assert why_skipped(plan["kernels"], 0, "cpu") == "needs a GPU"


def test_the_table_of_what_has_run_names_tests_that_are_there() -> None:
    root = Path(__file__).parents[2]
    page = (root / "docs" / "ran-on.md").read_text(encoding="utf-8")
    named = re.findall(r"`([a-z_0-9/]+/test_[a-z_0-9]+\.py)`", page)
    assert len(named) > 20 and all((root / "tests" / name).is_file() for name in named), named
