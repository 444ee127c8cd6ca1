"""Load the initial weights of a new run from a checkpoint instead of the seed.

    before any rank     names and shapes of the source against the model's, from headers alone
    rank 0              verifies every byte, broadcasts which checkpoint it is
    every rank          reads its parts of the tensors that it holds, one at a time, and no others

A run that holds only an imported checkpoint of step 0 begins from that checkpoint. Prediction layers that the
source lacks get the values of the seed; those that the model lacks are not read.
"""

import contextlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from myriad.checkpoint.checkpoint_files import Shapes, Weights
from myriad.checkpoint.foreign.hugging_face import COMPANIONS_FOLDER, HuggingFaceWeights, copy_companions
from myriad.checkpoint.storage.checkpoint_folder import CheckpointFolder
from myriad.comm.typed_collectives import broadcast_value
from myriad.data.corpus_opening import open_corpora
from myriad.data.tokenizer import TOKENIZER_FILE, Tokenizer
from myriad.errors import BadInputError, RunFailedError, plain_value
from myriad.job import Job, parse_job
from myriad.job.job_changes import check_resume
from myriad.model.boundary import Boundary
from myriad.model.config import ModelConfig
from myriad.model.definition import full_shape
from myriad.model.experts import BATCH_LOADS
from myriad.model.gpt import GPT
from myriad.model.tensor_shard import TensorShard
from myriad.parallel.engine import Engine
from myriad.parallel.forward_engine import ForwardEngine
from myriad.run import Run
from myriad.train.checkpoint_tools.named_weights import open_weights

__all__ = [
    "check_initial",
    "fill_initial",
    "fill_parameters",
    "first_rank_finds",
    "refuse_other_run",
    "shapes_of",
]

_KEY, _PREFIX = "train.init_from", "model."
_SAME = {
    "heads": "heads",
    "num_kv_heads": "kv_heads",
    "head_width": "head_dim",
    "block": "block",
    "position": "position",
    "norm": "norm",
    "activation": "activation",
    "parallel_norms": "parallel_norms",
    "norm_placement": "norm_placement",
    "norm_zero_centered": "norm_zero_centered",
    "qk_norm": "qk_norm",
    "qk_norm_kind": "qk_norm_kind",
    "kv_lora_rank": "kv_lora_rank",
    "q_lora_rank": "q_lora_rank",
    "qk_nope_head_dim": "qk_nope_head_dim",
    "qk_rope_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
}
"""Fields of a model, and their job keys. If one of these differs, equal shapes do not mean equal models."""
_REPORTED = (
    *("vocabulary", "norm_epsilon", "window", "window_pattern", "rotary_base", "rotary_fraction"),
    *("rotary_pattern", "window_rotary_base", "rotary_scaling", "attention_scale", "attention_softcap"),
    "prediction_input",
    *("embedding_scale", "residual_scale", "logit_scale", "logit_softcap", "mup_base_width"),
)
"""Fields whose differences are reported, not refused: the user may intend them."""


def check_initial(run: Run, job: Job) -> None:
    """Refuse weights of another model before any rank starts.

    Raises `BadInputError` with the first tensor that differs. Nothing is checked if the run has a checkpoint
    of its own.
    """
    if job.train.init_from is not None and not CheckpointFolder(run.checkpoints(job)).steps():
        _open(job.train.init_from, job)


def fill_initial(run: Run, job: Job, engine: Engine) -> dict[str, Any] | None:
    """Set the parameters of a new run; every rank calls it.

    Returns a description for the run's events, or ``None`` if the seed's values stay.
    """
    source = first_rank_finds(lambda: _imported(run, job), engine) or job.train.init_from
    if source is None:
        return None
    where = first_rank_finds(lambda: _open(source, job, every_byte=True).where, engine)
    assert where is not None, "it is the place that was opened"
    weights = _open(where, job, verified=True)
    lacking, unused = _unmatched(shapes_of(job.model), weights.shapes)
    if lacking:
        engine.draw_initial(lacking)
    fill_parameters(weights, engine, lacking)
    engine.restart_average()
    kind = "hugging_face" if isinstance(weights, HuggingFaceWeights) else "checkpoint"
    description = {"source": weights.where, "kind": kind, "tensors": len(weights.shapes.keys() - unused)}
    counts = {"drawn_prediction_layers": lacking, "unused_prediction_layers": unused}
    description |= {key: number for key, names in counts.items() if (number := len(_predictions_of(names)))}
    if isinstance(weights, HuggingFaceWeights) and weights.num_left_out:
        description["unused_prediction_layers"] = weights.num_left_out
    differs = _differences(weights.model, job.model)
    if engine.groups.grid.rank == 0:
        differs |= _other_tokenizer(weights, job)
        if "tokenizer" not in differs:
            _carry_companions(weights, run)
    return description | ({"differs": differs} if differs else {})


def fill_parameters(weights: Weights, engine: ForwardEngine, but: Collection[str] = ()) -> None:
    """Set the parameters of this rank, except ``but``, from weights of the same model; every rank calls
    it."""
    for name, parts in _by_name(engine.all_shards()).items():
        if name in but:
            continue
        boxes = [_box_of(part) for part in parts]
        for part, values in zip(parts, weights.read_parts(name, boxes), strict=True):
            part.values.copy_(values)
    engine.loaded()


def refuse_other_run(run: Run, job: Job, step: int, engine: Engine) -> None:
    """Refuse a checkpoint that was copied from another run, even if its tensors fit. Every rank calls it.
    Raises `RunFailedError`."""

    def check() -> None:
        checkpoint = CheckpointFolder(run.checkpoints(job)).at_step(step)
        try:
            text = checkpoint.storage.read(checkpoint.at("job.toml")).decode()
            check_resume(parse_job(text, checkpoint.where), job, checkpoint.where)
        except BadInputError as error:
            raise RunFailedError(f"checkpoint of another run: {error}") from None
        except (OSError, ValueError):  # it has no job.toml, like checkpoints of other tools
            pass

    first_rank_finds(check, engine)


def _open(source: str, job: Job, *, every_byte: bool = False, verified: bool = False) -> Weights:
    """Open weights that fit the model. ``verified``: another rank has verified them."""
    weights = open_weights(
        source,
        _KEY,
        vocabulary_multiple=job.model.vocabulary_multiple,
        every_byte=every_byte,
        verified=verified,
    )
    _refuse_other_shapes(source, shapes_of(job.model), weights.shapes)
    if weights.model is not None:
        _refuse_other_kind(source, job.model, weights.model)
    return weights


def _imported(run: Run, job: Job) -> str | None:
    """Return the checkpoint of step 0 that an import has left, if the run begins with one."""
    folder = CheckpointFolder(run.checkpoints(job))
    return folder.at_step(0).where if 0 in folder.steps() else None


@dataclass(frozen=True)
class _Found:
    """What rank 0 has found, or its error."""

    text: str | None = None
    error: str | None = None
    bad_input: tuple[str, str, str] | None = None
    """Key, value and what is allowed, if the error is about input."""


def first_rank_finds(find: Callable[[], str | None], engine: ForwardEngine) -> str | None:
    """Run ``find`` on rank 0, and return its result, or raise its error, on every rank."""
    found = _Found()
    if engine.groups.grid.rank == 0:
        try:
            found = _Found(find())
        except BadInputError as error:
            found = _Found(bad_input=(error.key, str(error.value), error.allowed))
        except RunFailedError as error:
            found = _Found(error=str(error))
    found = broadcast_value(found, _Found, engine.groups.world)
    if found.bad_input is not None:
        raise BadInputError(*found.bad_input)
    if found.error is not None:
        raise RunFailedError(found.error)
    return found.text


def shapes_of(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor that a checkpoint of the model holds."""
    definition = GPT(model, seed=0)
    shapes: dict[str, tuple[int, ...]] = {}
    with torch.device("meta"):
        for index, prefix in enumerate(definition.names):
            layer = definition.build(index, Boundary())
            shapes |= {
                whole: full_shape(definition, whole, x.shape)
                for name, x in layer.named_parameters()
                for whole in (f"{prefix}.{name}",)
            }
    return {name: shape for name, shape in shapes.items() if name not in definition.tied}


_PREDICTION = re.compile(r"head\.predictions\.\d+\.")


def _predictions_of(names: Iterable[str]) -> set[str]:
    """Return the prefixes of the prediction layers that have a tensor of these names."""
    return {found.group() for name in names if (found := _PREDICTION.match(name))}


def _unmatched(here: Shapes, there: Shapes) -> tuple[set[str], set[str]]:
    """Return the tensors that only the model here has, and only the source, if they are of prediction layers
    or loads of experts."""
    both = _predictions_of(here) & _predictions_of(there)
    lacking, unused = (
        {name for name in shapes if (found := _PREDICTION.match(name)) and found.group() not in both}
        | {name for name in shapes.keys() - other.keys() if name.endswith(BATCH_LOADS)}
        for shapes, other in ((here, there), (there, here))
    )
    return lacking, unused


def _refuse_other_shapes(source: str, here: Shapes, there: Shapes) -> None:
    unmatched = set[str]().union(*_unmatched(here, there))
    both = (name for name in {**here, **there} if name not in unmatched)
    other = [name for name in both if here.get(name) != there.get(name)]
    if not other:
        return
    name, nothing = other[0], "nothing"
    shapes = f"{name} is {here.get(name, nothing)} here, {there.get(name, nothing)} there"
    more = f" (and {len(other) - 1} more)" if len(other) > 1 else ""
    raise BadInputError(_KEY, source, f"weights of another model: {shapes}{more}")


def _refuse_other_kind(source: str, here: ModelConfig, there: ModelConfig) -> None:
    for name, key in _SAME.items():
        own, other = getattr(here, name), getattr(there, name)
        if own != other:
            differs = f"model.{key} is {plain_value(own)} here, {plain_value(other)} there"
            raise BadInputError(_KEY, source, f"weights of another model: {differs}")


def _differences(there: ModelConfig | None, here: ModelConfig) -> dict[str, Any]:
    """Return the model keys that differ and that equal shapes do not show, as (there, here)."""
    if there is None:
        return {}
    values = there.model_dump(), here.model_dump()
    pairs = {key: (values[0][key], values[1][key]) for key in _REPORTED}
    return {f"model.{key}": pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _other_tokenizer(weights: Weights, job: Job) -> dict[str, Any]:
    """Return the fingerprints of the weights' tokenizer and the corpus's, if both are known and differ."""
    here = open_corpora(job.data, job.model.sequence).fingerprint
    there = None
    if weights.run is not None:
        events = Run(weights.run).read_events()
        there = next((event.get("fingerprint") for event in events if event["event"] == "corpus"), None)
    for folder in (weights.run, Path(weights.where)):
        if folder is not None and (folder / TOKENIZER_FILE).is_file():
            with contextlib.suppress(BadInputError):  # no end-of-document token: not compared
                there = Tokenizer.load(folder).fingerprint
    return {"tokenizer": (there, here)} if there and here and there != here else {}


def _carry_companions(weights: Weights, run: Run) -> None:
    """Keep the files that came with the weights, such as the template of a chat, for an export of this run. A
    file that cannot be copied is left out."""
    source = weights.path if isinstance(weights, HuggingFaceWeights) else None
    if source is None and weights.run is not None:
        source = weights.run / COMPANIONS_FOLDER
    if source is not None and source.is_dir():
        with contextlib.suppress(BadInputError, OSError):
            copy_companions(source, run.path / COMPANIONS_FOLDER)


def _by_name(shards: Iterator[TensorShard]) -> Mapping[str, list[TensorShard]]:
    """Group this rank's shards of the model by tensor name."""
    parts: dict[str, list[TensorShard]] = {}
    for part in shards:
        if part.name.startswith(_PREFIX):
            parts.setdefault(part.name.removeprefix(_PREFIX), []).append(part)
    return parts


def _box_of(part: TensorShard) -> tuple[slice, ...]:
    """Return the first element and the end of a shard, in each dimension."""
    return tuple(
        slice(start, start + size) for start, size in zip(part.offsets, part.values.shape, strict=True)
    )
