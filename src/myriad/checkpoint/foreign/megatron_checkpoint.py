"""Read a Megatron-LM checkpoint, in either of its formats, as a `ForeignState`.

    CHECKPOINT/latest_checkpointed_iteration.txt      names one of several; or the folder of one is given
    iter_NNNNNNN/mp_rank_*/                           --ckpt-format torch          `megatron_ranks`
    iter_NNNNNNN/metadata.json, common.pt, .metadata  --ckpt-format torch_dist     this module

A distributed checkpoint holds full tensors, so it does not depend on tp, pp and virtual stages. Layers are
stacked (``decoder.layers.X`` is ``[L, ...]``) or numbered. Optimizer state is read if it has the shape of the
parameters (``fully_reshardable``, and every checkpoint without the distributed optimizer); flat buckets
(``dp_reshardable``) are refused. Source: ``megatron/core/dist_checkpointing`` and
``megatron/core/optimizer``, version 0.16.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from myriad.checkpoint.foreign.archives import DcpFolder, read_archive
from myriad.checkpoint.foreign.megatron_args import model_of_arguments
from myriad.checkpoint.foreign.megatron_names import canonical, megatron_mappings
from myriad.checkpoint.foreign.megatron_ranks import MegatronRanks
from myriad.checkpoint.foreign.training_state import KEY, MOMENTS, ForeignState, Kind, whole_number
from myriad.errors import BadInputError
from myriad.model.config import ModelConfig

__all__ = ["is_megatron", "open_megatron", "optimizer_step"]

_TRACKER, _COMMON, _METADATA = "latest_checkpointed_iteration.txt", "common.pt", "metadata.json"
_STACKED = re.compile(r"decoder\.layers\.(?!\d)(.+)")
_OUTPUT = "output_layer.weight"


def is_megatron(path: Path) -> bool:
    """Whether a path is a folder in one of Megatron-LM's layouts."""
    named = any((path / name).is_file() for name in (_TRACKER, _COMMON))
    return named or any(found.is_dir() for found in path.glob("mp_rank_*"))


def _folder_of(path: Path) -> Path:
    """Return the folder of the checkpoint at ``path``."""
    if not (path / _TRACKER).is_file():
        return path
    text = (path / _TRACKER).open(encoding="utf-8", errors="replace").read(64).strip()
    if text != "release" and not re.fullmatch(r"\d{1,9}", text):
        raise BadInputError(KEY, str(path / _TRACKER), "must contain an iteration number or the word release")
    folder = path / (text if text == "release" else f"iter_{int(text):07d}")
    if not folder.is_dir():
        raise BadInputError(KEY, str(folder), f"does not exist, although {_TRACKER} names it")
    return folder


def open_megatron(path: Path) -> ForeignState:
    """Read names, shapes and arguments. Raises `BadInputError` for anything that cannot be read exactly."""
    folder = _folder_of(path)
    if (folder / _COMMON).is_file():
        source: MegatronRanks | _Distributed = _Distributed(folder)
        system = "Megatron-LM, torch_dist"
    else:
        source = MegatronRanks(folder)
        system = f"Megatron-LM, torch, tp {source.tp}, pp {source.pp}, {source.chunks} chunks"
    arguments = _arguments(source.common, folder)
    model, notes = model_of_arguments(arguments, KEY)
    if arguments.get("padded_vocab_size") is None and (
        shape := source.shape("embedding.word_embeddings.weight")
    ):
        arguments["padded_vocab_size"] = shape[0]
        model, notes = model_of_arguments(arguments, KEY)
    _check_layers(model, folder)
    neighbours = bool(arguments.get("rotary_interleaved"))
    step = whole_number(source.common.get("iteration", 0), "iteration", folder)
    samples = arguments.get("consumed_train_samples", 0)
    state = ForeignState(
        folder,
        system,
        model,
        megatron_mappings(model, neighbours=neighbours),
        source,
        step,
        whole_number(samples, "consumed_train_samples", folder),
        arguments,
        notes,
        norms_from_one=bool(
            arguments.get("apply_layernorm_1p") or arguments.get("layernorm_zero_centered_gamma")
        ),
        unused=frozenset({_OUTPUT}) if model.tied else frozenset(),
    ).check()
    _check_tied(state)
    return state


def optimizer_step(state: ForeignState) -> int:
    """Return the number of Adam steps that the moments have accumulated."""
    found = getattr(state.source, "step_of_moments", None)
    return state.step if found is None else int(found)


def _arguments(common: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    found = common.get("args")
    if found is None or not hasattr(found, "__dict__"):
        raise BadInputError(KEY, str(folder), "has no args, which describe the model")
    return {str(name): value for name, value in vars(found).items()}


def _check_layers(model: ModelConfig, folder: Path) -> None:
    """Refuse a model whose tensors `megatron_mappings` does not name, though its arguments are read."""
    for there, what in (
        (model.latent is not None, "latent attention (multi_latent_attention)"),
        (model.prediction_layers > 0, "prediction layers (mtp_num_layers)"),
        (model.attention_sinks, "learned offsets of softmax (softmax_type)"),
    ):
        if there:
            allowed = f"has {what}, whose weights are not read; myriad translate reads the arguments"
            raise BadInputError(KEY, str(folder), allowed)


def _check_tied(state: ForeignState) -> None:
    """Raise `BadInputError` if the last stage's output projection differs from its tied embedding."""
    embedding = "embedding.word_embeddings.weight"
    if state.model.tied and state.source.shape(_OUTPUT) is not None:
        both = (state.source.read("weights", name) for name in (embedding, _OUTPUT))
        if not torch.equal(*both):
            raise BadInputError(
                KEY, str(state.where), f"{_OUTPUT} is tied to {embedding}, and differs from it"
            )


class _Distributed:
    """A `TensorSource` of a ``torch_dist`` checkpoint."""

    def __init__(self, folder: Path) -> None:
        self._where = folder
        self._check_backend(folder / _METADATA)
        common = read_archive(folder / _COMMON, KEY)
        if not isinstance(common, dict):
            raise BadInputError(KEY, str(folder / _COMMON), "must hold a dictionary")
        self.common: Mapping[str, Any] = common
        self._dcp = DcpFolder(folder, KEY)
        self._refuse_buckets()
        self._places: dict[Kind, dict[str, tuple[str, int | None]]] = {
            "weights": self._find(""),
            "exp_avg": self._find("optimizer.state.exp_avg."),
            "exp_avg_sq": self._find("optimizer.state.exp_avg_sq."),
        }
        self._masters = self._find("optimizer.state.fp32_param.") | self._find("optimizer.state.param.")
        self._last: tuple[str, torch.Tensor] | None = None

    @property
    def step_of_moments(self) -> int | None:
        """Step of Adam in the common state, or ``None``."""
        optimizer = self.common.get("optimizer")
        inner = optimizer.get("optimizer", optimizer) if isinstance(optimizer, dict) else {}
        state = inner.get("state") if isinstance(inner, dict) else None
        step = state.get("common_step") if isinstance(state, dict) else None
        groups = inner.get("param_groups", ()) if isinstance(inner, dict) else ()
        steps = [group.get("step") for group in groups if isinstance(group, dict)]
        found = next((one for one in (step, *steps) if one is not None), None)
        return int(found) if isinstance(found, int | float | torch.Tensor) else None

    def _check_backend(self, path: Path) -> None:
        try:
            known = json.loads(path.open(encoding="utf-8").read(4096))["sharded_backend"]
        except (OSError, ValueError, KeyError, TypeError):
            known = "missing"
        if known != "torch_dist":
            raise BadInputError(
                KEY, str(path), f"sharded_backend is {str(known)[:50]!r}: only torch_dist can be read"
            )

    def _refuse_buckets(self) -> None:
        optimizer = self.common.get("optimizer")
        kind = optimizer.get("param_state_sharding_type") if isinstance(optimizer, dict) else None
        if kind in ("dp_reshardable", "fully_sharded_bucket_space", "dp_zero_gather_scatter"):
            allowed = (
                f"its optimizer state is kept as {kind}, in flat buckets of one layout: save it with "
                "--dist-ckpt-optim-fully-reshardable, or import with --weights-only"
            )
            self._buckets: str | None = allowed
        else:
            self._buckets = None

    def _find(self, prefix: str) -> dict[str, tuple[str, int | None]]:
        """Map canonical names to the stored name and, for stacked layers, the layer's index."""
        places: dict[str, tuple[str, int | None]] = {}
        for name, shape in self._dcp.shapes.items():
            if not name.startswith(prefix) or (not prefix and name.startswith(("optimizer.", "rng_state"))):
                continue
            own = name.removeprefix(prefix)
            if stacked := _STACKED.fullmatch(own):
                for layer in range(shape[0] if shape else 0):
                    if (ours := canonical(f"decoder.layers.{layer}.{stacked[1]}")) is not None:
                        places[ours] = (name, layer)
            elif (ours := canonical(own)) is not None:
                places[ours] = (name, None)
        return places

    def names(self) -> set[str]:
        """Return the names of all weights in this checkpoint."""
        return set(self._places["weights"])

    def has_optimizer(self) -> bool:
        """Whether the checkpoint has both moments of every weight."""
        if self._buckets is not None:
            raise BadInputError(KEY, str(self._where), self._buckets)
        return all(self._places[kind].keys() >= self.names() for kind in MOMENTS)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of one layer's tensor, or ``None``."""
        if (place := self._places["weights"].get(name)) is None:
            return None
        shape = self._dcp.shapes[place[0]]
        return shape if place[1] is None else shape[1:]

    def read(self, kind: Kind, name: str) -> torch.Tensor:
        """Return one tensor. A stack of layers is cached until another one is requested."""
        places = self._places[kind]
        if kind == "weights" and name in self._masters:
            places = self._masters
        stored, layer = places[name]
        if self._last is None or self._last[0] != stored:
            self._last = (stored, self._dcp.read(stored))
        return self._last[1] if layer is None else self._last[1][layer]
