"""What a person sees of a run in a real browser: who is slow, who waits, who is silent."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from played_runs import HANG_AT, SILENT_RANK, SLOW_NODE, Watch, player_of, slow_run

from myriad.cli.watch_access import open_in_browser
from myriad.run import Run
from myriad.telemetry.span_io.span_batch import SpanBatch
from span_generator import make_run
from span_player import Wrong

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

Tab = Callable[..., "Page"]
SLOW_RANKS = range(8 * SLOW_NODE, 8 * SLOW_NODE + 8)
GONE = (
    "ERR_CONNECTION_REFUSED",
    "ERR_INCOMPLETE_CHUNKED_ENCODING",
    "ERR_CONNECTION_RESET",
    "ERR_EMPTY_RESPONSE",
)

REDDEST = """canvas => {
    const {width, height} = canvas;
    const {data} = canvas.getContext("2d").getImageData(0, 0, width, height);
    let [most, at] = [-1, 0];
    for (let i = 0; i < data.length; i += 4) {
        const red = data[i + 3] ? data[i] - data[i + 1] - data[i + 2] : -1e9;
        if (red > most) [most, at] = [red, i / 4];
    }
    const scale = canvas.clientWidth / width;
    return {x: (at % width + 2) * scale, y: (Math.floor(at / width) + 2) * scale};
}"""
"""Where the reddest cell of a canvas begins, in the page's pixels."""

OPAQUE = """canvas => {
    const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    let sum = 0;
    for (let i = 0; i < data.length; i++) sum = (sum * 31 + data[i]) % 1000000007;
    return sum;
}"""
"""One number for all of a canvas."""
LINE_PIXELS = """canvas => {
    const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    const off = (i) => Math.max(...[0x1f, 0x5f, 0xa8].map((part, k) => Math.abs(data[i + k] - part)));
    const near = (i) => data[i + 3] > 200 && off(i) < 40;
    return Array.from({length: data.length / 4}, (_, i) => near(4 * i)).filter(Boolean).length;
}"""
"""Of a chart's curve."""
TICKS = """async () => {
    const {tickTexts, ticksOf} = await import("/static/chart_paint.js");
    const {count, plain, seconds} = await import("/static/format.js");
    return [
        tickTexts([1, 1.001], seconds),
        tickTexts([0, 0.5], String),
        ticksOf(1e16, 1e17, 1e-3).length,
        [plain(null), count(1234), plain(1e30)],
    ];
}"""


def cells(page: "Page") -> "Locator":
    page.locator(".beside tbody tr").first.wait_for()
    return page.locator(".cells canvas")


def test_slow_host_is_the_reddest_cell_and_row_1_of_the_table(slow: Watch, tab: Tab) -> None:
    page = tab(slow, "heat")
    spot = cells(page).evaluate(REDDEST)
    cells(page).hover(position=spot)
    tip = page.locator(".tip").inner_text()
    assert f"node {SLOW_NODE}" in tip and "forward" in tip and "dp 1 · tp" in tip
    rows = page.locator(".beside tbody tr").all_inner_texts()
    ranks = {int(row.split()[0]) for row in rows[:8]}
    assert ranks == set(SLOW_RANKS)
    assert f"node {SLOW_NODE}" in page.locator(".said").inner_text()


def test_click_on_the_slow_cell_leads_to_its_timeline_with_arrows_to_those_who_wait(
    slow: Watch, tab: Tab
) -> None:
    page = tab(slow, "heat?last=6")
    canvas = cells(page)
    canvas.click(position=canvas.evaluate(REDDEST))
    waiters = page.locator(".waiters")
    waiters.get_by_role("button").first.wait_for()
    rank = int(re.search(r"rank=(\d+)", page.url)[1])
    assert rank in SLOW_RANKS
    waiting = {int(text) for text in waiters.get_by_role("button").all_inner_texts()}
    assert waiting and waiting.isdisjoint(SLOW_RANKS)
    drawn = page.locator(".lanes canvas")
    with_arrows = drawn.evaluate(OPAQUE)
    page.get_by_label("Arrows").uncheck()
    page.wait_for_function(
        "([canvas, before]) => (" + OPAQUE + ")(canvas) !== before", arg=[drawn.element_handle(), with_arrows]
    )


def test_a_hang_names_the_silent_rank_in_front(hung: Watch, tab: Tab) -> None:
    page = tab(hung, "overview")
    link = page.get_by_role("link", name=f"Silent: rank {SILENT_RANK}")
    link.wait_for()
    assert "hang" in page.locator(".state").inner_text()
    link.click()
    alarm = page.locator(".alarm")
    alarm.get_by_role("heading", name=f"Rank {SILENT_RANK} is silent").wait_for()
    assert re.search(rf"{SILENT_RANK}\s+node 12\s.*\s{HANG_AT}\s", alarm.locator("tbody").inner_text())
    page.goto(f"{hung.address}/#/parallel?rank=106")
    page.locator("dd", has=page.locator(f"text='{SILENT_RANK}'")).wait_for()
    assert re.search(r"Action\s+(await |wait|exchange|reduce|gather|clip)", page.locator("dl").inner_text())


def test_page_shows_a_lost_server_and_recovers_with_it(tmp_path: Path, tab: Tab) -> None:
    watch = Watch(slow_run(tmp_path / "again", ranks=64, steps=3)).start()
    metrics = watch.run.metrics_path
    line = json.loads(metrics.read_text().splitlines()[-1])
    try:
        page = tab(watch, "overview", *GONE)
        page.get_by_text(f"step {line['step']} of").first.wait_for()
        watch.stop()
        page.get_by_text("The server has been unreachable since").wait_for()
        with metrics.open("a") as file:
            file.write(json.dumps(line | {"step": 4711}) + "\n")
        watch.start()
        page.get_by_text("The server has been unreachable since").wait_for(state="detached")
        page.get_by_text("step 4711 of").first.wait_for()
        page.close()
    finally:
        watch.stop()


def test_a_private_file_leads_a_browser_in_and_the_address_keeps_no_token(
    slow: Watch, browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `--open` does. A strict cookie is not sent where another site's page, or a file, leads a browser."""
    monkeypatch.setenv("BROWSER", "chromium")
    monkeypatch.setattr("webbrowser.open", lambda page: None)
    entry = tmp_path / "state" / "entry.html"
    open_in_browser(f"{slow.address}/?token={slow.token}", entry, has_token=True)
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(entry.as_uri())
        page.wait_for_url(f"{slow.address}/**", timeout=60_000)
        page.get_by_role("navigation").get_by_role("link", name="Heat map").click(timeout=60_000)
        assert slow.token not in page.evaluate("() => location.href + document.cookie + document.referrer")
        page.go_back()
        assert slow.token not in page.url
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(f"{slow.address}/")
        assert "a token is needed" in page.inner_text("body")


def test_all_views_work_offline_in_light_and_dark(slow: Watch, tab: Tab) -> None:
    page = tab(slow, "overview")
    page.locator(".chart canvas").nth(3).wait_for()
    before = page.locator("body").evaluate("body => getComputedStyle(body).backgroundColor")
    page.get_by_role("button", name="Use dark colours").click()
    assert page.locator("body").evaluate("body => getComputedStyle(body).backgroundColor") != before
    for view, there in {
        "Heat map": ".cells canvas",
        "Timeline": ".lanes canvas",
        "Parallel view": ".replica",
        "Nodes": ".faults table",
    }.items():
        page.get_by_role("navigation").get_by_role("link", name=view).click()
        page.locator(there).first.wait_for()
    policy = page.request.get(slow.address).headers["content-security-policy"]
    assert "default-src 'self'" in policy and "unsafe" not in policy


def test_everything_can_be_reached_by_keyboard(slow: Watch, tab: Tab) -> None:
    page = tab(slow, "heat?rank=0")
    cells(page)
    focused = "() => document.activeElement.getAttribute('aria-roledescription')"
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.evaluate(focused) == "heat map":
            break
    assert page.evaluate(focused) == "heat map"
    assert page.evaluate("() => getComputedStyle(document.activeElement).outlineStyle") != "none"
    page.keyboard.press("ArrowRight")
    page.locator("[aria-live]", has_text="rank 1 on node 0").wait_for()
    page.keyboard.press("PageDown")
    page.keyboard.press("Enter")
    page.locator(".lanes canvas").wait_for()
    assert "/timeline?" in page.url
    chosen = page.locator(".below b").inner_text()
    page.locator(".lanes").focus()
    page.keyboard.press("ArrowDown")
    page.wait_for_function("before => document.querySelector('.below b').textContent !== before", arg=chosen)
    page.keyboard.press("+")
    page.wait_for_url("**start=**")
    page.keyboard.press("Enter")
    page.get_by_role("heading", name=re.compile(r"^Rank \d+$")).wait_for()


def test_slider_moves_the_steps_shown_and_the_address_keeps_them(slow: Watch, tab: Tab) -> None:
    page = tab(slow, "heat?by=grid&scale=ms&phase=backward")
    cells(page)
    page.get_by_role("slider", name="Last step shown").press("ArrowLeft")
    page.wait_for_url("**last=7**")
    page.get_by_role("slider", name="First step shown").press("End")
    page.wait_for_url("**last=8**")
    page.reload()
    cells(page)
    assert page.get_by_label("Phase").input_value() == "backward"
    assert page.get_by_label("Arranged by").input_value() == "grid"
    assert page.get_by_role("slider", name="Last step shown").get_attribute("aria-valuenow") == "8"


def test_worst_lane_stands_for_its_group_when_lanes_outnumber_pixels(slow: Watch, tab: Tab) -> None:
    page = tab(slow, "timeline?steps=6", viewport={"width": 1280, "height": 340})
    page.get_by_text("each is the worst of its group").wait_for()
    page.locator(".lanes").focus()
    for _ in range(80):
        page.keyboard.press("ArrowDown")
        if int(re.search(r"\d+", page.locator(".below").inner_text())[0]) in SLOW_RANKS:
            return
    pytest.fail("the slow host is hidden behind faster ranks")


def test_every_view_shows_that_a_run_has_no_data_yet(tmp_path: Path, tab: Tab) -> None:
    watch = Watch(make_run(tmp_path / "new", 64)).start()
    try:
        page = tab(watch, "heat")
        for view in ("heat", "timeline"):
            page.goto(f"{watch.address}/#/{view}")
            page.get_by_text("No spans have arrived yet").wait_for()
        for view in ("overview", "parallel", "faults"):
            page.goto(f"{watch.address}/#/{view}")
            page.locator("main > section").wait_for()
        page.close()
    finally:
        watch.stop()


def test_plan_is_shown_beside_what_was_measured(slow: Watch, tab: Tab) -> None:
    page = tab(slow, "overview")
    page.locator(".waterfall th", has_text="Predicted").wait_for()
    assert re.search(r"MFU\s+[\d.]+ %\s+[\d.]+ %", page.locator(".waterfall .total").inner_text())
    page.goto(f"{slow.address}/#/timeline?ranks=96-99&steps=6")
    page.locator(".lanes canvas").wait_for()
    assert page.locator(".lanes").get_attribute("aria-label") == "Timeline of 8 lanes, 4 of them predicted"


def test_charts_share_axis_and_zoom_and_can_be_downloaded(slow: Watch, tab: Tab) -> None:
    page = tab(slow, "overview", accept_downloads=True)
    charts = page.locator(".chart")
    charts.nth(4).wait_for()
    titles = page.locator(".chart figcaption").all_inner_texts()
    assert [title.split("\n")[0] for title in titles] == [
        *("Loss", "Tokens per second", "MFU", "Step time", "Exposed communication")
    ], "what the run has figures for"
    plot = page.get_by_role("application", name=re.compile("^MFU"))
    plot.focus()
    page.keyboard.press("Home")
    page.keyboard.press("PageUp")
    assert re.search(
        r"step 1: [\d.]+ %", plot.get_attribute("aria-label")
    ) and "start: " in plot.get_attribute("aria-label")
    page.locator(".tip.marked", has_text="start: 256 ranks").wait_for()
    assert page.locator(".cursor").count() == 5, "all charts show the same step"
    page.get_by_label("By").select_option("tokens")
    page.get_by_label("Scale").select_option("log")
    page.get_by_label("Smoothing").select_option("0.9")
    plot.focus()
    page.keyboard.press("+")
    page.get_by_text("Steps 1 to 3").wait_for()
    page.wait_for_url(re.compile("first=1.*last=3|last=3.*first=1"))
    saved = {kind: download(page, "Loss", kind) for kind in ("CSV", "SVG", "PNG")}
    rows = saved["CSV"].decode().splitlines()
    assert rows[0] == "step,tokens,training" and [row.split(",")[0] for row in rows[1:]] == ["1", "2", "3"]
    assert (
        saved["SVG"].startswith(b"<svg")
        and b"Loss, by tokens" in saved["SVG"]
        and saved["SVG"].count(b'opacity="0.28"') == 1
    )
    assert saved["PNG"].startswith(b"\x89PNG")
    page.get_by_role("button", name="All steps").click()
    page.get_by_text("Steps 1 to 3").wait_for(state="detached")


def download(page: "Page", chart: str, kind: str) -> bytes:
    page.get_by_label(f"Download: {chart}").click()
    with page.expect_download() as found:
        page.locator(".save[open]").get_by_role("button", name=kind).click()
    assert found.value.suggested_filename == f"{chart.lower()}.{kind.lower()}"
    return Path(found.value.path()).read_bytes()


def test_rows_of_charts_have_no_holes(slow: Watch, tab: Tab) -> None:
    page = tab(slow, "overview")
    page.locator(".chart").nth(4).wait_for()
    for width in (390, 1000, 1920, 3840):
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_function(
            """width => {
                const box = document.querySelector(".charts"), last = box.lastElementChild;
                const right = last.offsetLeft + last.offsetWidth - box.offsetLeft;
                return box.clientWidth > width - 60 && Math.abs(right - box.clientWidth) < 8;
            }""",
            arg=width,
        )
        boxes = [chart.bounding_box() for chart in page.locator(".chart").all()]
        ends: dict[float, float] = {}
        for box in boxes:
            ends[box["y"]] = max(ends.get(box["y"], 0.0), box["x"] + box["width"])
        assert max(ends.values()) - min(ends.values()) < 8, (width, ends)
        assert page.evaluate("document.body.scrollWidth") <= width


def test_predicted_lane_lies_under_its_measured_one(slow: Watch, tab: Tab) -> None:
    page = tab(slow, "overview")
    lanes = [{"rank": 7}, {"rank": 9}, {"rank": 9, "predicted": True}, {"rank": 7, "predicted": True}]
    spans = {"lane": [3, 0, 2, 1], "start": [0, 0.5, 0, 0], "duration": [1, 1, 1, 1], "name": [0, 0, 0, 0]}
    found = page.evaluate(
        """async ([lanes, spans]) => {
            const {arrangeLanes} = await import("/static/lanes.js");
            const arrays = {...spans, stage: [0, 0, 0, 0], micro_batch: [0, 0, 0, 0], chunk: [0, 0, 0, 0]};
            const made = arrangeLanes({facts: {lanes, names: ["forward"], start: 0, end: 2}, arrays});
            return made.lanes.map(lane => [lane.rank, lane.predicted, made.start[lane.from]]);
        }""",
        [lanes, spans],
    )
    assert found == [[7, False, 0.5], [7, True, 0], [9, False, 0], [9, True, 0]]


def test_names_and_texts_of_a_run_cannot_inject_anything(tmp_path: Path, tab: Tab) -> None:
    attack = "<img src=x onerror=window.hit=1><script>window.hit=1<"
    run = slow_run(tmp_path / attack.replace("/", ""), ranks=64, steps=2)
    run.append_event("fault", node=0, problem=attack, evidence={attack: attack}, rule=attack)
    watch = Watch(run).start()
    try:
        watch.post(span_named(run, attack))
        page = tab(watch, "heat")
        page.locator("option", has_text=attack).first.wait_for(state="attached")
        for view in (
            "overview",
            "faults",
            "parallel?rank=0",
            "timeline",
            f"heat?phase={attack}&by={attack}",
            f"{attack}?rank={attack}",
        ):
            page.goto(f"{watch.address}/#/{view}")
            page.locator("main > section").wait_for()
            if view in ("overview", "faults"):
                page.locator("main").get_by_text(attack).first.wait_for()
            assert page.locator("img, main script").count() == 0
        assert page.evaluate("() => window.hit") is None
        assert attack.replace("/", "") in page.locator(".name").inner_text()
        page.close()
    finally:
        watch.stop()


def span_named(run: Run, name: str) -> SpanBatch:
    """Of all ranks, in step 1, but later than what its files have."""
    records = player_of(run, Wrong(), 2).step(1)
    records = records[records["name"] == records["name"][0]].copy()
    records["start_ns"] += 60 * 10**9
    records["name"] = 0
    return SpanBatch(0, 1, (name,), records)


def test_many_pages_of_one_browser_share_its_connections(slow: Watch, tab: Tab) -> None:
    """It has six to a server: with a stream for each page the sixth would wait for ever."""
    first = tab(slow, "overview")
    pages = [first, *(first.context.new_page() for _ in range(7))]
    for page in pages[1:]:
        page.goto(f"{slow.address}/#/overview")
    for page in pages:
        page.locator(".chart canvas").first.wait_for()
    for page in pages[1:]:
        page.close()


def test_an_odd_address_or_a_browser_that_keeps_nothing_leaves_no_page_blank(slow: Watch, tab: Tab) -> None:
    page = tab(slow, "overview", "400 (Bad Request)")
    page.add_init_script(
        "Object.defineProperty(window, 'localStorage', {get() { throw new DOMException('denied'); }});"
    )
    views = ("constructor", "__proto__", "%", "timeline?rank=abc&zoom=-4", "timeline?start=0",
             "parallel?rank=2.5", "heat?rank=-3&first=x&last=y&by=z&scale=q&phase=w")  # fmt: skip
    for view in views:
        page.goto("about:blank")
        page.goto(f"{slow.address}/#/{view}")
        page.locator("main > section").wait_for()
        page.wait_for_timeout(200)
        assert not re.search(r"undefined|rank NaN|\[object", page.locator("main").inner_text()), view
    page.get_by_role("button", name="Use dark colours").click()
    page.get_by_role("button", name="Use light colours").wait_for()


def odd_run(path: Path) -> Run:
    """Of one step with a loss between steps without one, figures that do not fit an axis, and events of all
    kinds."""
    run = slow_run(path, ranks=64, steps=2)
    lines = [json.loads(line) for line in run.metrics_path.read_text().splitlines()]
    run.metrics_path.write_text("")
    for step in range(1, 6):
        odd = {"loss": 3.25 if step == 2 else None, "tokens_per_second": 1e16 + 2 * step, "mfu": 0.5}
        odd["user"] = {"<b>mine": step / 2}
        if step == 4:
            odd["expert_loads"] = {"blocks.0": [0.5, 1.5], "<b>": [1, None]}
        if step in (3, 5):
            odd["layer_norms"] = {
                "gradient": {"<b>": step / 2, "head": None},
                "parameter": {"<b>": 4.0, "head": 2.0},
                "update": {"<b>": 0.5, "head": 1.0},
            }
        run.append_metrics(lines[0] | {"step": step, "step_seconds": 1e-12 * step} | odd)
    run.append_event("validation", step=2, loss=3.5)
    changed = {"key": "optimizer.learning_rate", "before": 0.0025, "after": 0.0005}
    run.append_event("job_changed", step=3, **changed)
    run.append_event("retry", step=4, problem="No space left on device", seconds=20.0)
    run.append_event("telemetry", place="metrics.jsonl", problem="", num_late=1600, num_dropped=3)
    run.append_event("fault", rank=9, node=1, step=4, time=1e9, problem="rank 9 is silent")
    run.append_event("held", step=5, problem="No space left on device", servers=[])
    for step, text in ((2, 900.0), (4, None)):
        scores = {"scores": {"<b>/acc": step / 8, "text/perplexity": text}, "documents": {"<b>": 8}}
        run.append_event("evaluation", step=step, **scores, standard_errors={"<b>/acc": 0.0625})
    (run.path / "spans" / "attempt-1-node-9-0.parquet").write_bytes(b"PAR1")
    return run


def test_events_have_words_and_steps_and_what_is_no_number_is_no_line(tmp_path: Path, tab: Tab) -> None:
    run = odd_run(tmp_path / "odd")
    watch = Watch(run).start()
    try:
        page = tab(watch, "overview", *GONE)
        figures = page.locator(".figures")
        figures.get_by_text("non-finite since step 3; 3.250 at step 2").wait_for()
        events = page.locator(".events")
        for words in (
            "optimizer.learning_rate was 0.0025, is 0.0005 step 3",
            "this step is in memory only; storing it is retried for 20.0 s: No space left on device step 4",
            "metrics.jsonl is written again: 1,600 lines late, 3 lines lost",
            "rank 9 is silent step 4 · node 1 · rank 9",
        ):
            events.locator("li", has_text=re.compile(rf"{re.escape(words)}\s*$")).wait_for()
        page.get_by_text("step 5 is in memory only: `myriad checkpoint save` stores it elsewhere").wait_for()
        page.get_by_text("could not be read").click()
        page.get_by_text("attempt-1-node-9-0.parquet: not a complete span file").wait_for()
        scores = page.locator(".scores tbody tr")
        assert [text.split() for text in scores.all_inner_texts()] == [
            ["<b>/acc", "0.250", "0.500", "±", "0.0625", "4", "8"],
            ["text/perplexity", "900.000", "–", "–", "4", "–"],
        ]
        assert scores.locator(".spark circle title").all_text_contents() == [
            "step 2: 0.250 ± 0.0625",
            "step 4: 0.500 ± 0.0625",
        ]
        page.get_by_text("Busiest: blocks.0, expert 1, 1.500.").wait_for()
        cells = page.locator(".experts rect title").all_text_contents()
        assert cells[::3] == ["blocks.0, expert 0: 0.500", "<b>, expert 1: –"], "of step 4"
        norms = page.locator(".norms")
        norms.get_by_text("Largest now: head, 0.500.").wait_for()
        norms.get_by_label("Show").select_option("gradient")
        norms.get_by_text("Largest now: <b>, 2.500.").wait_for()
        cells = norms.locator("rect title").all_text_contents()
        assert [cells[0], cells[-1]] == ["<b>, step 3: 1.500", "head, step 5: –"]
        loss = page.get_by_role("application", name=re.compile("^Loss"))
        high = page.locator(".chart").first.bounding_box()
        loss.focus()
        for key in ("ArrowLeft", "ArrowLeft", "ArrowLeft"):
            page.keyboard.press(key)
        page.locator(".tip.marked", has_text="validation 3.500").get_by_text("training 3.250").wait_for()
        assert page.locator(".chart").first.bounding_box() == high, "what is told moves nothing"
        page.keyboard.press("Escape")
        page.locator(".chart figcaption", has_text="<b>mine").get_by_text("now 2.500").wait_for()
        page.locator(".chart figcaption", has_text="<b>/acc").get_by_text("last 0.500, step 4").wait_for()
        drawn = page.locator(".chart canvas").first.evaluate(LINE_PIXELS)
        assert 4 <= drawn <= 40, "a dot"
        events.get_by_role("link", name="rank 9").click()
        page.get_by_role("heading", name="Rank 9").wait_for()
        assert page.evaluate(TICKS) == [
            ["1.000 s", "1.001 s"],
            ["0", "0.5"],
            12,
            ["–", "1,234", "1.00 × 10³⁰"],
        ]
        run.path.rename(tmp_path / "away")
        page.get_by_text("odd is gone: this is what was read before").wait_for()
        page.close()
    finally:
        watch.stop()
