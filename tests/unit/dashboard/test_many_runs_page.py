"""If these fail, the page of many runs shows wrong runs or curves, or reads a run that it does not list."""

import asyncio
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from ended_runs import AT, make_run, write_lines
from starlette.testclient import TestClient

from myriad.cli.watch_content import ManyRuns, content_of
from myriad.dashboard.many import run_curves
from myriad.dashboard.many.live_table import LiveTable, id_of
from myriad.dashboard.many.run_pages import MOST_OPEN, RunPages
from myriad.dashboard.many.runs_app import build_runs_app
from myriad.dashboard.request_guard import Access
from myriad.errors import BadInputError
from myriad.many_runs import row_cache
from myriad.many_runs.row_cache import RowCache
from myriad.run import Run

TOKEN = "a" * 32


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three runs, one of them below a sweep's folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    make_run(tmp_path / "runs" / "base", loss=4.0)
    make_run(tmp_path / "runs" / "sweep" / "fast", "optimizer.learning_rate=0.01", loss=3.0, at=AT + 1000)
    make_run(tmp_path / "runs" / "broken", "layout.dp=2", loss=5.0, end="", at=AT + 2000, steps=3)
    return tmp_path / "runs"


class Page:
    """The page's requests, after one pass over the folders."""

    def __init__(self, *folders: Path, may_write: bool = False) -> None:
        self.table = LiveTable(folders)
        self.table.poll()
        self.pages = RunPages(self.table, ManyRuns([*folders])._open_run, unused_seconds=0.0)
        self.client = TestClient(
            build_runs_app(self.table, Access(TOKEN), self.pages, may_write=may_write),
            base_url="http://127.0.0.1:8765",
            headers={"authorization": f"Bearer {TOKEN}"},
        )

    def ask(self, path: str, code: int = 200, **query: str) -> Any:
        answer = self.client.get(path, params=query)
        assert answer.status_code == code, answer.text
        return answer.json()

    def get(self, path: str) -> int:
        return self.client.get(path).status_code

    def send(self, path: str, body: bytes, kind: str) -> int:
        headers = {"content-type": kind}
        return self.client.post(f"/api/runs/{path}", content=body, headers=headers).status_code

    def post(self, path: str, body: dict[str, Any], code: int = 200) -> Any:
        answer = self.client.post(
            f"/api/runs/{path}", content=json.dumps(body), headers={"content-type": "application/json"}
        )
        assert answer.status_code == code, answer.text
        return answer.json()

    def names(self, **query: str) -> list[str]:
        return [row["name"] for row in self.ask("/api/runs", **query)["runs"]]


def ids(*runs: Path) -> str:
    return ",".join(map(id_of, runs))


def test_the_table_is_that_of_the_terminal_filtered_sorted_and_grouped(folder: Path) -> None:
    page = Page(folder)
    found = page.ask("/api/runs", group="layout.dp")
    assert [(row["name"], row["group"]) for row in found["runs"]] == [
        ("broken", "2"), ("fast", "1"), ("base", "1")
    ]  # fmt: skip
    assert found["keys"] == ["optimizer.learning_rate"], "without those that columns show"
    assert found["runs"][1]["differs"] == [["optimizer.learning_rate", "0.01"]]
    assert page.names(sort="loss") == ["fast", "base", "broken"]
    assert page.names(filter="state=finished, loss>3.5") == ["base"]
    assert page.names(filter="SWEEP") == ["fast"], "words of name, path and job"
    assert page.names(filter="tiny, base") == ["base"]
    assert page.ask("/api/run")["sentence"] == "3 runs: 2 finished, 1 failed"
    for key, value in (("filter", "los<3"), ("sort", "los"), ("group", "los"), ("filter", "a" * 2000)):
        assert key.replace("group", "sort") in page.ask("/api/runs", 400, **{key: value})["error"]


def test_a_run_has_its_page_below_the_table_and_is_closed_when_unused(folder: Path) -> None:
    for number in range(5):
        make_run(folder / f"more-{number}", loss=4.0)
    (folder / "broken" / "job.toml").write_text("damaged")
    page = Page(folder)
    base = id_of(folder / "base")
    answer = page.client.get(f"/run/{base}")
    assert answer.history and "app.js" in answer.text and not page.pages.open_runs, "its questions open it"
    assert page.ask(f"/run/{base}/api/run")["name"] == "base"
    assert page.ask(f"/run/{base}/api/run?{TOKEN}")["state"] in ("reading", "finished")
    assert page.pages.open_runs == [base]
    for path in ("0" * 16, "%2e%2e%2f", str(folder / "base"), "base"):
        assert page.get(f"/run/{path}/api/run") == 404
    assert page.get(f"/run/{base}/api/traces/..%2fjob.toml") == 404
    assert "is damaged" in page.ask(f"/run/{id_of(folder / 'broken')}/api/run", 409)["error"]
    trace = page.client.post(f"/run/{base}/api/trace", json={"ranks": [0], "seconds": 1})
    assert trace.status_code == 400 and "--write" in trace.json()["error"]
    for number in range(4):
        page.ask(f"/run/{id_of(folder / f'more-{number}')}/api/overview")
    assert len(page.pages.open_runs) == MOST_OPEN and base not in page.pages.open_runs
    asyncio.run(page.pages.close_unused())
    assert page.pages.open_runs == []
    assert not [one.name for one in threading.enumerate() if one.name in ("follower", "analyst")]


def test_no_answer_waits_for_the_curves_of_a_long_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_curves, "_MOST_BYTES_AT_ONCE", 0)
    may_read, read = threading.Event(), run_curves.RunCurves.read

    def slow(run: Run) -> run_curves.RunCurves:
        assert may_read.wait(60)
        return read(run)

    monkeypatch.setattr(run_curves.RunCurves, "read", slow)
    page, base = Page(folder), ids(folder / "base")
    for _ in range(2):
        (run,) = page.ask("/api/runs/curves", runs=base)["runs"]
        assert run["reading"] and run["columns"]["step"] == []
    may_read.set()
    while (run := page.ask("/api/runs/curves", runs=base)["runs"][0])["reading"]:
        time.sleep(0.01)
    assert run["columns"]["step"] == [1, 2, 3, 4, 5, 6]


def test_curves_of_several_runs_lie_on_one_axis_and_are_cut_exactly(folder: Path) -> None:
    base, fast = folder / "base", folder / "sweep" / "fast"
    lines = [json.loads(line) for line in (fast / "metrics.jsonl").read_text().splitlines()]
    write_lines(fast / "metrics.jsonl", [line | {"tokens": 1000 * line["step"]} for line in lines])
    page = Page(folder)
    runs = ids(base, fast)

    def steps(**query: str) -> list[list[float]]:
        return [run["columns"]["step"] for run in page.ask("/api/runs/curves", runs=runs, **query)["runs"]]

    assert steps() == [[1, 2, 3, 4, 5, 6]] * 2
    assert steps(by="tokens", first="300", last="2000") == [[3, 4, 5, 6], [1, 2]]
    assert steps(by="time", first="25", last="40") == [[3, 4], [3, 4]], "since each began"
    assert steps(by="FLOPs", first="1500", last="2500") == [[3, 4, 5], [3, 4, 5]]
    assert steps(by="tokens", first="7e5", last="8e5") == [[], []]
    curves = page.ask("/api/runs/curves", runs=runs)["runs"]
    assert [run["validation"][0]["value"] for run in curves] == [[7.0, 4.25, 4.5], [6.0, 3.25, 3.5]]
    assert [run["began"] for run in curves] == [AT, AT + 1000]
    assert len(steps(points="2")[0]) < 6
    for query in ({"by": "x"}, {"first": "nan", "last": "2"}, {"points": "1"}):
        page.ask("/api/runs/curves", 400, runs=runs, **query)


def test_differences_of_jobs_environments_and_resumes(folder: Path) -> None:
    base, fast = Run(folder / "base"), Run(folder / "sweep" / "fast")
    fast.append_event("start", world=1, device="cuda", software={"myriad": "1", "commit": "abc"})
    change = {"key": "optimizer.learning_rate", "before": 0.1, "after": 0.01, "user": "ann@here"}
    fast.append_event("job_changed", step=4, **change)
    page = Page(folder)
    found = page.ask("/api/runs/diff", runs=ids(base.path, fast.path))
    assert found["job"] == [["optimizer.learning_rate", ["0.001", "0.01"]]]
    assert ["device", ["cpu", "cuda"]] in found["environment"]
    assert ["software.commit", [None, "abc"]] in found["environment"]
    assert found["changes"] == [[], [change | {"before": "0.1", "after": "0.01", "step": 4.0}]]
    assert page.ask("/api/runs")["runs"][1]["changes"] == found["changes"][1]


def test_only_runs_of_the_table_are_answered(folder: Path, tmp_path: Path) -> None:
    other = make_run(tmp_path / "secret")
    page = Page(folder)
    for name in (id_of(other.path), str(other.path), "../secret"):
        assert page.ask("/api/runs/curves", runs=name)["runs"] == []
        assert page.ask("/api/runs/diff", runs=name)["runs"] == []
    page.ask("/api/runs/curves", 400, runs="")
    page.ask("/api/runs/curves", 400, runs=",".join(map(str, range(11))))


def test_the_table_follows_runs_that_come_go_and_grow(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Page(folder, folder / "base", folder / "later")
    assert sorted(page.names()) == ["base", "broken", "fast"], "each once"
    assert page.ask("/api/runs")["problems"] == [f"{folder / 'later'} is missing"]
    make_run(folder / "later")
    (folder / "broken").rename(folder / ".broken")
    Run(folder / "base").append_metrics({"step": 7, "time": AT + 80, "loss": 1.5})
    (folder / "sweep" / "fast" / "job.toml").write_text("[train")
    page.table._figures.clear()  # no run waits for its next reading
    page.table.poll()
    rows = {row["name"]: row for row in page.ask("/api/runs")["runs"]}
    assert rows.keys() == {"base", "later", "fast"}
    assert (rows["base"]["loss"], rows["base"]["steps"]) == (1.5, 7)
    assert rows["fast"]["state"] == "unreadable" and "damaged" in rows["fast"]["problem"]
    read = row_cache.read_figures
    monkeypatch.setattr(
        row_cache, "read_figures", lambda run: read(run) if run.path.name != "base" else 1 / 0
    )
    table = LiveTable([folder], RowCache(folder.parent / "other cache"))
    table.poll()
    assert len(table.rows) == 2 and "base cannot be read" in table.problems[0]


def test_arguments_name_a_run_a_folder_or_several(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)

    def many(*names: str, **options: Any) -> list[str]:
        found = content_of([*names], **options)
        assert isinstance(found, ManyRuns)
        return [os.fspath(path) for path in found.folders]

    assert many() == ["runs"]
    assert many("runs/sweep") == ["runs/sweep"]
    assert many("base", "runs/sweep") == ["runs/base", "runs/sweep"]
    assert not isinstance(content_of(["base"]), ManyRuns)
    (folder / "empty").mkdir()
    for names, options in (
        (["runs/empty"], {}),
        (["nothing"], {}),
        (["base", "nothing"], {}),
        (["runs"], {"memory": "1 GiB"}),
        (["runs"], {"collect": folder / "spans"}),
        (["runs"], {"cluster": "laptop"}),
        (["base"], {"write": True}),
    ):
        with pytest.raises(BadInputError):
            many(*names, **options)
    monkeypatch.chdir(folder)
    with pytest.raises(BadInputError, match="folder of runs"):
        many()


def test_a_page_without_write_changes_nothing(folder: Path) -> None:
    page, run = Page(folder), id_of(folder / "base")
    assert page.ask("/api/runs")["may_write"] is False
    for path, body in (
        ("notes", {"run": run, "note": "x", "tags": []}),
        ("archive", {"runs": [run], "archived": True}),
        ("plan", {"runs": [run]}),
        ("delete", {"plan": ""}),
    ):
        assert "--write" in page.post(path, body, 400)["error"]
        assert page.get(f"/api/runs/{path}") == 405
    assert not (folder / "base" / "notes.json").exists()


def test_notes_tags_and_the_archive_are_kept_in_the_run(folder: Path) -> None:
    page, run = Page(folder, may_write=True), id_of(folder / "base")
    note = "<b>best</b>\nso far \u202e"
    page.post("notes", {"run": run, "note": note, "tags": ["paper", "lr:1e-3", "paper"]})
    row = next(row for row in page.ask("/api/runs")["runs"] if row["name"] == "base")
    assert (row["note"], row["tags"], row["archived"]) == (note, ["lr:1e-3", "paper"], False)
    assert (folder / "base" / "notes.json").stat().st_mode & 0o777 == 0o600, "as the run's other files"
    assert page.names(filter="tags=pap*") == page.names(filter="BEST") == ["base"]
    assert page.names(filter="tags!=paper") == ["broken", "fast"]
    page.post("archive", {"runs": [run, run], "archived": True})
    assert page.names() == ["broken", "fast"] and page.ask("/api/runs")["num_archived"] == 1
    assert page.names(archived="1") == ["broken", "fast", "base"]
    page.post("archive", {"runs": [run], "archived": False})
    page.table.poll()
    row = page.ask("/api/runs", group="tags")["runs"][-1]
    assert (row["name"], row["note"], row["group"]) == ("base", note, "lr:1e-3 paper")
    for body in (
        {"run": run, "note": "x" * 20_000, "tags": []},
        {"run": run, "note": "\ud800", "tags": []},
        {"run": run, "note": "x", "tags": ["two words"]},
        {"run": run, "note": "x", "tags": ["a"] * 21 + [str(number) for number in range(21)]},
        {"run": run, "note": "x", "tags": "a"},
        {"run": run, "note": 1, "tags": []},
        {"run": "../base", "note": "x", "tags": []},
        {"run": ["base"], "note": "x", "tags": []},
    ):
        page.post("notes", body, 400)
    for runs in ([], ["x"], "x", [run] * 101):
        page.post("archive", {"runs": runs, "archived": True}, 400)
    page.post("archive", {"runs": [run], "archived": "yes"}, 400)
    assert page.send("notes", b'{"run": "x"}', "text/plain") == 400, "a form of another site can send this"
    assert page.send("notes", b"[]", "application/json") == 400


@pytest.mark.parametrize(
    "text", ["", "[]", '{"tags": "x"}', '{"tags": ["a b"]}', '{"note": 1}', "{" * 1000, "x" * 2**18]
)
def test_a_wrong_file_of_notes_counts_as_missing(folder: Path, text: str) -> None:
    (folder / "base" / "notes.json").write_text(text)
    row = Page(folder).ask("/api/runs")["runs"][-1]
    assert (row["name"], row["note"], row["tags"], row["archived"]) == ("base", "", [], False)


def test_runs_are_deleted_by_a_plan_that_was_shown(folder: Path) -> None:
    page = Page(folder, may_write=True)
    base, broken = folder / "base", folder / "broken"
    runs = {"runs": [id_of(base), id_of(broken)]}
    plan = page.post("plan", runs)
    assert [one["name"] for one in plan["delete"]] == ["base", "broken"] and plan["stay"] == []
    assert plan["bytes"] == sum(one["bytes"] for one in plan["delete"]) > 1000
    Run(broken).append_event("resume")
    done = page.post("delete", {"plan": plan["plan"]})
    assert done["deleted"] == [id_of(base)] and "has changed since" in done["problems"][0]
    assert not base.exists() and broken.exists() and page.names() == ["broken", "fast"]
    page.post("delete", {"plan": plan["plan"]}, 400)
    page.post("delete", {"plan": None}, 400)
    with Run(broken).lock():
        plan = page.post("plan", {"runs": [id_of(broken)]})
        assert plan["delete"] == [] and "running" in plan["stay"][0]["why"]
        assert page.post("delete", {"plan": plan["plan"]})["deleted"] == []
    page.post("plan", runs, 400)
    assert broken.exists(), "and base is no run of the table any more"
