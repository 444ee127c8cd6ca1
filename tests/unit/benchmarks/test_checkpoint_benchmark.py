"""A benchmark whose contenders save different bytes, or that adds up stalls wrongly, compares nothing."""

from dataclasses import replace
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoint_chart import draw
from checkpoint_ranks import Trained
from checkpoint_report import Full, Row, Spread, row_of, show_full, show_rows, show_summary
from checkpoint_state import Place, balanced, digest, local_shapes, make_state, update


def place(rank: int, world: int = 2) -> Place:
    return Place(rank, world, "nowhere", "nowhere")


@given(st.lists(st.floats(0, 100), min_size=1, max_size=300))
def test_no_more_than_one_in_a_hundred_is_above_the_99th_percentile(seconds):
    spread = Spread.of(seconds)
    assert min(seconds) <= spread.median <= spread.p99 <= spread.largest == max(seconds)
    assert sum(value > spread.p99 for value in seconds) <= len(seconds) / 100


@pytest.mark.parametrize("megabytes", [10, 64, 1000])
def test_the_state_is_as_large_as_was_asked_for(megabytes):
    num_bytes = sum(4 * _product(shape) for shape in local_shapes(megabytes).values())
    assert 0.9 < num_bytes / (megabytes * 1e6) < 1.1
    assert len(local_shapes(megabytes)) == 99


def _product(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def test_shards_tile_the_whole_and_replicas_are_equal():
    shards = [make_state(1, "sharded", place(rank)) for rank in range(2)]
    replicas = [make_state(1, "replicated", place(rank)) for rank in range(2)]
    assert digest(shards[0]) != digest(shards[1])
    assert digest(replicas[0]) == digest(replicas[1])
    assert shards[0].full_bytes == 2 * replicas[0].full_bytes == 2 * shards[0].num_bytes
    for name, tensor in shards[1].tensors.items():
        assert shards[1].offsets(name)[0] == tensor.shape[0] == shards[1].full_shape(name)[0] / 2
        assert replicas[1].full_shape(name) == tensor.shape
        assert not any(replicas[1].offsets(name))


def test_a_step_changes_every_tensor_and_equal_bits_have_equal_digests():
    state, same = (make_state(1, "sharded", place(0)) for _ in range(2))
    before = {name: tensor.clone() for name, tensor in state.tensors.items()}
    assert digest(state) == digest(same)
    update(state)
    assert digest(state) != digest(same)
    assert not any(state.tensors[name].equal(tensor) for name, tensor in before.items())
    assert digest(make_state(1, "sharded", place(0), empty=True)) != digest(state)


@given(
    st.dictionaries(st.text(min_size=1), st.lists(st.integers(1, 50), max_size=2), min_size=1),
    st.integers(1, 5),
)
def test_replicas_share_the_writing_evenly(shapes, world):
    owner = balanced(shapes, world)
    loads = [sum(_product(shapes[name]) for name in shapes if owner[name] == rank) for rank in range(world)]
    assert set(owner) == set(shapes)
    assert max(loads) - min(loads) <= max(_product(shape) for shape in shapes.values())


def seen(stall: float, durable: float) -> Trained:
    return Trained(
        stalls=[9.0, stall, stall],
        durable=[9.0, durable, durable],
        busy_steps=[1.2, 1.4],
        quiet_steps=[1.0, 1.0],
        cycles=[(20.0, 2), (3.5, 2), (3.5, 2)],
        quiet_walls=[1.5, 1.5],
        full_bytes=4_000_000,
        written_bytes=4_100_000,
    )


def rows() -> list[Row]:
    where = ("disk", "sharded", 2)
    ours = row_of(where, "Myriad", True, [seen(0.001, 2.0), seen(0.003, 1.0)], 0.5)
    peer = row_of(where, "DCP save", False, [seen(0.5, 2.5), seen(0.5, 2.5)], 0.5)
    loaded = replace(ours, load_warm_seconds=0.25, load_cold_seconds=1.5, same_bits=True)
    return [loaded, peer, Row(*where, "DCP async", False, failed="it is broken")]


def test_a_row_leaves_the_first_save_out_and_waits_for_the_slowest_rank():
    row = rows()[0]
    assert row.stall == Spread(0.002, 0.003, 0.003)
    assert (row.first_stall, row.durable_seconds, row.bytes_per_second) == (9.0, 2.0, 2e6)
    assert row.slowdown == pytest.approx(0.3)
    assert row.lost_seconds == 0.5


def test_tables_show_failures_unequal_bits_and_the_best_peer():
    table = show_rows(rows(), 2.0)
    assert "### disk, sharded, 2 ranks of 2 MB" in table
    assert "| Myriad | 2 | 3 | 3 | 9,000 | 2.00 | 2 | 4 | +30% | 0.50 | 1.50 | 0.25 | equal |" in table
    assert "DIFFER" in next(line for line in table.splitlines() if "DCP save" in line)
    assert "| DCP async | failed: it is broken |" in table
    lines = [line for line in table.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in lines}) == 1
    assert "| disk | sharded | 2 | 2 : 500 | 2,000 : 2,500 | 500 : 500 | 250 |" in show_summary(rows())


def test_the_full_disk_benchmark_reports_the_stall_of_training():
    table = show_full([Full("DCP save", "save raised A | B", 1, "durable")], "A small disk")
    assert "| DCP save | save raised A / B | 1 | durable |" in table


@pytest.mark.parametrize("shown", [[], rows()])
def test_the_chart_names_every_contender_that_has_figures(shown):
    picture = ElementTree.fromstring(draw(shown))
    words = {element.text for element in picture.iter() if element.text}
    assert {row.contender for row in shown if row.stall} <= words
    assert "DCP async" not in words
