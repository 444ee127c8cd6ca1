"""Open weights by name: a run, one of its checkpoints, or a Hugging Face folder."""

from pathlib import Path

from myriad.checkpoint.checkpoint_files import AVERAGE_PREFIX, MODEL_PREFIX, CheckpointWeights, Weights
from myriad.checkpoint.foreign.hugging_face import HuggingFaceWeights, is_hugging_face
from myriad.checkpoint.storage.checkpoint_folder import Checkpoint
from myriad.errors import BadInputError
from myriad.job import Job, parse_job
from myriad.job.job_steps import JobSteps
from myriad.model.config import ModelConfig
from myriad.run import Run
from myriad.train.checkpoint_tools.locate_checkpoint import ALLOWED, locate, newest_whole

__all__ = ["job_of", "model_of", "open_weights", "prefix_of"]

_JOB = "job.toml"
_NO_AVERAGE = "must have a moving average of the weights: train with optimizer.ema_decay"


def open_weights(
    name: str,
    key: str,
    *,
    vocabulary_multiple: int = 64,
    every_byte: bool = False,
    verified: bool = False,
    ema: bool = False,
) -> Weights:
    """Find weights and read their headers; for a run, use the newest checkpoint that verifies.

    ``key`` is the option that the user set, for messages. A Hugging Face vocabulary is padded to
    ``vocabulary_multiple``. With ``every_byte``, checkpoints are verified by their hashes, not by sizes
    alone; with ``verified``, another process has done so, and no value is read. ``ema``: the moving average
    of the weights. Raises `BadInputError`.
    """
    try:
        found = locate(name, key)
    except BadInputError as error:
        for path in (Path(name).expanduser(), Path("runs") / name):
            if is_hugging_face(path):
                if ema:
                    raise BadInputError("--ema", name, _NO_AVERAGE) from None
                return HuggingFaceWeights(path, vocabulary_multiple, compare_tied=not verified)
        if not error.allowed.startswith(ALLOWED):
            raise
        raise BadInputError(key, name, f"{ALLOWED}, or a Hugging Face folder with safetensors") from None
    return _open_checkpoint(newest_whole(found, every_byte=every_byte), found.run, ema=ema)


def _open_checkpoint(checkpoint: Checkpoint, run: Path | None, *, ema: bool) -> CheckpointWeights:
    job = job_of(checkpoint, run)
    model = None if job is None else model_of(checkpoint, job)
    return CheckpointWeights(checkpoint, run, model, prefix_of(checkpoint, ema=ema))


def prefix_of(checkpoint: Checkpoint, *, ema: bool) -> str:
    """Return the prefix of the weights' names. ``ema``: the prefix of their moving average. Raises
    `BadInputError` for a checkpoint without one."""
    if not ema:
        return MODEL_PREFIX
    if not any(name.startswith(AVERAGE_PREFIX) for name in checkpoint.manifest().tensors):
        raise BadInputError("--ema", checkpoint.where, _NO_AVERAGE)
    return AVERAGE_PREFIX


def _job_in(checkpoint: Checkpoint) -> Job | None:
    """Read the ``job.toml`` that a run stores in each of its checkpoints."""
    if checkpoint.storage.size(checkpoint.at(_JOB)) is None:
        return None
    return parse_job(checkpoint.storage.read(checkpoint.at(_JOB)).decode(), checkpoint.at(_JOB))


def job_of(checkpoint: Checkpoint, run: Path | None) -> Job | None:
    """Return the job that made a checkpoint, from the checkpoint or its run, if either has it."""
    return _job_in(checkpoint) or (None if run is None else Run(run).job())


def model_of(checkpoint: Checkpoint, job: Job) -> ModelConfig:
    """Return the model as the last step before a checkpoint trained it: a phase may have given it another
    sequence length than the job begins with."""
    return JobSteps(job).phase_at(max(0, checkpoint.manifest().step - 1)).model
