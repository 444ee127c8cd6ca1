"""If these fail, a comparison of layouts counts chosen experts wrongly, or a run that replays the routing of
another computes with other experts."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parity_case import Case, make_engine, train_steps
from ranks import reuse_ranks, run_ranks

from myriad.comm.groups import close_world
from myriad.errors import RunFailedError
from myriad.parallel.routing_tape import Routing, RoutingFolders, read_routing

MODEL: dict[str, Any] = {"layers": 2, "experts": 4, "expert_hidden": 16, "balance_loss": 0.1}
STEPS = 2
LAYOUTS: list[dict[str, Any]] = [
    {"dp": 2, "cp": 2, "ep": 4, "micro_batch": 2, "recompute": "full"},
    {"tp": 4, "ep": 2, "etp": 2, "micro_batch": 2},
    {"tp": 2, "pp": 2},
]


def train(case: Case, routing: RoutingFolders) -> list[tuple[float, float]]:
    engine = make_engine(case, routing=routing)
    found = train_steps(case, engine, 0, case.steps)
    engine.close()
    close_world()
    return found


def losses(layout: dict[str, Any], routing: RoutingFolders) -> list[tuple[float, float]]:
    case = Case(layout, MODEL, steps=STEPS, overlap={"tensor_chunks": 2})
    found: list[tuple[float, float]] = reuse_ranks(case.world, train, case, routing)[0]
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process recorded."""
    folder = tmp_path_factory.mktemp("alone") / "routing"
    losses({}, RoutingFolders(record=folder))
    return folder


@pytest.fixture(scope="module")
def others(alone: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[float, float]]]:
    """Routing in which each token gets the experts after its own, and the losses of one process with it."""
    folder = tmp_path_factory.mktemp("others")
    for path in alone.iterdir():
        arrays = dict(np.load(path))
        moved = {name: (array + 1) % 4 for name, array in arrays.items() if name.endswith(":chosen")}
        np.savez(folder / path.name, **(arrays | moved))  # type: ignore[arg-type]
    return folder, losses({}, RoutingFolders(replay=folder))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_records_the_experts_of_every_token(
    layout: dict[str, Any], alone: Path, tmp_path: Path
) -> None:
    losses(layout, RoutingFolders(record=tmp_path / "routing"))
    for step in range(1, STEPS + 1):
        expected, found = read_routing(alone, step), read_routing(tmp_path / "routing", step)
        assert found.keys() == expected.keys() and len(found) == 2 * 2
        for name, own in found.items():
            assert own.chosen.shape == (8, 16, 2)
            assert (own.samples == expected[name].samples).all()
            assert (np.sort(own.chosen) == np.sort(expected[name].chosen)).all()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_replayed_experts_compute_every_token(
    layout: dict[str, Any], others: tuple[Path, list[tuple[float, float]]]
) -> None:
    folder, expected = others
    found = losses(layout, RoutingFolders(replay=folder))
    assert np.array(found) == pytest.approx(np.array(expected), rel=1e-5)
    assert found[0][0] != pytest.approx(losses({}, RoutingFolders())[0][0], rel=2e-5), "the router's own"


def test_routing_of_another_model_is_refused(alone: Path) -> None:
    case = Case({}, MODEL | {"experts": 2, "experts_per_token": 1}, steps=1)
    with pytest.raises(AssertionError, match="has 1 of 2 experts a token here"):
        run_ranks(1, train, case, RoutingFolders(replay=alone))


def test_routing_that_cannot_be_used_is_refused_in_one_line(tmp_path: Path) -> None:
    routing = Routing(np.array([3, 5]), np.zeros((2, 4, 1), dtype=np.int64))
    with pytest.raises(RunFailedError, match="lacks the experts of sequence 4, positions 0 to 3"):
        routing.of(torch.tensor([4]), torch.arange(4))
    with pytest.raises(RunFailedError, match="no recorded routing of step 7"):
        read_routing(tmp_path, 7)
    path, none = tmp_path / "step-7-rank-0.npz", np.zeros((1, 2, 1), dtype=np.int16)
    whole = {"a:0:samples": np.array([3]), "a:0:chosen": none, "a:0:positions": np.array([0, 2**40])}
    np.savez(path, **whole)  # type: ignore[arg-type]
    with pytest.raises(RunFailedError, match="is incomplete"):
        read_routing(tmp_path, 7)
    np.savez(path, **(whole | {"a:0:chosen": none[0]}))  # type: ignore[arg-type]
    with pytest.raises(RunFailedError, match="other shapes"):
        read_routing(tmp_path, 7)
    path.write_bytes(b"PK no archive")
    with pytest.raises(RunFailedError, match="not a file of recorded routing") as caught:
        read_routing(tmp_path, 7)
    assert "\n" not in str(caught.value)
