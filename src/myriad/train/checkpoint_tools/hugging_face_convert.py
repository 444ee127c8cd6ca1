"""Export a run's weights to a Hugging Face folder, and import such a folder as a run."""

import errno
import os
import re
import shutil
from pathlib import Path
from typing import Any

from myriad.checkpoint.checkpoint_files import CheckpointWeights, save
from myriad.checkpoint.foreign.hugging_face import (
    ExportType,
    HuggingFaceWeights,
    end_of_text,
    is_hugging_face,
    write_folder,
)
from myriad.checkpoint.foreign.hugging_face_config import kind_of
from myriad.checkpoint.storage.checkpoint_folder import CheckpointFolder, open_checkpoint
from myriad.checkpoint.storage.staged_folder import staged_folder
from myriad.data.config import DataConfig
from myriad.data.tokenizer import TOKENIZER_FILE, Tokenizer
from myriad.errors import BadInputError
from myriad.job import Job
from myriad.model.tensor_shard import TensorShard
from myriad.run import Run
from myriad.train.checkpoint_tools.named_weights import job_of, open_weights
from myriad.train.inputs import tokenizer_of

__all__ = ["export_hugging_face", "import_hugging_face"]


def export_hugging_face(path: str, out: Path, dtype: ExportType) -> dict[str, Any]:
    """Write the weights of a run (its newest whole checkpoint) or of one checkpoint to ``out``, and return a
    description.

    Raises `BadInputError`, with nothing written, for a model that has no counterpart.
    """
    weights = open_weights(path, "PATH", every_byte=True)
    job = (
        job_of(open_checkpoint(weights.where), weights.run)
        if isinstance(weights, CheckpointWeights)
        else None
    )
    if job is None:
        allowed = "must be a run, or a checkpoint in one: its job.toml says what the model is"
        raise BadInputError("PATH", path, allowed)
    kind = kind_of(job.model)
    tokenizer, why_not = _tokenizer(weights.run, job)
    write_folder(weights, job.model, out, tokenizer, dtype)
    return {
        "checkpoint": weights.where,
        "out": str(out),
        "model_type": kind,
        "dtype": dtype,
        "parameters": job.model.num_parameters(),
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

    The run holds a job with the folder's model, a checkpoint of step 0 and the tokenizer. The job reads a
    corpus in ``out/corpus``, which does not exist yet. The whole model is held in memory. Raises
    `BadInputError`, with nothing written, for what cannot be read.
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
        values = {f"model.{name}": weights.read(name).float() for name in weights.shapes}
        parts = [TensorShard(name, tuple(x.shape), (0,) * x.dim(), x) for name, x in values.items()]
        save(CheckpointFolder(run.checkpoints_path), 0, parts, {"step": 0, "optimizer_steps": 0})
        run.append_event("import", source=str(folder), tensors=len(parts))
        if run.flush_lines():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    parameters = weights.model.num_parameters()
    made = {"source": str(folder), "run": str(out), "parameters": parameters, "tokenizer": has_tokenizer}
    return {**made, "other_end": other_end}


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
