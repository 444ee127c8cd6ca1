"""A run as a model of lm-evaluation-harness (the package ``lm_eval``, which is installed apart).

    python -m myriad.lm_eval_model run --model myriad --model_args run=runs/NAME --tasks arc_easy

This starts the harness with the model "myriad"; its arguments are those of ``lm_eval``. From Python, an
import of this module registers the model:

    import lm_eval, myriad.lm_eval_model
    lm_eval.simple_evaluate(model="myriad", model_args={"run": "runs/NAME"}, tasks=["arc_easy"])

Model arguments: ``run`` (a run, a checkpoint or a Hugging Face folder), ``batch_tokens`` (tokens of one
forward pass) and ``ema`` (true: the moving average of the weights). One process on the CPU computes in
float32. The harness's own batch size is not used.
"""

import sys
from collections.abc import Sequence
from typing import Any, Protocol

from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from myriad.errors import BadInputError, MyriadError
from myriad.evaluation.full_model import FullModel
from myriad.evaluation.packed_pieces import PieceScore
from myriad.evaluation.task_files import parse_generation
from myriad.evaluation.token_requests import RequestPiece
from myriad.train.checkpoint_tools.whole_model import open_model

__all__ = ["MyriadLM", "main"]


class _Request(Protocol):
    """One request of the harness."""

    @property
    def args(self) -> tuple[Any, ...]: ...


@register_model("myriad")
class MyriadLM(LM):
    """The model of a run, a checkpoint or a Hugging Face folder."""

    def __init__(
        self,
        run: str,
        batch_tokens: int = 8192,
        ema: bool = False,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
    ) -> None:
        """The last three are what the harness gives every model."""
        super().__init__()
        if device not in (None, "cpu"):
            raise BadInputError("device", device, "cpu: one process on the CPU computes the scores")
        found = open_model(run, "run", ema=ema)
        self._model = FullModel(found.layers, found.tokenizer, found.config.sequence)
        self._batch_tokens = int(batch_tokens)

    def loglikelihood(
        self, requests: Sequence[_Request], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, and whether greedy decoding gives it."""
        where = [f"request {number}" for number in range(len(requests))]
        pieces = self._model.encoder.pairs([request.args for request in requests], where)
        return [(one.log_likelihood, one.is_greedy) for one in self._score(pieces)]

    def loglikelihood_rolling(self, requests: Sequence[_Request], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each text."""
        texts = self._model.encoder.texts([request.args[0] for request in requests])
        scores = iter(self._score([piece for pieces in texts for piece in pieces]))
        return [PieceScore.total([next(scores) for _ in pieces]).log_likelihood for pieces in texts]

    def generate_until(self, requests: Sequence[_Request], disable_tqdm: bool = False) -> list[str]:
        """Return the likeliest text after each prompt."""
        prompts = [(request.args[0], parse_generation(request.args[1], "gen_kwargs")) for request in requests]
        return self._model.generate(prompts, self._batch_tokens)

    def _score(self, pieces: Sequence[RequestPiece]) -> list[PieceScore]:
        return self._model.score(pieces, self._batch_tokens)


def main() -> int:
    """Run the harness's command line. Return the exit code."""
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except MyriadError as error:
        sys.stderr.write(f"myriad: error: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
