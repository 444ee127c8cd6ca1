"""Read and write model folders in Hugging Face's layout.

    config.json               the model configuration               `hugging_face_config`
    model.safetensors         its tensors, or several such files     `hugging_face_names`
    model.safetensors.index.json       the file that holds each tensor
    generation_config.json, tokenizer.json, tokenizer_config.json, chat_template.jinja

A folder is written beside its final path and renamed, so a kill leaves no partial folder.
"""

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from myriad.checkpoint.checkpoint_files import Shapes, Weights
from myriad.checkpoint.foreign.hugging_face_config import config_of, model_of, read_json
from myriad.checkpoint.foreign.hugging_face_names import (
    TensorMapping,
    missing_or_other,
    prediction_mappings,
    tensor_mappings,
)
from myriad.checkpoint.foreign.hugging_face_sources import Place, Source, is_readable, sources_of, stack_of
from myriad.checkpoint.foreign.hugging_face_values import Quantization, quantization_of
from myriad.checkpoint.foreign.safetensors_file import Box, SafetensorsFile, whole_box
from myriad.checkpoint.storage.staged_folder import staged_folder
from myriad.data.tokenizer import Tokenizer
from myriad.errors import BadInputError
from myriad.model.config import ModelConfig
from myriad.model.experts import BATCH_LOADS
from myriad.system.whole_file import is_own_file, read_regular

__all__ = [
    "COMPANIONS_FOLDER",
    "ExportType",
    "HuggingFaceWeights",
    "copy_companions",
    "end_of_text",
    "is_hugging_face",
    "write_folder",
]

_CONFIG, _WEIGHTS, _INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
COMPANIONS = (
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
"""Files that travel with a model: how text is generated, special tokens, and the template of a chat."""
COMPANIONS_FOLDER = "hugging_face"
"""Folder of a run that holds these files."""
_MOST_COMPANION_BYTES = 2**24
_CACHE_LINKS = ("..", "..", "blobs")
"""Where a file of Hugging Face's cache links to."""
ExportType = Literal["float32", "bfloat16", "float16"]
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SHARD_BYTES = 5 * 10**9
_OUTPUTS = ("lm_head.weight", "embed_out.weight")
"""Names of the output projection."""
_DERIVED = (
    *(".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias"),
    *(".attention.bias", ".attention.masked_bias"),
)
"""Suffixes of tensors that follow from config.json: rotary frequencies, causal masks of GPT-2 and of
GPT-NeoX."""
_BASES = ("model.", "transformer.", "gpt_neox.")
"""Prefixes of all names except the output projection. Files of a base model omit them."""


def is_hugging_face(path: Path) -> bool:
    """Whether a path is a folder in Hugging Face's layout."""
    return (path / _CONFIG).is_file()


def end_of_text(path: Path) -> list[int]:
    """Return the end-of-text tokens in the folder's ``config.json``; empty if there are none."""
    ends = read_json(path / _CONFIG).get("eos_token_id")
    return [] if ends is None else list(ends) if isinstance(ends, list) else [ends]


class HuggingFaceWeights:
    """Weights in a Hugging Face folder, under Myriad's names and in Myriad's shapes."""

    def __init__(self, path: Path, vocabulary_multiple: int = 64, *, compare_tied: bool = True) -> None:
        """Read headers, and the values of an output projection only if it should be tied, unless
        ``compare_tied`` is false: another process has compared them.

        Raises `BadInputError` if the model has no counterpart in Myriad, if a tensor is missing or differs in
        shape or dtype from ``config.json``, and if there are tensors that ``config.json`` does not imply."""
        self.path, self.where = path, str(path)
        self.run: Path | None = None
        config = read_json(path / _CONFIG)
        model = model_of(config, vocabulary_multiple)
        self.model: ModelConfig | None = model
        self._mappings: dict[str, TensorMapping] = {}
        self._sources: dict[str, Source] = {}
        self._compare_tied, self._quantization = compare_tied, quantization_of(config)
        self._places = _find_tensors(path, self._quantization)
        if problem := self._add(tensor_mappings(model, config["model_type"])):
            raise BadInputError("weights", str(path), f"does not match its config.json: {problem}")
        further = _num_predictions(config)
        self.num_left_out = further
        """Prediction layers that ``config.json`` names and that are not read."""
        self.why_left_out: str | None = None
        """The tensor for which they are not read; ``None``: there are none."""
        if further:
            whole = model.model_copy(update={"prediction_layers": further, "prediction_input": "normed"})
            self.why_left_out = self._add(prediction_mappings(whole, config["model_type"]))
            if self.why_left_out is None:
                self.model, self.num_left_out = whole, 0
        self._refuse_others(_names_of_predictions(further, model.layers))
        self.shapes: Shapes = {name: mapping.shape for name, mapping in self._mappings.items()}

    def _add(self, mappings: Sequence[TensorMapping]) -> str | None:
        """Add the tensors of these mappings, or return why they cannot be read."""
        names = [name for mapping in mappings for name in mapping.their_shapes()]
        sources = sources_of(self._places, names, self._quantization)
        found = {name: source.shape for name, source in sources.items()}
        if problem := next(missing_or_other(mappings, found), None):
            return problem
        self._mappings |= {mapping.name: mapping for mapping in mappings}
        self._sources |= sources
        return None

    @property
    def bytes_read(self) -> int:
        """Bytes of values that were read so far."""
        return sum(file.bytes_read for file in {place.file for place in self._places.values()})

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor by Myriad's name."""
        return self._mappings[name].read_box(_read_once(self._read_theirs), whole_box(self.shapes[name]))

    def read_parts(self, name: str, boxes: Sequence[Box]) -> Iterator[torch.Tensor]:
        """Yield parts of one tensor, and read no others."""
        theirs = _read_once(self._read_theirs)
        for box in boxes:
            yield self._mappings[name].read_box(theirs, box)

    def _refuse_others(self, unused: tuple[str, ...]) -> None:
        """Raise `BadInputError` for tensors that would be dropped, unless the model does not need them.
        ``unused``: beginnings of the names of some that it does not need."""
        used = {place for source in self._sources.values() for place in source.places}
        others = {place.name for place in self._places.values() if place not in used}
        left = [
            name
            for name in sorted(others)
            if not name.endswith(_DERIVED) and not name.startswith(unused) and not self._is_tied(name)
        ]
        if left:
            more = f" and {len(left) - 3} more" if len(left) > 3 else ""
            problem = f"holds tensors that its config.json does not name: {', '.join(left[:3])}{more}"
            raise BadInputError(
                "weights", str(self.path), f"{problem}; if the model does not need them, remove them"
            )

    def _is_tied(self, name: str) -> bool:
        """Whether a tensor is an output projection that equals the embedding."""
        table = self._mappings["embedding.tokens.weight"].row_slices[0].name
        output, tokens = (self._places[one].stored for one in (name, table))
        if name not in _OUTPUTS or not is_readable(name, output.dtype, None):
            return False
        if (output.dtype, output.shape) != (tokens.dtype, tokens.shape):
            return False
        rows, columns = tokens.shape
        boxes = [
            (slice(row, min(row + _COMPARED_ROWS, rows)), slice(0, columns))
            for row in range(0, rows if self._compare_tied else 0, _COMPARED_ROWS)
        ]
        return all(torch.equal(self._read_theirs(name, box), self._read_theirs(table, box)) for box in boxes)

    def _read_theirs(self, name: str, box: Box) -> torch.Tensor:
        if name in self._sources:
            return self._sources[name].read(box)
        place = self._places[name]
        return place.file.read(place.name, box)


_Read = Callable[[str, Box], torch.Tensor]


def _read_once(theirs: _Read) -> _Read:
    """Return a function that reads parts, and the same part only once in a row: gates and values that take
    turns are of one part."""
    kept: dict[tuple[str, str], torch.Tensor] = {}

    def read(name: str, box: Box) -> torch.Tensor:
        key = name, str(box)
        if key not in kept:
            kept.clear()
            kept[key] = theirs(name, box)
        return kept[key]

    return read


_MOST_PREDICTION_LAYERS = 16


def _num_predictions(config: Mapping[str, Any]) -> int:
    """Return the number of prediction layers that a ``config.json`` of DeepSeek names; 0 for any other
    value."""
    number = config.get("num_nextn_predict_layers")
    if isinstance(number, bool) or not isinstance(number, int) or not 0 < number <= _MOST_PREDICTION_LAYERS:
        return 0
    return number


def _names_of_predictions(number: int, layers: int) -> tuple[str, ...]:
    """Return the beginnings of the names of prediction layers, which follow the model's layers. Their copies
    of the embedding and the output projection are not read: these are shared."""
    return tuple(f"model.layers.{layer}." for layer in range(layers, layers + number))


_COMPARED_ROWS = 1024
"""Rows of two tables in memory while they are compared."""


def _find_tensors(path: Path, quantization: Quantization | None) -> Mapping[str, Place]:
    """Return the location of every tensor, by full name."""
    places: dict[str, Place] = {}
    for file_path in _weight_files(path):
        file = SafetensorsFile(file_path)
        for name, stored in file.tensors.items():
            if not is_readable(name, stored.dtype, quantization) and not name.endswith(_DERIVED):
                allowed = f"{name} is stored as {stored.dtype}: one of F32, F16, BF16, or quantized as its "
                allowed += "config.json says (quantization_config: fp8 or mxfp4)"
                raise BadInputError("weights", str(file_path), allowed)
            if name in places:
                raise BadInputError(
                    "weights", str(file_path), f"{name} is in {places[name].file.path} as well"
                )
            places[name] = Place(file, name)
    _refuse_other_index(path, places)
    if any(name.startswith(_BASES) for name in places):
        return places
    return places | {f"{base}{name}": place for base in _BASES for name, place in places.items()}


def _weight_files(path: Path) -> Sequence[Path]:
    if (path / _INDEX).is_file():
        return [path / name for name in sorted(set(_weight_map(path).values()))]
    if not (path / _WEIGHTS).is_file():
        raise BadInputError(
            "weights", str(path), f"must hold {_WEIGHTS} or {_INDEX}; other formats are not read"
        )
    return [path / _WEIGHTS]


def _weight_map(path: Path) -> dict[str, str]:
    """Return the file name of each tensor according to the index; empty without an index.

    Raises `BadInputError` if a file is not in the folder."""
    if not (path / _INDEX).is_file():
        return {}
    places = read_json(path / _INDEX).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise BadInputError("weights", str(path / _INDEX), "must have a weight_map of tensors and files")
    for tensor, name in places.items():
        if not is_own_file(path, name):
            allowed = f"{tensor[:200]} must be in a file of this folder, is in {name!r:.100}"
            raise BadInputError("weights", str(path / _INDEX), allowed)
    return places


def _refuse_other_index(path: Path, places: Mapping[str, Place]) -> None:
    """Raise `BadInputError` if files do not match their index: some may be of another model or version."""
    for tensor, name in _weight_map(path).items():
        found = places.get(tensor)
        if found is None and tensor.endswith(_DERIVED):
            continue
        if found is None or found.file.path.name != name:
            there = "is not there" if found is None else f"is in {found.file.path.name}"
            raise BadInputError("weights", str(path / _INDEX), f"{tensor} should be in {name}, {there}")


def write_folder(
    weights: Weights,
    model: ModelConfig,
    out: Path,
    tokenizer: Tokenizer | None,
    dtype: ExportType = "float32",
    shard_bytes: int = _SHARD_BYTES,
    model_type: str | None = None,
    companions: Path | None = None,
) -> None:
    """Write to ``out`` all that ``AutoModelForCausalLM`` and ``AutoTokenizer`` need for ``from_pretrained``.

    One file's tensors are in memory at a time. ``model_type``: by default the first that fits.
    ``companions``: folder with files that replace those written with the tokenizer (`copy_companions`).
    Raises `BadInputError`, with nothing written, if the model has no Hugging Face counterpart, if weights
    exceed float16's range and ``dtype`` is float16, or if ``out`` is not empty."""
    end = None if tokenizer is None else tokenizer.end_of_document
    config = config_of(model, dtype, end, model_type)
    mappings = tensor_mappings(model, config["model_type"])
    _refuse_other_weights(weights, mappings)
    with staged_folder(out) as partial:
        _write_json(partial / _CONFIG, config)
        ends = {key: end for key in ("bos_token_id", "eos_token_id") if end is not None}
        _write_json(partial / "generation_config.json", ends)
        if tokenizer is not None:
            _write_tokenizer(partial, tokenizer, model.sequence)
            if companions is not None and companions.is_dir():
                copy_companions(companions, partial)
        _write_weights(
            partial, weights, _in_shards(mappings, _DTYPES[dtype].itemsize, shard_bytes), _DTYPES[dtype]
        )


def _refuse_other_weights(weights: Weights, mappings: Sequence[TensorMapping]) -> None:
    """Raise `BadInputError` if the weights are not those of the model to be written, which has no prediction
    layers and no loads of experts."""
    expected = {mapping.name: mapping.shape for mapping in mappings}
    written = (name for name in weights.shapes if not name.startswith("head.predictions."))
    found = (name for name in written if not name.endswith(BATCH_LOADS))
    for name in sorted(expected.keys() | set(found)):
        here, there = expected.get(name), weights.shapes.get(name)
        if here != there:
            is_there = "not there" if there is None else f"{list(there)}"
            should = "not be there" if here is None else f"be {list(here)}"
            allowed = f"not the model of its job.toml: {name} is {is_there}, should {should}"
            raise BadInputError("PATH", weights.where, allowed)


def copy_companions(source: Path, out: Path) -> None:
    """Copy the files that travel with a model besides its weights and its tokenizer, those that there are,
    and create ``out`` if there are any.

    Raises `BadInputError` for one that is no file of a few megabytes, and for a link to another place: an
    export would publish a file of the user."""
    for name in COMPANIONS:
        path = source / name
        if not path.exists():
            continue
        if path.resolve().parent not in (source.resolve(), source.joinpath(*_CACHE_LINKS).resolve()):
            raise BadInputError(
                "path", str(path), "must be a file of this folder, not a link to another place"
            )
        try:
            content = read_regular(path, _MOST_COMPANION_BYTES)
        except OSError as error:
            raise BadInputError("path", str(path), f"cannot be read: {error.strerror or error}") from None
        out.mkdir(exist_ok=True)
        (out / name).write_bytes(content)


def _write_tokenizer(folder: Path, tokenizer: Tokenizer, sequence: int) -> None:
    tokenizer.save(folder)
    end = tokenizer.token(tokenizer.end_of_document)
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": end,
            "eos_token": end,
            "model_max_length": sequence,
            "clean_up_tokenization_spaces": False,
        },
    )


def _units(mappings: Sequence[TensorMapping]) -> list[list[TensorMapping]]:
    """Return mappings in groups that are written together: the entries of a stack, or one mapping."""
    found: dict[str, list[TensorMapping]] = {}
    for mapping in mappings:
        stack = stack_of(mapping.row_slices[0].name)
        found.setdefault(mapping.name if stack is None else stack[0], []).append(mapping)
    return list(found.values())


_Unit = Sequence[TensorMapping]


def _in_shards(mappings: Sequence[TensorMapping], item_bytes: int, shard_bytes: int) -> list[list[_Unit]]:
    shards: list[list[_Unit]] = [[]]
    filled = 0
    for unit in _units(mappings):
        shapes = [shape for mapping in unit for shape in mapping.their_shapes().values()]
        size = item_bytes * sum(math.prod(shape) for shape in shapes)
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(unit)
        filled += size
    return shards


def _write_weights(
    folder: Path, weights: Weights, shards: Sequence[Sequence[_Unit]], dtype: torch.dtype
) -> None:
    total = 0
    places: dict[str, str] = {}
    for number, units in enumerate(shards, 1):
        name = _WEIGHTS if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors: dict[str, torch.Tensor] = {}
        for unit in units:
            tensors |= _written(weights, unit, dtype)
        _save(tensors, folder / name)
        shutil.copymode(folder / _CONFIG, folder / name)  # safetensors makes it readable by its owner only
        total += sum(tensor.nbytes for tensor in tensors.values())
        places |= dict.fromkeys(tensors, name)
    if len(shards) > 1:
        _write_json(folder / _INDEX, {"metadata": {"total_size": total}, "weight_map": places})


def _written(weights: Weights, unit: _Unit, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the tensors of the files that a unit is written to."""
    found: dict[str, torch.Tensor] = {}
    for mapping in unit:
        for name, values in mapping.write(_rounded(weights, mapping.name, dtype)).items():
            stack = stack_of(name)
            if stack is None:
                found[name] = values
                continue
            if stack[0] not in found:
                found[stack[0]] = values.new_empty(len(unit), *values.shape)
            found[stack[0]][stack[1]] = values
    return found


def _rounded(weights: Weights, name: str, dtype: torch.dtype) -> torch.Tensor:
    values = weights.read(name)
    if dtype == torch.float16 and float(values.abs().max()) > torch.finfo(dtype).max:
        raise BadInputError("--dtype", "float16", f"float32 or bfloat16: {name} has values beyond 65,504")
    return values if name.endswith(".router.bias") else values.to(dtype)  # transformers keeps them, too


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(str(error).removeprefix("Error while serializing: ")) from None


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
