"""What the page paints, measured. If these fail, colour-blind people take one kind of time for another, or a
timeline promises that its clocks are better than they are."""

from collections.abc import Callable, Iterable
from itertools import combinations, pairwise
from typing import TYPE_CHECKING, Any

import pytest
from played_runs import Watch
from seen_colours import EYES, lightness, seen_apart

from myriad.reports.charts import colours, ledger_chart

if TYPE_CHECKING:
    from playwright.sync_api import Page

Tab = Callable[..., "Page"]
LEAST_APART = {"all cones": 8.0, "no red cones": 8.0, "no green cones": 8.0, "no blue cones": 4.0}
"""The last are one in ten thousand."""
STEPS = 24
PALETTES = """async ([classes, steps]) => {
    const at = await import("/static/colours.js");
    const hex = (part) => part.toString(16).padStart(2, "0");
    const text = (word) => "#" + [0, 8, 16].map((by) => hex((word >> by) & 255)).join("");
    const ramp = (scale, theme, values) => {
        const into = new Uint32Array(values.length);
        at.paintValues(values, [0, steps], scale, theme, into);
        return Array.from(into, text);
    };
    const values = Float32Array.from({length: steps + 2}, (_, i) => i > steps ? NaN : i);
    const ramps = {};
    for (const scale of ["z", "ms"])
        for (const theme of ["light", "dark"]) ramps[`${scale} ${theme}`] = ramp(scale, theme, values);
    const {inkOf} = await import("/static/chart_paint.js");
    return {
        series: Object.fromEntries(["light", "dark"].map((theme) => [theme, inkOf(theme).series])),
        spans: Object.fromEntries(
            at.SPAN_LEGEND.map(([title, names]) => [title, at.spanColour(names.split(" ")[0])]),
        ),
        classes: Object.fromEntries(classes.map((name) => [name, at.classColour(name, 0)])),
        ramps,
    };
}"""
"""Of ramps the last is that of who has no value."""
LOSSES = {"slower than peak": "compute", "slower ranks": "slow", "tensor": "tp", "experts": "ep",
          "context": "cp", "pipeline": "pp", "data parallel": "dp"}  # fmt: skip
"""In the report, to the class of time that the page shows it as."""
CLOCKS = """async (error) => {
    const {GUTTER, TimelinePaint, laneGeometry} = await import("/static/timeline_paint.js");
    const paint = new TimelinePaint(document.createElement("canvas"));
    paint.resize(GUTTER + 900, 200, 1);
    const [lines, texts, context] = [[], [], paint.context];
    const {moveTo, lineTo, fillText} = CanvasRenderingContext2D.prototype;
    let from;
    context.moveTo = (...to) => moveTo.call(context, ...(from = to));
    context.lineTo = (...to) => (lines.push([...from, ...to]), lineTo.call(context, ...to));
    context.fillText = (text, x, y) => (texts.push(text), fillText.call(context, text, x, y));
    const options = {theme: "light", selected: -1, arrows: false, clockError: error};
    const lanes = laneGeometry([], 100, 1);
    paint.draw({lanes: [], names: [], arrows: {}}, lanes, {start: 100, end: 109, top: 0, zoom: 1}, options);
    const bars = lines.filter(([x0, y0, x1, y1]) => y0 === y1).map(([x0, , x1]) => [x0, x1]);
    return {bars, right: GUTTER + 900, told: texts.filter((text) => text.includes("±"))};
}"""


@pytest.fixture(scope="module")
def palettes(browser: Any, slow: Watch) -> dict[str, Any]:
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(f"{slow.address}/?token={slow.token}")
        page.wait_for_url(f"{slow.address}/")
        names = [*LOSSES.values(), *colours.COLOURS.keys() - LOSSES, *ledger_chart.COLOURS]
        found: dict[str, Any] = page.evaluate(PALETTES, [names, STEPS])
        return found


def closest(colours: dict[str, str], pairs: Iterable[tuple[str, str]] | None = None) -> list[str]:
    """Pairs that are too close, and for whom."""
    return [
        f"{one} and {other}, {eyes}: {apart:.1f}"
        for one, other in pairs or combinations(colours, 2)
        for eyes in EYES
        if (apart := seen_apart(colours[one], colours[other], eyes)) < LEAST_APART[eyes]
    ]


def test_no_two_kinds_of_time_look_alike_to_colour_blind_eyes(palettes: dict[str, Any]) -> None:
    classes = palettes["classes"]
    losses = {name: classes[LOSSES.get(name, name)] for name in colours.COLOURS}
    assert losses == colours.COLOURS, "the terminal, the report and the page have the same"
    ledger = {name: classes[name] for name in ledger_chart.COLOURS}
    assert ledger == ledger_chart.COLOURS
    assert closest(palettes["spans"]) == []
    assert closest(ledger) == []
    assert closest(losses | {"MFU": colours.USEFUL}) == []


def test_curves_of_one_chart_are_told_apart(palettes: dict[str, Any]) -> None:
    for theme, colours_of in palettes["series"].items():
        assert len(colours_of) == 5 and closest(dict(enumerate(colours_of))) == [], theme


def test_heat_map_colours_are_distinguishable_with_colour_blindness(palettes: dict[str, Any]) -> None:
    for name, (*ramp, unknown) in palettes["ramps"].items():
        for eyes in EYES:
            assert min(seen_apart(one, unknown, eyes) for one in ramp) > 15, (
                f"who has no value, {name}, {eyes}"
            )
            if name.startswith("ms"):
                shades = [lightness(one, eyes) for one in ramp]
                assert all(less < more for less, more in pairwise(shades)), f"{name}, {eyes}"
            else:
                mirrored = zip(ramp[: STEPS // 2 - 1], reversed(ramp[STEPS // 2 + 2 :]), strict=True)
                assert min(seen_apart(fast, slow, eyes) for fast, slow in mirrored) > 20, f"{name}, {eyes}"


def test_how_far_clocks_may_be_apart_is_drawn_in_the_scale_of_the_axis(slow: Watch, tab: Tab) -> None:
    page = tab(slow, "overview")
    drawn = page.evaluate(CLOCKS, 0.5)
    ((left, right),) = drawn["bars"]
    assert right - left == pytest.approx(100.0), (
        "from half a second before to half a second after, of nine on 900"
    )
    assert right < drawn["right"] and drawn["told"] == ["clocks ± 500 ms"]
    assert page.evaluate(CLOCKS, 0)["bars"] == [], "one machine has one clock"
    ((left, right),) = page.evaluate(CLOCKS, 60)["bars"]
    assert 0 < left < right < drawn["right"], "one that is too wide stays on the axis"
