"""What a repaired run must be: the undisturbed one, bit for bit."""

from pathlib import Path

import numpy as np
from ranks import run_ranks

from myriad.checkpoint.checkpoint_files import load_model
from myriad.checkpoint.snapshots.snapshot_server_process import ServerThread
from myriad.data import loader
from myriad.data.loader_process import LoaderThread
from myriad.faults.injector import plan_rank_faults
from myriad.faults.rank_faults import ARMED
from myriad.faults.scenario import Fault
from myriad.run import Run
from myriad.train import trainer, worker

__all__ = ["assert_same_run", "slow_steps", "tensors_at", "train_rank", "train_undisturbed"]


def train_rank(arguments: list[str]) -> int:
    """Do what `worker.main` does, with the loader and the snapshot server in threads of the rank, as
    `myriad.train.in_process` has them. As processes they cost half a CPU-second at each start. Snapshots end
    with the rank."""
    loader._LoaderProcess = LoaderThread  # type: ignore[assignment,misc]
    trainer.start_snapshot_server = ServerThread  # type: ignore[assignment]
    return worker.main(arguments)


def train_undisturbed(run: Run) -> Run:
    """Train the run to its end on forked ranks. Nothing happens to it, so nothing needs to supervise it; a
    supervised start costs several CPU-seconds."""
    world = run.job().layout.world
    assert run_ranks(world, train_rank, [str(run.path)]) == [0] * world
    return run


def slow_steps(folder: Path, factor: float, world: int = 2) -> dict[str, str]:
    """The environment in which all ranks sleep for most of each step, in each attempt: a run that is to last
    until something has happened to it then costs little processor time."""
    slow = [Fault(kind="slow", rank=rank, step=2, factor=factor) for rank in range(world)]
    return {ARMED: str(plan_rank_faults(folder, slow, None))}


def assert_same_run(run: Run, undisturbed: Run) -> None:
    """Losses, norms and rates of every step to the last, and every tensor at the end."""
    last = undisturbed.job().train.steps
    for key in ("step", "loss", "grad_norm", "learning_rate", "tokens", "data_digest"):
        expected = [line[key] for line in undisturbed.read_metrics()]
        assert len(expected) == last and [line[key] for line in run.read_metrics()] == expected, key
    found, expected_tensors = (tensors_at(each, last) for each in (run, undisturbed))
    assert found.keys() == expected_tensors.keys()
    for name, tensor in found.items():
        np.testing.assert_array_equal(tensor, expected_tensors[name], err_msg=name)


def tensors_at(run: Run, step: int) -> dict[str, np.ndarray]:
    """Of the durable checkpoint after ``step`` steps."""
    return {name: t.numpy() for name, t in load_model(f"{run.checkpoints()}/step-{step}", "").items()}
