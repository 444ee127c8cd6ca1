"""If these fail, the page shows numbers that no rank had, forgets without saying so, or takes all memory."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from myriad.comm.layout import Layout
from myriad.dashboard.api.span_api import TimeWindow, choose_lanes, spans_in, window_of_steps
from myriad.dashboard.insight.rank_arrays import Ranks
from myriad.dashboard.run_files import RunFiles
from myriad.dashboard.run_page import Follower
from myriad.dashboard.store.heat_map import HeatMap
from myriad.dashboard.store.span_store import SpanStore
from myriad.dashboard.tile import pack_tile, to_json, unpack_tile
from myriad.dashboard.watched_run import WatchedRun
from myriad.job import load_job
from myriad.run import Run
from myriad.telemetry.span_io.span_batch import BatchError, SpanBatch
from myriad.telemetry.span_io.span_files import read_span_file, write_span_file
from myriad.telemetry.span_io.span_records import RECORD

NAMES = ("forward", "tensor_comm", "wait", "mine")
EPOCH = 1_700_000_000 * 10**9


def batch(*spans: tuple[int, int, str, float, float], attempt: int = 1, node: int = 0) -> SpanBatch:
    """Spans as rank, step, name, start, seconds."""
    records = np.zeros(len(spans), RECORD)
    for record, (rank, step, name, start, seconds) in zip(records, spans, strict=True):
        record["rank"], record["step"], record["name"] = rank, step, NAMES.index(name)
        record["start_ns"], record["duration_ns"] = EPOCH + round(start * 1e9), round(seconds * 1e9)
    return SpanBatch(node, attempt, NAMES, records)


def seconds_of(store: SpanStore, phase: str, step: int) -> list[float | None]:
    ranks = Ranks(Layout(dp=store.world), 1)
    seconds = HeatMap(store, ranks).heat(phase, step, step).seconds
    return [None if np.isnan(value) else round(float(value), 4) for value in seconds]


def test_what_lies_inside_of_a_span_is_not_its_own_even_if_it_came_with_the_batch_before() -> None:
    inner, outer = (0, 1, "tensor_comm", 0.2, 0.3), (0, 1, "forward", 0.0, 1.0)
    once, twice = SpanStore(2, 10), SpanStore(2, 10)
    once.add(batch(inner, outer))
    twice.add(batch((1, 1, "forward", 0.0, 0.5), inner))
    twice.add(batch(outer))
    assert seconds_of(once, "forward", 1) == [0.7, None]
    assert seconds_of(twice, "forward", 1) == [0.7, 0.5]
    assert seconds_of(twice, "tensor", 1) == [0.3, None]


def test_forwards_of_an_evaluation_are_not_forwards_of_the_step_they_follow() -> None:
    """Live, as in a report: else each step with an evaluation shows forwards several times as long."""
    spans = batch((0, 1, "forward", 0.0, 0.5), (0, 1, "tensor_comm", 1.0, 2.0), (0, 1, "wait", 0.9, 2.5))
    store = SpanStore(1, 10)
    store.add(replace(spans, names=("forward", "evaluate_forward", "evaluate", "mine")))
    assert seconds_of(store, "forward", 1) == [0.5]
    assert seconds_of(store, "evaluate", 1) == [2.5]
    assert store.names.phases_in_order() == ["forward", "evaluate"]


def test_a_span_that_is_posted_and_in_a_file_counts_once(tmp_path: Path) -> None:
    """A node posts within a second and writes files every five: a page that reads both showed time twice."""
    spans = [(rank, 1, "mine", 0.1 * at, 0.05) for at in range(9) for rank in (0, 1)]
    store = SpanStore(2, 10)

    def file(number: int, *some: tuple[int, int, str, float, float]) -> None:
        path = tmp_path / f"attempt-1-node-0-{number}.parquet"
        write_span_file(path, batch(*some))
        store.add(read_span_file(path))

    file(0, *spans[:6])
    store.add_checked([batch(*spans[4:12])])
    file(1, *spans[6:14])
    store.add_checked([batch(*spans[12:])])
    file(2, *spans[14:])
    assert seconds_of(store, "mine", 1) == [0.45, 0.45]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 3), st.sampled_from(NAMES[2:]), st.integers(1, 9)),
        max_size=40,
    ),
    st.integers(1, 7),
)
def test_sums_are_those_of_the_spans_however_they_are_cut_into_batches(
    spans: list[tuple[int, int, str, int]], size: int
) -> None:
    store, expected = SpanStore(4, 10), dict[tuple[str, int, int], float]()
    rows = [(rank, step, name, 10.0 * at, float(long)) for at, (rank, step, name, long) in enumerate(spans)]
    for at in range(0, len(rows), size):
        store.add(batch(*rows[at : at + size]))
    for rank, step, name, _, long in rows:
        key = ("mine" if name == "mine" else "receive wait", step, rank)
        expected[key] = expected.get(key, 0.0) + long
    for phase in ("mine", "receive wait"):
        for step in range(4):
            assert seconds_of(store, phase, step) == [expected.get((phase, step, rank)) for rank in range(4)]
    assert store.counts.kept == len(rows)


def test_full_memory_drops_the_oldest_steps_and_counts_them_but_keeps_their_sums() -> None:
    store = SpanStore(4, 10_000, memory_bytes=2**20)
    for step in range(1, 200):
        store.add(
            batch(*((rank, step, "mine", step + 0.001 * at, 0.001) for rank in range(4) for at in range(100)))
        )
        assert store.nbytes < 1.2 * 2**20
    kept = [step for step, block in store.blocks() if block.count]
    assert kept == list(range(kept[0], 200))
    assert store.counts.dropped_steps == 199 - len(kept) > 100
    assert seconds_of(store, "mine", 1) == [0.1] * 4
    store.add(batch((0, 1, "mine", 1.5, 0.1)))
    assert store.counts.too_old == 1


def test_a_step_that_is_done_again_replaces_what_the_attempt_before_left_of_it() -> None:
    store = SpanStore(2, 10)
    store.add(batch((0, 3, "mine", 0.0, 1.0), (1, 3, "mine", 0.0, 1.0)))
    store.add(batch((0, 3, "mine", 9.0, 2.0), attempt=2))
    store.add(batch((1, 3, "mine", 0.5, 7.0)))
    assert seconds_of(store, "mine", 3) == [2.0, None]
    assert store.counts.too_old == 1


@pytest.mark.parametrize(
    ("span", "told"),
    [
        ((2, 1, "mine", 0.0, 1.0), "rank 2: the run has 2 ranks"),
        ((0, 11, "mine", 0.0, 1.0), "step 11"),
        ((0, -2, "mine", 0.0, 1.0), "step -2"),
        ((0, 1, "mine", 4e9, 1.0), "after tomorrow"),
        ((0, 1, "mine", -1.7e9, 1.0), "before 1970"),
        ((0, 1, "mine", 0.0, 9e8), "longer than a year"),
    ],
)
def test_a_batch_with_a_span_that_no_rank_can_have_sent_is_refused_whole(span: Any, told: str) -> None:
    store = SpanStore(2, 10)
    with pytest.raises(BatchError, match=told):
        store.add(batch((0, 1, "mine", 0.0, 1.0), span))
    assert store.counts.kept == 0 and store.blocks() == []


def test_the_worst_rank_stands_for_its_group() -> None:
    badness = np.array([0.0, 5.0, 1.0, np.nan, 2.0, -1.0, np.nan, np.nan])
    lanes = choose_lanes(np.arange(8), badness, 3)
    assert [(lane.rank, lane.worst_of) for lane in lanes] == [(1, 3), (4, 3), (6, 2)]
    assert [lane.rank for lane in choose_lanes(np.array([3, 7]), badness, 400)] == [3, 7]


def test_of_spans_that_share_a_pixel_the_longest_is_drawn() -> None:
    store = SpanStore(2, 10)
    short = [(0, 1, "mine", 0.1 + 0.0001 * at, 0.00001 * (at + 1)) for at in range(8)]
    store.add(batch(*short, (0, 1, "forward", 0.5, 0.2), (1, 1, "forward", 0.5, 0.1)))
    window = TimeWindow(EPOCH, EPOCH + 10**9)
    spans = spans_in(store, window, choose_lanes(np.array([0]), np.zeros(2), 10), 100)
    assert spans["duration"].tolist() == pytest.approx([0.00008, 0.2])
    assert spans["rank"].tolist() == [0, 0]
    whole = window_of_steps(store, 1, 1)
    assert whole is not None and whole.start_ns == EPOCH + 10**8


def test_the_slow_rank_has_the_highest_score_and_what_is_not_known_has_none() -> None:
    ranks = Ranks(Layout(dp=8, pp=2), 2)
    store = SpanStore(16, 100)
    for step in (1, 2):
        known = [rank for rank in range(16) if rank != 3]
        store.add(batch(*((rank, step, "mine", 9 * step, 1.2 if rank == 6 else 1.0) for rank in known)))
    heat = HeatMap(store, ranks).heat("mine", 1, 2)
    assert int(np.nanargmax(heat.z)) == 6 and heat.z[6] > 4
    assert heat.missing == 1 and np.isnan(heat.z[3])
    figures = HeatMap(store, ranks).by_step("mine")
    assert figures.step.tolist() == [1, 2] and figures.worst_z.min() > 4
    assert heat.deviation[6] == pytest.approx(0.2) and heat.deviation[5] == pytest.approx(0.0)
    assert figures.worst_deviation.tolist() == pytest.approx([0.2, 0.2])


def test_a_tile_comes_back_as_it_went_and_is_aligned_for_typed_arrays() -> None:
    arrays = {"a": np.arange(3, dtype=np.float32), "b": np.arange(5, dtype=np.uint8), "c": np.ones(2)}
    packed = pack_tile(arrays, name="<script>", seconds=float("nan"))
    head = int.from_bytes(packed[:4], "little")
    assert (head + 4) % 8 == 0 and len(packed) % 8 == 0
    found, facts = unpack_tile(packed)
    assert facts == {"name": "<script>", "seconds": None}
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype and found[name].tolist() == array.tolist()


def test_json_has_no_number_that_a_browser_refuses() -> None:
    assert to_json({"a": [1.5, float("inf")], "b": {"c": float("nan")}}) == b'{"a":[1.5,null],"b":{"c":null}}'


def test_a_follower_that_begins_late_reads_the_newest_files_and_stops_when_memory_is_full(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path / "run")
    run.create_or_resume(load_job("tiny-3d", ["train.steps=1000"]))
    (run.path / "spans").mkdir()
    for step in range(1, 31):
        path = run.path / "spans" / f"attempt-1-node-0-{step}.parquet"
        write_span_file(
            path,
            batch(*((rank, step, "mine", step + at / 2000, 1e-4) for rank in range(8) for at in range(999))),
        )
        os.utime(path, (step, step))
    store = SpanStore(8, 1000, memory_bytes=2**20)
    watched = WatchedRun(RunFiles(run), store, dict)
    Follower(watched).poll()
    kept = [step for step, block in store.blocks() if block.count]
    assert kept == list(range(kept[0], 31)) and len(kept) < 10
    assert store.counts.problems == [f"{29 - len(kept)} older files of spans are not read: --memory is full"]
