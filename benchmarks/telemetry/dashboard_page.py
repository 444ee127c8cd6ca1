"""How quick the page is at 12,288 ranks: size of its scripts, first map, frames while it is dragged.

    python benchmarks/telemetry/dashboard_page.py [--ranks 12288] [--steps 12] [--seconds 4]

Plays a run into a server of its own (span_generator.py) and opens the page in the system's
Chromium, which draws by software here. A frame is the time from one animation frame to the next; 16.7 ms is
the display's own pace. Scrubbing drags the window of steps of the heat map, so that each move asks the
server; panning drags and zooms a timeline of thousands of lanes.
"""

import argparse
import gzip
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "browser"))

from played_runs import REPOSITORY, Watch, chromium

from span_generator import make_run, ranks_of, tell_step
from span_player import Player, Wrong, batches

PAGE = REPOSITORY / "src" / "myriad" / "dashboard" / "page"
VIEWPORT = {"width": 1280, "height": 720}
MOVE_SECONDS = 0.008

RECORD_FRAMES = """() => {
    const frames = window.frames_ = [];
    let before = 0;
    const next = now => {
        if (before) frames.push(now - before);
        before = now;
        if (window.frames_ === frames) requestAnimationFrame(next);
    };
    requestAnimationFrame(next);
}"""
REPAINT = """async () => {
    const {Raster} = await import("/static/raster.js");
    const {byNode} = await import("/static/arrange.js");
    const {paintValues} = await import("/static/colours.js");
    const raster = new Raster(document.createElement("canvas"));
    const values = Float32Array.from({length: RANKS}, (_, i) => Math.sin(i) * 4);
    const colours = new Uint32Array(RANKS);
    raster.arrange(byNode(RANKS, 8, 812, 516, []), 1);
    const times = [];
    for (let i = 0; i < 200; i++) {
        const began = performance.now();
        paintValues(values, [-6, 6], "z", "light", colours);
        raster.paint(colours);
        times.push(performance.now() - began);
    }
    return times.sort((a, b) => a - b)[100];
}"""


def script_bytes() -> tuple[int, int]:
    """Return the gzipped bytes of all scripts, and of the vendored ones among them."""
    sizes = {path: len(gzip.compress(path.read_bytes(), 9)) for path in PAGE.rglob("*.js")}
    return sum(sizes.values()), sum(size for path, size in sizes.items() if path.parent.name == "vendor")


def play(watch: Watch, ranks: int, steps: int) -> int:
    """Sends the spans of all steps; how many."""
    wrong = Wrong(slow_node=ranks // 8 * 588 // 1536, slow_from=steps // 3)
    player = Player(ranks_of(watch.run), 16, wrong, time.time() - steps * 6.5)
    count = 0
    for step in range(1, steps + 1):
        began = player.begin_seconds
        for _, batch in batches(player, step, 10.0, 128):
            watch.post(batch)
            count += len(batch.records)
        tell_step(watch.run, player, step, began)
    return count


def first_map_seconds(browser: Browser, address: str, times: int = 7) -> list[float]:
    """From the start of a navigation with an empty cache to the first drawn map."""
    found = []
    for _ in range(times):
        with browser.new_context(viewport=VIEWPORT) as context:
            page = context.new_page()
            page.goto(f"{address}/#/heat")
            page.wait_for_function("() => performance.getEntriesByName('myriad:map').length > 0")
            found.append(
                page.evaluate("() => performance.getEntriesByName('myriad:map')[0].startTime") * 1e-3
            )
    return found


def scrub(page: Page, address: str, seconds: float) -> list[float]:
    """Drags the window of steps to and fro."""
    page.goto(f"{address}/#/heat?first=1&last=2")
    page.locator(".beside tbody tr").first.wait_for()
    box = page.locator(".window").bounding_box()
    strip = page.locator(".scrubber").bounding_box()
    if box is None or strip is None:
        raise RuntimeError("the heat map shows no steps")
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 20)
    page.mouse.down()
    frames = moved(page, seconds, strip["x"] + 40, strip["x"] + strip["width"] - 40, box["y"] + 20)
    page.mouse.up()
    return frames


def pan(page: Page, address: str, seconds: float, ranks: int) -> tuple[list[float], int]:
    """Drags a timeline with as many lanes as the server gives; frames, and lanes."""
    page.goto(f"{address}/#/timeline?ranks=0-{min(ranks, 4096) - 1}&steps=1-2&zoom=32")
    page.locator(".lanes canvas").wait_for()
    page.wait_for_timeout(1500)
    lanes = int((page.locator(".lanes").get_attribute("aria-label") or "").split()[2])
    page.mouse.move(700, 400)
    page.mouse.down()
    frames = moved(page, seconds, 400, 1000, 400, sway=150)
    page.mouse.up()
    page.evaluate(RECORD_FRAMES)
    for turn in range(40):
        page.mouse.wheel(0, -120 if turn % 20 < 10 else 120)
        page.wait_for_timeout(20)
    return frames + page.evaluate("() => window.frames_"), lanes


def moved(page: Page, seconds: float, left: float, right: float, y: float, sway: float = 0.0) -> list[float]:
    """Milliseconds of each frame while the pressed mouse goes between two points."""
    page.evaluate(RECORD_FRAMES)
    until = time.monotonic() + seconds
    for share in to_and_fro():
        page.mouse.move(left + (right - left) * share, y + sway * (share - 0.5))
        time.sleep(MOVE_SECONDS)
        if time.monotonic() > until:
            return page.evaluate("() => window.frames_")
    return []


def to_and_fro() -> Iterator[float]:
    """0 to 1 and back, for ever."""
    while True:
        yield from (step / 120 for step in range(120))
        yield from (1 - step / 120 for step in range(120))


def frame_text(frames: list[float]) -> str:
    """Longest, and what is usual."""
    over = sum(frame > 33.4 for frame in frames)
    usual = statistics.median(frames)
    return f"longest {max(frames):.1f} ms, median {usual:.1f} ms, {over} of {len(frames)} over 33.4 ms"


def measure(watch: Watch, given: argparse.Namespace) -> Iterator[tuple[str, str, str]]:
    """What, aim and found."""
    total, others = script_bytes()
    yield "scripts, gzipped", "60 KB", f"{total / 1000:.1f} KB, of it {others / 1000:.1f} KB not ours"
    with sync_playwright() as engine:
        browser = engine.chromium.launch(executable_path=chromium(), args=["--no-sandbox", "--disable-gpu"])
        maps = first_map_seconds(browser, watch.address)
        middle = statistics.median(maps)
        yield (
            "first map, cold page",
            "0.5 s",
            f"median {middle:.2f} s, worst {max(maps):.2f} s of {len(maps)}",
        )
        page = browser.new_page(viewport=VIEWPORT)
        page.goto(f"{watch.address}/#/heat")
        repaint: Any = page.evaluate(REPAINT.replace("RANKS", str(given.ranks)))
        yield f"repaint of {given.ranks:,} cells", "1 ms", f"median {repaint:.2f} ms"
        yield "frames, scrubbing the heat map", "33 ms", frame_text(scrub(page, watch.address, given.seconds))
        frames, lanes = pan(page, watch.address, given.seconds, given.ranks)
        yield f"frames, panning and zooming {lanes:,} lanes", "33 ms", frame_text(frames)


def main(arguments: list[str]) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=12288, choices=(256, 1024, 12288))
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=4.0)
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        watch = Watch(make_run(Path(folder) / "played", given.ranks)).start()
        try:
            spans = play(watch, given.ranks, given.steps)
            print(f"{spans:,} spans of {given.ranks:,} ranks are in the server\n")
            print("| what | aim | found |\n|---|---|---|")
            for line in measure(watch, given):
                print(f"| {' | '.join(line)} |", flush=True)
        finally:
            watch.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
