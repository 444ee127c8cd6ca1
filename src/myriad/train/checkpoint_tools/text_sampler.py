"""Generate text from a run's newest checkpoint, on one device."""

from collections.abc import Iterator

from torch import nn

from myriad.data.tokenizer import Tokenizer
from myriad.model.generate import generate
from myriad.run import Run
from myriad.train.checkpoint_tools.whole_model import open_checkpoint_model, set_thread_count

__all__ = ["TextSampler", "continue_text", "open_run", "open_sampler"]


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


def open_sampler(name: str, *, own_process: bool = False, ema: bool = False) -> TextSampler:
    """Open the model of a named checkpoint (`locate`), or of the newest one that verifies.

    With ``own_process``, this process does nothing else, so its threads are set for generation. ``ema``: use
    the moving average of the weights. Raises `BadInputError` where there is no checkpoint.
    """
    found = open_checkpoint_model(name, ema=ema)
    if own_process:
        set_thread_count(found.config.num_parameters())
    return TextSampler(found.layers, found.tokenizer, found.config.sequence)


def continue_text(run: Run, prompt: str, tokens: int = 120) -> str:
    """Return a short continuation of the prompt for the end of a run."""
    return "".join(open_run(run).generate(prompt, tokens))
