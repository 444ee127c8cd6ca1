"""If these fail, a fault that users of other systems met with experts would not be found by the comparison
with one process, or a step in which a rank's experts get no token does not end.

Each fault is put in on purpose, in every rank, and named after the report of it."""

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parity_case import Case, make_engine, run_case
from ranks import reuse_ranks, run_ranks

from myriad.checkpoint.checkpoint_files import load_model, save
from myriad.checkpoint.storage.checkpoint_folder import CheckpointFolder
from myriad.comm.comm_scheduler import CommScheduler
from myriad.comm.groups import Groups, close_world
from myriad.model import expert_dispatch, experts
from myriad.model.experts import Router
from myriad.model.tensor_shard import TensorShard
from myriad.parallel import expert_exchange, forward_engine
from myriad.parallel.chunk import Chunk, Sharing
from myriad.parallel.model_state import ModelState
from myriad.parallel.parameter_table import Row

MODEL: dict[str, Any] = {
    "layers": 2,
    "experts": 4,
    "expert_hidden": 16,
    "balance_loss": 0.1,
    "router_z_loss": 0.01,
}
TOLERANCE = 1e-5
Trained = tuple[list[tuple[float, float]], dict[str, np.ndarray]]


def results_stay_in_the_order_in_which_tokens_arrived() -> None:
    """Megatron-LM#1327 and #1603: losses differ with the dispatcher."""

    def unordered(arrived: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        numbers = torch.arange(int(arrived.sum()))
        return numbers, numbers

    experts.by_expert = unordered  # type: ignore[attr-defined]


def gradients_of_tokens_that_went_to_other_ranks_are_lost() -> None:
    """NVIDIA-NeMo/Automodel#1260: the backward of the exchange has no sum over the ranks."""
    start = expert_exchange._RowsState._start

    def only_own(self: Any, x: torch.Tensor, *, forward: bool) -> Any:
        if not forward:
            parts = x.split(list(self._sizes[1]))
            rank = self._peers.rank
            x = torch.cat([part if index == rank else 0 * part for index, part in enumerate(parts)])
        return start(self, x, forward=forward)

    expert_exchange._RowsState._start = only_own  # type: ignore[method-assign]


def gates_that_travel_get_no_gradient() -> None:
    """huggingface/transformers#48687: only the router's gradient is wrong under expert parallelism."""
    unpack = expert_dispatch._unpacked

    def without_gates(rows: torch.Tensor, *sizes: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x, gates, chosen = unpack(rows, *sizes)
        return x, gates if chosen.any() else 0 * gates, chosen  # numbers of experts travel forward only

    expert_dispatch._unpacked = without_gates


def experts_of_later_tensor_parallel_ranks_are_not_in_the_norm() -> None:
    """Megatron-LM#5916: with whole experts their gradients are taken for copies."""

    counts = ModelState._counts_row

    def first_only(self: ModelState, chunk: Chunk, row: Row) -> float:
        later = chunk.sharing.of_experts and self._grid.index("tp") > 0
        return 0.0 if later else counts(self, chunk, row)

    ModelState._counts_row = first_only  # type: ignore[method-assign]


def each_replica_of_an_expert_is_in_the_norm() -> None:
    """Megatron-LM#6489: the norm is inflated where experts and the rest have different groups."""
    counts = ModelState._counts_row

    def all_experts(self: ModelState, chunk: Chunk, row: Row) -> float:
        return 1.0 if chunk.sharing.of_experts else counts(self, chunk, row)

    ModelState._counts_row = all_experts  # type: ignore[method-assign]


def gradients_of_an_expert_are_not_summed_over_its_replicas() -> None:
    """Megatron-LM#1622 and #5916: ranks that hold the same expert have other gradients of it."""

    def alone(
        others: Sharing, groups: Groups, overlap: Any, comm: Any, device: torch.device, *, trains_alone: bool
    ) -> Sharing:
        index, size = groups.grid.index("expert_dp"), groups.grid.size("expert_dp")
        scheduler = CommScheduler(groups, None, overlap, comm, device)
        one = {"group_rank": 0, "group_size": 1, "copy": index, "num_copies": size, "of_experts": True}
        return replace(others, scheduler=scheduler, **one)

    forward_engine.make_expert_sharing = alone


def each_tensor_parallel_rank_adds_the_whole_balance_loss() -> None:
    """Megatron-LM#7452: the auxiliary loss counts once for each tensor-parallel rank."""
    add = Router.with_losses

    def more(self: Router, logits: torch.Tensor, loss_factor: float, samples: Any = None) -> torch.Tensor:
        return add(self, logits, loss_factor * self._num_ranks, samples)

    Router.with_losses = more  # type: ignore[method-assign]


def each_rank_numbers_its_experts_from_0_in_checkpoints() -> None:
    """KempnerForge#202: a checkpoint has the experts of one rank only."""
    shards = ModelState.shards

    def renumbered(self: ModelState, *arguments: Any, **options: Any) -> Iterator[TensorShard]:
        held = MODEL["experts"] // self._layout.ep
        for shard in shards(self, *arguments, **options):
            own = re.sub(r"(?<=experts\.)\d+", lambda number: str(int(number[0]) % held), shard.name)
            yield replace(shard, name=own)

    ModelState.shards = renumbered  # type: ignore[method-assign]


TWO = Case({"dp": 2, "ep": 2}, MODEL, steps=2, global_batch=4)
FOUR = replace(TWO, layout={"dp": 4, "ep": 2})
FAULTS: list[tuple[Callable[[], None], Case]] = [
    (results_stay_in_the_order_in_which_tokens_arrived, TWO),
    (gradients_of_tokens_that_went_to_other_ranks_are_lost, TWO),
    (gates_that_travel_get_no_gradient, replace(TWO, layout=TWO.layout | {"expert_dispatch": "rank"})),
    (
        experts_of_later_tensor_parallel_ranks_are_not_in_the_norm,
        replace(TWO, layout={"tp": 2, "ep": 2, "etp": 1}),
    ),
    (each_replica_of_an_expert_is_in_the_norm, FOUR),
    (gradients_of_an_expert_are_not_summed_over_its_replicas, FOUR),
    (each_tensor_parallel_rank_adds_the_whole_balance_loss, replace(TWO, layout={"tp": 2})),
]
_WITHOUT_FAULT: dict[str, list[str]] = {}


def run_with(fault: Callable[[], None] | None, case: Case) -> Any:
    if fault is not None:
        fault()
    return run_case(case)


def train(case: Case, fault: Callable[[], None] | None = None) -> Trained:
    start = reuse_ranks if fault is None else run_ranks
    found: Trained = start(case.world, run_with, fault, case)[0]
    return found


@functools.cache
def one_process(fault: Callable[[], None] | None = None) -> Trained:
    return train(replace(TWO, layout={}), fault)


def differs(found: Trained, expected: Trained) -> list[str]:
    """What differs from one process by more than rounding."""
    (losses, parameters), (other_losses, others) = found, expected
    names = [
        f"{what} of step {step}"
        for step, pairs in enumerate(zip(losses, other_losses, strict=True))
        for what, one, other in zip(("loss", "norm"), *pairs, strict=True)
        if abs(one - other) > TOLERANCE * abs(other)
    ]
    names += [f"presence of {name}" for name in sorted(parameters.keys() ^ others.keys())]
    return names + [
        name
        for name in parameters.keys() & others.keys()
        if np.linalg.norm(parameters[name] - others[name]) > TOLERANCE * np.linalg.norm(others[name])
    ]


@pytest.mark.parametrize(("fault", "case"), FAULTS, ids=lambda one: getattr(one, "__name__", ""))
def test_a_fault_that_others_met_is_found(fault: Callable[[], None], case: Case) -> None:
    if (layout := str(case.layout)) not in _WITHOUT_FAULT:
        _WITHOUT_FAULT[layout] = differs(train(case), one_process())
    assert not _WITHOUT_FAULT[layout], "the layout itself"
    assert differs(train(case, fault), one_process())


def save_with(fault: Callable[[], None], case: Case, folder: Path) -> None:
    fault()
    load_model(save(CheckpointFolder(folder), 0, list(make_engine(case).shards()), {}))
    close_world()


def test_a_checkpoint_with_the_experts_of_one_rank_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"experts\.0\.\S+ is not whole"):
        run_ranks(TWO.world, save_with, each_rank_numbers_its_experts_from_0_in_checkpoints, TWO, tmp_path)


def only_two_experts_are_chosen() -> None:
    products = Router.products

    def steered(self: Router, x: torch.Tensor) -> torch.Tensor:
        return products(self, x) + torch.tensor([50.0, 50.0, 0.0, 0.0])

    Router.products = steered  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "layout",
    [
        {"dp": 2, "ep": 2, "zero": 3},
        {"tp": 4, "ep": 2, "etp": 2},
        {"dp": 4, "ep": 4, "zero": 1, "expert_dispatch": "node"},
    ],
    ids=str,
)
def test_a_rank_whose_experts_get_no_token_takes_its_step(layout: dict[str, Any]) -> None:
    """Elsewhere such steps hang (DeepSpeed#7461, NVIDIA-NeMo/Automodel#935) or fail (Megatron-LM#1877)."""
    case = replace(TWO, layout=layout, comm={"node_size": 2})
    expected = one_process(only_two_experts_are_chosen)
    assert not differs(train(case, only_two_experts_are_chosen), expected)
