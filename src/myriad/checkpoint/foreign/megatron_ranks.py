"""Read Megatron-LM's ``torch`` format: one file for each tensor- and pipeline-parallel rank.

    iter_0000010/mp_rank_TT/model_optim_rng.pt            tp ranks alone
    iter_0000010/mp_rank_TT_PPP/model_optim_rng.pt        tp and pp ranks
                               /distrib_optim.pt          moments with --use-distributed-optimizer

    layers      are numbered from 0 in each chunk of a rank; the model's order is chunk after chunk, and
                within a chunk pipeline rank after pipeline rank: so uneven and interleaved stages need no
                argument
    moments     are numbered by parameter, in the order of groups: matrices, then parameters without decay
    distrib_optim.pt
                flat memory of a chunk's gradients: parameters from the last to the first, each beginning at
                a multiple of 64, buckets side by side without the padding at their ends

Sources: ``megatron/training/checkpointing.py`` (names of files, version 3.0),
``megatron/core/optimizer/optimizer.py``, ``distrib_optimizer.py`` (``get_parameter_state_dp_zero``) and
``megatron/core/distributed/param_and_grad_buffer.py`` (places in a buffer).
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from myriad.checkpoint.foreign.archives import bounded, read_archive
from myriad.checkpoint.foreign.megatron_names import canonical, cut_dim
from myriad.checkpoint.foreign.training_state import KEY, Kind
from myriad.errors import BadInputError

__all__ = ["MegatronRanks", "rank_folders"]

_RANK = re.compile(r"mp_rank_(\d{2,5})(?:_(\d{3,5}))?")
_FILE, _SPREAD = "model_optim_rng.pt", "distrib_optim.pt"
_ALIGNMENT = 64
"""Alignment, in elements, of parameters in a buffer of the distributed optimizer."""
_MASTERS = "fp32_from_fp16_params"


def rank_folders(folder: Path) -> dict[tuple[int, int], Path]:
    """Return the folder of each (tensor, pipeline) rank. Raises `BadInputError` if ranks are missing."""
    found: dict[tuple[int, int], Path] = {}
    for path in sorted(folder.iterdir()):
        if path.name.startswith("mp_rank_"):
            named = _RANK.fullmatch(path.name)
            if named is None:
                allowed = "mp_rank_TT or mp_rank_TT_PPP: checkpoints with experts are not read"
                raise BadInputError(KEY, str(path), allowed)
            found[int(named[1]), int(named[2] or 0)] = path
    tp, pp = (max((at[axis] for at in found), default=-1) + 1 for axis in (0, 1))
    if missing := [(t, p) for p in range(pp) for t in range(tp) if (t, p) not in found]:
        rank, stage = missing[0]
        allowed = f"has no files of tensor-parallel rank {rank}, pipeline rank {stage} (of {tp} x {pp})"
        raise BadInputError(KEY, str(folder), allowed)
    return found


@dataclass
class _Parameter:
    """One parameter of a rank, with its master weight and moments."""

    name: str
    """Canonical name of the parameter."""
    values: torch.Tensor
    master: torch.Tensor | None = None
    exp_avg: torch.Tensor | None = None
    exp_avg_sq: torch.Tensor | None = None

    @property
    def decays(self) -> bool:
        return self.values.dim() > 1 and not self.name.endswith(".bias")

    def of(self, kind: Kind) -> torch.Tensor:
        if kind == "weights":
            return self.values if self.master is None else self.master
        found = self.exp_avg if kind == "exp_avg" else self.exp_avg_sq
        assert found is not None, "asked for only where has_optimizer"
        return found


class MegatronRanks:
    """A `TensorSource` that reads the files of all ranks."""

    def __init__(self, folder: Path) -> None:
        """Read the pickle of every file; tensors stay mapped. Raises `BadInputError`."""
        self._where, folders = folder, rank_folders(folder)
        self.tp, self.pp = (max(at[axis] for at in folders) + 1 for axis in (0, 1))
        contents = {at: self._read(path / _FILE) for at, path in folders.items()}
        self.common: Mapping[str, Any] = contents[0, 0]
        self.chunks = len(_chunk_keys(self.common))
        self.gated = bool(getattr(self.common.get("args"), "swiglu", False))
        self.step_of_moments: int | None = None
        self._parameters: list[dict[str, _Parameter]] = []
        for rank in range(self.tp):
            states = [contents[rank, stage] for stage in range(self.pp)]
            own = self._of_rank(states)
            for stage, (state, chunks) in enumerate(zip(states, own, strict=True)):
                self._moments(state, chunks, folders[rank, stage], stage)
            merged: dict[str, _Parameter] = {}
            for chunks in own:
                for one in (parameter for chunk in chunks for parameter in chunk):
                    self._add(merged, one)
            self._parameters.append(merged)
        if any(own.keys() != self._parameters[0].keys() for own in self._parameters):
            raise BadInputError(KEY, str(folder), "its tensor-parallel ranks hold different parameters")

    def _read(self, path: Path) -> Mapping[str, Any]:
        content = read_archive(path, KEY)
        if not isinstance(content, dict) or not _chunk_keys(content):
            raise BadInputError(KEY, str(path), "must hold a dictionary with model, or model0 and so on")
        version = content.get("checkpoint_version", 0)
        if version != 3.0:
            allowed = f"has checkpoint_version {version}: 3.0, that of Megatron-LM since 2021"
            raise BadInputError(KEY, str(path), allowed)
        return content

    def _of_rank(self, states: Sequence[Mapping[str, Any]]) -> list[list[list[_Parameter]]]:
        """Return one tensor-parallel rank's parameters by stage and chunk, under their global names."""
        found: list[list[list[_Parameter]]] = [[] for _ in states]
        layer = 0
        for chunk in range(self.chunks):
            for stage, state in enumerate(states):
                keys = _chunk_keys(state)
                if len(keys) != self.chunks:
                    raise BadInputError(
                        KEY, str(self._where), f"pipeline rank {stage} has other model chunks"
                    )
                tensors = dict(_flat(state[keys[chunk]]))
                named = [(canonical(name, layer), name, value) for name, value in tensors.items()]
                own = [
                    _Parameter(ours, bounded(value, name, self._where, KEY))
                    for ours, name, value in named
                    if ours is not None and value is not None
                ]
                found[stage].append(own)
                layer += len(
                    {one.name.split(".")[2] for one in own if one.name.startswith("decoder.layers.")}
                )
        return found

    def _add(self, merged: dict[str, _Parameter], one: _Parameter) -> None:
        """Add a parameter; raise `BadInputError` for a duplicate.

        A tied output projection of the last stage is no duplicate: it has a name of its own."""
        if one.name in merged:
            raise BadInputError(KEY, str(self._where), f"{one.name} occurs twice")
        merged[one.name] = one

    def _moments(
        self, state: Mapping[str, Any], chunks: Sequence[Sequence[_Parameter]], folder: Path, stage: int
    ) -> None:
        """Attach the moments and master weights, if present, to one rank's parameters."""
        optimizer = state.get("optimizer")
        if isinstance(optimizer, list) and len(optimizer) == 1:
            optimizer = optimizer[0]
        if optimizer is None:
            return
        if not isinstance(optimizer, dict):
            allowed = "has several optimizers; only one, Adam, is read (import with --weights-only)"
            raise BadInputError(KEY, str(folder), allowed)
        if (folder / _SPREAD).is_file():
            arguments = state.get("args")
            bucket = None
            if getattr(arguments, "overlap_grad_reduce", False) and stage == 0:
                dp = int(getattr(arguments, "data_parallel_size", 1) or 1)
                bucket = getattr(arguments, "ddp_bucket_size", None) or max(40_000_000, 1_000_000 * dp)
            self._spread(read_archive(folder / _SPREAD, KEY), chunks, folder, bucket)
            self._note_step(_step_of_groups(optimizer))
            return
        own = [one for chunk in chunks for one in chunk]
        self._numbered(optimizer, own, folder)

    def _numbered(self, optimizer: Mapping[str, Any], own: Sequence[_Parameter], folder: Path) -> None:
        inner = optimizer.get("optimizer", optimizer)
        if not isinstance(inner, dict) or not inner.get("state"):
            return
        groups = inner.get("param_groups")
        in_order = self._in_order(groups, own, folder)
        for index, parameter in in_order:
            kept = inner["state"].get(index)
            if not isinstance(kept, dict) or "exp_avg" not in kept or "exp_avg_sq" not in kept:
                raise BadInputError(KEY, str(folder), f"has no Adam moments of {parameter.name}")
            parameter.exp_avg = self._like(kept["exp_avg"], parameter, "exp_avg")
            parameter.exp_avg_sq = self._like(kept["exp_avg_sq"], parameter, "exp_avg_sq")
            self._note_step(kept.get("step", _step_of_groups(optimizer)))
        if _MASTERS in optimizer:
            masters = [one for group in optimizer[_MASTERS] for one in group]
            if len(masters) != len(in_order):
                raise BadInputError(KEY, str(folder), f"{_MASTERS} has {len(masters)} of {len(in_order)}")
            for (_, parameter), master in zip(in_order, masters, strict=True):
                parameter.master = self._master(master, parameter)

    def _in_order(self, groups: Any, own: Sequence[_Parameter], folder: Path) -> list[tuple[int, _Parameter]]:
        """Return the parameters with their numbers, group after group."""
        found: list[tuple[int, _Parameter]] = []
        for group in groups if isinstance(groups, list) else []:
            numbers = group.get("params", ())
            decays = group.get("wd_mult", 1.0) != 0.0
            members = [one for one in own if one.decays == decays]
            if len(numbers) != len(members):
                allowed = f"an optimizer group has {len(numbers)} parameters, {len(members)} were expected"
                raise BadInputError(KEY, str(folder), allowed)
            found += zip(numbers, members, strict=True)
        if len(found) != len(own):
            raise BadInputError(KEY, str(folder), f"its optimizer has {len(found)} of {len(own)} parameters")
        return found

    def _spread(
        self, content: Any, chunks: Sequence[Sequence[_Parameter]], folder: Path, bucket: int | None
    ) -> None:
        """Attach slices of the distributed optimizer's flat buffers to the parameters."""
        tied = self.pp > 1 and not getattr(
            self.common.get("args"), "untie_embeddings_and_output_weights", False
        )
        buffers = [content.get(number) for number in range(len(chunks))] if isinstance(content, dict) else []
        if not buffers or not content.get("buckets_coalesced"):
            raise BadInputError(KEY, str(folder / _SPREAD), "must hold one coalesced buffer for each chunk")
        for number, (buffer, own) in enumerate(zip(buffers, chunks, strict=True)):
            if not isinstance(buffer, dict) or len(buffer) != 1:
                allowed = f"buffer {number} must have one precision: experts or mixed ones are not read"
                raise BadInputError(KEY, str(folder / _SPREAD), allowed)
            flat = next(iter(buffer.values()))
            tensors = {
                key: bounded(flat[key], key, folder, KEY) for key in ("param", "exp_avg", "exp_avg_sq")
            }
            size = bucket if number == 0 else None
            places, total = _buffer_places(own, size, tied=tied)
            if any(tensor.dim() != 1 or tensor.numel() != total for tensor in tensors.values()):
                allowed = f"buffer {number} has {tensors['param'].numel()} elements, {total} were expected"
                raise BadInputError(KEY, str(folder / _SPREAD), allowed)
            for start, parameter in places:
                cut = slice(start, start + parameter.values.numel())
                shape = parameter.values.shape
                parameter.master = self._master(tensors["param"][cut].view(shape), parameter)
                parameter.exp_avg = tensors["exp_avg"][cut].view(shape)
                parameter.exp_avg_sq = tensors["exp_avg_sq"][cut].view(shape)

    def _like(self, value: Any, parameter: _Parameter, what: str) -> torch.Tensor:
        tensor = bounded(value, f"{what} of {parameter.name}", self._where, KEY)
        if tensor.shape != parameter.values.shape:
            allowed = (
                f"{what} of {parameter.name} is {tuple(tensor.shape)}, not {tuple(parameter.values.shape)}"
            )
            raise BadInputError(KEY, str(self._where), allowed)
        return tensor

    def _master(self, value: Any, parameter: _Parameter) -> torch.Tensor:
        """Return a master weight. Raises `BadInputError` if it does not round to the parameter's weight."""
        master = self._like(value, parameter, "the master weight")
        if not torch.equal(master.to(parameter.values.dtype), parameter.values):
            allowed = f"the master weight of {parameter.name} does not round to it: the places do not match"
            raise BadInputError(KEY, str(self._where), allowed)
        return master

    def _note_step(self, step: Any) -> None:
        number = int(step) if isinstance(step, int | float | torch.Tensor) else None
        if number is None:
            return
        if self.step_of_moments not in (None, number):
            allowed = f"moments of step {self.step_of_moments} and of step {number}"
            raise BadInputError(KEY, str(self._where), allowed)
        self.step_of_moments = number

    def names(self) -> set[str]:
        """Return the names of all weights in this checkpoint."""
        return set(self._parameters[0])

    def has_optimizer(self) -> bool:
        """Whether every parameter of every rank has both moments."""
        every = (one for own in self._parameters for one in own.values())
        return all(one.exp_avg is not None and one.exp_avg_sq is not None for one in every)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a full weight; ``None``: there is no weight with this name."""
        parts = [own[name].values for own in self._parameters if name in own]
        if not parts:
            return None
        shape, dim = list(parts[0].shape), cut_dim(name)
        if dim is not None and dim < len(shape):
            shape[dim] = sum(part.shape[dim] for part in parts)
        return tuple(shape)

    def read(self, kind: Kind, name: str) -> torch.Tensor:
        """Return one full tensor, joined from the parts of all tensor-parallel ranks."""
        parts = [own[name].of(kind) for own in self._parameters]
        if (dim := cut_dim(name)) is None:
            return parts[0]
        if self.gated and ".linear_fc1." in name:
            return torch.cat([part.chunk(2, 0)[half] for half in (0, 1) for part in parts], 0)
        return torch.cat(parts, dim)


def _chunk_keys(state: Mapping[str, Any]) -> list[str]:
    """Return the keys of the model chunks: ``model``, or ``model0``, ``model1``, ... with virtual stages."""
    if "model" in state:
        return ["model"]
    count = sum(1 for key in state if isinstance(key, str) and re.fullmatch(r"model\d{1,3}", key))
    return [f"model{number}" for number in range(count) if f"model{number}" in state]


def _flat(state: Any, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of nested dictionaries by dotted name, as models before Megatron Core save them."""
    if not isinstance(state, dict) or depth > 8:
        return
    for name, value in state.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.", depth + 1)
        elif isinstance(value, torch.Tensor):
            yield f"{prefix}{name}", value


def _step_of_groups(optimizer: Mapping[str, Any]) -> Any:
    """Return Adam's step, which some versions store with the parameter groups."""
    inner = optimizer.get("optimizer", optimizer)
    groups = inner.get("param_groups") if isinstance(inner, dict) else None
    return next(
        (group["step"] for group in groups or () if isinstance(group, dict) and "step" in group), None
    )


def _buffer_places(
    own: Sequence[_Parameter], bucket: int | None, *, tied: bool
) -> tuple[list[tuple[int, _Parameter]], int]:
    """Return the offset of each parameter in a coalesced buffer, and the buffer's length, in elements.

    ``bucket``: number of elements at which a bucket closes. ``tied``: the tied embeddings of two stages have
    a bucket of their own."""
    places: list[tuple[int, _Parameter]] = []
    done = start = first = 0
    opened = False
    for parameter in reversed(own):
        size = parameter.values.numel()
        alone = tied and parameter.name in ("embedding.word_embeddings.weight", "output_layer.weight")
        start = math.ceil(start / _ALIGNMENT) * _ALIGNMENT
        if alone and opened:
            done, first, opened = done + start - first, start, False
        places.append((done + start - first, parameter))
        start, opened = start + size, True
        if alone or (bucket is not None and start - first >= bucket):
            done, first, opened = done + start - first, start, False
            start = first = math.ceil(start / 128) * 128
    return places, done + (start - first if opened else 0)
