"""A model that this machine cannot hold is refused before a rank starts."""

import pytest

from myriad.errors import BadInputError
from myriad.job import load_job
from myriad.resilience.engines.local_memory import check_local_memory

GIB = 2.0**30


@pytest.mark.parametrize("changes", [[], ["model.layers=10000"], ["train.precision=float32"]])
def test_a_model_larger_than_the_machine_is_refused(changes: list[str]) -> None:
    """In one line, that says how much it has."""
    job = load_job("gpt-13b", ["train.device=cpu", *changes])
    with pytest.raises(BadInputError, match=r"gpt-13b.*at most 24.* GiB, all that this machine has"):
        check_local_memory(job, 24 * GIB)


def test_replicas_count_and_shards_of_a_node_do_not() -> None:
    """Eight whole replicas of 1.6e9 parameters need 8 times what one needs; ZeRO 3 divides it among them."""
    replicas = ["train.device=cpu", "layout.dp=8", "layout.tp=1", "layout.pp=1"]
    check_local_memory(load_job("gpt2-1558m", [*replicas, "layout.zero=3"]), 128 * GIB)
    with pytest.raises(BadInputError, match="GiB"):
        check_local_memory(load_job("gpt2-1558m", [*replicas, "layout.zero=0"]), 128 * GIB)


def test_a_job_on_a_gpu_is_left_to_its_ranks() -> None:
    """The memory of the host says nothing about it."""
    check_local_memory(load_job("gpt-13b", ["train.device=cuda"]), GIB)
