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
import pickle
import re
import types
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from myriad.errors import BadInputError

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
        reason = (str(error) or type(error).__name__).splitlines()[0][:200]
        raise BadInputError(key, str(path), f"not readable ({reason})") from None


def _check_zip(path: Path, key: str) -> None:
    if path.is_symlink() or not path.is_file():
        raise BadInputError(key, str(path), "must be a file of the checkpoint's folder")
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError) as error:
        raise BadInputError(key, str(path), f"not a file of torch.save since torch 1.6 ({error})") from None
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


class _MetadataUnpickler(pickle.Unpickler):
    """Accepts the classes of DCP's ``.metadata``. Any other class becomes `Opaque`; functions are refused."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _DTYPES:
            return getattr(torch, name)
        if name in _METADATA_CLASSES.get(module, ()):
            import importlib

            return getattr(importlib.import_module(module), name)
        if module.startswith(
            ("torch.distributed.checkpoint.", "megatron.core.dist_checkpointing", "pathlib")
        ):
            return type("Opaque", (Opaque,), {})
        raise pickle.UnpicklingError(f"holds {module}.{name}, which a .metadata file never needs"[:200])


class DcpFolder:
    """Tensors of a torch.distributed.checkpoint folder, read one at a time."""

    def __init__(self, path: Path, key: str) -> None:
        """Read ``.metadata``. Raises `BadInputError` if it is invalid."""
        from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

        self.path, self._key = path, key
        file = path / ".metadata"
        if not file.is_file() or file.is_symlink() or file.stat().st_size > _METADATA_BYTES:
            raise BadInputError(key, str(file), f"must be a file of at most {_METADATA_BYTES >> 30} GiB")
        try:
            found = _MetadataUnpickler(io.BytesIO(file.read_bytes())).load()
            assert isinstance(found, Metadata) and isinstance(found.storage_data, dict)
            self._tensors = {
                str(name): one
                for name, one in found.state_dict_metadata.items()
                if isinstance(one, TensorStorageMetadata)
            }
            self.shapes: Mapping[str, tuple[int, ...]] = {
                name: tuple(int(size) for size in one.size) for name, one in self._tensors.items()
            }
            self._places = {(at.fqn, tuple(at.offset or ())): info for at, info in found.storage_data.items()}
        except Exception as error:
            reason = (str(error) or type(error).__name__).splitlines()[0][:200]
            raise BadInputError(key, str(file), f"not readable ({reason})") from None

    def read(self, name: str) -> torch.Tensor:
        """Return one full tensor in its stored dtype. Raises `BadInputError` if parts of it are missing."""
        known, shape = self._tensors[name], self.shapes[name]
        whole: torch.Tensor | None = None
        filled = 0
        for chunk in known.chunks:
            offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
            inside = len(offsets) == len(sizes) == len(shape) and all(
                start >= 0 and size >= 0 and start + size <= full
                for start, size, full in zip(offsets, sizes, shape, strict=True)
            )
            if not inside:
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
        needed = torch.Size(shape).numel() * item_bytes
        if needed > sum(file.stat().st_size for file in self.path.glob("*.distcp")):
            self._refuse(name, f"has the shape {shape}, more than the files hold")

    def _part(self, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
        info = self._places.get((name, offsets))
        file_name = str(getattr(info, "relative_path", ""))
        file = self.path / file_name
        if info is None or Path(file_name).name != file_name or file.is_symlink() or not file.is_file():
            self._refuse(name, f"must be in a file of this folder, is in {file_name[:100]!r}")
        start, length = int(info.offset), int(info.length)
        if getattr(info, "transform_descriptors", None):
            self._refuse(name, "is packed")
        if start < 0 or length < 0 or start + length > file.stat().st_size:
            self._refuse(name, f"is at bytes {start} to {start + length} of {file_name}, which is shorter")
        with file.open("rb") as opened:
            opened.seek(start)
            content = io.BytesIO(opened.read(length))
        try:
            with zipfile.ZipFile(content) as archive:
                packed = any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist())
            content.seek(0)
            part = None if packed else torch.load(content, map_location="cpu", weights_only=True)
        except Exception as error:
            self._refuse(name, f"not readable ({str(error).splitlines()[0][:150]})")
        tensor = bounded(part, name, self.path, self._key)
        if tensor.numel() != torch.Size(sizes).numel():
            self._refuse(name, f"has a part of {tuple(tensor.shape)} where .metadata says {sizes}")
        return tensor.reshape(sizes)

    def _refuse(self, name: str, problem: str) -> NoReturn:
        raise BadInputError(self._key, str(self.path), f"{name[:200]} {problem}")
