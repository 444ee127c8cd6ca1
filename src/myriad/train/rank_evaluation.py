"""``python -m myriad.train.rank_evaluation``: one rank of `myriad eval` in a layout.

    command    tasks ──► pieces and prompts ──► `EvaluationRequest`, to every rank on its standard input
    rank       its shards of the weights, no gradients, no optimizer ──► `LayoutScorer`
    rank 0     progress, warnings and `EvaluationResult`, as lines of JSON on its standard output

`myriad.launchers.local_ranks` starts the ranks. They compute in float32, on GPUs if the machine has one for
each of them, else on the CPU.
"""

import contextlib
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from pydantic import TypeAdapter

from myriad.comm.config import CommConfig
from myriad.comm.layout import Layout
from myriad.comm.lost_peer_errors import report_lost_peers
from myriad.comm.typed_collectives import gather_values
from myriad.data.tokenizer import Tokenizer
from myriad.data.windows import pack_documents
from myriad.errors import BadInputError, MyriadError, RunFailedError
from myriad.evaluation.greedy_texts import Prompt
from myriad.evaluation.packed_pieces import PieceScore, window_length
from myriad.evaluation.task_files import Task
from myriad.evaluation.task_requests import TaskRequests
from myriad.evaluation.token_requests import RequestPiece
from myriad.job import Job, TrainConfig
from myriad.job.scoring_layout import check_scoring
from myriad.model.config import ModelConfig
from myriad.model.gpt import GPT
from myriad.parallel.forward_engine import ForwardEngine
from myriad.telemetry.spans import Recorder
from myriad.train.checkpoint_tools.initial_weights import fill_parameters, first_rank_finds, shapes_of
from myriad.train.checkpoint_tools.named_weights import open_weights
from myriad.train.checkpoint_tools.whole_model import DescribedWeights
from myriad.train.device_setup import read_rank_environment
from myriad.train.engine_setup import sample_batch, stage_layers
from myriad.train.rank_context import agree_on_numbers, open_device
from myriad.train.task_evaluation import LayoutScorer, Show, WindowBatches

__all__ = ["MODULE", "EvaluationRequest", "EvaluationResult", "check_tasks", "evaluate_rank"]

MODULE = "myriad.train.rank_evaluation"
"""The module of a rank."""

_SHOW_SECONDS = 0.1
_MICRO_BATCHES_OF_STAGE = 4
"""Micro-batches of a forward program for each pipeline rank: ranks then wait a fifth of the time at most."""


@dataclass(frozen=True)
class EvaluationRequest:
    """What all ranks of an evaluation are to compute."""

    name: str
    """The weights as the user named them."""
    key: str
    """The option with which the user named them, for messages."""
    where: str
    """The weights that were found."""
    ema: bool
    """Use the moving average of the weights."""
    model: ModelConfig
    layout: Layout
    tokenizer: str
    """The content of ``tokenizer.json``."""
    batch_tokens: int
    """Tokens of one forward pass."""
    pieces: list[RequestPiece]
    prompts: list[Prompt]

    @classmethod
    def of(
        cls,
        name: str,
        key: str,
        found: DescribedWeights,
        requests: TaskRequests,
        layout: Layout,
        batch_tokens: int,
        *,
        ema: bool,
    ) -> "EvaluationRequest":
        """Return the request of some weights, in a layout. Raises `BadInputError` for weights that do not
        make the whole model."""
        shapes = found.weights.shapes
        for parameter, shape in shapes_of(found.model).items():
            if shapes.get(parameter) != shape:
                allowed = f"its weights lack the parameter {parameter} of shape {shape}"
                raise BadInputError(key, found.weights.where, allowed)
        return cls(
            name,
            key,
            found.weights.where,
            ema,
            found.model,
            layout,
            found.tokenizer.as_text(),
            batch_tokens,
            requests.pieces,
            requests.prompts,
        )

    def encode(self) -> bytes:
        """Return the request as JSON."""
        return _REQUEST.dump_json(self)


@dataclass(frozen=True)
class EvaluationResult:
    """What the ranks have computed."""

    where: str
    """Path or URL of the weights."""
    scores: list[PieceScore]
    """The score of each piece."""
    texts: list[str]
    """The continuation of each prompt."""

    @staticmethod
    def parse(result: Any) -> "EvaluationResult":
        """Return the result that rank 0 has sent."""
        return _RESULT.validate_python(result)


_REQUEST, _RESULT = TypeAdapter(EvaluationRequest), TypeAdapter(EvaluationResult)


def check_tasks(model: ModelConfig, layout: Layout, tasks: Sequence[Task]) -> None:
    """Refuse a layout that does not divide the model, and prompts that cannot be sent to ranks. Raises
    `BadInputError`."""
    check_scoring(model, layout)
    for task in tasks:
        for one in task.documents if task.request_type == "generate_until" else ():
            texts = one.context, *one.generation.until
            if lone := next((text for text in texts if _has_lone_surrogate(text)), None):
                allowed = "text that UTF-8 can encode, in ranks; or evaluate in one process, without a layout"
                raise BadInputError(f"{one.where}: arguments", lone, allowed)


def _has_lone_surrogate(text: str) -> bool:
    """Return whether UTF-8 cannot encode the text, as JSON may write it."""
    return any("\ud800" <= character <= "\udfff" for character in text)


@dataclass(frozen=True)
class _Shape:
    """The shape of a batch."""

    window: int
    micro_batch: int
    num_micro_batches: int

    @classmethod
    def of(cls, request: EvaluationRequest) -> "_Shape":
        """Return the shape for the requests: as many windows in one pass as the tokens of a pass allow, but
        no more than there are for each replica, in several passes if there are stages to fill."""
        model, layout = request.model, request.layout
        lengths = [len(piece.tokens) for piece in request.pieces]
        fixed = model.rotary_scaling.kind == "longrope"
        window = window_length(max(lengths, default=0), model.sequence, keeps_length=fixed)
        window = -(-window // layout.sequence_multiple) * layout.sequence_multiple
        num_windows = len(pack_documents(np.array(lengths, np.int64), window).firsts) - 1
        each = max(1, -(-num_windows // layout.dp))
        micro_batch = max(1, min(request.batch_tokens // window, -(-each // layout.pp)))
        most = _MICRO_BATCHES_OF_STAGE * layout.pp if layout.pp > 1 else 1
        return cls(window, micro_batch, min(most, -(-each // micro_batch)))


def evaluate_rank(
    request: EvaluationRequest, show: Show = lambda stage, done, total: None
) -> EvaluationResult:
    """Compute one rank's part of an evaluation, and return the result, which is equal on all ranks. Raises
    `MyriadError`."""
    tokenizer = Tokenizer.of_text(request.tokenizer, request.where)
    shape = _Shape.of(request)
    layout = request.layout.model_copy(update={"micro_batch": shape.micro_batch})
    comm, train = CommConfig(hierarchy="flat"), TrainConfig(precision="float32")
    values = {"model": request.model, "layout": layout, "comm": comm, "train": train}
    with contextlib.ExitStack() as at_close, report_lost_peers(comm.timeout_seconds):
        job = Job().model_copy(update=values)
        place = read_rank_environment(layout.world)
        device = open_device(job, place, at_close, in_process=False)
        engine = _build_engine(job, shape, device, at_close)
        at_close.callback(engine.close)
        engine.open_reader()
        where = _load(request, engine)
        each, replica = shape.micro_batch * shape.num_micro_batches, engine.groups.grid.index("dp")
        rows = range(replica * each, (replica + 1) * each)
        shrinks = layout.pp == 1  # messages between stages have fixed shapes
        batches = WindowBatches(shape.window, layout.dp * each, rows, device, layout.dp if shrinks else None)
        sequence = request.model.sequence
        cached = request.batch_tokens
        scorer = LayoutScorer(request.pieces, request.prompts, tokenizer, sequence, batches, cached, show)
        results = scorer.results(engine)
        assert results is not None, "no rank is asked to stop"
        return EvaluationResult(where, *results)


def _build_engine(
    job: Job, shape: _Shape, device: torch.device, at_close: contextlib.ExitStack
) -> ForwardEngine:
    job, groups, kernels = agree_on_numbers(job, device, torch.float32, at_close)
    windows = job.model.model_copy(update={"sequence": shape.window})
    sample = sample_batch(job.model_copy(update={"model": windows}), device)
    definition = GPT(job.model, job.train.seed)
    return ForwardEngine(
        definition,
        groups,
        stage_layers(definition, job.layout, groups, sample, torch.float32),
        sample,
        shape.num_micro_batches,
        seed=job.train.seed,
        dtype=torch.float32,
        device=device,
        recorder=Recorder(rank=groups.grid.rank),
        overlap=job.overlap,
        comm=job.comm,
        kernels=kernels,
    )


def _load(request: EvaluationRequest, engine: ForwardEngine) -> str:
    """Load this rank's shards, and return the place of the weights. If a byte that any rank reads is damaged,
    all ranks load the newest checkpoint whose every byte is right."""
    key, ema = request.key, request.ema
    problem = None
    try:
        fill_parameters(open_weights(request.where, key, ema=ema, verified=True), engine)
    except RunFailedError as error:
        problem = str(error)
    if not any(gather_values(problem, str | None, engine.groups.world)):
        return request.where
    where = first_rank_finds(lambda: open_weights(request.name, key, ema=ema, every_byte=True).where, engine)
    assert where is not None, "it is the place that was opened"
    fill_parameters(open_weights(where, key, ema=ema, verified=True), engine)
    return where


class _Channel:
    """The standard output of the rank, for messages alone: what libraries print goes to standard error."""

    def __init__(self) -> None:
        self._file = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)
        self._shown = 0.0

    def send(self, kind: str, value: Any) -> None:
        """Send a message: a line of JSON."""
        self._file.write(json.dumps({kind: value}, default=str).encode() + b"\n")
        self._file.flush()

    def show(self, stage: str, done: int, total: int) -> None:
        """Send the progress, at intervals."""
        if done == total or time.monotonic() - self._shown > _SHOW_SECONDS:
            self._shown = time.monotonic()
            self.send("progress", [stage, done, total])


class _Warnings(logging.Handler):
    """Sends warnings to the command, which shows them."""

    def __init__(self, channel: _Channel) -> None:
        super().__init__(logging.WARNING)
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        """Send the text of a warning to the command."""
        self._channel.send("warning", record.getMessage())


def main() -> NoReturn:
    """Evaluate as one rank, send the result and exit."""
    channel, code = _Channel(), 0
    try:
        request = _REQUEST.validate_json(_read_all(0))
        is_first = os.environ["RANK"] == "0"
        if is_first:
            logging.getLogger().addHandler(_Warnings(channel))
        result = evaluate_rank(request, channel.show) if is_first else evaluate_rank(request)
        if is_first:
            channel.send("result", _RESULT.dump_python(result, mode="json"))
    except BadInputError as error:
        channel.send("refused", [error.key, error.value, error.allowed])
        code = error.exit_code
    except MyriadError as error:
        channel.send("failed", str(error))
        code = error.exit_code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os._exit(code)  # the interpreter's own end would take most of a second


def _read_all(descriptor: int) -> bytes:
    """Return the content of a file that other processes read through the same descriptor."""
    parts, size = list[bytes](), 0
    while part := os.pread(descriptor, 1 << 24, size):
        parts.append(part)
        size += len(part)
    return b"".join(parts)


if __name__ == "__main__":
    main()
