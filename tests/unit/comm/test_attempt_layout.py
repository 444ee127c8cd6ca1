"""If these fail, ranks of an attempt compute in another layout than was decided, or one that cannot be."""

import pytest

from myriad.comm.attempt_layout import AttemptLayout, equal_shares
from myriad.errors import BadInputError
from myriad.job import load_job
from myriad.job.job_values import work_of
from myriad.wire.message_codec import plain, read

FEWER = AttemptLayout(dp=2, shares=(4, 3))
KEYS = ["layout.dp=3", "layout.shares=[3, 2, 2]", "train.global_batch=7", "layout.pp=2"]


@pytest.mark.parametrize(
    "changed", [AttemptLayout(), FEWER, AttemptLayout(shares=(5, 1, 1)), AttemptLayout(partition="manual:2")]
)
def test_it_arrives_as_it_was_sent(changed: AttemptLayout) -> None:
    assert AttemptLayout.parse(changed.text) == changed == read(AttemptLayout, plain(changed))


def test_what_is_not_changed_is_the_jobs() -> None:
    job = load_job("tiny", KEYS)
    assert job.in_attempt(AttemptLayout()) == job
    fewer = job.in_attempt(FEWER)
    assert (fewer.layout.dp, fewer.layout.world, fewer.shares, fewer.layout.pp) == (2, 4, (4, 3), 2)
    cut = job.in_attempt(AttemptLayout(partition="manual:3"))
    assert (cut.layout.partition, cut.shares) == ("manual:3", (3, 2, 2))


@pytest.mark.parametrize(("dp", "group"), [(2, 2), (3, None), (1, None)])
def test_fewer_replicas_keep_groups_that_divide_them(dp: int, group: int | None) -> None:
    keys = ["layout.dp=4", "layout.zero=3", "layout.shard_group=2", "checkpoint.holders=2"]
    job = load_job("tiny", [*keys, "train.global_batch=12"])
    attempt = job.in_attempt(AttemptLayout(dp=dp))
    fewer = attempt.layout
    assert (fewer.shard_group, fewer.num_shards) == (group, group or dp)
    assert (job.snapshot_holders, attempt.snapshot_holders) == (2, 1), "one group is left"


def test_one_replica_that_is_left_estimates_the_noise_scale_from_micro_batches() -> None:
    keys = ["layout.dp=2", "layout.micro_batch=4", "train.global_batch=8", "telemetry.noise_scale=true"]
    attempt = load_job("tiny", keys).in_attempt(AttemptLayout(dp=1))
    assert attempt.telemetry.noise_scale and attempt.num_micro_batches == 2
    assert work_of(attempt).copies_gradients


def test_fewer_replicas_have_fewer_nodes_in_no_order_of_the_plan() -> None:
    job = load_job("tiny", [*KEYS, "resilience.nodes=3", "comm.node_order=[2, 0, 1]"])
    fewer = job.in_attempt(FEWER)
    assert fewer.resilience.nodes == 2 and fewer.comm.node_order is None


@pytest.mark.parametrize(
    ("keys", "changed", "key"),
    [
        ([], AttemptLayout(dp=2), "train.global_batch"),
        ([], AttemptLayout(dp=2, shares=(4, 4)), "layout.shares"),
        ([], AttemptLayout(partition="manual:9"), "layout.partition"),
        (["resilience.nodes=2"], FEWER, "layout.dp"),
    ],
)
def test_what_cannot_be_is_refused(keys: list[str], changed: AttemptLayout, key: str) -> None:
    with pytest.raises(BadInputError, match=key):
        load_job("tiny", [*KEYS, *keys]).in_attempt(changed)


def test_shares_are_as_equal_as_can_be() -> None:
    assert equal_shares(8, 3) == (3, 3, 2) and equal_shares(8, 2) == (4, 4)
