"""Weights by the name a person gives: a run, one checkpoint of it, or a folder of Hugging Face's."""

from pathlib import Path

from myriad.checkpoint.folder import Checkpoint, CheckpointFolder, open_checkpoint, verify
from myriad.checkpoint.hugging_face import HuggingFaceWeights, is_hugging_face
from myriad.checkpoint.manifest import MANIFEST
from myriad.checkpoint.weights import CheckpointWeights, Weights
from myriad.errors import BadInputError
from myriad.job import Job, parse_job
from myriad.run import Run

__all__ = ["job_of", "open_weights"]

_JOB = "job.toml"
_ALLOWED = "must be a run with a checkpoint, a checkpoint's folder, or a Hugging Face folder with safetensors"


def open_weights(name: str, key: str, *, vocabulary_multiple: int = 64, every_byte: bool = False) -> Weights:
    """Finds weights and reads their headers; of a run, the newest checkpoint that verifies.

    ``key``: what the user set, for messages. ``vocabulary_multiple``: how the vocabulary of Hugging Face's is
    padded. ``every_byte``: checkpoints are verified by their hashes, not by sizes alone. Raises
    `BadInputError`."""
    if "://" in name:
        return _open_checkpoint(_newest([open_checkpoint(name)], key, every_byte), None)
    for path in (Path(name).expanduser(), Path("runs") / name):
        if any((path / file).is_file() for file in (".metadata", MANIFEST)):
            run = path.resolve().parent.parent
            return _open_checkpoint(_newest([open_checkpoint(path)], key, every_byte), run)
        if Run(path).exists:
            folder = CheckpointFolder(Run(path).checkpoints())
            checkpoints = [folder.at_step(step) for step in reversed(folder.steps())]
            if not checkpoints:
                raise BadInputError(key, name, "no checkpoint yet; train first")
            return _open_checkpoint(_newest(checkpoints, key, every_byte), path)
        if is_hugging_face(path):
            return HuggingFaceWeights(path, vocabulary_multiple)
    raise BadInputError(key, name, _ALLOWED)


def _newest(checkpoints: list[Checkpoint], key: str, every_byte: bool) -> Checkpoint:
    problems: list[str] = []
    for checkpoint in checkpoints:
        if not (found := verify(checkpoint, sizes_only=not every_byte)):
            return checkpoint
        problems += found
    raise BadInputError(key, checkpoints[0].where, f"no whole checkpoint ({problems[0]})")


def _open_checkpoint(checkpoint: Checkpoint, run: Path | None) -> CheckpointWeights:
    run = run if run is not None and Run(run).exists else None
    job = _job_in(checkpoint) or (None if run is None else Run(run).job())
    return CheckpointWeights(checkpoint, run, None if job is None else job.model)


def _job_in(checkpoint: Checkpoint) -> Job | None:
    """The ``job.toml`` that a run leaves in each of its checkpoints."""
    if checkpoint.storage.size(checkpoint.at(_JOB)) is None:
        return None
    return parse_job(checkpoint.storage.read(checkpoint.at(_JOB)).decode(), checkpoint.at(_JOB))


def job_of(weights: CheckpointWeights) -> Job | None:
    """The job that made a checkpoint, if it or its run says."""
    job = _job_in(open_checkpoint(weights.where))
    return job or (None if weights.run is None else Run(weights.run).job())
