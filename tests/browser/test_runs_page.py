"""If this fails, the page of many runs cannot be read, used by keyboard, or trusted with names of runs."""

import asyncio
import json
import re
import secrets
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from test_dashboard_page import download

from myriad.cli.watch_content import ManyRuns
from myriad.dashboard.app import listen_at, make_server
from myriad.dashboard.request_guard import Access
from myriad.run import Run

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from ended_runs import AT, make_run

if TYPE_CHECKING:
    from playwright.sync_api import Page

Tab = Callable[..., "Page"]
ATTACK = "<img src=x onerror=window.hit=1>"


@dataclass
class Served:
    """The page of many runs, from a thread of this process."""

    address: str
    token: str
    folder: Path


@pytest.fixture
def many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """Seven runs, one of them with a name and a change that are markup."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "runs"
    for number in range(5):
        rate = f"optimizer.learning_rate={0.001 * (number + 1)}"
        make_run(folder / f"sweep-{number}", rate, loss=3 + number / 4, at=AT + 1000 * number)
    make_run(folder / "broken", "layout.dp=2", loss=5.0, end="", at=AT + 9000, steps=3)
    odd = Run(make_run(folder / ATTACK, loss=2.0, at=AT + 8000).path)
    odd.append_event("job_changed", step=4, key=ATTACK, before=0.1, after=0.01, user=f"ann {ATTACK}")
    listener, token = listen_at("127.0.0.1", 0), secrets.token_urlsafe(24)
    ready = threading.Event()
    content = ManyRuns([folder], may_write=True)
    server = make_server(content.app(Access(token)), ready.set, content.end)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    try:
        assert ready.wait(60)
        yield Served(f"http://127.0.0.1:{listener.getsockname()[1]}", token, folder)
    finally:
        server.should_exit = True
        thread.join(30)


def names(page: "Page") -> list[str]:
    return page.locator("td.named > a").all_inner_texts()


def test_runs_are_found_compared_and_told_apart(many: Served, tab: Tab) -> None:
    page = tab(many, "runs", "400 (Bad Request)", accept_downloads=True)
    page.set_default_timeout(15_000)
    page.get_by_text("7 runs: 6 finished, 1 failed.").wait_for()
    sweep = [f"sweep-{number}" for number in range(5)]
    assert names(page) == ["broken", ATTACK, *reversed(sweep)], "newest first"
    page.get_by_role("button", name="Best validation").click()
    page.locator("th[aria-sort=ascending]", has_text="Best validation").wait_for()
    page.wait_for_function("() => document.querySelector('td.named').innerText.startsWith('<img')")
    page.get_by_label("Filter").fill("sweep, loss<3.6")
    page.get_by_label("Filter").press("Enter")
    page.get_by_text("3 of 7 runs").wait_for()
    assert names(page) == sweep[:3]
    page.get_by_label("Filter").fill("los<3")
    page.get_by_label("Filter").press("Enter")
    page.get_by_role("alert").get_by_text("a column (name,").wait_for()
    page.get_by_label("Filter").fill("")
    page.get_by_label("Filter").press("Enter")
    page.get_by_role("alert").wait_for(state="detached")
    page.get_by_label("Groups").select_option("layout")
    page.get_by_text("layout = dp2 · 1 run, best validation 8.000 (broken)").wait_for()

    # By keyboard: choose six runs, so that the last one's line is dashed.
    for name in ("broken", ATTACK, *sweep[:4]):
        box = page.get_by_role("checkbox", name=f"Show {name} in charts")
        box.focus()
        box.press("Space")
    page.locator(".chips .chip").nth(5).wait_for()
    titles = [text.split("\n")[0] for text in page.locator(".chart figcaption").all_inner_texts()]
    assert titles == ["Loss", "Validation loss", "Tokens per second", "MFU", "Step time"]
    page.get_by_label("By").select_option("tokens")
    loss = page.get_by_role("application", name=re.compile("^Loss"))
    page.wait_for_url("**x=tokens**")
    loss.focus()
    page.keyboard.press("PageUp")
    page.keyboard.press("PageUp")
    page.locator(".tip.many", has_text=f"7.000 {ATTACK}").wait_for()
    assert "100 tokens" in loss.get_attribute("aria-label")
    for _ in range(4):
        page.keyboard.press("ArrowRight")
    tip = page.locator(".tip.many")
    tip.get_by_text("sweep-3").wait_for()
    assert tip.get_by_text("broken").count() == 0, "it ended before"
    rows = download(page, "Loss", "CSV").decode().splitlines()
    assert rows[0].startswith("tokens,broken,") and rows[-1].split(",")[:2] == ["600", ""]
    loss.focus()
    page.keyboard.press("+")
    page.get_by_role("button", name="Whole runs").wait_for()
    page.wait_for_url("**first=**")
    shared = page.url
    page.get_by_role("button", name="Whole runs").click()
    page.get_by_role("button", name="Whole runs").wait_for(state="detached")

    differences = page.get_by_role("region", name="Differences")
    rate = differences.locator("tr", has=page.get_by_role("rowheader", name="optimizer.learning_rate"))
    assert rate.locator("td").all_inner_texts() == ["0.001", "0.001", "0.001", "0.002", "0.003", "0.004"]
    page.locator("dd", has_text=f"{ATTACK}: 0.1 → 0.01, step 4, ann {ATTACK}").wait_for()
    assert page.locator("img").count() == 0 and page.evaluate("() => window.hit") is None

    # The address shows another person the same; a run that grows is followed.
    page.goto("about:blank")
    page.goto(shared)
    page.get_by_role("button", name="Whole runs").wait_for()
    assert page.locator(".chips .chip").count() == 6
    page.get_by_role("button", name="Remove broken from charts").click()
    page.get_by_role("button", name="Whole runs").wait_for(state="detached")
    with (many.folder / "sweep-0" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 7, "time": AT + 80, "loss": 0.125, "tokens": 700}) + "\n")
    page.locator("tr", has_text="sweep-0").get_by_text("0.125").wait_for()

    # A run's own page, and back to the same choice.
    shared = page.url
    page.get_by_role("link", name="sweep-1").click()
    page.get_by_text("Finished: step 6 of").wait_for()
    assert page.title() == "sweep-1: Overview" and "/run/" in page.url
    page.locator("figcaption", has_text="Loss").first.wait_for()
    page.get_by_role("link", name="Nodes and faults").click()
    page.get_by_text("finish").first.wait_for()
    page.go_back()
    page.go_back()
    page.locator(".chips .chip").nth(4).wait_for()
    assert page.url == shared
    page.get_by_role("link", name=ATTACK).click()
    page.get_by_role("link", name="All runs").click()
    page.get_by_text("7 runs: 6 finished, 1 failed.").wait_for()
    assert page.evaluate("() => window.hit") is None
    page.goto(shared)
    for width in (390, 1000, 1920, 3840):
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_function("width => document.body.scrollWidth <= width", arg=width)
    before = page.locator("body").evaluate("body => getComputedStyle(body).backgroundColor")
    page.get_by_role("button", name="Use dark colours").click()
    assert page.locator("body").evaluate("body => getComputedStyle(body).backgroundColor") != before
    change_runs(page, many.folder)


def change_runs(page: "Page", folder: Path) -> None:
    """Notes and tags, archive, deletion: by dialogs that keep the focus, and only after the last button."""
    page.get_by_role("button", name="Clear the choice").click()
    page.get_by_role("button", name="Edit the note of sweep-4").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Tags").fill("paper two,words")
    dialog.get_by_label("Note").fill(ATTACK)
    dialog.get_by_role("button", name="Save").click()
    dialog.wait_for(state="detached")
    row = page.get_by_role("region", name="Table of runs").locator("tr", has_text="sweep-4")
    row.get_by_text(ATTACK).wait_for()
    assert row.locator(".tag").all_inner_texts() == ["paper", "two", "words"]
    page.get_by_role("button", name="Edit the note of sweep-4").click()
    dialog.get_by_label("Tags").fill("a" * 41)
    dialog.get_by_role("button", name="Save").click()
    dialog.get_by_role("alert").get_by_text("at most 20, each of 1 to 40 letters").wait_for()
    page.keyboard.press("Escape")
    dialog.wait_for(state="detached")

    page.get_by_role("checkbox", name="Show sweep-4 in charts").check()
    page.get_by_role("button", name="Archive…").click()
    dialog.get_by_role("button", name="Archive", exact=True).click()
    row.wait_for(state="detached")
    page.get_by_label("1 archived").check()
    row.locator(".tag", has_text="archived").wait_for()
    row.get_by_role("checkbox").check()
    page.get_by_role("button", name="Take from the archive…").click()
    dialog.get_by_role("button", name="List again").click()
    row.locator(".tag", has_text="archived").wait_for(state="detached")

    for name in ("sweep-4", "broken"):
        page.get_by_role("checkbox", name=f"Show {name} in charts").check()
    with Run(folder / "broken").lock():
        page.get_by_role("button", name="Delete…").click()
        dialog.get_by_text("broken is running").wait_for()
    assert dialog.get_by_text(str(folder / "sweep-4")).count() == 1
    dialog.get_by_role("button", name="Cancel").click()
    dialog.wait_for(state="detached")
    assert (folder / "sweep-4").exists()
    page.get_by_role("button", name="Delete…").click()
    dialog.get_by_role("button", name="Delete 2 for ever").click()
    row.wait_for(state="detached")
    assert sorted(path.name for path in folder.iterdir()) == [
        ATTACK,
        *(f"sweep-{number}" for number in range(4)),
    ]
    assert page.locator("img").count() == 0 and page.evaluate("() => window.hit") is None
