"""Open the model of a run, a checkpoint or a Hugging Face folder with its tokenizer: the whole of it in one
process, or what it is (`describe_weights`), for ranks that each load their part."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from myriad.checkpoint.checkpoint_files import Weights, load_model
from myriad.checkpoint.foreign.hugging_face import HuggingFaceWeights
from myriad.checkpoint.storage.checkpoint_folder import Checkpoint, open_checkpoint
from myriad.data.tokenizer import Tokenizer
from myriad.errors import BadInputError, RunFailedError
from myriad.job import Job
from myriad.model.config import ModelConfig
from myriad.model.definition import values_of_rank
from myriad.model.gpt import GPT, build_full
from myriad.run import Run
from myriad.system.spin_control import control_spinning
from myriad.train.checkpoint_tools.locate_checkpoint import Location, locate, newest_whole
from myriad.train.checkpoint_tools.named_weights import job_of, model_of, open_weights, prefix_of
from myriad.train.inputs import tokenizer_of

__all__ = [
    "DescribedWeights",
    "WholeModel",
    "describe_weights",
    "open_checkpoint_model",
    "open_model",
    "set_thread_count",
]

_ONE_THREAD_PARAMETERS = 100_000_000
"""Largest number of parameters for one thread: up to this size, synchronizing threads takes longer than
computing a token."""


class WholeModel(NamedTuple):
    """Every layer of a model on the CPU, in float32."""

    layers: nn.ModuleList
    tokenizer: Tokenizer
    config: ModelConfig
    where: str
    """Path or URL of the weights."""


class DescribedWeights(NamedTuple):
    """Weights of which no value was read, and what is known of their model."""

    weights: Weights
    model: ModelConfig
    tokenizer: Tokenizer
    job: Job | None
    """The job that made the weights; ``None``: they came in a Hugging Face folder."""


def set_thread_count(parameters: int) -> None:
    """Choose the number of threads for generation; a user's OMP_NUM_THREADS stays."""
    if parameters <= _ONE_THREAD_PARAMETERS and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    control_spinning(torch.get_num_threads())


def open_model(name: str, key: str, *, ema: bool = False) -> WholeModel:
    """Open a run's newest checkpoint that verifies, one checkpoint, or a Hugging Face folder. ``key`` is the
    option that the user set, for messages. ``ema``: the moving average of the weights. Raises
    `BadInputError`."""
    weights = open_weights(name, key, ema=ema)
    if not isinstance(weights, HuggingFaceWeights):
        return open_checkpoint_model(name, key, ema=ema)
    assert weights.model is not None, "config.json says what the model is"
    tokenizer = Tokenizer.load(Path(weights.where))
    model = weights.model.without_predictions()
    return WholeModel(_build(model, 1, weights.read), tokenizer, model, weights.where)


def open_checkpoint_model(name: str, key: str = "run", *, ema: bool = False) -> WholeModel:
    """Open the model of a named checkpoint (`locate`), or of the newest one that verifies. ``ema``: the
    moving average of the weights. Raises `BadInputError` where there is no checkpoint, or no average."""
    found = locate(name, key)
    checkpoint, values = _load_newest(found, ema=ema)
    job, tokenizer = _job_and_tokenizer(checkpoint, found.run, key, name)
    model = model_of(checkpoint, job).without_predictions()

    def read(parameter: str) -> torch.Tensor:
        if parameter not in values:
            raise BadInputError(key, checkpoint.where, f"its checkpoint lacks the parameter {parameter}")
        return values[parameter]

    return WholeModel(_build(model, job.train.seed, read), tokenizer, model, checkpoint.where)


def describe_weights(name: str, key: str, *, ema: bool = False) -> DescribedWeights:
    """Find what `open_model` opens, and read no values. Raises `BadInputError`."""
    weights = open_weights(name, key, ema=ema)
    if isinstance(weights, HuggingFaceWeights):
        assert weights.model is not None, "config.json says what the model is"
        model = weights.model.without_predictions()
        return DescribedWeights(weights, model, Tokenizer.load(Path(weights.where)), None)
    checkpoint = open_checkpoint(weights.where)
    job, tokenizer = _job_and_tokenizer(checkpoint, weights.run, key, name)
    return DescribedWeights(weights, model_of(checkpoint, job).without_predictions(), tokenizer, job)


def _job_and_tokenizer(
    checkpoint: Checkpoint, run: Path | None, key: str, name: str
) -> tuple[Job, Tokenizer]:
    """Return the job that made a checkpoint, and its tokenizer. Raises `BadInputError` if there is no job."""
    job = job_of(checkpoint, run)
    if job is None:
        raise BadInputError(key, name, "must hold a job.toml, which describes the model")
    tokenizer = tokenizer_of(None if run is None else Run(run), job)
    if tokenizer is None:
        raise RunFailedError(
            f"{job.data.corpus}: no tokenizer.json beside the corpus, so no text can be read"
        )
    return job, tokenizer


def _build(config: ModelConfig, seed: int, read: Callable[[str], torch.Tensor]) -> nn.ModuleList:
    """Build every layer, with the values that ``read`` returns for a parameter's full name."""
    layers, definition = build_full(config, seed), GPT(config, seed)
    with torch.no_grad():
        for prefix, layer in zip(definition.names, layers, strict=True):
            for name, parameter in layer.named_parameters():
                if (whole := f"{prefix}.{name}") not in definition.tied:
                    parameter.copy_(values_of_rank(definition, whole, read(whole)))
    return layers.eval()


def _load_newest(found: Location, *, ema: bool) -> tuple[Checkpoint, dict[str, torch.Tensor]]:
    """Return the newest checkpoint whose model can be read.

    The bytes that are read are verified. All files are verified only if that fails, to find an older whole
    checkpoint.
    """
    checkpoint = newest_whole(found, every_byte=False)
    try:
        return checkpoint, load_model(checkpoint.where, prefix_of(checkpoint, ema=ema))
    except RunFailedError:
        checkpoint = newest_whole(found, every_byte=True)
        return checkpoint, load_model(checkpoint.where, prefix_of(checkpoint, ema=ema))
