"""If these break: `myriad faults run` causes no fault, because the rank's own faults patch a method that has
another name by now. Setting a missing attribute raises no error."""

from collections.abc import Iterator
from typing import Any

import pytest

from myriad.faults import rank_faults
from myriad.parallel import compute
from myriad.parallel.chunk import Chunk
from myriad.parallel.compute import EagerCompute
from myriad.telemetry.progress.progress_page import ProgressRow

OWNERS: tuple[Any, ...] = (compute, EagerCompute, Chunk, ProgressRow)


@pytest.fixture
def before() -> Iterator[list[dict[str, Any]]]:
    """The attributes of everything that is patched, which are restored afterwards."""
    kept = [dict(vars(owner)) for owner in OWNERS]
    yield kept
    for owner, attributes in zip(OWNERS, kept, strict=True):
        for name in [name for name in vars(owner) if name not in attributes]:
            delattr(owner, name)
        for name, value in attributes.items():
            if vars(owner)[name] is not value:
                setattr(owner, name, value)


@pytest.mark.parametrize(
    ("kind", "patched"),
    [
        ("hang", {"step", "enter"}),
        ("flip", {"step", "enter", "__init__"}),
        ("slow", {"forward", "differentiate", "apply_deferred"}),
        ("nan-once", {"start_reduce"}),
    ],
)
def test_a_fault_patches_only_what_the_rank_calls(
    before: list[dict[str, Any]], kind: str, patched: set[str], tmp_path: Any
) -> None:
    fault: dict[str, Any] = {"kind": kind, "step": 1, "during": None, "factor": 1.0, "number": 0, "state": {}}
    if kind in ("hang", "flip"):
        rank_faults._arm_one(fault, tmp_path / "caused.jsonl")
    else:
        rank_faults._CAUSES[kind](fault)
    changed = set[str]()
    for owner, attributes in zip(OWNERS, before, strict=True):
        now = vars(owner)
        assert set(now) == set(attributes), "a fault sets a name that did not exist"
        changed |= {name for name, value in attributes.items() if now[name] is not value}
    assert changed == patched


@pytest.mark.parametrize("name", ["grad_buffer", "values"])
def test_a_chunk_has_the_tensors_that_faults_corrupt(name: str) -> None:
    assert any(name in method.__code__.co_names for method in (Chunk._allocate, Chunk.start_reduce))
