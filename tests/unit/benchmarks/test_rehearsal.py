"""What breaks for the user: a rehearsal that counts disturbed visits, or draws what was not measured."""

import xml.etree.ElementTree as ElementTree

import pytest

from plan_against_brute_force import all_cases
from quiet import others_at_work
from rehearsal import spearman
from rehearsal_cases import CASES, Measured, read, write
from rehearsal_chart import Dot, dots_svg


def test_ranks_that_agree_correlate_whatever_the_values():
    assert spearman([1, 2, 3, 10], [0.1, 5, 6, 7]) == pytest.approx(1)
    assert spearman([1, 2, 3, 10], [9, 8, 7, 1]) == pytest.approx(-1)


def test_disturbed_visits_do_not_count_where_there_are_quiet_ones():
    paces = [[1.0, 2.0], [9.0, 9.0], [2.0, 4.0]]
    quiet = Measured("pp2", "loopback", [1.0, 9.0, 2.0], [0.0, 0.5, 0.01], paces)
    assert (quiet.seconds, quiet.pace) == (1.5, [1.5, 3.0])
    disturbed = Measured("pp2", "loopback", [4.0, 3.0], [0.5, 0.3], paces[:2])
    assert (disturbed.seconds, disturbed.num_quiet) == (3.0, 0)


def test_what_was_measured_is_read_back(tmp_path):
    found = [Measured("pp2", "1gbit", [1.0], [0.02], [[0.002, 0.003]])]
    write(tmp_path / "kept.json", found)
    assert read(tmp_path / "kept.json") == found
    assert read(tmp_path / "nothing.json") == []


def test_layouts_are_legal_and_named_apart():
    assert len({case.name for case in CASES}) == len(CASES) >= 12
    assert {case.job.layout.world for case in CASES} == {2, 4, 8}
    every = list(all_cases(4, 8))
    assert len({case.name for case in every}) == len(every)
    assert all(case.job.layout.world == 4 for case in every)


def test_a_share_of_the_cores_is_a_share():
    with others_at_work() as others:
        sum(range(10**6))
    assert 0 <= others() <= 1.1


def test_the_chart_is_one_picture_with_a_dot_for_each_layout():
    dots = [Dot("pp2 <off>", "loopback", 0.5, 0.6), Dot("tp2", "1gbit", 2.0, 1.5)]
    root = ElementTree.fromstring(dots_svg("a title", "s", dots))
    titles = [one.text for one in root.iter("{http://www.w3.org/2000/svg}title")]
    assert titles == [
        "a title",
        "pp2 <off>, loopback: measured 0.5, predicted 0.6",
        "tp2, 1gbit: measured 2, predicted 1.5",
    ]
