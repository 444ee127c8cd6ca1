"""What breaks for the user: a picture that does not open, or shows another program than runs."""

import json
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from program_shapes import computes, lowered

from myriad.cli.main import main
from myriad.cli.simulate.program_view import draw_svg, text_rows
from myriad.program.actions import COMPUTE
from myriad.program.checker import check
from myriad.program.schedules import schedule
from myriad.program.timeline import timeline

SVG = "{http://www.w3.org/2000/svg}"


def boxes(svg: str) -> list[str]:
    rects = ElementTree.fromstring(svg).iter(f"{SVG}rect")
    return [title.text or "" for rect in rects for title in rect.iter(f"{SVG}title")]


@given(lowered(4, 6))
@settings(max_examples=30, deadline=None)
def test_the_svg_is_xml_and_shows_every_compute_once(program):
    svg = draw_svg(program, timeline(program), check(program))
    shown = boxes(svg)
    assert len(shown) == len(set(shown)) == sum(action.kind in COMPUTE for _, action in program)


def test_the_svg_loads_nothing_and_shows_the_bubble():
    program = schedule("1f1b", 4, 1, 8)
    svg = draw_svg(program, timeline(program), check(program))
    assert "1f1b, 4 ranks, 8 micro-batches: bubble 27.3%" in svg
    assert "href" not in svg and "url(" not in svg


@given(computes(5, 12), st.integers(20, 300))
@settings(max_examples=60, deadline=None)
def test_text_fits_and_all_rows_are_as_long(program, columns):
    rows = ["".join(cell.text for cell in row) for row in text_rows(program, timeline(program), columns)]
    assert len({len(row) for row in rows}) == 1
    assert len(rows[0]) <= columns


def test_text_shows_kind_and_micro_batch_where_there_is_room():
    program = schedule("1f1b", 2, 1, 2)
    rows = ["".join(cell.text for cell in row) for row in text_rows(program, timeline(program), 80)]
    assert rows == ["F0 F1       B0       B1    ", "   F0 B0    F1 B1          "]


def shown(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["simulate", "tiny", "--layout.pp", "2", "--train.global_batch", "4", *arguments])
    out = capsys.readouterr()
    return out.out if ended.value.code == 0 else f"{ended.value.code} {out.err}"


def test_simulate_prints_ranks_bubble_and_micro_batches_in_flight(capsys):
    out = shown(capsys, "--program")
    assert "1f1b, 2 ranks, 4 micro-batches: bubble 20.0%" in out
    assert "idle 3, 2 in flight" in out and "idle 3, 1 in flight" in out


def test_simulate_as_json_has_every_box(capsys):
    found = json.loads(shown(capsys, "--program", "--json", "--layout.schedule", "zero-bubble"))
    assert found["bubble"] == [1.0, 1.0]
    assert len(found["boxes"]) == 2 * 3 * 4


def test_simulate_writes_the_picture(capsys, tmp_path):
    assert str(tmp_path / "a.svg") in shown(capsys, "--program", "--out", str(tmp_path / "a.svg"))
    assert len(boxes((tmp_path / "a.svg").read_text())) == 2 * 2 * 4
    assert [path.name for path in tmp_path.iterdir()] == ["a.svg"]


def test_simulate_refuses_what_it_cannot_do_in_one_line(capsys, tmp_path):
    assert shown(capsys).startswith("2 myriad: error: --program")
    assert shown(capsys, "--program", "--out", "a.gif").startswith("2 myriad: error: --out")
    nowhere = tmp_path / "none" / "a.svg"
    assert shown(capsys, "--program", "--out", str(nowhere)).startswith("2 myriad: error: --out")
    bad = shown(capsys, "--program", "--layout.virtual_stages", "2", "--layout.schedule", "1f1b")
    assert bad.startswith("2 myriad: error: layout.virtual_stages")


def test_simulate_prints_what_the_program_needs_on_gpus(capsys):
    *_, needs, seen_to = shown(capsys, "--program").splitlines()
    assert needs.endswith("a hardware queue for each of 6 streams")
    assert seen_to == "ranks see to that, unless CUDA_DEVICE_MAX_CONNECTIONS is set to less than 6"
    assert "whatever is loaded late" in shown(capsys, "--program", "--overlap.pipeline=false")
    found = json.loads(shown(capsys, "--program", "--json", "--overlap.receive_ahead=1"))["devices"]
    assert found == {
        "free_of_deadlock": True,
        "communicators_at_start": True,
        "kernels_at_start": False,
        "queues": 1,
        "streams": 6,
        "cycle": None,
    }
    assert json.loads(shown(capsys, "--program", "--json", "--layout.pp=1"))["devices"] is None
