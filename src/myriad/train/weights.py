"""Weights by the name a person gives: a run, one checkpoint of it, or a folder of Hugging Face's."""

from pathlib import Path

from myriad.checkpoint.folder import Checkpoint
from myriad.checkpoint.hugging_face import HuggingFaceWeights, is_hugging_face
from myriad.checkpoint.weights import CheckpointWeights, Weights
from myriad.errors import BadInputError
from myriad.job import Job, parse_job
from myriad.run import Run
from myriad.train.locate import ALLOWED, locate, newest_whole

__all__ = ["job_of", "open_weights"]

_JOB = "job.toml"


def open_weights(name: str, key: str, *, vocabulary_multiple: int = 64, every_byte: bool = False) -> Weights:
    """Finds weights and reads their headers; of a run, the newest checkpoint that verifies.

    ``key``: what the user set, for messages. ``vocabulary_multiple``: how the vocabulary of Hugging Face's is
    padded. ``every_byte``: checkpoints are verified by their hashes, not by sizes alone. Raises
    `BadInputError`."""
    try:
        found = locate(name, key)
    except BadInputError as error:
        for path in (Path(name).expanduser(), Path("runs") / name):
            if is_hugging_face(path):
                return HuggingFaceWeights(path, vocabulary_multiple)
        if not error.allowed.startswith(ALLOWED):
            raise
        raise BadInputError(key, name, f"{ALLOWED}, or a Hugging Face folder with safetensors") from None
    return _open_checkpoint(newest_whole(found, every_byte=every_byte), found.run)


def _open_checkpoint(checkpoint: Checkpoint, run: Path | None) -> CheckpointWeights:
    job = job_of(checkpoint, run)
    return CheckpointWeights(checkpoint, run, None if job is None else job.model)


def _job_in(checkpoint: Checkpoint) -> Job | None:
    """The ``job.toml`` that a run leaves in each of its checkpoints."""
    if checkpoint.storage.size(checkpoint.at(_JOB)) is None:
        return None
    return parse_job(checkpoint.storage.read(checkpoint.at(_JOB)).decode(), checkpoint.at(_JOB))


def job_of(checkpoint: Checkpoint, run: Path | None) -> Job | None:
    """The job that made a checkpoint, if it or its run says."""
    return _job_in(checkpoint) or (None if run is None else Run(run).job())
