"""The picture of the loss, in a terminal and as a file."""

import math
import xml.etree.ElementTree as ET

from hypothesis import example, given
from hypothesis import strategies as st

from myriad.reports.charts.loss_chart import loss_svg, smooth, terminal_plot

LOSSES = st.lists(st.floats(0, 20), min_size=2, max_size=300)


def falling(steps: int) -> list[tuple[float, float]]:
    return [(float(step), 2 + 6 * math.exp(-step / 50)) for step in range(1, steps + 1)]


@given(LOSSES)
def test_any_curve_fits_its_frame(losses):
    points = [(float(step), loss) for step, loss in enumerate(losses)]
    lines = terminal_plot(points, width=40, height=6)
    assert len(lines) == 7
    assert all(len(line) == 48 for line in lines)


def test_a_falling_loss_starts_at_the_upper_left_and_ends_at_the_lower_right():
    first, *_, last, axis = terminal_plot(falling(200), width=30, height=5)
    assert first.startswith("  7.88 ┤") and last.startswith("  2.11 ┤")
    assert first[8] != "⠀" and first[-1] == "⠀" and last[8] == "⠀" and last[-1] != "⠀"
    assert axis.split() == ["step", "1", "200"]


def test_a_run_of_one_step_has_no_curve():
    assert terminal_plot([(1.0, 2.0)]) == []


@given(LOSSES)
def test_smoothing_keeps_steps_start_and_range_and_ends_in_a_mean(losses):
    points = [(float(step), loss) for step, loss in enumerate(losses)]
    smoothed = smooth(points, 0.2)
    assert [step for step, _ in smoothed] == [step for step, _ in points]
    last = losses[-1 - min(int(len(losses) * 0.1), len(losses) - 1) :]
    assert smoothed[0] == points[0] and abs(smoothed[-1][1] - sum(last) / len(last)) < 1e-6
    assert all(min(losses) - 1e-9 <= loss <= max(losses) + 1e-9 for _, loss in smoothed)


@example([0.0, 5e-324])
@given(LOSSES)
def test_the_file_is_an_svg_whose_curves_stay_inside(losses):
    points = [(float(step), loss) for step, loss in enumerate(losses)]
    root = ET.fromstring(loss_svg(points, points[-1:], "a & b <loss>"))
    space = "{http://www.w3.org/2000/svg}"
    assert root.tag == space + "svg"
    for line in root.iter(space + "polyline"):
        for pair in line.attrib["points"].split():
            x, y = map(float, pair.split(","))
            assert 60 <= x <= 700 and 44 <= y <= 352
    assert len(list(root.iter(space + "circle"))) == 1
