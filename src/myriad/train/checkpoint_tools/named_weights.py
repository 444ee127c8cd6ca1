"""Open weights by name: a run, one of its checkpoints, or a Hugging Face folder."""

from pathlib import Path

from myriad.checkpoint.checkpoint_files import CheckpointWeights, Weights
from myriad.checkpoint.foreign.hugging_face import HuggingFaceWeights, is_hugging_face
from myriad.checkpoint.storage.checkpoint_folder import Checkpoint
from myriad.errors import BadInputError
from myriad.job import Job, parse_job
from myriad.run import Run
from myriad.train.checkpoint_tools.locate_checkpoint import ALLOWED, locate, newest_whole

__all__ = ["job_of", "open_weights"]

_JOB = "job.toml"


def open_weights(
    name: str, key: str, *, vocabulary_multiple: int = 64, every_byte: bool = False, verified: bool = False
) -> Weights:
    """Find weights and read their headers; for a run, use the newest checkpoint that verifies.

    ``key`` is the option that the user set, for messages. A Hugging Face vocabulary is padded to
    ``vocabulary_multiple``. With ``every_byte``, checkpoints are verified by their hashes, not by sizes
    alone; with ``verified``, another process has done so, and no value is read. Raises `BadInputError`.
    """
    try:
        found = locate(name, key)
    except BadInputError as error:
        for path in (Path(name).expanduser(), Path("runs") / name):
            if is_hugging_face(path):
                return HuggingFaceWeights(path, vocabulary_multiple, compare_tied=not verified)
        if not error.allowed.startswith(ALLOWED):
            raise
        raise BadInputError(key, name, f"{ALLOWED}, or a Hugging Face folder with safetensors") from None
    return _open_checkpoint(newest_whole(found, every_byte=every_byte), found.run)


def _open_checkpoint(checkpoint: Checkpoint, run: Path | None) -> CheckpointWeights:
    job = job_of(checkpoint, run)
    return CheckpointWeights(checkpoint, run, None if job is None else job.model)


def _job_in(checkpoint: Checkpoint) -> Job | None:
    """Read the ``job.toml`` that a run stores in each of its checkpoints."""
    if checkpoint.storage.size(checkpoint.at(_JOB)) is None:
        return None
    return parse_job(checkpoint.storage.read(checkpoint.at(_JOB)).decode(), checkpoint.at(_JOB))


def job_of(checkpoint: Checkpoint, run: Path | None) -> Job | None:
    """Return the job that made a checkpoint, from the checkpoint or its run, if either has it."""
    return _job_in(checkpoint) or (None if run is None else Run(run).job())
