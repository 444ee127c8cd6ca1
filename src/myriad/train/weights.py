"""Weights by the name a person gives: a run, one checkpoint of it, or a folder of Hugging Face's."""

from pathlib import Path

from myriad.checkpoint.folder import CheckpointFolder, verify
from myriad.checkpoint.hugging_face import HuggingFaceWeights, is_hugging_face
from myriad.checkpoint.weights import CheckpointWeights, Weights
from myriad.errors import BadInputError
from myriad.job import Job, load_job
from myriad.run import Run

__all__ = ["job_of", "open_weights"]

_ALLOWED = "must be a run with a checkpoint, a checkpoint's folder, or a Hugging Face folder with safetensors"


def open_weights(name: str, key: str, *, vocabulary_multiple: int = 64, every_byte: bool = False) -> Weights:
    """Finds weights and reads their headers; of a run, the newest checkpoint that verifies.

    ``key``: what the user set, for messages. ``vocabulary_multiple``: how the vocabulary of Hugging Face's is
    padded. ``every_byte``: checkpoints are verified by their hashes, not by sizes alone. Raises
    `BadInputError`."""
    for path in (Path(name).expanduser(), Path("runs") / name):
        if any((path / file).is_file() for file in (".metadata", "manifest.json")):
            return _open_checkpoint(_newest([path], key, every_byte))
        if Run(path).exists:
            folder = CheckpointFolder(Run(path).checkpoints_path)
            steps = [folder.of_step(step) for step in reversed(folder.steps())]
            if not steps:
                raise BadInputError(key, name, "no checkpoint yet; train first")
            return _open_checkpoint(_newest(steps, key, every_byte))
        if is_hugging_face(path):
            return HuggingFaceWeights(path, vocabulary_multiple)
    raise BadInputError(key, name, _ALLOWED)


def _newest(checkpoints: list[Path], key: str, every_byte: bool) -> Path:
    problems: list[str] = []
    for path in checkpoints:
        if not (found := verify(path, sizes_only=not every_byte)):
            return path
        problems += found
    raise BadInputError(key, str(checkpoints[0]), f"no whole checkpoint ({problems[0]})")


def _open_checkpoint(path: Path) -> CheckpointWeights:
    job = job_of(path)
    return CheckpointWeights(path, None if job is None else job.model)


def job_of(checkpoint: Path) -> Job | None:
    """The job that made a checkpoint: of the run around it, or a ``job.toml`` of its own."""
    resolved = checkpoint.resolve()
    for folder in (resolved.parent.parent, resolved):
        if (folder / "job.toml").is_file():
            return load_job(str(folder / "job.toml"))
    return None
