"""If these fail, wrong weights are trained on, or a healthy rank is blamed for them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_decisions import World, kinds, seen

from myriad.job import load_job
from myriad.launchers.supervised_run import expert_replica_groups, replica_groups
from myriad.supervise.messages import Beat
from myriad.supervise.observations import Digest, RankExited
from myriad.supervise.policy.numeric_faults import ReplicaDifference, ReplicaDigests
from myriad.supervise.policy.policy_actions import EndRun, Evict, ReportFault, StartAttempt

FOUR = ((0, 1, 2, 3),)


def told(replicas: ReplicaDigests, step: int, values: dict[int, int]) -> ReplicaDifference | None:
    for rank, value in values.items():
        replicas.observe(rank, [Digest(step, value)])
    return replicas.find_difference()


def test_the_one_that_differs_from_the_majority_is_named() -> None:
    found = told(ReplicaDigests(FOUR), 10, {0: 7, 1: 7, 2: 8, 3: 7})
    assert found == ReplicaDifference(10, (2,), (0, 1, 3))
    assert found.text == "rank 2 holds other parameters than ranks 0, 1 and 3 after step 10"


def test_of_two_that_differ_both_are_suspect() -> None:
    found = told(ReplicaDigests(((0, 2), (1, 3))), 10, {0: 7, 1: 5, 2: 8, 3: 5})
    assert found == ReplicaDifference(10, (0, 2), ())
    assert (
        found.text
        == "ranks 0 and 2 hold different parameters after step 10, and nothing says whose are wrong"
    )


def test_two_against_two_are_four_suspects() -> None:
    assert told(ReplicaDigests(FOUR), 10, {0: 7, 1: 7, 2: 8, 3: 8}) == ReplicaDifference(10, (0, 1, 2, 3), ())


def test_experts_are_compared_among_the_ranks_that_hold_the_same() -> None:
    job = load_job("tiny-moe", ["layout.dp=4", "layout.ep=2", "resilience.verify_every=1"])
    assert expert_replica_groups(job) == ((0, 2), (1, 3))
    keys = [
        "layout.dp=8",
        "layout.ep=2",
        "layout.zero=3",
        "layout.shard_group=4",
        "resilience.verify_every=1",
    ]
    apart = load_job("tiny-moe", [*keys, "train.global_batch=8"])
    assert (
        expert_replica_groups(apart) == replica_groups(apart) == tuple((rank, rank + 4) for rank in range(4))
    )
    assert expert_replica_groups(load_job("tiny-moe", ["layout.dp=4", "resilience.verify_every=1"])) == ()
    dense, experts = 5 << 32, (1, 2)
    same = {rank: dense | experts[rank % 2] for rank in range(4)}
    compared = ReplicaDigests(FOUR, expert_replica_groups(job), splits=True)
    assert told(compared, 10, same) is None and compared.agreed == 10
    assert told(compared, 20, same | {3: dense | 9}) == ReplicaDifference(20, (1, 3), ())
    compared = ReplicaDigests(FOUR, expert_replica_groups(job), splits=True)
    assert told(compared, 10, same | {2: 6 << 32 | 1}) == ReplicaDifference(10, (2,), (0, 1, 3))
    apart = load_job("tiny-moe", ["layout.dp=4", "layout.ep=4", "resilience.verify_every=1"])
    compared = ReplicaDigests(FOUR, expert_replica_groups(apart), splits=bool(expert_replica_groups(apart)))
    assert told(compared, 10, {rank: dense | rank for rank in range(4)}) is None, "no two hold the same"
    fewer = ReplicaDigests(FOUR, splits=True)  # with another number of replicas
    assert told(fewer, 10, same) is None and fewer.agreed == 10


def test_digests_of_different_steps_are_never_compared() -> None:
    replicas = ReplicaDigests(FOUR)
    for rank in range(4):
        replicas.observe(rank, [Digest(10 * (rank + 1), rank)])
    assert replicas.find_difference() is None and replicas.agreed == -1


def test_a_late_digest_completes_its_step() -> None:
    replicas = ReplicaDigests(FOUR)
    assert told(replicas, 10, {0: 1, 1: 1, 2: 1}) is None
    assert told(replicas, 20, {0: 2, 1: 2, 2: 2, 3: 2}) is None
    assert replicas.agreed == 20
    assert told(replicas, 30, {0: 2, 1: 2, 2: 2}) is None
    assert told(replicas, 30, {3: 9}) == ReplicaDifference(30, (3,), (0, 1, 2))


def test_the_earliest_difference_is_reported_and_nothing_after_it_counts_as_agreed() -> None:
    replicas = ReplicaDigests(FOUR)
    for step, odd in ((10, 1), (20, 5), (30, 1)):
        for rank in range(4):
            replicas.observe(rank, [Digest(step, odd if rank == 3 else 1)])
    assert replicas.find_difference() == ReplicaDifference(20, (3,), (0, 1, 2)) and replicas.agreed == 10


def test_steps_that_never_become_complete_are_forgotten() -> None:
    replicas = ReplicaDigests(FOUR)
    for step in range(10_000):
        replicas.observe(0, [Digest(step, 1)])
        replicas.find_difference()
    assert len(replicas._values) <= 65


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40)), max_size=300))
def test_healthy_ranks_in_any_order_and_with_any_gaps_are_never_reported_to_differ(
    beats: list[tuple[int, int]],
) -> None:
    replicas = ReplicaDigests(((0, 1), (2, 3)))
    for rank, step in beats:
        replicas.observe(rank, [Digest(step, 100 * (rank // 2) + step)])
        assert replicas.find_difference() is None


@pytest.mark.parametrize(
    ("overrides", "groups"),
    [
        (["layout.dp=3", "train.global_batch=9"], ((0, 1, 2),)),
        (["layout.dp=2", "layout.tp=2"], ((0, 2), (1, 3))),
        (["layout.dp=2", "layout.pp=2", "layout.zero=1"], ((0, 2), (1, 3))),
        (["layout.dp=2", "layout.zero=3"], ()),
        (["layout.tp=2"], ()),
        (["layout.dp=2", "resilience.verify_every=0"], ()),
    ],
)
def test_ranks_with_the_same_share_of_a_stage_are_compared(overrides: list[str], groups: tuple) -> None:
    assert replica_groups(load_job("tiny", overrides)) == groups


# What the driver makes of it


def beat(world: World, step: int, values: dict[int, int], at: int | None = None) -> list:
    """Ranks report digests of one step while they are in another."""
    actions = []
    for node in list(world.decider.nodes):
        placed = world.decider.state.placement.get(node, ())
        ranks = tuple(
            seen(rank, step=at or step + 1, digests=(Digest(step, values[rank]),)) for rank in placed
        )
        actions += world.handle(Beat(node, world.epoch, 7, ranks))
    return actions


def same(value: int = 1) -> dict[int, int]:
    return dict.fromkeys(range(4), value)


def test_the_attempt_ends_and_the_next_continues_from_what_all_agreed_on() -> None:
    world = World(replicas=FOUR)
    assert beat(world, 10, same()) == []
    blame, _ = beat(world, 20, same() | {2: 9})
    assert isinstance(blame, ReportFault) and (blame.cause, blame.rank, blame.step) == ("corruption", 2, 20)
    assert blame.evidence == {"suspects": (2,), "others": (0, 1, 3), "agreed_step": 10}
    (started,) = world.all_exit(step=23)
    assert isinstance(started, StartAttempt) and started.newest_step == 10


def test_the_limit_stays_until_ranks_train_again_and_no_longer() -> None:
    world = World(replicas=FOUR)
    beat(world, 10, same())
    beat(world, 20, same() | {2: 9})
    world.all_exit(step=23)
    (started,) = [one for one in world.all_exit(step=-1) if isinstance(one, StartAttempt)]
    assert started.newest_step == 10, "the last attempt ended before anything was loaded"
    world.handle(Beat(0, world.epoch, 7, tuple(seen(rank, step=11) for rank in range(4))))
    (started,) = [one for one in world.all_exit(step=12) if isinstance(one, StartAttempt)]
    assert started.newest_step is None


def test_without_any_step_that_agreed_what_is_stored_is_as_good_as_anything() -> None:
    world = World(replicas=FOUR)
    blame, _ = beat(world, 5000, same() | {2: 9})
    assert blame.rank == 2
    (started,) = world.all_exit(step=5001)
    assert started.newest_step is None


def test_two_suspects_on_one_node_are_reported_and_no_node_is_named() -> None:
    world = World(replicas=((0, 1), (2, 3)))
    blame, _ = beat(world, 20, {0: 1, 1: 2, 2: 3, 3: 3})
    assert (blame.rank, blame.node, blame.evidence["suspects"]) == (-1, 0, (0, 1))


def test_digests_of_another_attempt_count_for_nothing() -> None:
    world = World(replicas=FOUR)
    beat(world, 10, same())
    world.exit(0)
    world.all_exit()
    world.handle(Beat(0, 5, 7, tuple(seen(rank, digests=(Digest(10, rank),)) for rank in range(4))))
    assert beat(world, 10, same(3)) == [], "an attempt is compared with itself alone"


def test_what_ranks_had_not_reported_when_they_ended_well_is_compared_before_the_run_is_over() -> None:
    world = World(replicas=FOUR)
    beat(world, 10, same())
    for rank in range(4):
        digest = (Digest(20, 9 if rank == 1 else 1),)
        world.handle(RankExited(0, world.epoch, rank, 0, "done", 20, "", "a.log", digest))
    blame, started = world.actions[-2:]
    assert (blame.cause, blame.rank) == ("corruption", 1)
    assert isinstance(started, StartAttempt) and started.newest_step == 10


def test_a_node_on_which_it_comes_again_gives_way_to_a_spare_however_much_later() -> None:
    world = World(nodes=2, spares=1, replicas=FOUR)
    step = 0
    for times in (1, 2):
        beat(world, step + 10, same())
        beat(world, step + 20, same() | {3: 9})
        world.all_exit(step=step + 21)
        assert ("Evict" in kinds(world.actions)) == (times == 2)
        step += 100
    assert [one.node for one in world.actions if isinstance(one, Evict)] == [1]


def test_a_rank_that_is_wrong_again_and_again_ends_the_run() -> None:
    world = World(replicas=FOUR, restarts=2)
    beat(world, 10, same())
    for more in range(3):
        beat(world, 20 + more, same() | {3: 9}, at=30 + more)
        world.all_exit(step=30 + more)
    (over,) = [one for one in world.actions if isinstance(one, EndRun)]
    assert over.outcome == "failed" and "rank 3 holds other parameters" in over.reason
