"""A job that this machine cannot hold, or that may hang on its GPUs, is refused before a rank starts."""

import pytest

from myriad.errors import BadInputError
from myriad.job import load_job
from myriad.launchers.launcher import check_engine
from myriad.launchers.local import check_local_memory

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


def test_of_a_job_on_a_gpu_the_snapshots_count() -> None:
    """Pinned, in the memory of the host: the kernel would kill the rank that touches more than there is."""
    asked = ["train.device=cuda", "layout.dp=1", "layout.pp=1", "layout.tp=1"]
    needed = 12 * load_job("gpt-13b", asked).model.num_parameters()
    check_local_memory(load_job("gpt-13b", asked), 4.01 * needed)
    with pytest.raises(
        BadInputError, match=r"4 snapshots of gpt-13b.*; checkpoint\.memory_every = 0 needs two"
    ):
        check_local_memory(load_job("gpt-13b", asked), 3.99 * needed)
    check_local_memory(load_job("gpt-13b", [*asked, "checkpoint.memory_every=0"]), 2.01 * needed)


def test_a_pipeline_that_may_deadlock_on_gpus_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    job = load_job("tiny", ["layout.pp=2", "train.device=cuda"])
    with pytest.raises(
        BadInputError, match=r"^CUDA_DEVICE_MAX_CONNECTIONS = \"1\".*overlap\.receive_ahead = 1"
    ):
        check_engine(job, oversubscribe=True)
    for fits in (["overlap.receive_ahead=1"], ["resilience.engine=join"], ["train.device=cpu"]):
        check_engine(load_job("tiny", ["layout.pp=2", "train.device=cuda", *fits]), oversubscribe=True)
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    check_engine(job, oversubscribe=True)
