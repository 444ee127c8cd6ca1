"""If these break: `myriad top` or `myriad report` does not say what a run's spans say, or a broken run breaks
them."""

import errno
import json
import os
import re
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from run_folder import slow_run, write_run
from simulated_run import as_recorded

from myriad.checkpoint.format.checkpoint_manifest import CheckpointManifest
from myriad.checkpoint.storage.checkpoint_folder import CheckpointFolder
from myriad.cli.main import main
from myriad.dashboard.insight.losses import Losses
from myriad.job import load_job
from myriad.reports.run_report.run_summary import finished_unwritten, lost_lines_warning, summarize
from myriad.reports.run_report.steps_section import _RIGHT, _WIDTH, _waterfall
from myriad.run import Run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "slow", slow_run(), end="interrupted")


def run_verb(*arguments: object) -> int:
    with pytest.raises(SystemExit) as end:
        main([str(argument) for argument in arguments])
    return int(end.value.code or 0)


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict:
    assert run_verb(*arguments, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_top_shows_slow_ranks_and_where_a_step_s_time_is_spent(folder: Path, capsys) -> None:
    found = told(capsys, "top", folder, "--without", "22")
    assert found["state"] == "interrupted" and found["step"] == 24
    assert re.search(
        r"rank 22 on node 2 runs backward 2\d% slower than its peers since step 15", found["sentence"]
    )
    assert {tuple(one["ranks"]) for one in found["slow"]} == {(22,)}
    losses = found["losses"]
    assert losses["waits_are_split"]
    assert sum(losses["shares"].values()) + losses["mfu"] == pytest.approx(1.0)
    assert losses["mfu"] == pytest.approx(found["mfu"])
    assert summarize(Run(folder)).mfu == pytest.approx(found["mfu"]), "and the summary has the same"
    path = found["critical_path"]
    assert sum(path["by_class"].values()) == pytest.approx(path["seconds"])
    assert found["without"]["without_seconds"] < 0.99 * found["without"]["measured_seconds"]
    assert found["spans"]["unreadable_files"] == 0


def test_one_frame_is_for_people(folder: Path, capsys) -> None:
    assert run_verb("top", folder, "--once", "--without", "22") == 0
    frame = " ".join(capsys.readouterr().out.split())
    for words in (
        "stopped after step 24 of 40",
        "rank 22 (node 2)",
        "bubble",
        "critical path of step",
        "MFU",
    ):
        assert words in frame
    assert "without rank 22 the step would take" in frame


def test_in_a_hang_the_silent_rank_is_named(tmp_path: Path, capsys) -> None:
    """Rank 9 stops after some actions of the last step; the others before anything that would need it."""
    run = slow_run(6)
    records = as_recorded(run).records
    last = records["step"] == 6
    turn = np.cumsum(last) - np.searchsorted(records["rank"][last], records["rank"])  # within a rank
    keep = ~last | (turn <= np.where(records["rank"] == 9, 6, 45))
    path = write_run(tmp_path / "hang", run, records[keep], ended_ago=60.0)
    with Run(path).lock():
        found = told(capsys, "top", path)
        assert run_verb("top", path, "--once") == 0
    assert found["state"] == "hangs"
    assert found["waiting"]["silent"][0] == 9
    assert "wait for rank 9 on node 1" in found["sentence"]
    assert "silent: rank 9 on node 1" in " ".join(capsys.readouterr().out.split())


def test_a_hang_is_seen_from_a_machine_that_has_not_launched_it(tmp_path: Path, capsys) -> None:
    """No process on this machine holds its lock; what its node agents write each second distinguishes a hang
    from an end."""
    run = slow_run(6)
    path = write_run(tmp_path / "elsewhere", run, ended_ago=80.0)
    assert told(capsys, "top", path)["state"] == "failed"
    counters = path / "counters" / "node-3.jsonl"
    counters.parent.mkdir()
    counters.write_text("{}\n")
    assert told(capsys, "top", path)["state"] == "hangs"
    os.utime(counters, (time.time() - 30, time.time() - 30))
    assert told(capsys, "top", path)["state"] == "failed"
    counters.write_text("{}\n")
    Run(path).append_event("interrupted", step=6)
    assert told(capsys, "top", path)["state"] == "interrupted", "they leave some seconds after Ctrl-C"


def test_a_run_that_trains_is_not_called_hung(tmp_path: Path, capsys) -> None:
    path = write_run(tmp_path / "runs", slow_run(4), ended_ago=0.5)
    with Run(path).lock():
        assert told(capsys, "top", path)["state"] == "training"


def test_a_run_that_is_half_gone_is_shown_as_far_as_it_is_there(tmp_path: Path, capsys) -> None:
    path = write_run(tmp_path / "broken", slow_run(8))
    files = sorted((path / "spans").iterdir())
    files[0].write_bytes(files[0].read_bytes()[:-100])
    (path / "spans" / "attempt-1-node-9-0.parquet").symlink_to(files[1])
    with (path / "metrics.jsonl").open("a") as lines:
        lines.write('{"step": 9, "ti')
    found = told(capsys, "top", path)
    assert found["spans"]["unreadable_files"] == 1
    assert found["losses"] is not None
    for file in files:
        file.unlink()
    (path / "events.jsonl").unlink()
    assert told(capsys, "top", path)["losses"] is None
    assert run_verb("top", path, "--once") == 0
    assert run_verb("report", path) == 0


def test_lines_of_others_in_the_metrics_are_left_out_and_counted(tmp_path: Path, capsys) -> None:
    """A script of the user's, or a disk, put something else there: the run can be looked at all the same."""
    path = write_run(tmp_path / "others", slow_run(8))
    before = told(capsys, "report", path)
    lines = [{"step": "x"}, {"step": None}, {"loss": 1.0}, {"step": -4}, {"step": True}, {"step": 2.5}]
    with (path / "metrics.jsonl").open("a") as file:
        for line in lines:
            file.write(json.dumps({"time": 2e9} | line) + "\n")
        last = json.loads((path / "metrics.jsonl").read_text().splitlines()[0])["step"] + 50
        file.write(json.dumps({"step": last, "loss": "low", "step_seconds": [1], "mfu": {}}) + "\n")
    after = told(capsys, "report", path)
    assert after["wrong_lines"] == len(lines) + 1 and before["wrong_lines"] == 0
    assert after["classes"]["training"] == before["classes"]["training"]
    found = told(capsys, "top", path)
    assert (found["wrong_lines"], found["step"]) == (len(lines) + 1, last)
    assert run_verb("top", path, "--once") == 0 and run_verb("report", path) == 0
    assert f"{len(lines) + 1} lines of metrics.jsonl are wrong" in capsys.readouterr().out
    assert f"{len(lines) + 1} lines of metrics.jsonl" in (path / "report.html").read_text()


@pytest.mark.slow
def test_the_report_opens_offline_and_escapes_what_a_job_called_its_spans(tmp_path: Path, capsys) -> None:
    run = slow_run(8)
    spans = as_recorded(run).records
    evil = spans[spans["step"] == 5][::40].copy()
    evil["name"], evil["duration_ns"] = len(run.names), 5 * 10**6
    evil["start_ns"] += 50 * 10**6
    named = replace(run, names=(*run.names, "<script>alert(1)</script>"))
    path = write_run(tmp_path / "evil", named, np.concatenate([spans, evil]))
    assert run_verb("report", path, "--cluster", "megascale-256xa100") == 0
    page = (path / "report.html").read_text()
    assert "<script" not in page and 'src="http' not in page and "<link" not in page and "@import" not in page
    assert "Where a step's time goes" in page and "Critical path of a step" in page
    assert "plan" in page and "data:image/png;base64," in page


def test_the_report_describes_the_slow_rank(folder: Path, capsys) -> None:
    found = told(capsys, "report", folder)
    assert found["slow"][0]["sentence"] in (folder / "report.html").read_text()
    assert found["steps"] == 24


def test_a_loss_that_is_no_number_any_more_is_the_report_s_news(tmp_path: Path, capsys) -> None:
    """A chart that ends early and a figure that is left out say nothing."""
    path = write_run(tmp_path / "gone", slow_run(8))
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    for wrong, words in (
        ([3], "the loss of 1 steps is not a number"),
        ([6, 7, 8], "not a number after step 5"),
    ):
        for line in lines:
            line["loss"] = None if line["step"] in wrong else 2.0
        (path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
        assert words in told(capsys, "report", path)["doubts"][0]
        page = (path / "report.html").read_text()
        assert words in page and (f"<b>{'NaN' if 8 in wrong else '2.0000'}</b><span>training loss" in page)


def test_the_report_shows_scores_on_tasks_over_the_steps(tmp_path: Path, capsys) -> None:
    path = write_run(tmp_path / "scored", slow_run(8))
    event = {"time": time.time(), "event": "evaluation", "documents": {"<w>": 9}}
    for step, value in ((4, 0.25), (8, 0.75)):
        scores = {"scores": {"<w>/acc": value}, "standard_errors": {"<w>/acc": 0.125}}
        with (path / "events.jsonl").open("a") as file:
            file.write(json.dumps(event | scores | {"step": step}) + "\n")
        assert run_verb("report", path) == 0
        page = (path / "report.html").read_text()
        assert (
            "<td>&lt;w&gt;/acc</td>" in page and f"<td class=n>{value}</td><td class=n>± 0.125</td>" in page
        )
        assert ("step 4: 0.25 ± 0.12" in page) == (step == 8), "a chart of several evaluations"


def test_ten_thousand_faults_are_no_page_without_an_end(tmp_path: Path, capsys) -> None:
    path = write_run(tmp_path / "many", slow_run(8))
    with (path / "events.jsonl").open("a") as file:
        for number in range(10_000):
            line = {"time": time.time(), "event": "fault", "cause": "rank", "problem": f"number {number}."}
            file.write(json.dumps(line) + "\n")
    assert run_verb("report", path) == 0
    printed, page = capsys.readouterr().out, (path / "report.html").read_text()
    for text in (printed, page):
        assert (
            "number 9999." in text and "number 99." not in text and "older ones are in events.jsonl" in text
        )
    assert "10000: number 9999." in printed


def test_a_loss_below_zero_stays_inside_the_report_s_chart() -> None:
    """Ranks that compute faster than the configured peak."""
    losses = Losses(1.0, 0.8, 0.6, {"slower than peak": -0.2, "bubble": 0.3, "other": 0.1}, True)
    bars = [
        (float(x), float(width))
        for x, width in re.findall(
            r'<rect x="([\d.]+)" y="[\d.]+" width="([\d.]+)"', _waterfall(losses, None)
        )
    ]
    assert max(x + width for x, width in bars) <= _WIDTH - _RIGHT + 1
    (_, whole), (slower, wide), *_ = bars
    assert slower == pytest.approx(bars[0][0] + whole, abs=0.2) and wide == pytest.approx(
        0.2 * whole, abs=0.2
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("top", "no-such-run"),
        ("top", "RUN", "--without", "99"),
        ("top", "RUN", "--without", "x"),
        ("top", "RUN", "--every", "0"),
        ("top", "RUN", "--steps", "0"),
        ("report", "RUN", "--cluster", "no-such-cluster"),
        ("report", "RUN", "--without", "-1"),
    ],
)
def test_bad_input_is_one_line(arguments: tuple[str, ...], folder: Path, capsys) -> None:
    code = run_verb(*(str(folder) if argument == "RUN" else argument for argument in arguments))
    assert code == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_a_run_whose_disk_is_full_trains_and_is_not_called_hung(tmp_path: Path, capsys, monkeypatch) -> None:
    """No line comes for as long as there is no room; the time of the file's last change needs none."""
    path = write_run(tmp_path / "full", slow_run(5), ended_ago=60)
    with Run(path).lock():
        assert told(capsys, "top", path)["state"] == "hangs"
        run = Run(path)
        full = OSError(errno.EDQUOT, "Disk quota exceeded")
        monkeypatch.setattr("myriad.system.jsonl._write", Mock(side_effect=full))
        run.append_metrics({"time": time.time(), "step": 6})
        found = told(capsys, "top", path)
        assert found["state"] == "training" and "takes no lines since then: make room" in found["sentence"]
        monkeypatch.undo()
        run.append_metrics({"time": time.time(), "step": 7})
        found = told(capsys, "top", path)
        assert found["step"] == 7 and "takes no lines" not in found["sentence"]


def test_a_run_that_could_not_write_down_its_end_is_finished_if_the_last_checkpoint_is_stored(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path / "run")
    run.create_or_resume(load_job("tiny", ["train.steps=9", "optimizer.warmup_steps=2"]))
    run.append_event("start", world=1)
    for step in range(1, 5):
        run.append_metrics({"time": time.time(), "step": step})
    folder = CheckpointFolder(run.checkpoints_path)
    folder.begin(5).commit(CheckpointManifest(5, 1, 0.0, {}, {}, {}, {}, {}, {}))
    before = summarize(run)
    assert finished_unwritten(run, before).state == "failed", "only step 5 of 9 is stored"
    folder.begin(9).commit(CheckpointManifest(9, 1, 0.0, {}, {}, {}, {}, {}, {}))
    after = finished_unwritten(run, before)
    assert (after.state, after.steps, after.steps_without_line) == ("finished", 9, 5)
    assert "no room for the metrics lines of 5" in lost_lines_warning(run, after)
    assert lost_lines_warning(run, before) == ""
