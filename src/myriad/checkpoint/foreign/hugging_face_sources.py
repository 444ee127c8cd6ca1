"""The tensors of a Hugging Face folder as vectors and matrices: as stored, one of a stack, or quantized.

    stack    all experts of a block in one tensor [E, ...]; "NAME[3]" names its fourth entry
    fp8      NAME in float8 (e4m3), and NAME_scale_inv: a factor for each block of, say, 128 x 128 values
             (DeepSeek-V3, arXiv 2412.19437, section 3.3)
    mxfp4    NAME_blocks [E, R, G, 16]: R rows of G groups of 32 values, two in a byte, the first in its low
             half; NAME_scales [E, R, G]: the exponent of each group, plus 127 (OCP Microscaling Formats 1.0,
             sections 5.3 and 6.3). Its entries are matrices [32 G, R]: rows are columns of the model's tensor

Which tensors are quantized is decided by what is stored. Quantized parts are read as float32, which holds
their values exactly. A part is read with the groups and blocks that it touches, and nothing else.
"""

import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from myriad.checkpoint.foreign.hugging_face_values import Quantization
from myriad.checkpoint.foreign.safetensors_file import Box, SafetensorsFile, StoredTensor
from myriad.errors import BadInputError

__all__ = ["Place", "Source", "is_readable", "sources_of", "stack_of"]

_READ_TYPES = ("F32", "F16", "BF16")
"""Dtypes whose values float32 represents exactly."""
_GROUP = 32
"""Number of values that share an exponent in mxfp4."""
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the 4-bit floats, by their lower three bits; the highest bit is the sign."""
_BLOCKS, _SCALES, _SCALE_INV = "_blocks", "_scales", "_scale_inv"


class Place(NamedTuple):
    """A tensor in a file."""

    file: SafetensorsFile
    name: str

    @property
    def stored(self) -> StoredTensor:
        """Its dtype, shape and offset."""
        return self.file.tensors[self.name]


class Source(Protocol):
    """A vector or a matrix that is read from stored tensors."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Size in each dimension."""
        ...

    @property
    def places(self) -> tuple[Place, ...]:
        """The stored tensors that it is read from."""
        ...

    def read(self, box: Box) -> torch.Tensor:
        """Return a part. Raises `BadInputError` if a file was changed."""
        ...


@dataclass(frozen=True)
class _Plain:
    """A tensor as it is stored, or an entry of a stack."""

    place: Place
    entry: StoredTensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.entry or self.place.stored).shape

    @property
    def places(self) -> tuple[Place, ...]:
        return (self.place,)

    def read(self, box: Box) -> torch.Tensor:
        return self.place.file.read(self.place.name, box, self.entry)


@dataclass(frozen=True)
class _Float8:
    """A matrix in float8, with a factor for each block."""

    values: Place
    factors: Place
    block: tuple[int, int]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.stored.shape

    @property
    def places(self) -> tuple[Place, ...]:
        return self.values, self.factors

    def read(self, box: Box) -> torch.Tensor:
        found = self.values.file.read(self.values.name, box).float()
        touched = tuple(
            slice(one.start // size, -(-one.stop // size)) for one, size in zip(box, self.block, strict=True)
        )
        factors = self.factors.file.read(self.factors.name, touched).float()
        for dim, (one, size, part) in enumerate(zip(box, self.block, touched, strict=True)):
            factors = factors.index_select(dim, torch.arange(one.start, one.stop) // size - part.start)
        return found.mul_(factors)


@dataclass(frozen=True)
class _Mxfp4:
    """An entry of a stack in mxfp4, as the matrix ``[32 G, R]``."""

    blocks: Place
    scales: Place
    index: int

    @property
    def shape(self) -> tuple[int, ...]:
        _, rows, groups = self.scales.stored.shape
        return groups * _GROUP, rows

    @property
    def places(self) -> tuple[Place, ...]:
        return self.blocks, self.scales

    def read(self, box: Box) -> torch.Tensor:
        columns, rows = box
        groups = slice(columns.start // _GROUP, -(-columns.stop // _GROUP))
        codes = self._read(self.blocks, rows, slice(16 * groups.start, 16 * groups.stop)).int()
        exponents = self._read(self.scales, rows, groups).int() - 127
        table = torch.tensor((*_FP4, *(-one for one in _FP4)))
        values = torch.stack((table[codes & 15], table[codes >> 4]), -1)  # [R, 16 G, 2]
        values = torch.ldexp(values.view(*exponents.shape, _GROUP), exponents[..., None]).flatten(1)
        first = columns.start - groups.start * _GROUP
        return values[:, first : first + columns.stop - columns.start].T

    def _read(self, place: Place, rows: slice, columns: slice) -> torch.Tensor:
        entry = place.stored.entry(self.index).as_matrix()
        return place.file.read(place.name, (rows, columns), entry)


def is_readable(name: str, dtype: str, quantization: Quantization | None) -> bool:
    """Return whether a tensor of this name and dtype may be a source, or a part of one."""
    kind = None if quantization is None else quantization.kind
    is_group = kind == "mxfp4" and dtype == "U8" and name.endswith((_BLOCKS, _SCALES))
    return dtype in _READ_TYPES or is_group or (kind == "fp8" and dtype == "F8_E4M3")


_ENTRY = re.compile(r"(.+)\[(\d+)\]")


def stack_of(name: str) -> tuple[str, int] | None:
    """Return the stack and the index of an entry's name; ``None``: it is the name of a whole tensor."""
    found = _ENTRY.fullmatch(name)
    return None if found is None else (found[1], int(found[2]))


def sources_of(
    places: Mapping[str, Place], names: Collection[str], quantization: Quantization | None
) -> dict[str, Source]:
    """Return the sources of the tensors of a model, as far as they are there. ``names``: all of them, entries
    of stacks included. Raises `BadInputError` for a stack of another number of entries, and for a quantized
    tensor without scales, or with those of another one."""
    stacks = Counter(stack[0] for name in names if (stack := stack_of(name)) is not None)
    found: dict[str, Source] = {}
    for name in names:
        stack = stack_of(name)
        if stack is None:
            source = _whole(name, places, quantization)
        else:
            source = _entry(*stack, stacks[stack[0]], places, quantization)
        if source is not None:
            found[name] = source
    return found


def _whole(name: str, places: Mapping[str, Place], quantization: Quantization | None) -> Source | None:
    place, factors = places.get(name), places.get(f"{name}{_SCALE_INV}")
    if place is None:
        return None
    if place.stored.dtype in _READ_TYPES:
        return _Plain(place)
    if quantization is None or quantization.kind != "fp8" or len(place.stored.shape) != 2:
        raise _refusal(
            place, f"{name} is stored as {place.stored.dtype}: only matrices with factors are read"
        )
    block = quantization.block
    shape = tuple(-(-size // own) for size, own in zip(place.stored.shape, block, strict=True))
    if factors is None or factors.stored.shape != shape or factors.stored.dtype not in _READ_TYPES:
        is_there = "not there" if factors is None else f"{factors.stored.dtype} {factors.stored.shape}"
        raise _refusal(place, f"{name}{_SCALE_INV} should be F32 {shape}, is {is_there}")
    return _Float8(place, factors, block)


def _entry(
    stack: str, index: int, number: int, places: Mapping[str, Place], quantization: Quantization | None
) -> Source | None:
    """Return an entry of a stack of ``number`` entries, if the stack is there."""
    if (place := places.get(stack)) is not None:
        shape = place.stored.shape
        if place.stored.dtype not in _READ_TYPES:
            raise _refusal(place, f"{stack} is stored as {place.stored.dtype}, which is not read in a stack")
        if shape[:1] != (number,) or len(shape) not in (2, 3):
            raise _refusal(place, f"{stack} should have {number} entries of vectors or matrices, is {shape}")
        return _Plain(place, place.stored.entry(index))
    blocks, scales = places.get(f"{stack}{_BLOCKS}"), places.get(f"{stack}{_SCALES}")
    if quantization is None or quantization.kind != "mxfp4" or blocks is None or scales is None:
        return None
    shapes = blocks.stored.shape, scales.stored.shape
    is_right = len(shapes[1]) == 3 and shapes[0] == (*shapes[1], _GROUP // 2) and shapes[1][0] == number
    if not is_right or (blocks.stored.dtype, scales.stored.dtype) != ("U8", "U8"):
        expected = f"U8 ({number}, rows, groups, 16) and ({number}, rows, groups)"
        raise _refusal(blocks, f"{stack}{_BLOCKS} and {_SCALES} should be {expected}, are {shapes}")
    return _Mxfp4(blocks, scales, index)


def _refusal(place: Place, allowed: str) -> BadInputError:
    return BadInputError("weights", str(place.file.path), allowed)
