"""A small problem with everything in it: several nodes, windows, tied embeddings, uneven stages."""

from functools import cache

from hypothesis import strategies as st

from myriad.model.config import ModelConfig
from myriad.planner.cluster_config import Cluster
from myriad.planner.search.layout_problem import LayoutCandidate, LayoutProblem
from myriad.planner.search.layout_search import score_layout
from myriad.planner.search.layout_space import LayoutGrid, layout_grids
from myriad.planner.search.stage_times import LayerTable
from myriad.recipes.cluster import load_cluster

MODEL = ModelConfig(
    layers=14,
    hidden=1024,
    heads=16,
    sequence=1024,
    vocabulary=32000,
    window=256,
    window_pattern=(True, False),
    norm="layer",
    bias=True,
)


def cluster_of(*changes: str, nodes: int = 4) -> Cluster:
    return load_cluster("megascale-256xa100", [f"nodes={nodes}", "accelerators_per_node=4", *changes])


@cache
def problem_of(*changes: str, nodes: int = 4, batch: int = 32) -> LayoutProblem:
    return LayoutProblem(MODEL, batch, cluster_of(*changes, nodes=nodes))


@cache
def _table() -> LayerTable:
    return LayerTable(problem_of())


@cache
def _grids() -> tuple[LayoutGrid, ...]:
    return tuple(layout_grids(problem_of()))


@st.composite
def candidates(draw: st.DrawFn) -> LayoutCandidate:
    """Any legal layout of the small problem, judged."""
    grid = draw(st.sampled_from(_grids()))
    index = tuple(draw(st.integers(0, count - 1)) for count in grid.axes)
    layout, overlap = grid.at(index)
    return score_layout(problem_of(), LayoutCandidate(layout, overlap, 0.0, 0.0, 0.0), _table())
