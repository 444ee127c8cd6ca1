"""Read untrusted files of ``torch.save`` and of torch.distributed.checkpoint (DCP).

a pickle         is read by torch's restricted unpickler; of other classes only names on a list are
                 accepted, and each is replaced by `Opaque`, which keeps its arguments and runs nothing
a zip            must store its members uncompressed: a compressed one could expand without bound
a tensor         is mapped, not read; its storage is part of the file, so its bytes are bounded by the
                 file's size (`bounded`: a view that repeats its elements is refused)
``.metadata``    of DCP is a plain pickle, for which torch has no restricted reader: this module has one
                 that accepts eleven classes
a file name      inside ``.metadata`` must be one of the folder's own
"""

import argparse
import io
import math
import pickle
import re
import types
import zipfile
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from myriad.errors import BadInputError
from myriad.system.whole_file import is_own_file

__all__ = ["DcpFolder", "Opaque", "bounded", "read_archive"]

_PICKLE_BYTES = 2**28
"""Largest pickle that is read; the pickle of a model with 100,000 tensors has about 30 MB."""
_METADATA_BYTES = 2**30
_INERT = re.compile(
    r"(megatron|deepspeed|transformer_engine|apex|transformers|numpy|pathlib|signal|types|enum|datetime"
    r"|torch\.(torch_version|distributed|_C)|__builtin__|__main__)\b.*"
)
"""Classes that checkpoints of these systems hold beside tensors: random states, enumerations, paths. None of
them is imported."""


class Opaque:
    """A value whose class is not imported. It keeps its arguments and state, and runs nothing."""

    def __new__(cls, *args: Any, **_: Any) -> "Opaque":
        """Keep the arguments without interpreting them."""
        made = super().__new__(cls)
        made.args = args
        return made

    args: tuple[Any, ...]

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.state = state


def read_archive(path: Path, key: str) -> Any:
    """Return the content of a ``torch.save`` file, with its tensors mapped from the file.

    Raises `BadInputError` if the file is damaged, compressed, in the format before torch 1.6, or names a
    class that is not on the list."""
    _check_zip(path, key)
    try:
        names = get_unsafe_globals_in_checkpoint(path)
        with safe_globals(_stand_ins(names, path, key)):
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except BadInputError:
        raise
    except Exception as error:  # an unpickler may raise anything on damaged bytes
        raise BadInputError(key, str(path), f"not readable ({_reason(error)})") from None


def _reason(error: Exception) -> str:
    """Return the first line of an error, which may have no text."""
    lines = str(error).splitlines() or [""]
    return lines[0][:200] or type(error).__name__


def _check_zip(path: Path, key: str) -> None:
    if path.is_symlink() or not path.is_file():
        raise BadInputError(key, str(path), "must be a file of the checkpoint's folder")
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except Exception as error:  # zipfile raises errors of several kinds for damaged files
        allowed = f"not a file of torch.save since torch 1.6 ({_reason(error)})"
        raise BadInputError(key, str(path), allowed) from None
    for member in members:
        if member.compress_type != zipfile.ZIP_STORED:
            raise BadInputError(
                key, str(path), f"{member.filename} is compressed; torch.save stores members uncompressed"
            )
        if member.filename.endswith(".pkl") and member.file_size > _PICKLE_BYTES:
            raise BadInputError(key, str(path), f"its pickle has more than {_PICKLE_BYTES >> 20} MiB")


def _stand_ins(names: list[str], path: Path, key: str) -> list[Any]:
    """Return the class that replaces each class named in a pickle."""
    found: list[Any] = []
    for name in names:
        if name in ("argparse.Namespace", "types.SimpleNamespace"):
            found.append((argparse.Namespace if name.startswith("arg") else types.SimpleNamespace, name))
        elif _INERT.fullmatch(name):
            found.append((type("Opaque", (Opaque,), {}), name))
        else:
            allowed = f"holds {name[:100]!r}, which no checkpoint of Megatron-LM or DeepSpeed needs; not read"
            raise BadInputError(key, str(path), allowed)
    return found


def bounded(value: Any, name: str, where: object, key: str) -> torch.Tensor:
    """Return ``value`` if it is a floating-point tensor whose elements are all in its file.

    Raises `BadInputError` otherwise."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.is_sparse:
        raise BadInputError(key, str(where), f"{name[:200]} must be a tensor of floating point numbers")
    if value.numel() > value.untyped_storage().nbytes() // value.element_size():
        raise BadInputError(key, str(where), f"{name[:200]} repeats its elements: {tuple(value.shape)}")
    return value.detach()


_METADATA_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "MetadataIndex",
        "TensorProperties",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "collections": {"OrderedDict"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
}
_DTYPES = {"float32", "float16", "bfloat16", "float64", "uint8", "int64", "int32", "int8", "bool", "int16"}
_DTYPES |= {"float8_e4m3fn", "float8_e5m2", "complex64"}


_OPCODES = (
    *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.POP, pickle.POP_MARK),
    *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BINFLOAT),
    *(pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1),
    *(pickle.BINUNICODE, pickle.SHORT_BINUNICODE, pickle.BINUNICODE8, pickle.BINBYTES, pickle.SHORT_BINBYTES),
    *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
    *(pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS, pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS),
    *(pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.REDUCE, pickle.BUILD, pickle.NEWOBJ, pickle.NEWOBJ_EX),
    *(pickle.BINPUT, pickle.LONG_BINPUT, pickle.MEMOIZE, pickle.BINGET, pickle.LONG_BINGET),
)
"""Opcodes of protocols 2 to 5 that dataclasses, dictionaries and plain values need. Not: byte arrays, which
are allocated before they are read; sets, persistent ids, extensions, and the text opcodes of protocol 0."""


_READS: Mapping[int, Any] = pickle._Unpickler.dispatch


class _MetadataUnpickler(pickle._Unpickler):
    """Accepts the classes of DCP's ``.metadata``. Any other class becomes `Opaque`; functions are refused.

    It is Python's unpickler in Python, whose memory is bounded by its input: the one in C allocates as much
    as the number of a memo entry says."""

    stack: list[Any]
    dispatch: ClassVar[dict[int, Any]] = {code[0]: _READS[code[0]] for code in _OPCODES}

    def _set_items(self) -> None:
        self._check_keys(self.stack[::2])
        _READS[pickle.SETITEMS[0]](self)

    def _set_item(self) -> None:
        self._check_keys(self.stack[-2:-1])
        _READS[pickle.SETITEM[0]](self)

    def _build(self) -> None:
        kind = type(self.stack[-2])  # that of a class is type, that of a function is function
        is_listed = kind.__name__ in _METADATA_CLASSES.get(kind.__module__, ())
        if not (is_listed or issubclass(kind, Opaque)) or issubclass(kind, Enum):
            raise pickle.UnpicklingError("would change a class, a function or a constant of this process")
        _READS[pickle.BUILD[0]](self)

    dispatch |= {pickle.SETITEMS[0]: _set_items, pickle.SETITEM[0]: _set_item, pickle.BUILD[0]: _build}

    @staticmethod
    def _check_keys(keys: Sequence[Any]) -> None:
        """Refuse keys that take long to hash: a tuple that holds another one twice, which does the same, and
        so on, takes exponential time."""
        for key in keys:
            fqn, offset = getattr(key, "fqn", key), getattr(key, "offset", None) or ()
            flat = isinstance(offset, tuple) and all(type(one) is int for one in offset)
            if not isinstance(fqn, str | int) or not flat:
                raise pickle.UnpicklingError("a key must be text, a number or the index of a tensor")

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _DTYPES:
            return getattr(torch, name)
        if name in _METADATA_CLASSES.get(module, ()):
            import importlib

            return getattr(importlib.import_module(module), name)
        if (module, name) == ("builtins", "getattr"):
            return _memory_format
        if module.startswith(
            ("torch.distributed.checkpoint.", "megatron.core.dist_checkpointing", "pathlib")
        ):
            return type("Opaque", (Opaque,), {})
        raise pickle.UnpicklingError(f"holds {module}.{name}, which a .metadata file never needs"[:200])


def _memory_format(kind: object, name: object) -> object:
    """Return a member of torch's enumeration of memory formats, and nothing else: Python 3.11.0 to 3.11.3
    pickle a member as ``getattr`` of its class and name."""
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING as FORMATS

    if kind is not FORMATS or not isinstance(name, str) or name not in FORMATS.__members__:
        raise pickle.UnpicklingError("reads an attribute of another class than the memory formats")
    return FORMATS[name]


_MOST = 2**62
"""Largest length of a dimension, offset and size."""


class _Chunk(NamedTuple):
    """A stored part of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class _Place(NamedTuple):
    """Location of a part in a file."""

    file: str
    start: int
    length: int
    is_packed: bool


class _DcpMetadata:
    """The content of ``.metadata`` as plain values, each of which is checked: a pickle may hold any value in
    any field."""

    def __init__(self, found: object) -> None:
        """Raises ``ValueError`` with the field that is wrong."""
        from torch.distributed.checkpoint.metadata import Metadata

        if not isinstance(found, Metadata):
            raise ValueError("not a Metadata")
        tensors, places = _field(found, "state_dict_metadata"), _field(found, "storage_data")
        if not isinstance(tensors, dict) or not isinstance(places, dict):
            raise ValueError("state_dict_metadata and storage_data must be dictionaries")
        self.chunks: dict[str, list[_Chunk]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for name, one in tensors.items():
            self._add_tensor(name, one)
        self.places = dict(self._place(at, info) for at, info in places.items())

    def _add_tensor(self, name: object, one: object) -> None:
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        if not isinstance(name, str) or not name.isprintable():
            raise ValueError(f"{name!r:.80} is not a name of a tensor")
        if not isinstance(one, TensorStorageMetadata):
            return
        self.shapes[name] = shape = _sizes(_field(one, "size"), f"size of {name}")
        chunks = _field(one, "chunks")
        if not isinstance(chunks, list):
            raise ValueError(f"chunks of {name} must be a list")
        self.chunks[name] = [
            _Chunk(
                *(_sizes(_field(chunk, key), f"{key} of {name}", len(shape)) for key in ("offsets", "sizes"))
            )
            for chunk in chunks
        ]

    @staticmethod
    def _place(at: object, info: object) -> tuple[tuple[str, tuple[int, ...]], _Place]:
        name, offset = getattr(at, "fqn", None), getattr(at, "offset", None)
        if not isinstance(name, str):
            raise ValueError(f"the name {name!r:.80} in storage_data must be text")
        file = _field(info, "relative_path")
        if not isinstance(file, str):
            raise ValueError(f"relative_path of {name} must be text")
        start, length = (_whole(_field(info, key), f"{key} of {name}") for key in ("offset", "length"))
        packed = bool(getattr(info, "transform_descriptors", None))
        found = () if offset is None else _sizes(offset, f"offset of {name}")
        return (name, found), _Place(file, start, length, packed)


def _field(value: object, name: str) -> object:
    """Return a field of an unpickled object, which may lack it."""
    try:
        return getattr(value, name)
    except AttributeError:
        raise ValueError(f"a {type(value).__name__} without {name}") from None


def _sizes(value: object, name: str, count: int | None = None) -> tuple[int, ...]:
    if not isinstance(value, tuple | list) or (count is not None and len(value) != count):
        of = "" if count is None else f" of {count}"
        raise ValueError(f"{name} is {value!r:.80}: must be a list{of}")
    return tuple(_whole(one, name) for one in value)


def _whole(value: object, name: str) -> int:
    if type(value) is not int or not 0 <= value <= _MOST:
        raise ValueError(f"{name} is {value!r:.80}: must be a whole number of 0 to 2**62")
    return value


class DcpFolder:
    """Tensors of a torch.distributed.checkpoint folder, read one at a time."""

    def __init__(self, path: Path, key: str) -> None:
        """Read ``.metadata``. Raises `BadInputError` if it is invalid."""
        self.path, self._key = path, key
        file = path / ".metadata"
        if not file.is_file() or file.is_symlink() or file.stat().st_size > _METADATA_BYTES:
            raise BadInputError(key, str(file), f"must be a file of at most {_METADATA_BYTES >> 30} GiB")
        try:
            self._metadata = _DcpMetadata(_MetadataUnpickler(io.BytesIO(file.read_bytes())).load())
        except Exception as error:  # an unpickler may raise anything on damaged bytes
            raise BadInputError(key, str(file), f"not readable ({_reason(error)})") from None
        self.shapes: Mapping[str, tuple[int, ...]] = self._metadata.shapes

    def read(self, name: str) -> torch.Tensor:
        """Return one full tensor in its stored dtype. Raises `BadInputError` if parts of it are missing."""
        shape = self.shapes[name]
        whole: torch.Tensor | None = None
        filled = 0
        for offsets, sizes in self._metadata.chunks[name]:
            ends = zip(offsets, sizes, shape, strict=True)
            if any(start + size > full for start, size, full in ends):
                self._refuse(name, f"has a part at {offsets} of {sizes}, beyond {shape}")
            part = self._part(name, offsets, sizes)
            if whole is None:
                self._check_room(name, shape, part.element_size())
                whole = torch.empty(shape, dtype=part.dtype)
            whole[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))] = part
            filled += part.numel()
        if whole is None or filled != whole.numel():
            self._refuse(name, f"is not whole: {filled} of the elements of {shape} are there")
        return whole

    def _check_room(self, name: str, shape: tuple[int, ...], item_bytes: int) -> None:
        """Raise `BadInputError` for a tensor larger than the files, before memory is allocated for it."""
        needed = math.prod(shape) * item_bytes
        if needed > sum(file.stat().st_size for file in self.path.glob("*.distcp")):
            self._refuse(name, f"has the shape {shape}, more than the files hold")

    def _part(self, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
        place = self._metadata.places.get((name, offsets))
        if place is None:
            self._refuse(name, f"has no file for its part at {offsets}")
        file = self.path / place.file
        if not is_own_file(self.path, place.file) or file.is_symlink():
            self._refuse(name, f"must be in a file of this folder, is in {place.file[:100]!r}")
        start, length = place.start, place.length
        if place.is_packed:
            self._refuse(name, "is packed")
        if start + length > file.stat().st_size:
            self._refuse(name, f"is at bytes {start} to {start + length} of {place.file}, which is shorter")
        with file.open("rb") as opened:
            opened.seek(start)
            content = io.BytesIO(opened.read(length))
        try:
            with zipfile.ZipFile(content) as archive:
                packed = any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist())
            content.seek(0)
            part = None if packed else torch.load(content, map_location="cpu", weights_only=True)
        except Exception as error:
            self._refuse(name, f"not readable ({_reason(error)})")
        tensor = bounded(part, name, self.path, self._key)
        if tensor.numel() != math.prod(sizes):
            self._refuse(name, f"has a part of {tuple(tensor.shape)} where .metadata says {sizes}")
        return tensor.reshape(sizes)

    def _refuse(self, name: str, problem: str) -> NoReturn:
        raise BadInputError(self._key, str(self.path), f"{name[:200]} {problem}")
