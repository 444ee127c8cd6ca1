"""Which experts each token got: recorded by one run, and used again by another.

Two layouts may differ in the last bit of a router's input. Where two experts have equal scores but for that
bit, a token then gets another expert, and everything after it differs by more than rounding. A run that
replays the routing of another computes with the same experts, so that all else can be compared
(``myriad parity --replay-routing``).

    FOLDER/step-3-rank-0.npz     for each mixture of experts of this rank: the chosen experts of its tokens,
                                 with the sequence and the position of each (`_Part`)

A token is known by the global index of its sequence and its position, which no layout changes. Experts that
the balance loss counts are recorded apart, as they may be others (`myriad.model.experts.Router`).
"""

import io
import math
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from myriad.comm.groups import Groups
from myriad.errors import RunFailedError
from myriad.model.experts import Experts
from myriad.parallel.rank_model import RankModel
from myriad.system.whole_file import write_whole

__all__ = ["Routing", "RoutingFolders", "RoutingTape", "read_routing"]


class RoutingFolders(NamedTuple):
    """Where routing is written, and whence it is read; ``None``: it is not."""

    record: Path | None = None
    replay: Path | None = None


@dataclass(frozen=True)
class Routing:
    """The chosen experts of all tokens of a step at one place of the model."""

    samples: np.ndarray
    """Global indices of the sequences, ascending, int64 ``[N]``."""
    chosen: np.ndarray
    """Experts of each token, int64 ``[N, S, k]``."""

    def of(self, samples: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the experts ``[B, S, k]`` of the tokens at ``positions``, ``[S]`` or ``[B, S]``. Raises
        `RunFailedError` for tokens that were not recorded."""
        wanted, at = samples.cpu().numpy(), positions.cpu().numpy()
        rows = np.searchsorted(self.samples, wanted).clip(max=len(self.samples) - 1)
        found = self.chosen[rows[:, None], at.clip(max=self.chosen.shape[1] - 1)]
        if (self.samples[rows] != wanted).any() or at.max() >= self.chosen.shape[1] or (found < 0).any():
            missing = f"sequence {int(wanted[0])}, positions {at.min()} to {at.max()}"
            raise RunFailedError(f"train.replay_routing lacks the experts of {missing}")
        return torch.from_numpy(found).to(samples.device)


class _Part(NamedTuple):
    """The chosen experts of some tokens."""

    samples: np.ndarray
    """Global indices of the sequences, int64 ``[B]``."""
    positions: np.ndarray
    """Positions of the tokens, int64 ``[S]``, or ``[B, S]`` if sequences have others."""
    chosen: np.ndarray
    """Experts of each token, int16 ``[B, S, k]``."""

    @property
    def fits(self) -> bool:
        """Whether the arrays have the shapes and the positions that a run records."""
        shape = self.chosen.shape
        return (
            len(shape) == 3
            and self.chosen.size > 0
            and self.samples.shape == shape[:1]
            and self.positions.shape in (shape[1:2], shape[:2])
            and all(one.dtype.kind == "i" for one in self)
            and self.positions.min() >= 0
        )


class RoutingTape:
    """Records and replays the routing of a rank's mixtures of experts."""

    def __init__(
        self, folders: RoutingFolders, model: RankModel, layers: Sequence[str], groups: Groups
    ) -> None:
        """``layers``: names of all layers of the model."""
        self._folders, self._rank = folders, groups.grid.rank
        self._records = folders.record is not None and groups.grid.index("etp") == 0
        if folders.record is not None:
            folders.record.mkdir(exist_ok=True)
        self._found: dict[str, list[_Part]] = {}
        self._replayed: Mapping[str, Routing] = {}
        for stage in model.stages.values():
            for number, layer in stage.layers.items():
                for path, module in layer.named_modules(prefix=layers[number]):
                    if isinstance(module, Experts):
                        module.router.routing = partial(self._route, path, module.num_experts)

    def _route(
        self,
        path: str,
        num_experts: int,
        purpose: str,
        chosen: torch.Tensor,
        samples: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """Return the experts ``[B, S, k]`` to use instead of the chosen ones, and record them. Raises
        `RunFailedError` for routing of another model."""
        name = f"{path}.{purpose}"
        if self._folders.replay is not None:
            where = f"train.replay_routing = {self._folders.replay}"
            if name not in self._replayed:
                raise RunFailedError(f"{where}: nothing of {name}")
            replayed, most = self._replayed[name], chosen.shape[2]
            if replayed.chosen.shape[2] != most or replayed.chosen.max() >= num_experts:
                raise RunFailedError(f"{where}: {name} has {most} of {num_experts} experts a token here")
            chosen = replayed.of(samples, positions)
        if self._records and torch.is_grad_enabled():  # a recomputed layer has its second pass with gradients
            part = _Part(*(one.cpu().numpy() for one in (samples, positions, chosen.to(torch.int16))))
            self._found.setdefault(name, []).append(part)
        return chosen

    def begin(self, step: int) -> None:
        """Begin an iteration. Raises `RunFailedError` if the routing to replay cannot be read."""
        if self._folders.replay is not None:
            self._replayed = read_routing(self._folders.replay, step)

    def end(self, step: int) -> None:
        """Write what was recorded in the iteration."""
        if not self._records:
            return
        assert self._folders.record is not None
        arrays: dict[str, np.ndarray] = {}
        for name, parts in self._found.items():
            for number, part in enumerate(parts):
                arrays |= {f"{name}:{number}:{field}": array for field, array in part._asdict().items()}
        self._found.clear()
        content = io.BytesIO()
        np.savez(content, **arrays)  # type: ignore[arg-type]  # it takes one more keyword
        write_whole(self._folders.record / f"step-{step}-rank-{self._rank}.npz", content.getvalue())


def read_routing(folder: Path, step: int) -> dict[str, Routing]:
    """Return what all ranks recorded in a step, by mixture and purpose. Raises `RunFailedError` if a file is
    not readable or there is none."""
    parts: dict[str, list[_Part]] = {}
    paths = sorted(folder.glob(f"step-{step}-rank-*.npz"))
    if not paths:
        raise RunFailedError(f"{folder}: no recorded routing of step {step}")
    for path in paths:
        try:
            with np.load(path, allow_pickle=False) as arrays:
                for name in (key for key in arrays.files if key.endswith(":chosen")):
                    whole, begin = name.rsplit(":", 2)[0], name.removesuffix("chosen")
                    part = _Part(*(arrays[f"{begin}{field}"] for field in _Part._fields))
                    if not part.fits:
                        raise ValueError(f"{whole} has other shapes")
                    parts.setdefault(whole, []).append(part)
        except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
            raise RunFailedError(f"{path}: not a file of recorded routing ({error})") from None
    try:
        return {name: _joined(found) for name, found in parts.items()}
    except ValueError as error:
        raise RunFailedError(f"{folder}: recorded routing of step {step} is incomplete ({error})") from None


def _joined(parts: Sequence[_Part]) -> Routing:
    """Return the routing of all parts. Raises ``ValueError`` if they do not cover whole sequences, so that
    few bytes of a file never take much memory."""
    samples = np.unique(np.concatenate([part.samples for part in parts]))
    length = max(int(part.positions.max()) + 1 for part in parts)
    shape = len(samples), length, parts[0].chosen.shape[2]
    if math.prod(shape) > sum(part.chosen.size for part in parts):
        raise ValueError(f"{len(samples)} sequences of {length} positions are not all there")
    whole = np.full(shape, -1, dtype=np.int64)
    for part in parts:
        whole[np.searchsorted(samples, part.samples)[:, None], part.positions] = part.chosen
    return Routing(samples, whole)
