"""Generate text from a run's newest checkpoint, on one device."""

import os
from collections.abc import Iterator

import torch
from torch import nn

from myriad.checkpoint.checkpoint_files import load_model
from myriad.checkpoint.storage.checkpoint_folder import Checkpoint
from myriad.data.tokenizer import Tokenizer
from myriad.errors import BadInputError, RunFailedError
from myriad.model.definition import values_of_rank
from myriad.model.generate import generate
from myriad.model.gpt import GPT, build_full
from myriad.run import Run
from myriad.system.spin_control import control_spinning
from myriad.train.checkpoint_tools.locate_checkpoint import Location, locate, newest_whole
from myriad.train.checkpoint_tools.named_weights import job_of
from myriad.train.inputs import tokenizer_of

__all__ = ["TextSampler", "continue_text", "open_run", "open_sampler", "set_thread_count"]

_ONE_THREAD_PARAMETERS = 100_000_000
"""Largest number of parameters for one thread: up to this size, synchronizing threads takes longer than
computing a token."""


def set_thread_count(parameters: int) -> None:
    """Choose the number of threads for generation; a user's OMP_NUM_THREADS stays."""
    if parameters <= _ONE_THREAD_PARAMETERS and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    control_spinning(torch.get_num_threads())


class TextSampler:
    """A trained model that continues text."""

    def __init__(self, layers: nn.ModuleList, tokenizer: Tokenizer, sequence: int) -> None:
        self._layers, self._tokenizer, self._sequence = layers, tokenizer, sequence

    def generate(
        self, prompt: str, tokens: int = 200, temperature: float = 0.8, top_p: float = 0.95, seed: int = 1
    ) -> Iterator[str]:
        """Yield pieces of text that continue ``prompt`` (which is not repeated), whole characters at a
        time."""
        encoded = self._tokenizer.encode(prompt) or [self._tokenizer.end_of_document]
        drawn = generate(
            self._layers,
            encoded,
            sequence=self._sequence,
            max_new_tokens=tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            stop_token=self._tokenizer.end_of_document,
        )
        made: list[int] = []
        shown = ""
        for token in drawn:
            made.append(token)
            text = self._tokenizer.decode(made)
            if not text.endswith("�"):
                yield text[len(shown) :]
                shown = text


def open_run(run: Run) -> TextSampler:
    """Open the model of a run's newest verified checkpoint. Raises `BadInputError` if there is none yet."""
    return open_sampler(str(run.path))


def open_sampler(name: str, *, own_process: bool = False) -> TextSampler:
    """Open the model of a named checkpoint (`locate`), or of the newest one that verifies.

    With ``own_process``, this process does nothing else, so its threads are set for generation. Raises
    `BadInputError` where there is no checkpoint.
    """
    found = locate(name, "run")
    checkpoint, values = _load_newest(found)
    job = job_of(checkpoint, found.run)
    if job is None:
        raise BadInputError("run", name, "must hold a job.toml, which describes the model")
    if own_process:
        set_thread_count(job.model.num_parameters())
    model = job.model.without_predictions()
    layers = build_full(model, job.train.seed)
    definition = GPT(model, job.train.seed)
    names = ["embedding", *(f"blocks.{i}" for i in range(model.layers)), "head"]
    with torch.no_grad():
        for prefix, layer in zip(names, layers, strict=True):
            for name, parameter in layer.named_parameters():
                if (whole := f"{prefix}.{name}") not in definition.tied:
                    if whole not in values:
                        raise BadInputError(
                            "run", checkpoint.where, f"its checkpoint lacks the parameter {whole}"
                        )
                    parameter.copy_(values_of_rank(definition, whole, values[whole]))
    tokenizer = tokenizer_of(None if found.run is None else Run(found.run), job)
    if tokenizer is None:
        raise RunFailedError(
            f"{job.data.corpus}: no tokenizer.json beside the corpus, so no text can be made"
        )
    return TextSampler(layers.eval(), tokenizer, job.model.sequence)


def _load_newest(found: Location) -> tuple[Checkpoint, dict[str, torch.Tensor]]:
    """Return the newest checkpoint whose model can be read.

    The bytes that are read are verified. All files are verified only if that fails, to find an older whole
    checkpoint.
    """
    checkpoint = newest_whole(found, every_byte=False)
    try:
        return checkpoint, load_model(checkpoint.where)
    except RunFailedError:
        checkpoint = newest_whole(found, every_byte=True)
        return checkpoint, load_model(checkpoint.where)


def continue_text(run: Run, prompt: str, tokens: int = 120) -> str:
    """Return a short continuation of the prompt for the end of a run."""
    return "".join(open_run(run).generate(prompt, tokens))
