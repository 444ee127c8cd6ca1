"""If these fail, a plan promises to hide tensor-parallel transfers that no order of slices could hide, or
does not see that slices do."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planned import cluster_of

from myriad.cli.main import main
from myriad.model.config import ModelConfig
from myriad.model.overlap_parts import num_slices, part_sizes
from myriad.parallel.sliced_products import rows_of_slices
from myriad.planner.cluster_config import Cluster
from myriad.planner.cost.layer_costs import _behind_slices, block_times
from myriad.planner.cost.product_costs import OVERLAP_MODES, LayerContext
from myriad.planner.search.layout_problem import LayoutCandidate, LayoutProblem
from myriad.planner.search.layout_search import score_layout
from myriad.planner.search.layout_space import layout_grids
from myriad.planner.workload import FrameworkProfile
from myriad.program.config import OverlapConfig
from myriad.recipes.cluster import load_cluster

SECONDS = st.floats(1e-3, 10.0)


def gather_step_by_step(comm: float, product: float, more: float, tp: int, slices: int) -> float:
    """Own rows and other work first, then each slice when it is there and the one before it is multiplied."""
    messages = slices * (tp - 1)
    now = product / tp + more
    for number in range(1, messages + 1):
        now = max(now, comm * number / messages) + product * (tp - 1) / tp / messages
    return now


def scatter_step_by_step(comm: float, product: float, more: float, tp: int, slices: int) -> float:
    """Each slice is sent when it is made and the one before it has left; own rows and other work last."""
    messages = slices * (tp - 1)
    now = left = 0.0
    for _ in range(messages):
        now += product * (tp - 1) / tp / messages
        left = max(left, now) + comm / messages
    return max(left, now + product / tp + more)


@given(SECONDS, SECONDS, st.sampled_from([0.0, 0.5, 5.0]), st.sampled_from([2, 4, 8]), st.integers(1, 16))
def test_what_slices_leave_exposed_is_what_a_step_by_step_timeline_leaves(
    comm: float, product: float, more: float, tp: int, slices: int
) -> None:
    messages = float(slices * (tp - 1))
    added = float(_behind_slices(comm, product, more, 1 - 1 / tp, messages, 0.0))
    for timeline in (gather_step_by_step, scatter_step_by_step):
        expected = timeline(comm, product, more, tp, slices) - product - more
        assert added == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(2, 16), st.integers(1, 10**6))
@settings(max_examples=200)
def test_every_row_is_in_one_slice_and_no_slice_is_smaller_than_a_message(
    rows: int, row_bytes: int, chunks: int, message_bytes: int
) -> None:
    slices = rows_of_slices(rows, row_bytes, chunks=chunks, message_bytes=message_bytes)
    assert [row for own in slices for row in range(rows)[own]] == list(range(rows))
    lengths = [own.stop - own.start for own in slices]
    assert lengths == part_sizes(rows, len(slices))
    assert 1 <= len(slices) <= chunks
    assert max(lengths) - min(lengths) <= 1
    assert len(slices) == 1 or min(lengths) * row_bytes > message_bytes - row_bytes
    keys = {"chunks": chunks, "message_bytes": message_bytes}
    assert len(slices) == int(num_slices(np.array([float(rows)]), float(row_bytes), **keys)[0])


MODEL = ModelConfig(layers=4, hidden=1024, heads=16, sequence=1024, vocabulary=32000)
KINDS = ("turns", "slices", "auto", None)


def exposed(cluster: Cluster, tp: int, kind: str | None, **model: object) -> float:
    """Tensor-parallel seconds of a block that compute waits for, both ways."""
    overlap_mode, overlap = OVERLAP_MODES[kind], OverlapConfig()  # type: ignore[index]
    where = LayerContext(
        cluster, FrameworkProfile(), float(tp), 4.0, 4 if cluster.on_cpu else 2, overlap, overlap_mode
    )
    times = block_times(MODEL.model_copy(update=model), where, 5e5)
    return float(times.forward.tensor + times.backward_input.tensor)


@pytest.mark.parametrize("block", ["serial", "parallel"])
@pytest.mark.parametrize("cluster", [cluster_of(), load_cluster("laptop")], ids=["gpus", "cores"])
def test_each_way_hides_some_and_auto_takes_the_quicker(cluster: Cluster, block: str) -> None:
    turns, slices, auto, off = (exposed(cluster, 2, kind, block=block) for kind in KINDS)
    assert auto == min(turns, slices, off)
    assert 0 < slices < off and 0 < turns < off and slices != turns


def test_gpus_of_other_nodes_have_no_slices() -> None:
    """PyTorch's operators reach memory within a node only; four GPUs are one here."""
    cluster = cluster_of()
    assert exposed(cluster, 4, "slices") < exposed(cluster, 4, None)
    assert exposed(cluster, 8, "slices") == exposed(cluster, 8, None)
    assert exposed(cluster, 8, "auto") == min(exposed(cluster, 8, kind) for kind in ("turns", None))


@pytest.mark.parametrize("kind", ["turns", "slices", "auto"])
def test_a_search_tries_the_way_that_the_job_names_and_none(kind: str) -> None:
    overlap = OverlapConfig(tensor=kind)  # type: ignore[arg-type]
    problem = LayoutProblem(MODEL, 8, cluster_of(nodes=1), overlap, fixed={"tp": 2, "pp": 1})
    (grid,) = layout_grids(problem)
    assert grid.tensors == (kind, None)
    (layout, one), (_, other) = (grid.at((0, 0, 0, 0, number, 0, 0)) for number in (0, 1))
    assert (one.tensor, other.tensor) == (kind, None)
    hidden, waits = (
        score_layout(problem, LayoutCandidate(layout, own, 0.0, 0.0, 0.0)) for own in (one, other)
    )
    if kind == "turns":  # of one sequence on quick links: what each part begins anew is more than it hides
        assert hidden.seconds > waits.seconds
    else:
        assert hidden.seconds < waits.seconds


def shown(capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    with pytest.raises(SystemExit, match="0"):
        main(["simulate", "tiny", "--program", "--layout.tp=2", "--layout.micro_batch=2", *overrides])
    return capsys.readouterr().out


def test_the_picture_of_a_program_shows_what_travels_behind_which_product(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cut = ["--overlap.tensor=slices", "--overlap.tensor_message=1"]
    slices = shown(capsys, *cut, "--overlap.tensor_chunks=3")
    assert "computes |own        |1.1|1.2|1.3|" in slices
    assert "travels      |1.1|1.2|1.3|" in slices
    assert "2 parts of the micro-batch take turns" in shown(capsys, "--overlap.tensor_message=1")
    told = json.loads(shown(capsys, *cut, "--json"))
    assert told["tensor"] == {"ranks": 2, "kind": "slices", "slices": 2}
    assert "waited for" in shown(capsys, "--overlap.tensor=off")
