"""Makes the README's pictures of the dashboard, from the same runs that the browser's tests look at.

    python scripts/screenshots.py [FOLDER [dark]]        # default: docs/images/

Needs Chromium and `pip install 'myriad-train[dev]'`. Each picture is 1200 x 675.
"""

import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY / "tests" / "browser"))

from played_runs import SLOW_NODE, STEP_SECONDS, Watch, chromium, hung_run, play_hang, slow_run, tell_repair  # noqa: E402
from playwright.sync_api import Page, sync_playwright  # noqa: E402

from myriad.run import Run  # noqa: E402

SLOW_RANK = 8 * SLOW_NODE + 3
VIEWPORT = {"width": 1200, "height": 675}
STILL_SECONDS = 120.0
STEPS, CLUSTER = 24, "megascale-12288xa100"
DRAWN_MS = 900


def slow_story(folder: Path) -> Run:
    """A run that repaired itself once, and still has a slow host. It goes on while it is looked at."""
    began = time.time() + STILL_SECONDS - STEPS * STEP_SECONDS
    run = slow_run(folder, steps=STEPS, ago_seconds=-STILL_SECONDS, micro_batches=16)
    tell_repair(run, began)
    return run


def slow_pictures(page: Page, address: str) -> Iterator[str]:
    """Of a run with a slow host; yields when the page shows what has this name."""
    page.goto(f"{address}/#/overview")
    page.locator(".chart canvas").nth(3).wait_for()
    yield "dashboard-overview"
    page.goto(f"{address}/#/heat?rank={SLOW_RANK}")
    page.locator(".beside tbody tr").first.wait_for()
    yield "dashboard-heat"
    pipeline = ",".join(str(rank) for rank in range(SLOW_RANK % 8 + 64, 128, 8))
    page.goto(f"{address}/#/timeline?rank={SLOW_RANK}&ranks={pipeline}&steps=20")
    page.locator(".waiters").get_by_role("button").first.wait_for()
    page.locator(".lanes").focus()
    for _ in range(3):
        page.keyboard.press("+")
    yield "dashboard-timeline"


def hung_pictures(page: Page, address: str) -> Iterator[str]:
    """Of one that hangs."""
    page.goto(f"{address}/#/parallel")
    page.locator(".alarm").wait_for()
    yield "dashboard-hang"


def main(arguments: list[str]) -> int:
    """Writes all pictures."""
    into = Path(arguments[0]) if arguments else REPOSITORY / "docs" / "images"
    theme = "dark" if "dark" in arguments[1:] else "light"
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as engine:
        browser = engine.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        slow = Watch(slow_story(Path(folder) / "slow-host"), ("--cluster", CLUSTER)).start()
        hung = Watch(hung_run(Path(folder) / "hung")).start()
        try:
            play_hang(hung)
            page = browser.new_page(viewport=VIEWPORT, color_scheme=theme)
            for pictures, watch in ((slow_pictures, slow), (hung_pictures, hung)):
                page.goto(f"{watch.address}/?token={watch.token}")
                page.wait_for_url(f"{watch.address}/")
                for name in pictures(page, watch.address):
                    page.wait_for_timeout(DRAWN_MS)
                    path = into / f"{name}.png"
                    path.write_bytes(page.screenshot())
                    print(f"{path}: {path.stat().st_size / 1000:.0f} KB")
            page.close()
        finally:
            slow.stop()
            hung.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
