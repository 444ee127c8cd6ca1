"""What breaks for the user: a timeline that does not open, or that hides or invents time."""

from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from myriad.reports.charts.span_chart import ChartLane, Panel, compute_share, draw_spans, under_way
from myriad.telemetry.spans import Span

SVG = "{http://www.w3.org/2000/svg}"
EPOCH = 1.7e9
FORWARD, WAITING = "#7ea8dc", "#c2410c"


def span(name: str, start: float, stop: float, stage: int = 0, micro_batch: int = 0) -> Span:
    return Span(name, stage, micro_batch, EPOCH + start, stop - start)


def panel(spans: list[Span], seconds: float = 1.0, title: str = "before") -> Panel:
    return Panel(title, EPOCH, EPOCH + seconds, [ChartLane("rank 0", spans)])


def rects(svg: str) -> list[dict[str, str]]:
    return [element.attrib for element in ElementTree.fromstring(svg).iter(f"{SVG}rect")]


def hints(svg: str) -> list[str]:
    found = ElementTree.fromstring(svg).iter(f"{SVG}rect")
    return [title.text or "" for rect in found for title in rect.iter(f"{SVG}title")]


COMPUTES = ["forward", "backward", "backward_input", "backward_weight"]
POSTS = ["start_gather", "start_reduce", "receive", "send"]
WAITS = ["await_gather", "await_reduce", "wait", "tensor_comm", "clip"]
NAMES = [*COMPUTES, *POSTS, *WAITS, "load", "step", "update", "collect_garbage", "<&>"]
SPANS = st.lists(
    st.builds(
        Span,
        st.sampled_from(NAMES),
        st.integers(-1, 7),
        st.integers(-1, 99),
        st.floats(EPOCH - 1, EPOCH + 3),
        st.floats(0, 2),
    ),
    max_size=40,
)


@given(st.lists(SPANS, min_size=1, max_size=3), st.floats(1e-5, 100))
@settings(max_examples=60, deadline=None)
def test_whatever_was_recorded_the_picture_is_xml_and_stays_inside_itself(lanes, seconds):
    ranks = [ChartLane(f"rank {number}", spans) for number, spans in enumerate(lanes)]
    svg = draw_spans("a <b> & c", [Panel("x & y", EPOCH, EPOCH + seconds, ranks)])
    width = float(ElementTree.fromstring(svg).attrib["width"])
    assert all(float(r.get("x", "0")) + float(r["width"]) <= width + 0.1 for r in rects(svg))
    assert "href" not in svg and "url(" not in svg


def test_every_compute_of_the_iteration_is_there_once_with_its_length():
    spans = [span("forward", 0.1 * i, 0.1 * i + 0.05, micro_batch=i) for i in range(10)]
    outside = [span("forward", -0.5, -0.4), span("backward", 1.2, 1.3)]
    assert hints(draw_spans("t", [panel(spans + outside)])) == [f"forward 0.{i}: 50.0 ms" for i in range(10)]


def test_panels_share_one_time_scale():
    boxes = [span("forward", 0.0, 0.5)]
    svg = draw_spans("t", [panel(boxes, 1.0), panel(boxes, 2.0, "after")])
    first, second = (float(r["width"]) for r in rects(svg) if r["fill"] == FORWARD)
    assert first == pytest.approx(second)


def test_waiting_inside_a_compute_is_drawn_over_it_and_not_counted_as_computing():
    spans = [span("tensor_comm", 0.2, 0.4), span("forward", 0.0, 0.5), span("wait", 0.5, 0.9)]
    shown = panel(spans)
    assert compute_share(shown, shown.lanes[0]) == pytest.approx(0.3)
    fills = [r["fill"] for r in rects(draw_spans("t", [shown]))]
    assert fills.index(FORWARD) < fills.index(WAITING, fills.index(FORWARD))


def test_what_is_posted_counts_until_a_rank_waits_for_it():
    spans = [
        span("start_gather", 0.0, 0.01, stage=1),
        span("start_gather", 0.1, 0.11, stage=1),
        span("await_gather", 0.3, 0.4, stage=1),
        span("await_gather", 0.5, 0.6, stage=2),
        span("receive", 0.6, 0.61, stage=-1),
        span("receive", 0.65, 0.66, stage=-1),
        span("wait", 0.7, 0.72, stage=-1),
        span("wait", 0.8, 0.82, stage=-1),
    ]
    found = [(start - EPOCH, stop - EPOCH) for start, stop in under_way(reversed(spans))]
    assert found == [pytest.approx((0.0, 0.3), abs=1e-6), pytest.approx((0.6, 0.8), abs=1e-6)]


def test_an_iteration_in_which_nothing_was_recorded_is_a_picture_too():
    assert ElementTree.fromstring(draw_spans("t", [panel([])])).tag == f"{SVG}svg"
    assert ElementTree.fromstring(draw_spans("t", [])).tag == f"{SVG}svg"


def test_the_legend_names_what_is_drawn_and_nothing_else():
    svg = draw_spans(
        "t", [panel([span("forward", 0.0, 0.5), span("step", 0.6, 0.6), span("load", 2.0, 3.0)])]
    )
    words = {element.text for element in ElementTree.fromstring(svg).iter(f"{SVG}text")}
    legend = {"forward", "backward", "waiting for others", "optimizer", "load", "posting"}
    assert words & legend == {"forward"}
