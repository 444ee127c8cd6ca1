"""What the digests are of must be equal on replicas that are healthy, whatever the layout: else every run
would be told that its numbers are wrong."""

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from parity_case import Case, make_engine, train_steps
from ranks import reuse_ranks

from myriad.comm.grid import RankGrid
from myriad.comm.groups import close_world
from myriad.comm.layout import Layout
from myriad.parallel.engine import Engine
from myriad.train.replica_digests import digest_of, reduce_bits

EXPERTS = {"experts": 4, "expert_hidden": 16}
CASES = [
    Case(layout={"dp": 4, "zero": 1}, steps=2),
    *(Case(layout={"dp": 4, "zero": zero, "shard_group": 2}, steps=2) for zero in (1, 3)),
    *(Case(layout={"dp": 2, "zero": zero, "tp": 2, "micro_batch": 2}, steps=2) for zero in (0, 2)),
    *(Case(layout={"dp": 2, "zero": zero, "pp": 2}, steps=2) for zero in (0, 2)),
    Case(layout={"dp": 2, "zero": 1, "pp": 2, "virtual_stages": 2}, steps=2),
    Case(layout={"dp": 2, "zero": 2}, steps=2, dtype=torch.bfloat16),
    Case(layout={"dp": 2, "zero": 1}, steps=2, comm={"compress_parameters": "int8"}),
    Case(layout={"dp": 2, "zero": 0}, steps=4, comm={"sync_every": 2}),
    Case(layout={"dp": 2, "zero": 0}, steps=4, comm={"sync_every": 2}, optimizer={"name": "muon"}),
    Case(layout={"dp": 2, "zero": 0, "tp": 2, "micro_batch": 2}, steps=2, optimizer={"name": "muon"}),
    Case(layout={"dp": 4, "ep": 2}, model=EXPERTS, steps=2),
    Case(layout={"dp": 2, "tp": 4, "zero": 2, "ep": 2, "etp": 2}, model=EXPERTS, steps=2),
    Case(layout={"dp": 8, "zero": 3, "ep": 2, "shard_group": 4}, model=EXPERTS, steps=2),
    Case(layout={"dp": 4, "tp": 2, "zero": 2, "ep": 4, "etp": 1, "shard_group": 2}, model=EXPERTS, steps=2),
]


def digests(case: Case) -> list[tuple[int, ...]]:
    """One rank's, by either way, before each update that replicas come to with the same; then the experts'
    that it does not share with all of them."""
    engine = make_engine(case)
    every, found = case.comm.get("sync_every", 1), []

    def take() -> None:
        if engine.optimizer.steps_done % every == 0:
            held, experts = engine.replicated(), engine.replicated(of_experts=True)
            own = (int(digest_of(held)), int(reduce_bits(held)))
            found.append((*own, int(digest_of(experts))) if experts else own)

    engine.before_update = take
    train_steps(case, engine, 0, case.steps)
    engine.gather()
    take()
    if case.layout.get("shard_group"):
        assert_mirrors(engine)
    engine.close()
    close_world()
    return found


def assert_mirrors(engine: Engine) -> None:
    """A rank has what each rank of the same place in another group stores, to the bit and in the same parts:
    snapshots of one replace those of the other."""
    grid = engine.groups.grid
    shards_of: list[Any] = [None] * grid.layout.world
    own = {(one.name, one.offsets): one.values.clone() for one in engine.shards()}
    torch.distributed.all_gather_object(shards_of, own)
    for rank in grid.peers("dp_replicate"):
        mirrored = {(one.name, one.offsets): one.values for one in engine.shards(rank)}
        assert mirrored.keys() == shards_of[rank].keys() != set()
        assert all(torch.equal(mirrored[key], shards_of[rank][key]) for key in mirrored)
    assert len({key for shards in shards_of for key in shards}) == sum(map(len, shards_of)), "stored once"


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.layout}-{case.dtype}-{case.comm}")
def test_replicas_report_the_same_after_every_step(case: Case) -> None:
    layout = Layout(**case.layout)
    model = {"layers": 2} | case.model
    case = replace(case, model=model, global_batch=2 * layout.dp * layout.micro_batch)
    told: list[Any] = reuse_ranks(layout.world, digests, case)
    for group in RankGrid(layout, 0).rows("dp_replicate" if layout.zero == 3 else "dp"):
        assert all([one[:2] for one in told[rank]] == [one[:2] for one in told[group[0]]] for rank in group)
    for group in (
        RankGrid(layout, 0).rows("dp_replicate" if layout.zero == 3 else "expert_dp") if layout.ep > 1 else ()
    ):
        assert all(told[rank] == told[group[0]] for rank in group)
        assert len(told[group[0]][0]) == 3, "experts are compared too"
    assert all(len(set(each)) == len(each) > 1 for each in told), "of each step another"


def test_a_bit_of_one_replica_shows_in_its_digest_alone() -> None:
    told = reuse_ranks(3, flipped, Case(layout={"dp": 3}, model={"layers": 2}, steps=3, global_batch=3))
    assert told[0] == told[2]
    assert [a == b for a, b in zip(told[0], told[1], strict=True)] == [True, True, False, False]


def flipped(case: Case) -> list[int]:
    engine = make_engine(case)
    found: list[int] = []

    def take() -> None:
        if os.environ["RANK"] == "1" and len(found) == 2:
            engine.model.chunks[-1].values.view(torch.int32)[-9] ^= 1
        found.append(int(digest_of(engine.replicated())))

    engine.before_update = take
    train_steps(case, engine, 0, case.steps)
    take()
    engine.close()
    close_world()
    return found
