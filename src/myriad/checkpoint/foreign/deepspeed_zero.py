"""Read a DeepSpeed checkpoint of a Hugging Face model, ZeRO or universal, as a `ForeignState`.

    CHECKPOINT/latest                                        names one of several; or a folder of one is given
    global_stepN/mp_rank_00_model_states.pt                  weights and shapes              ZeRO 1, 2
                 zero_pp_rank_X_mp_rank_00_model_states.pt   shapes                          ZeRO 3
                 [bf16_]zero_pp_rank_X_mp_rank_00_optim_states.pt    flat fp32 partitions and moments
    global_stepN_universal/zero/NAME/{fp32,exp_avg,exp_avg_sq}.pt    full tensors
    config.json            of the model: in CHECKPOINT, in the step's folder, or given

    ZeRO 1, 2   the parameters of a group end to end (each followed by its alignment), cut over the ranks
    ZeRO 3      each parameter cut over the ranks, rounded up; a rank's parts end to end, over all groups

Sources: ``deepspeed/utils/zero_to_fp32.py``, ``deepspeed/checkpoint/ds_to_universal.py``. Moments have the
layout of the master weights. If weights are stored too, the master weights must round to them.
"""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from myriad.checkpoint.foreign.archives import bounded, read_archive
from myriad.checkpoint.foreign.hugging_face_config import model_of
from myriad.checkpoint.foreign.hugging_face_names import tensor_mappings
from myriad.checkpoint.foreign.training_state import KEY, MOMENTS, ForeignState, Kind, whole_number
from myriad.errors import BadInputError
from myriad.system.whole_file import parse_json

__all__ = ["is_deepspeed", "open_deepspeed"]

_LATEST = ("latest", "latest_universal")
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d{1,5})_mp_rank_(\d{2,5})_optim_states\.pt")
_MODEL = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
_FILE_OF: dict[Kind, str] = {"weights": "fp32", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
_CONFIG_BYTES = 2**20


def is_deepspeed(path: Path) -> bool:
    """Whether a path is a folder in one of DeepSpeed's layouts."""
    return _has_files(path) or any((path / name).is_file() for name in _LATEST)


def _has_files(path: Path) -> bool:
    return (path / "zero").is_dir() or any((path / name).is_file() for name in _MODEL)


def _folder_of(path: Path) -> Path:
    """Return the folder of the checkpoint at ``path``."""
    if _has_files(path):
        return path
    name = next(name for name in _LATEST if (path / name).is_file())
    tag = (path / name).open(encoding="utf-8", errors="replace").read(256).strip()
    if Path(tag).name != tag or tag in ("", ".", ".."):
        raise BadInputError(KEY, str(path / name), f"must name a folder beside it, names {tag[:100]!r}")
    if not _has_files(path / tag):
        raise BadInputError(KEY, str(path / tag), f"has no DeepSpeed checkpoint, although {name} names it")
    return path / tag


def open_deepspeed(path: Path, config: Path | None = None) -> ForeignState:
    """Read names, shapes and settings.

    ``config``: the model's config.json, or its folder; default: beside the checkpoint. Raises `BadInputError`
    for anything that cannot be read exactly."""
    folder = _folder_of(path)
    states = _model_states(folder)
    if (size := states.get("mp_world_size", 1)) != 1:
        allowed = f"has {size} tensor-parallel ranks: of DeepSpeed, data-parallel checkpoints are read"
        raise BadInputError(KEY, str(folder), allowed)
    described = _read_config(folder, path, config)
    model = model_of(described)
    mappings = {one.name: one for one in tensor_mappings(model, described["model_type"])}
    source = _Universal(folder, states) if (folder / "zero").is_dir() else _Partitions(folder, states)
    tied = {"lm_head.weight"} if model.tied else set()
    ends = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
    state = ForeignState(
        folder,
        f"DeepSpeed, {source.text}",
        model,
        mappings,
        source,
        whole_number(states.get("global_steps", 0), "global_steps", folder),
        whole_number(states.get("global_samples", 0), "global_samples", folder),
        _settings(states, source.groups),
        list(_notes(source.groups, mappings, source)),
        unused=frozenset(tied | {name for name in source.names() if name.endswith(ends)}),
    )
    skipped = whole_number(states.get("skipped_steps", 0), "skipped_steps", folder)
    if source.step_of_moments is None:
        source.step_of_moments = state.step - skipped
    return state.check()


def _model_states(folder: Path) -> dict[str, Any]:
    path = next((folder / name for name in _MODEL if (folder / name).is_file()), None)
    if path is None:
        raise BadInputError(KEY, str(folder), f"must hold {_MODEL[0]} or {_MODEL[1]}")
    content = read_archive(path, KEY)
    if not isinstance(content, dict) or not isinstance(content.get("param_shapes"), list):
        raise BadInputError(KEY, str(path), "has no param_shapes: not a checkpoint of ZeRO")
    return content


def _read_config(folder: Path, path: Path, given: Path | None) -> dict[str, Any]:
    places = [folder / "config.json", path / "config.json", folder.parent / "config.json"]
    if given is not None:
        places = [given / "config.json" if given.is_dir() else given]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        allowed = "config.json of the Hugging Face model that was trained; name it with --config"
        raise BadInputError("--config", str(given or folder), allowed)
    try:
        with found.open("rb") as file:
            content = parse_json(file.read(_CONFIG_BYTES))
    except (OSError, ValueError) as error:
        raise BadInputError("--config", str(found), f"not readable ({error})") from None
    if not isinstance(content, dict):
        raise BadInputError("--config", str(found), "must be a JSON object")
    return content


def _plain(name: object) -> str:
    return str(name).removeprefix("module.").replace("_orig_mod.", "")


def _settings(states: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return DeepSpeed's configuration as saved, with the values of the optimizer that ran."""
    found = states.get("ds_config")
    settings = dict(found) if isinstance(found, dict) else {}
    if groups:
        first = max(groups, key=lambda group: group.get("weight_decay", 0) or 0)
        keys = ("lr", "betas", "eps", "weight_decay")
        values = {key: first[key] for key in keys if key in first}
        before = settings.get("optimizer")
        kind = before.get("type", "AdamW") if isinstance(before, dict) else "AdamW"
        settings["optimizer"] = {"type": kind, "params": values}
    return settings


def _notes(groups: Sequence[Mapping[str, Any]], mappings: Any, source: Any) -> Any:
    decayed = [group for group in groups if group.get("weight_decay")]
    if decayed and len(decayed) == len(groups):
        yield "weight decay of vectors: Myriad leaves norms and biases alone"
    if len({group.get("lr") for group in groups}) > 1:
        yield "several learning rates: Myriad has one, that of the group that decays most"
    if any(name.endswith("attn.c_attn.bias") for name in source.names()):
        yield "biases of keys are dropped: softmax does not see them"


class _Partitions:
    """A `TensorSource` of flat ZeRO partitions."""

    def __init__(self, folder: Path, states: Mapping[str, Any]) -> None:
        self._where = folder
        self._last: tuple[tuple[Kind, int], list[torch.Tensor]] | None = None
        files = self._files(folder)
        self._states = [self._optimizer_of(path) for path in files]
        self.stage = self._stage(states)
        self.text = f"ZeRO {self.stage}, {len(files)} ranks"
        self.shapes_of_groups = [
            {_plain(name): tuple(int(size) for size in shape) for name, shape in group.items()}
            for group in states["param_shapes"]
        ]
        inner = self._states[0].get("base_optimizer_state", self._states[0].get("optimizer_state_dict"))
        groups = inner.get("param_groups") if isinstance(inner, dict) else None
        self.groups: Sequence[Mapping[str, Any]] = groups if isinstance(groups, list) else []
        self._module = {_plain(name): value for name, value in dict(states.get("module") or {}).items()}
        paddings = self._states[0].get("param_alignment_paddings")
        self._paddings = paddings if isinstance(paddings, list) else None
        self._places = self._find_places()
        self.step_of_moments: int | None = self._step()
        if self.stage < 3:
            self._check_masters()

    def _files(self, folder: Path) -> list[Path]:
        """Return the optimizer files in order of rank. Raises `BadInputError` if one is missing."""
        found = {}
        for path in folder.iterdir():
            if named := _OPTIMIZER.fullmatch(path.name):
                found[int(named[1])] = path
        if not found or set(found) != set(range(len(found))):
            allowed = f"has optimizer files of the ranks {sorted(found)}: every rank from 0 is needed"
            raise BadInputError(KEY, str(folder), allowed)
        return [found[rank] for rank in range(len(found))]

    def _optimizer_of(self, path: Path) -> Mapping[str, Any]:
        content = read_archive(path, KEY)
        state = content.get("optimizer_state_dict") if isinstance(content, dict) else None
        if not isinstance(state, dict) or "zero_stage" not in state:
            raise BadInputError(KEY, str(path), "holds no optimizer state of ZeRO")
        count = state.get("partition_count", 1)
        count = max(count) if isinstance(count, list) else count
        if count != len(self._files(path.parent)):
            allowed = f"is of {count} ranks, and {len(self._files(path.parent))} have files"
            raise BadInputError(KEY, str(path), allowed)
        return state

    def _stage(self, states: Mapping[str, Any]) -> int:
        """Return the ZeRO stage, 1 to 3. A saved enumeration is opaque; its only argument is the number."""
        kept = self._states[0]["zero_stage"]
        number = getattr(kept, "args", (kept,))[0]
        if number not in (1, 2, 3):
            raise BadInputError(KEY, str(self._where), f"zero_stage is {str(number)[:50]}: 1, 2 or 3")
        return int(number)

    def _find_places(self) -> dict[str, tuple[int, int, tuple[int, ...]]]:
        """Map each parameter to its group, first element (of a rank's part, with ZeRO 3) and shape."""
        places: dict[str, tuple[int, int, tuple[int, ...]]] = {}
        start = 0
        for number, group in enumerate(self.shapes_of_groups):
            start = 0 if self.stage < 3 else start
            paddings = self._paddings[number] if self._paddings else [0] * len(group)
            for (name, shape), padding in zip(group.items(), paddings, strict=True):
                size = math.prod(shape)
                places[name] = (number if self.stage < 3 else 0, start, shape)
                start += size + int(padding) if self.stage < 3 else math.ceil(size / len(self._states))
            if self.stage < 3:
                self._check_length(number, start)
        return places

    def _check_length(self, number: int, end: int) -> None:
        there = sum(part.numel() for part in self._flats("weights", number))
        unit = 2 * len(self._states)
        if math.ceil(end / unit) != math.ceil(there / unit):
            allowed = f"group {number} has {there} elements in its partitions, {end} were expected"
            raise BadInputError(KEY, str(self._where), allowed)

    def _flats(self, kind: Kind, number: int) -> list[torch.Tensor]:
        """Return the flat tensor of each rank: of one group, or of all groups with ZeRO 3.

        The result is cached until another one is requested. Concatenating the ranks for each parameter would
        copy them once per parameter."""
        wanted = kind, number if self.stage < 3 else 0
        if self._last is None or self._last[0] != wanted:
            self._last = wanted, self._read_flats(kind, number)
        return self._last[1]

    def _read_flats(self, kind: Kind, number: int) -> list[torch.Tensor]:
        found = []
        for state in self._states:
            if kind == "weights":
                flats = state["single_partition_of_fp32_groups" if self.stage < 3 else "fp32_flat_groups"]
            else:
                inner = state["base_optimizer_state" if self.stage < 3 else "optimizer_state_dict"]
                if not isinstance(inner, dict) or not isinstance(inner.get("state"), dict):
                    allowed = "keeps its optimizer state in a form (elastic, or offloaded) that is not read"
                    raise BadInputError(KEY, str(self._where), allowed)
                flats = [inner["state"][index].get(kind) for index in sorted(inner["state"])]
            checked = [bounded(one, kind, self._where, KEY).flatten() for one in flats]
            if self.stage < 3 and number >= len(checked):
                raise BadInputError(KEY, str(self._where), f"has {kind} of {len(checked)} groups")
            found.append(checked[number] if self.stage < 3 else torch.cat(checked))
        return found

    def _step(self) -> int | None:
        inner = self._states[0].get("base_optimizer_state", self._states[0].get("optimizer_state_dict"))
        state = inner.get("state") if isinstance(inner, dict) else None
        if not isinstance(state, dict):
            return None
        steps = [one.get("step") for one in state.values() if isinstance(one, dict)]
        steps += [group.get("step") for group in self.groups]
        found = next((one for one in steps if isinstance(one, int | float | torch.Tensor)), None)
        return None if found is None else int(found)

    def _check_masters(self) -> None:
        for name in self._places:
            stored = self._module.get(name)
            if isinstance(stored, torch.Tensor) and stored.numel():
                weight = bounded(stored, name, self._where, KEY)
                if not torch.equal(self.read("weights", name).to(weight.dtype), weight):
                    allowed = f"the partitions of {name} do not round to its weights: another order is stored"
                    raise BadInputError(KEY, str(self._where), allowed)

    def names(self) -> set[str]:
        """Return the names of all weights in this checkpoint."""
        return set(self._places)

    def has_optimizer(self) -> bool:
        """Whether both moments are as long as the master weights."""
        try:
            for number in range(len(self.shapes_of_groups) if self.stage < 3 else 1):
                lengths = [
                    [part.numel() for part in self._flats(kind, number)] for kind in ("weights", *MOMENTS)
                ]
                if lengths[0] != lengths[1] or lengths[0] != lengths[2]:
                    return False
        except BadInputError:
            return False
        return True

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a full weight; ``None``: there is no weight with this name."""
        place = self._places.get(name)
        return None if place is None else place[2]

    def read(self, kind: Kind, name: str) -> torch.Tensor:
        """Return one full tensor, joined from the parts of all ranks."""
        group, start, shape = self._places[name]
        size, flats = math.prod(shape), self._flats(kind, group)
        if self.stage < 3:
            parts, first = [], 0
            for flat in flats:
                low, high = max(start, first), min(start + size, first + flat.numel())
                if low < high:
                    parts.append(flat[low - first : high - first])
                first += flat.numel()
        else:
            own = math.ceil(size / len(flats))
            parts = [flat[start : start + own] for flat in flats]
        whole = torch.cat(parts)[:size] if parts else torch.empty(0)
        if whole.numel() != size:
            raise BadInputError(KEY, str(self._where), f"{name} is not whole: {whole.numel()} of {size}")
        return whole.view(shape)


class _Universal:
    """A `TensorSource` of a universal checkpoint."""

    def __init__(self, folder: Path, states: Mapping[str, Any]) -> None:
        self._where = folder
        self.text = "universal"
        self._shapes = {
            _plain(name): tuple(int(size) for size in shape)
            for group in states["param_shapes"]
            for name, shape in group.items()
        }
        self.groups: Sequence[Mapping[str, Any]] = self._groups()
        self.step_of_moments: int | None = self._step()

    def _groups(self) -> Sequence[Mapping[str, Any]]:
        path = self._where / "zero" / "optimizer_state.pt"
        content = read_archive(path, KEY) if path.is_file() else {}
        inner = content.get("base_optimizer_state", content) if isinstance(content, dict) else {}
        groups = inner.get("param_groups") if isinstance(inner, dict) else None
        return [one for one in groups if isinstance(one, dict)] if isinstance(groups, list) else []

    def _step(self) -> int | None:
        name = next(iter(sorted(self._shapes)), "")
        path = self._place(name, "step")
        if not path.is_file():
            return None
        kept = read_archive(path, KEY)
        kept = kept.get("param") if isinstance(kept, dict) else kept
        return int(kept) if isinstance(kept, int | float | torch.Tensor) else None

    def _place(self, name: str, what: str) -> Path:
        """Return the file of a parameter. The folder has the parameter's name and must be in ``zero``."""
        if Path(name).name != name or name in ("", ".", ".."):
            raise BadInputError(KEY, str(self._where), f"names a parameter {name[:100]!r}")
        return self._where / "zero" / name / f"{what}.pt"

    def names(self) -> set[str]:
        """Return the names of all weights in this checkpoint."""
        return set(self._shapes)

    def has_optimizer(self) -> bool:
        """Whether every weight has a file of both moments."""
        return all(self._place(name, kind).is_file() for name in self._shapes for kind in MOMENTS)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape that the model's states declare; ``None``: unknown name."""
        return self._shapes.get(name)

    def read(self, kind: Kind, name: str) -> torch.Tensor:
        """Return one full tensor. A file holds it directly or in a dictionary."""
        path = self._place(name, _FILE_OF[kind])
        content = read_archive(path, KEY)
        tensor = bounded(content.get("param") if isinstance(content, dict) else content, name, path, KEY)
        size = math.prod(self._shapes[name])
        if tensor.numel() < size:
            raise BadInputError(KEY, str(path), f"has {tensor.numel()} elements, {size} were expected")
        return tensor.flatten()[:size].view(self._shapes[name])
