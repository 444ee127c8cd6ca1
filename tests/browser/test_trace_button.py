"""If this fails, the button that traces a rank in the page has no effect."""

import gzip
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from played_runs import Watch
from watching import descendants, wait_until

from myriad.run import Run

if TYPE_CHECKING:
    from playwright.sync_api import Page

Tab = Callable[..., "Page"]
SMALL = ["--model.layers", "2", "--model.hidden", "32", "--model.sequence", "32", "--train.threads", "1"]
TWO_RANKS = ["--layout.dp", "2", "--train.steps", "100000", "--telemetry.file_seconds", "1"]
REFUSED = "400 (Bad Request)"


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Watch, Callable[[], None]]]:
    """A run at work and its page; and what ends the run at once."""
    run = Run(tmp_path_factory.mktemp("runs") / "at work")
    words = ["train", "tiny", "--run", str(run.path), "--oversubscribe", *SMALL, *TWO_RANKS]
    command = [sys.executable, "-m", "myriad.cli.main", *words]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True) as process:

        def end() -> None:
            for pid in [process.pid, *descendants(process.pid)]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

        watch = Watch(run)
        try:
            wait_until(lambda: len(run.read_metrics()) > 3, 90)
            yield watch.start(), end
        finally:
            watch.stop()
            end()


def test_button_traces_the_rank_and_offers_the_file(
    training: tuple[Watch, Callable[[], None]], tab: Tab, tmp_path: Path
) -> None:
    watch, end = training
    page = tab(watch, "parallel?rank=1", REFUSED)
    page.get_by_role("button", name="Trace it for 5 s").click()
    told = page.locator(".said-of-trace")
    told.get_by_text("tracing for 5 s").wait_for()
    assert page.get_by_role("button", name="Trace it for 5 s").is_disabled(), "one at a time"
    link = told.get_by_role("link", name="traces/rank-1-step-")
    link.wait_for()
    with page.expect_download() as download:
        link.click()
    download.value.save_as(tmp_path / "trace.json.gz")
    names = {
        one.get("name")
        for one in json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]
    }
    assert {"aten::mm", "forward", "backward"} <= names
    assert download.value.suggested_filename in {path.name for path in watch.run.traces_path.iterdir()}

    page.get_by_label("Look at").select_option("stacks")
    page.get_by_role("button", name="Ask the rank").click()
    told.get_by_role("link", name="-stacks.txt").wait_for()

    end()
    page.get_by_role("button", name="Ask the rank").click()
    told.get_by_text("driver").wait_for()
    assert told.get_by_role("link").count() == 0
