"""A first step that hangs on GPUs: on NCCL the first use of a group, or of a pair of ranks in it, blocks the
host until its peers come to the same use. `nccl_like` does so on CPUs.

Without `myriad.comm.connection_setup` the pipelines here hang in their first step or in validation.
"""

import os
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from nccl_like import FIRST_USES, install
from parity_case import TINY, Case, batch_of_rank, make_engine, train_steps
from ranks import reuse_ranks, run_ranks
from same_run import assert_same_run, train_undisturbed
from test_recovery import Acts, events, kill, make_run
from tiny_corpora import make_corpus

from myriad.checkpoint.checkpoint_files import save
from myriad.checkpoint.storage.checkpoint_folder import CheckpointFolder
from myriad.comm.config import CommConfig
from myriad.comm.connection_setup import connect_pairs
from myriad.comm.groups import close_world, open_world
from myriad.comm.layout import Layout
from myriad.launchers.local import run_local
from myriad.model.config import ModelConfig
from myriad.planner.memory.constant_memory import count_communicators

CPU = torch.device("cpu")
PATIENCE = {"timeout_seconds": 60}
V = {"virtual_stages": 2, "schedule": "zero-bubble-v"}
CASES = {
    "1f1b-of-four": Case({"pp": 4}),
    "receives-far-ahead": Case({"pp": 2, "schedule": "gpipe"}, overlap={"receive_ahead": 4}),
    "zero-bubble": Case({"pp": 2, "schedule": "zero-bubble"}),
    "zero-bubble-v": Case({"pp": 2, **V}),
    "interleaved": Case({"pp": 2, "virtual_stages": 2, "micro_batch": 2}),
    "interleaved-of-three": Case({"pp": 3, "virtual_stages": 2}),
    "zero": Case({"dp": 2, "pp": 2, "zero": 3}, optimizer={"name": "lamb"}),
    "nodes-and-switches": Case(
        {"dp": 8, "zero": 1}, comm={"hierarchy": "switch", "node_size": 2, "switch_size": 2}
    ),
    "nodes-of-all": Case({"dp": 2}, comm={"hierarchy": "node", "node_size": 2}),
    "muon": Case({"dp": 2, "tp": 2, "pp": 2, "zero": 1, "micro_batch": 4}, optimizer={"name": "muon"}),
    "experts": Case(
        {"dp": 4, "ep": 2, "zero": 1}, {"experts": 4, "expert_hidden": 32}, optimizer={"name": "muon"}
    ),
    "whole-experts": Case(
        {"dp": 2, "tp": 2, "ep": 2, "etp": 1, "zero": 1, "micro_batch": 2},
        {"experts": 4, "expert_hidden": 32},
        optimizer={"name": "muon"},
    ),
    "halves-of-experts": Case(
        {"tp": 4, "ep": 2, "etp": 2, "zero": 1, "micro_batch": 4},
        {"experts": 4, "expert_hidden": 32},
        optimizer={"name": "lamb"},
    ),
    "context": Case({"cp": 2, "pp": 2, "zero": 1}),
    "context-in-rows": Case({"cp": 4, "ulysses": 2}, {"experts": 4, "balance_loss": 0.1}),
    "copies-of-heads": Case({"tp": 4, "micro_batch": 4}, {"kv_heads": 2}),
    "diloco": Case({"dp": 2}, comm={"sync_every": 2}),
}


def shortened(case: Case) -> Case:
    """As few layers and rows as the layout needs."""
    many = "virtual_stages" in case.layout or case.layout.get("pp", 1) > 2
    model = case.model | ({} if many else {"layers": 2})
    rows = 8 if case.world > 2 else 4
    return replace(case, model=model, steps=2, global_batch=rows, comm=PATIENCE | case.comm)


class Trained(NamedTuple):
    """What one rank did."""

    losses: list[Any]
    made: list[str]
    """First uses until the engine was there: the communicator, with ": WHAT" a connection in it."""
    late: list[str]
    planned: tuple[int, int]
    """Communicators that the planner counts: of groups, of pairs."""


def train(case: Case, like_nccl: bool, folder: Path) -> Trained:
    """Train, evaluate and save."""
    if like_nccl:
        install()
    engine = make_engine(case)
    count = len(FIRST_USES)
    losses: list[Any] = [*train_steps(case, engine, 0, case.steps)]
    losses.append(engine.evaluate(lambda: batch_of_rank(case, engine, 7)))
    late = FIRST_USES[count:]
    host = engine.groups.on_host("checkpoints")
    save(CheckpointFolder(folder), case.steps, list(engine.shards()), {}, host)
    planned = count_communicators(
        engine.layout,
        engine.programs[True],
        engine.groups.grid.index("pp"),
        CommConfig(**case.comm),
        optimizer=case.optimizer.get("name", "adamw"),
        kv_heads=ModelConfig(**(TINY | case.model)).num_kv_heads,
    )
    engine.close()
    close_world()
    return Trained(losses, FIRST_USES[:count], late, planned)


@pytest.mark.parametrize("name", CASES)
def test_training_makes_no_communicator_late_and_learns_the_same_bits(name: str, tmp_path: Path) -> None:
    case = shortened(CASES[name])
    plain = reuse_ranks(case.world, train, case, False, tmp_path / "plain")
    like = run_ranks(case.world, train, case, True, tmp_path / "like")
    for rank, expected in zip(like, plain, strict=True):
        if "tp" in case.layout:  # tokens of several sequences are added up in another order
            torch.testing.assert_close(torch.tensor(rank.losses[:-1]), torch.tensor(expected.losses[:-1]))
            assert rank.losses[-1] == pytest.approx(expected.losses[-1])
        else:
            assert rank.losses == expected.losses
        assert rank.late == []
        made = [one for one in rank.made if ": " not in one]
        of_groups = sum(one.endswith(" all") for one in made)
        assert (of_groups, len(made) - of_groups) == rank.planned, made


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ({"dp": 2, "zero": 2}, ["0 all"]),
        (
            {"tp": 2, "pp": 2, "micro_batch": 4},
            ["0 all", "group all", "tied all", "activation up", "gradient up"],
        ),
    ],
)
def test_collectives_of_an_axis_share_a_communicator(
    layout: dict[str, Any], expected: list[str], tmp_path: Path
) -> None:
    case = Case(layout, steps=1)
    for rank in run_ranks(case.world, train, case, True, tmp_path):
        made = [re.sub(r":\w+:0|( 0:1)", "", one) for one in rank.made if ": " not in one]
        assert made == expected


def post_crosswise(folder: Path) -> str:
    """Two ranks receive first, each in another group: what a pipeline with receives ahead does."""
    install()
    groups = open_world(Layout(pp=2), CPU, comm=CommConfig(timeout_seconds=2))
    pair = {way: groups.along("pp", purpose=way, pairwise=True) for way in ("up", "down")}
    rank = groups.grid.rank
    with pytest.raises(RuntimeError) as error:
        dist.irecv(torch.empty(1), group=pair["down" if rank == 0 else "up"], group_src=1 - rank)
    (folder / str(rank)).touch()
    while not (folder / str(1 - rank)).exists():  # rank 0 holds the store that the other still asks
        time.sleep(0.01)
    return str(error.value)


def test_first_uses_in_different_orders_wait_for_each_other(tmp_path: Path) -> None:
    errors = run_ranks(2, post_crosswise, tmp_path, timeout=60)
    assert all("timed out" in error.lower() or "timeout" in error.lower() for error in errors), errors


def abort_a_receive() -> str:
    install()
    groups = open_world(Layout(pp=2), CPU)
    group, rank = groups.along("pp", pairwise=True), groups.grid.rank
    connect_pairs(group, [(1 - rank, True), (1 - rank, False)], CPU)
    received = dist.irecv(torch.empty(1), group=group, group_src=1 - rank)
    group.abort()
    with pytest.raises(RuntimeError) as error:
        received.wait()
    return str(error.value)


def test_an_abort_fails_what_is_in_flight() -> None:
    told = run_ranks(2, abort_a_receive, timeout=60)
    assert told == ["NCCL communicator was aborted on rank 0.", "NCCL communicator was aborted on rank 1."]


SITE = Path(__file__).parent / "nccl_like_site"
PIPELINE = ["layout.pp=2", "layout.micro_batch=2", "checkpoint.memory_seconds=0", "train.steps=12"]


def test_a_killed_rank_whose_peer_only_waits_costs_a_step_at_most_and_not_a_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On NCCL the other rank hangs in a receive and notices nothing."""
    corpus = make_corpus(tmp_path, count=300)
    undisturbed = train_undisturbed(make_run(tmp_path / "undisturbed", corpus, *PIPELINE))
    monkeypatch.setenv("PYTHONPATH", str(SITE), prepend=os.pathsep)
    monkeypatch.setenv("NCCL_LIKE_TOLD", "1")
    run = make_run(tmp_path / "run", corpus, *PIPELINE)
    assert run_local(run, 2, observer=Acts(run, at_5=lambda: kill("rank-1"))) == "finished"
    [fault], [resume] = events(run, "fault"), events(run, "resume")
    assert (fault["cause"], fault["rank"], resume["source"]) == ("killed", 1, "memory")
    assert fault["step"] - resume["step"] <= 2
    for attempt in (1, 2):
        told = (run.logs_path / f"rank-0-attempt-{attempt}.log").read_text()
        assert "nccl_like: activation up" in told and "closed" not in told
    assert_same_run(run, undisturbed)
