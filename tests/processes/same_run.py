"""What a repaired run must be: the undisturbed one, bit for bit."""

import numpy as np

from myriad.checkpoint.checkpoint_files import load_model
from myriad.run import Run

__all__ = ["assert_same_run", "tensors_at"]


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
