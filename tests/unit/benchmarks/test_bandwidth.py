"""A benchmark whose contenders do different work, or whose bound is wrong, gives the user a ratio that means
nothing."""

from itertools import combinations, pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bandwidth_chart import draw
from bandwidth_contenders import Machines, Setting, all_settings, data_bytes, pipeline_bytes, tensor_bytes
from bandwidth_report import print_rate, print_summary, rows_of
from myriad.comm.layout import Layout, check_layout
from peers.myriad_side import model_of
from peers.plain_gpt import PlainGPT
from peers.work import Work

WORK = Work(layers=7, hidden=64, heads=4, vocabulary=256, sequence=32, global_batch=8)


def test_contenders_train_equal_models():
    plain = sum(parameter.numel() for parameter in PlainGPT(WORK).parameters())
    assert plain == WORK.parameters == model_of(WORK).num_parameters()


@given(st.integers(1, 9), st.integers(1, 6), st.sampled_from([64, 256, 1024]))
def test_stages_are_cut_as_evenly_as_can_be(layers, num_stages, vocabulary):
    work = Work(layers, hidden=64, heads=4, vocabulary=vocabulary, sequence=32, global_batch=8)
    num_stages = min(num_stages, layers + 2)
    cut = work.cut(num_stages)
    assert [layer for stage in cut for layer in stage] == list(range(layers + 2))
    assert all(len(stage) > 0 for stage in cut)

    costs = [0, *[12 * 64**2 + 2 * 32 * 64] * layers, vocabulary * 64]

    def largest(bounds: tuple[int, ...]) -> int:
        return max(sum(costs[a:b]) for a, b in pairwise((0, *bounds, len(costs))))

    best = min(largest(bounds) for bounds in combinations(range(1, len(costs)), num_stages - 1))
    assert max(sum(costs[layer] for layer in stage) for stage in cut) == best


def test_least_bytes_of_two_hosts():
    stream = 4 * WORK.tokens * WORK.hidden
    assert data_bytes(WORK, 2) == 4 * WORK.parameters
    assert data_bytes(WORK, 1) == 0
    assert tensor_bytes(WORK, 2, 2) == stream / 2 * (8 * 7 + 4)
    assert pipeline_bytes(WORK, [0, 1], 1) == stream
    assert pipeline_bytes(WORK, [0, 1, 0, 1], 1) == 3 * stream
    assert pipeline_bytes(WORK, [0, 1, 1, 0], 1) == 2 * stream
    assert pipeline_bytes(WORK, [0, 1], 2) == 0


@pytest.mark.parametrize("machines", [Machines(2, 1), Machines(2, 2), Machines(4, 1)])
def test_every_setting_of_ours_is_a_layout_of_these_machines(machines):
    ours = [setting for setting in all_settings(WORK, machines, with_deepspeed=True) if setting.is_ours]
    assert {"data", "tensor", "pipeline"} <= {setting.kind for setting in ours}
    for setting in ours:
        layout = Layout(**setting.make.keywords["layout"])
        check_layout(layout)
        assert layout.world == machines.world
        assert layout.num_stages <= WORK.layers + 2
        assert WORK.global_batch % (layout.dp * layout.micro_batch) == 0


def settings() -> list[Setting]:
    return [
        Setting("Myriad, data", "data", "dp 2", lambda work: None, 1e6),
        Setting("DDP", "data", "", lambda work: None, 1e6),
        Setting("torch 1F1B", "pipeline", "", lambda work: None, 1e5),
    ]


def figures(*seconds: float) -> list[tuple[Setting, float, float]]:
    return [(setting, time, 1.1e6) for setting, time in zip(settings(), seconds, strict=True)]


def rows():
    unshaped = rows_of("unshaped", 0.5, figures(0.5, 1.0, 0.8), [])
    return unshaped + rows_of("8mbit", 0.5, figures(1.25, 2.5, 1.0), unshaped)


def test_the_bound_is_what_is_larger_of_compute_and_bytes_over_rate():
    found = {(row.rate, row.contender): row for row in rows()}
    assert found["unshaped", "Myriad, data"].bound_ratio == 1.0
    assert found["8mbit", "Myriad, data"].least_seconds == 1.0
    assert found["8mbit", "Myriad, data"].bound_ratio == 0.8
    assert found["8mbit", "torch 1F1B"].least_seconds == 0.5
    assert found["8mbit", "Myriad, data"].speed_lost == 1 - 0.5 / 1.25


def test_tables_compare_with_the_best_peer_of_the_kind_and_of_all(capsys):
    slow = [row for row in rows() if row.rate == "8mbit"]
    print_rate("8mbit", 0.5, slow)
    print_summary(rows())
    out = capsys.readouterr().out
    assert "| data | Myriad, data | dp 2 | 1250 | 2.00 | 0.80 | 60% | 80% | 1.1 |" in out
    assert "| 8mbit | data: dp 2 | 1250 | torch 1F1B | 1000 | 0.80 | 80% |" in out


def test_an_eightfold_drop_names_its_losses(capsys):
    more = rows() + rows_of("64mbit", 0.5, [(settings()[0], 1.0, 1e6)], rows())
    print_summary(more)
    assert "speed lost from 64mbit to 8mbit:\n  Myriad, data         20%" in capsys.readouterr().out


@pytest.mark.parametrize("rates", [{"unshaped"}, {"8mbit"}, {"unshaped", "8mbit"}])
def test_the_chart_has_a_line_for_every_kind_and_side(rates):
    picture = ElementTree.fromstring(draw([row for row in rows() if row.rate in rates]))
    words = [element.text for element in picture.iter() if element.text]
    assert {"Myriad, data", "best peer, data", "best peer, pipeline", "compute alone", *rates} <= set(words)
