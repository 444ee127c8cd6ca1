"""If these fail, people cannot see where a run's time went, or a report breaks what it only reads."""

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from myriad.cli.main import main
from myriad.cli.report_command import save_report
from myriad.job import load_job
from myriad.run import Run

VOID = {"meta", "br"}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Killed once, in its fourth step, and finished."""
    run = Run(tmp_path / "runs" / "one <&> two")
    run.create_or_resume(load_job("tiny", ["train.steps=6"]))
    at = 1_700_000_000.0

    def line(path: Path, time: float, **fields: Any) -> None:
        with path.open("a") as file:
            file.write(json.dumps({"time": at + time, **fields}) + "\n")

    for step, time in ((1, 3.0), (2, 4.0), (3, 5.0), (3, 8.0), (4, 9.0), (5, 10.0), (6, 11.0)):
        fields = {"step": step, "loss": 6.0 - step / 10, "step_seconds": 1.0, "tokens": 512 * step}
        line(run.metrics_path, time, **fields, tokens_per_second=512.0, memory_bytes=2**20)
    events = run.events_path
    line(events, 0.0, event="corpus")
    line(events, 2.0, event="start", world=1, device="cpu", precision="float32")
    problem = "rank 0 was killed by SIGKILL (log: /somewhere/rank-0.log)\n<b>more</b>"
    line(events, 5.5, event="fault", cause="killed", rank=0, node=0, step=4, problem=problem)
    line(events, 5.6, event="restart", epoch=2)
    line(events, 7.0, event="start", resumed_from=2)
    line(events, 7.0, event="resume", step=2, seconds=0.1)
    line(events, 11.5, event="validation", step=6, loss=5.2, seconds=0.25)
    line(events, 12.0, event="finish", step=6)
    with events.open("a") as file:
        file.write('{"time": 17000')  # torn: it was killed while it wrote
    return run


class Page(HTMLParser):
    """Finds unclosed tags, and what a browser would have to fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self.fetched += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in ("path", "rect", "circle", "polyline")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def report(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["report", *arguments])
    return int(ended.value.code or 0)


def test_the_classes_of_json_sum_to_the_wall_time(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(str(run.path), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["state"] == "finished" and found["wall_seconds"] == pytest.approx(12.0)
    assert sum(found["classes"].values()) == pytest.approx(12.0)
    assert found["effective_ratio"] == pytest.approx(6 / 12)
    assert found["goodput_tokens_per_second"] == pytest.approx(512 * 6 / 12)
    (fault,) = found["faults"]
    assert fault["steps_lost"] == 1 and fault["back_seconds"] == pytest.approx(1.5)
    assert [one["ended"] for one in found["attempts"]] == ["killed", "finished"]


def test_the_table_names_each_class_fault_and_attempt(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(str(run.path)) == 0
    told = capsys.readouterr().out
    assert "effective training time 50.0% of 12.0 s" in told
    for word in ("starting", "validating", "killed", "rank 0", "1.50 s", "100.00%", "report.html"):
        assert word in told


def test_the_page_is_whole_and_needs_nothing_but_itself(run: Run) -> None:
    assert report(str(run.path)) == 0
    text = run.report_path.read_text()
    page = Page(text)
    assert page.open == [] and page.fetched == []
    assert "@import" not in text and "url(" not in text and "<script" not in text
    words = " ".join(page.words)
    assert "one <&> two" in words and "rank 0 was killed by SIGKILL" in words
    for chart in ("loss (nats a token)", "time of a step", "tokens per second"):
        assert chart in words, "those of the page's overview"
    assert "<b>more</b>" not in text, "what a log says is text, never markup"


def test_a_run_without_a_line_has_a_report(tmp_path: Path) -> None:
    run = Run(tmp_path / "new")
    run.create_or_resume(load_job("tiny", []))
    assert report(str(run.path)) == 0
    assert Page(run.report_path.read_text()).open == []


def test_bad_input_is_refused_and_writes_nothing(run: Run, tmp_path: Path) -> None:
    assert report(str(tmp_path / "nothing")) == 2
    assert report(str(run.path), "--out", str(tmp_path / "page.txt")) == 2
    assert report(str(run.path), "--out", str(tmp_path / "no folder" / "page.html")) == 2
    assert not run.report_path.exists() and not (tmp_path / "page.txt").exists()


def test_a_report_that_cannot_be_written_is_no_end_of_a_run(run: Run) -> None:
    run.report_path.mkdir()
    save_report(run)
    assert report(str(run.path), "--json") == 0


def test_a_run_that_is_held_is_running(run: Run) -> None:
    assert not run.is_locked
    with run.lock():
        assert run.is_locked
    assert not run.is_locked
