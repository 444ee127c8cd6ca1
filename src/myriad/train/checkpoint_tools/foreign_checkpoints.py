"""Checkpoints of other systems: make a run from one, and export to Hugging Face's format.

    RUN/job.toml                  model, optimizer, batch and length as the checkpoint states them
    RUN/checkpoints/step-N/       N iterations: ``train --run RUN`` goes on with iteration N + 1
                   step-0         weights alone: a run begins with them
    RUN/import.json               what was translated, what has no counterpart, what is unknown

A training state (Megatron-LM, DeepSpeed) has weights, optimizer and progress; Hugging Face's folders have
weights alone. Tensors are read one at a time. The whole state is held in memory once, as for every
checkpoint that one process writes. Nothing is written before all of it was read.
"""

import errno
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from myriad.checkpoint.checkpoint_files import CheckpointWeights, save
from myriad.checkpoint.foreign.deepspeed_zero import is_deepspeed, open_deepspeed
from myriad.checkpoint.foreign.hugging_face import (
    COMPANIONS_FOLDER,
    ExportType,
    HuggingFaceWeights,
    copy_companions,
    end_of_text,
    is_hugging_face,
    write_folder,
)
from myriad.checkpoint.foreign.hugging_face_config import kind_of
from myriad.checkpoint.foreign.megatron_checkpoint import is_megatron, open_megatron, optimizer_step
from myriad.checkpoint.foreign.training_state import KEY, MOMENTS, ForeignState, Kind
from myriad.checkpoint.storage.checkpoint_folder import CheckpointFolder, open_checkpoint
from myriad.checkpoint.storage.signature import SignatureKey, sign
from myriad.checkpoint.storage.staged_folder import staged_folder
from myriad.data.config import DataConfig
from myriad.data.tokenizer import TOKENIZER_FILE, Tokenizer
from myriad.errors import BadInputError
from myriad.job import Job
from myriad.job.translation.deepspeed_json import translate_deepspeed
from myriad.job.translation.megatron_arguments import translate_arguments
from myriad.job.translation.outcome import Translation
from myriad.model.tensor_shard import TensorShard
from myriad.run import Run
from myriad.run.run_exports import record_export
from myriad.system.machine import memory_bytes
from myriad.train.checkpoint_tools.named_weights import job_of, model_of, open_weights
from myriad.train.inputs import tokenizer_of

__all__ = ["export_hugging_face", "foreign_state", "import_foreign", "import_hugging_face", "is_foreign"]

_MEMORY_SHARE = 0.9
_LISTS = "import.json"


def is_foreign(folder: Path) -> bool:
    """Return whether a folder is a checkpoint of Megatron-LM or DeepSpeed, by the names of its files."""
    return folder.is_dir() and (is_megatron(folder) or is_deepspeed(folder))


def foreign_state(folder: Path, config: Path | None = None) -> ForeignState:
    """Open a checkpoint of another system. ``config``: config.json of the Hugging Face model that DeepSpeed
    trained. Raises `BadInputError`."""
    with _in_form(folder):
        if is_deepspeed(folder):
            return open_deepspeed(folder, config)
        if is_megatron(folder):
            return open_megatron(folder)
    raise BadInputError(KEY, str(folder), "must be a checkpoint of Hugging Face, Megatron-LM or DeepSpeed")


@contextmanager
def _in_form(folder: Path) -> Iterator[None]:
    """Turn the error of a malformed value in the block into a one-line `BadInputError`."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        raise BadInputError(KEY, str(folder), f"its content has an unsupported form ({reason})") from None


def import_foreign(
    folder: Path, out: Path, *, config: Path | None = None, weights_only: bool = False
) -> dict[str, Any]:
    """Create the run folder ``out`` from a checkpoint, and return a description of it.

    Raises `BadInputError`, with nothing written, for what cannot be read exactly."""
    state = foreign_state(folder, config)
    kinds: list[Kind] = ["weights"]
    if not weights_only:
        with _in_form(folder):
            complete = state.source.has_optimizer()
        if not complete:
            allowed = "has no Adam moments of every parameter: import with --weights-only"
            raise BadInputError(KEY, str(folder), allowed)
        kinds += MOMENTS
    _check_memory(state, kinds)
    with _in_form(folder):
        translation = _translate(state)
        parts = [_part(kind, name, state) for kind in kinds for name in state.mappings]
    named = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", out.name)
    job = _job(state, translation, out.name if named else "imported", out)
    done = 0 if weights_only else optimizer_step(state)
    step = 0 if weights_only else state.step
    samples = 0 if weights_only else state.samples
    with staged_folder(out) as partial:
        run = Run(partial)
        partial.chmod(0o700)
        run.create_or_resume(job)
        data = {"samples": samples, "tokens": samples * job.model.sequence}
        progress = {"step": step, "optimizer_steps": done, "data": data}
        save(CheckpointFolder(run.checkpoints_path), step, parts, progress)
        lists = {"source": str(folder), "notes": state.notes, **translation.lists()}
        (partial / _LISTS).write_text(json.dumps(lists, indent=2) + "\n", encoding="utf-8")
        run.append_event("import", source=str(folder), tensors=len(parts), system=state.system, step=step)
        if run.flush_lines():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return {
        "source": str(folder),
        "run": str(out),
        "system": state.system,
        "parameters": job.model.num_parameters(),
        "step": step,
        "optimizer_steps": done,
        "samples": samples,
        "optimizer": not weights_only,
        "notes": state.notes,
        **translation.lists(),
    }


def _part(kind: Kind, name: str, state: ForeignState) -> TensorShard:
    values = state.read(kind, name).contiguous()
    prefix = "model" if kind == "weights" else f"optimizer.{kind}"
    return TensorShard(f"{prefix}.{name}", tuple(values.shape), (0,) * values.dim(), values)


def _check_memory(state: ForeignState, kinds: list[Kind]) -> None:
    """Refuse a state that does not fit in this machine's memory, before it is read."""
    needed = 4 * len(kinds) * state.model.num_parameters()
    there = memory_bytes()
    if needed > _MEMORY_SHARE * there:
        allowed = f"takes {needed / 2**30:.1f} GiB of memory, and this machine has {there / 2**30:.1f} GiB"
        raise BadInputError(KEY, str(state.where), allowed)


def _translate(state: ForeignState) -> Translation:
    if state.system.startswith("Megatron"):
        return translate_arguments(state.settings, namespace=True)
    return translate_deepspeed(state.settings)


def _job(state: ForeignState, translation: Translation, name: str, out: Path) -> Job:
    """Return a job on one rank with the source's batch, optimizer and length; the source's layout is
    dropped."""
    keys = {
        key: value for key, value in translation.keys.items() if not key.startswith(("layout.", "model."))
    }
    keys.pop("data.mixture", None)
    keys["data.vocabulary"] = max(260, min(4096, state.model.vocabulary))
    keys["data.corpus"] = str(out.absolute() / "corpus")
    if keys.get("train.precision") == "float32":
        del keys["train.precision"]
    steps = keys.get("train.steps", 0)
    if not isinstance(steps, int) or steps <= state.step:
        keys["train.steps"] = max(state.step + 1, 1)
    kept = Translation(translation.system, keys)
    return kept.job(name, {"model": state.model.model_dump(mode="json")})


def export_hugging_face(
    path: str,
    out: Path,
    dtype: ExportType,
    model_type: str | None = None,
    key: SignatureKey | None = None,
    *,
    ema: bool = False,
) -> dict[str, Any]:
    """Write the weights of a run (its newest whole checkpoint) or of one checkpoint to ``out``, sign them if
    there is a key, and return a description.

    ``model_type``: by default the first that fits the model. ``ema``: write their moving average. Raises
    `BadInputError`, with nothing written, for a model that has no counterpart.
    """
    weights = open_weights(path, "PATH", every_byte=True, ema=ema)
    checkpoint = open_checkpoint(weights.where)
    job = job_of(checkpoint, weights.run) if isinstance(weights, CheckpointWeights) else None
    if job is None:
        allowed = "must be a run, or a checkpoint in one: its job.toml says what the model is"
        raise BadInputError("PATH", path, allowed)
    model = model_of(checkpoint, job)
    kind = kind_of(model, model_type)
    tokenizer, why_not = _tokenizer(weights.run, job)
    kept = None if weights.run is None else weights.run / COMPANIONS_FOLDER
    further = model.prediction_layers
    write_folder(weights, model, out, tokenizer, dtype, model_type=kind, companions=kept)
    if key is not None:
        sign(open_checkpoint(out.absolute()), key)
    if weights.run is not None:
        record_export(Run(weights.run), out, weights.where, f"{kind}, {dtype}")
    return {
        "checkpoint": weights.where,
        "out": str(out),
        "model_type": kind,
        "dtype": dtype,
        "ema": ema,
        "parameters": model.without_predictions().num_parameters(),
        "left_out": [f"model.prediction_layers = {further}"] if further else [],
        "tokenizer": tokenizer is not None,
        "why_no_tokenizer": why_not,
    }


def _tokenizer(run: Path | None, job: Job) -> tuple[Tokenizer | None, str | None]:
    """Return the run's tokenizer, or the reason why it is missing. A missing corpus does not prevent the
    export of weights."""
    try:
        tokenizer = None if run is None else tokenizer_of(Run(run), job)
    except BadInputError as error:
        return None, str(error)
    return tokenizer, None if tokenizer else f"{job.data.corpus} has no {TOKENIZER_FILE} beside it"


def import_hugging_face(folder: Path, out: Path) -> dict[str, Any]:
    """Create the run folder ``out`` from a Hugging Face ``folder``, and return a description of it.

    The run holds a job with the folder's model, a checkpoint of step 0, the tokenizer, and the files that
    travel with a model (`copy_companions`). The job reads a corpus in ``out/corpus``, which does not exist
    yet. One tensor is in memory at a time. Raises `BadInputError`, with nothing written, for what cannot be
    read.
    """
    if not is_hugging_face(folder):
        raise BadInputError("HF_FOLDER", str(folder), "must be a folder with config.json and safetensors")
    weights = HuggingFaceWeights(folder)
    assert weights.model is not None, "config.json says what the model is"
    named = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", out.name)
    data = DataConfig(corpus=str(out.absolute() / "corpus"))
    job = Job(name=out.name if named else "imported", model=weights.model, data=data).check()
    has_tokenizer = (folder / TOKENIZER_FILE).is_file()
    other_end = _check_tokenizer(folder, weights.model.vocabulary) if has_tokenizer else None
    with staged_folder(out) as partial:
        run = Run(partial)
        partial.chmod(0o700)
        run.create_or_resume(job)
        if has_tokenizer:
            shutil.copyfile(folder / TOKENIZER_FILE, partial / TOKENIZER_FILE)
        copy_companions(folder, partial / COMPANIONS_FOLDER)
        tensors = _save_model(weights, CheckpointFolder(run.checkpoints_path))
        run.append_event("import", source=str(folder), tensors=tensors)
        if run.flush_lines():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    parameters = weights.model.num_parameters()
    made = {"source": str(folder), "run": str(out), "parameters": parameters, "tokenizer": has_tokenizer}
    left_out = []
    if weights.why_left_out is not None:
        left_out = [f"num_nextn_predict_layers = {weights.num_left_out}: {weights.why_left_out}"]
    return {**made, "other_end": other_end, "left_out": left_out}


def _save_model(weights: HuggingFaceWeights, folder: CheckpointFolder) -> int:
    """Write the weights in float32 as the checkpoint of step 0, and return the number of tensors."""
    parts = [
        TensorShard(f"model.{name}", shape, (0,) * len(shape), torch.empty(shape, device="meta"))
        for name, shape in weights.shapes.items()
    ]

    def values(part: TensorShard) -> torch.Tensor:
        whole = part.values
        return weights.read(part.name.removeprefix("model.")).float() if whole.is_meta else whole

    save(folder, 0, parts, {"step": 0, "optimizer_steps": 0}, read=values)
    return len(parts)


def _check_tokenizer(folder: Path, vocabulary: int) -> str | None:
    """Refuse a tokenizer with tokens that the model lacks.

    Returns how its end-of-document token differs from the end-of-text token in config.json, if it does.
    """
    tokenizer = Tokenizer.load(folder)
    if tokenizer.vocabulary > vocabulary:
        allowed = f"has {tokenizer.vocabulary} tokens, and config.json a vocab_size of {vocabulary}"
        raise BadInputError("tokenizer", tokenizer.source, allowed)
    end, theirs = tokenizer.end_of_document, end_of_text(folder)
    if not theirs or end in theirs:
        return None
    return f"documents end with token {end}, {tokenizer.token(end)}; eos_token_id of config.json is {theirs}"
