"""A ``config.json`` of Hugging Face as typed values, the rotary positions that it describes, and how weights
are quantized."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from myriad.errors import BadInputError, plain_value
from myriad.kernels.rotary_scaling import RotaryScaling

__all__ = ["ConfigValues", "Quantization", "quantization_of", "read_mscales", "read_rotary", "written_rotary"]

_LARGEST = 1e300
"""Largest number that is read: JSON has integers that no float can hold."""


@dataclass(frozen=True)
class ConfigValues:
    """A ``config.json``, with transformers' defaults for missing fields."""

    values: Mapping[str, Any]
    defaults: Mapping[str, Any]

    def get(self, key: str) -> Any:
        """Return a value, or transformers' default, or ``None``."""
        return self.values.get(key, self.defaults.get(key))

    def size(self, key: str) -> int:
        """Return a whole number from 1 to 2^62. Raises `BadInputError`."""
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 2**62:
            raise BadInputError(key, value, "a whole number of at least 1, up to 2^62, in config.json")
        return value

    def size_or_none(self, key: str) -> int | None:
        """Return a whole number of at least 1, or ``None`` if the field is missing or null."""
        return None if self.get(key) is None else self.size(key)

    def number(self, key: str) -> float:
        """Return a finite number. Raises `BadInputError`."""
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _LARGEST:
            raise BadInputError(key, value, "a number in config.json")
        return value

    def number_or_none(self, key: str) -> float | None:
        """Return a number, or ``None`` if the field is missing or null."""
        return None if self.get(key) is None else self.number(key)

    def flag(self, key: str) -> bool:
        """Return true or false; a missing field is false. Raises `BadInputError`."""
        value = self.get(key)
        if value not in (None, True, False):
            raise BadInputError(key, value, "true or false in config.json")
        return bool(value)

    def names(self, key: str, length: int, *allowed: object) -> list[Any] | None:
        """Return a list of ``length`` of the allowed values; ``None`` if the field is missing or null."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != length or any(one not in allowed for one in value):
            choices = ", ".join(map(_as_json, allowed))
            raise BadInputError(key, value, f"a list of {length} of {choices} in config.json")
        return value

    def must_be(self, key: str, *allowed: object) -> None:
        """Raise `BadInputError` unless the field has one of these values."""
        value = self.get(key)
        if value not in allowed:
            choices = " or ".join(map(_as_json, allowed))
            raise BadInputError(key, value, f"{choices} in config.json; nothing else can be read")


def _as_json(value: object) -> str:
    """Return a value of a ``config.json``, text without quotes."""
    return "null" if value is None else plain_value(value)


_SCALING_FIELDS = {
    "linear": {"factor": "factor"},
    "dynamic": {"factor": "factor"},
    "yarn": {
        "factor": "factor",
        "original_max_position_embeddings": "original_sequence",
        "attention_factor": "attention_factor",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "truncate": "truncate",
    },
    "longrope": {
        "factor": "factor",
        "original_max_position_embeddings": "original_sequence",
        "attention_factor": "attention_factor",
        "short_factor": "short_factors",
        "long_factor": "long_factors",
    },
    "llama3": {
        "factor": "factor",
        "original_max_position_embeddings": "original_sequence",
        "low_freq_factor": "low_frequency_factor",
        "high_freq_factor": "high_frequency_factor",
    },
}
"""Fields of the scaling of each kind, and the keys of `RotaryScaling`."""
_OTHER_FIELDS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "mscale", "mscale_all_dim"}


def _parts(theirs: ConfigValues, layer_type: str | None) -> list[Mapping[str, Any]]:
    """Return the objects that describe the rotary positions of a type of layer, in versions 4 and 5."""
    found: list[Mapping[str, Any]] = []
    for key in ("rope_parameters", "rope_scaling"):
        rope = theirs.get(key) or {}
        if not isinstance(rope, dict):
            raise BadInputError(key, rope, "an object in config.json")
        has_types = any(isinstance(value, dict) for value in rope.values())
        if has_types and layer_type is None:
            raise BadInputError(key, rope, "one object, not one for each type of layer, in config.json")
        if has_types:
            rope = rope.get(layer_type) or {}
            if not isinstance(rope, dict):
                raise BadInputError(f"{key}.{layer_type}", rope, "an object in config.json")
        elif layer_type == "sliding_attention":  # one object belongs to the layers with full attention
            rope = {}
        found.append(rope)
    return found


def read_rotary(
    theirs: ConfigValues, base_key: str, default_base: float, layer_type: str | None = None
) -> tuple[float, RotaryScaling, float | None]:
    """Return the base, the scaling and the rotated fraction of each head (``None``: not given).

    ``base_key``: field of the base outside of these objects. ``layer_type``: "full_attention" or
    "sliding_attention" in models that have one description for each. Raises `BadInputError` for values that
    cannot be read exactly."""
    parts = _parts(theirs, layer_type)
    bases = [
        theirs.number_or_none(base_key),
        *(ConfigValues(part, {}).number_or_none("rope_theta") for part in parts),
    ]
    given = [base for base in bases if base is not None]
    if len(set(given)) > 1:
        raise BadInputError("rope_theta", sorted(set(given)), "one value in config.json")
    scalings = [scaling for part in parts if (scaling := _scaling(theirs, part)).kind != "none"]
    if len(scalings) == 2 and scalings[0] != scalings[1]:
        raise BadInputError("rope_scaling", dict(parts[1]), "the values of rope_parameters in config.json")
    fractions = [ConfigValues(part, {}).number_or_none("partial_rotary_factor") for part in parts]
    fraction = next((one for one in fractions if one is not None), None)
    return given[0] if given else default_base, scalings[0] if scalings else RotaryScaling(), fraction


def read_whole_rotary(theirs: ConfigValues, default_base: float = 1e4) -> dict[str, Any]:
    """Return the values of `ModelConfig` for rotary positions that rotate whole heads."""
    base, scaling, fraction = read_rotary(theirs, "rope_theta", default_base)
    if fraction not in (None, 1.0):
        raise BadInputError("partial_rotary_factor", fraction, "1 in config.json of this model type")
    return {"rotary_base": base, "rotary_scaling": scaling}


def read_partial_rotary(
    theirs: ConfigValues,
    default_fraction: float,
    base_key: str = "rope_theta",
    fraction_key: str = "partial_rotary_factor",
) -> dict[str, Any]:
    """Return the values of `ModelConfig` for rotary positions that may rotate a part of each head.
    ``base_key``, ``fraction_key``: fields outside of the objects that `read_rotary` reads."""
    base, scaling, fraction = read_rotary(theirs, base_key, 1e4)
    outer = theirs.number_or_none(fraction_key)
    fraction = next((one for one in (fraction, outer) if one is not None), default_fraction)
    return {"rotary_base": base, "rotary_scaling": scaling, "rotary_fraction": fraction}


def read_mscales(theirs: ConfigValues) -> tuple[dict[str, float], bool]:
    """Return DeepSeek's factors of yarn by their keys in `RotaryScaling`, without those that are 0, and
    whether the file has an attention factor beside them."""
    found: dict[str, float] = {}
    given = False
    for rope in _parts(theirs, None):
        values = ConfigValues(rope, {})
        for key in ("mscale", "mscale_all_dim"):
            if value := values.number_or_none(key):
                found[key] = value
        given = given or values.get("attention_factor") is not None
    return found, given


def _scaling(theirs: ConfigValues, rope: Mapping[str, Any]) -> RotaryScaling:
    """Return the scaling that one object describes."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    kind = "longrope" if kind == "su" else kind
    if kind == "default":
        return RotaryScaling()
    if not isinstance(kind, str) or kind not in _SCALING_FIELDS:
        choices = ", ".join(["default", *_SCALING_FIELDS])
        raise BadInputError("rope_type", kind, f"one of {choices} in config.json")
    fields, values = _SCALING_FIELDS[kind], ConfigValues(rope, {})
    if unknown := next(
        (key for key in rope if key not in fields | dict.fromkeys(_OTHER_FIELDS) and rope[key]), None
    ):
        raise BadInputError(
            unknown, rope[unknown], f"a field that rope_type {kind} does not have, in config.json"
        )
    found: dict[str, Any] = {ours: rope[name] for name, ours in fields.items() if rope.get(name) is not None}
    values.number_or_none("factor")  # checked before it is used in computations
    longest = theirs.size("max_position_embeddings")
    if kind == "dynamic":  # starts at the longest sequence, whatever the original one was
        found["original_sequence"] = longest
    elif kind != "linear":
        outer = theirs.size_or_none("original_max_position_embeddings")
        original = found.setdefault("original_sequence", outer or longest)
        if outer not in (None, original):
            key = "original_max_position_embeddings"
            raise BadInputError(key, [original, outer], "one value in config.json")
    if kind in ("yarn", "longrope") and "factor" not in found and isinstance(found["original_sequence"], int):
        found["factor"] = max(1.0, longest / max(1, found["original_sequence"]))
    scales = [values.number_or_none(key) for key in ("mscale", "mscale_all_dim")]
    if kind == "yarn" and "attention_factor" not in found and all(scales):
        one, other = (0.1 * (scale or 0.0) * math.log(max(1.0, found["factor"])) + 1.0 for scale in scales)
        found["attention_factor"] = one / other
    return RotaryScaling(kind=kind, **found)


def written_rotary(base: float, scaling: RotaryScaling, fraction: float | None = None) -> dict[str, Any]:
    """Return the object that describes rotary positions in version 5 of transformers."""
    kind = "default" if scaling.kind == "none" else scaling.kind
    written: dict[str, Any] = {"rope_type": kind, "rope_theta": base}
    for name, ours in _SCALING_FIELDS.get(kind, {}).items():
        value = getattr(scaling, ours)
        if value is not None:
            written[name] = list(value) if isinstance(value, tuple) else value
    mscales = {"mscale": scaling.mscale, "mscale_all_dim": scaling.mscale_all_dim}
    written |= {key: value for key, value in mscales.items() if value is not None}
    return written if fraction is None else written | {"partial_rotary_factor": fraction}


class Quantization(NamedTuple):
    """How some of the stored weights are quantized (`myriad.checkpoint.foreign.hugging_face_sources`)."""

    kind: Literal["fp8", "mxfp4"]
    block: tuple[int, int] = (1, 1)
    """Rows and columns that have one factor in fp8."""


_QUANTIZATION = "quantization_config"
_QUANTIZATION_FIELDS = {
    "mxfp4": {"quant_method", "modules_to_not_convert", "dequantize"},
    "fp8": {"quant_method", "modules_to_not_convert", "dequantize", "activation_scheme", "fmt", "scale_fmt"}
    | {"weight_block_size"},
}
"""Fields that are read, or do not change the values: the stored tensors show which modules are converted."""
_MOST_BLOCK = 2**16


def quantization_of(config: Mapping[str, Any]) -> Quantization | None:
    """Return how the weights of a ``config.json`` are quantized; ``None``: not at all. Raises
    `BadInputError`."""
    found = config.get(_QUANTIZATION)
    if not found:
        return None
    method = found.get("quant_method") if isinstance(found, dict) else None
    if not isinstance(method, str) or method not in _QUANTIZATION_FIELDS:
        allowed = "quant_method fp8 or mxfp4 in config.json: any other quantization is not understood"
        raise BadInputError(_QUANTIZATION, found, allowed)
    if other := next((key for key in found if key not in _QUANTIZATION_FIELDS[method] and found[key]), None):
        allowed = f"a field that is not understood with quant_method {method}, in config.json"
        raise BadInputError(f"{_QUANTIZATION}.{other}", found[other], allowed)
    if method == "mxfp4":
        return Quantization("mxfp4")
    values = ConfigValues(found, {})
    values.must_be("fmt", None, "e4m3")
    values.must_be("activation_scheme", None, "dynamic")
    block = found.get("weight_block_size")
    sizes = [one for one in block if type(one) is int] if isinstance(block, list) else []
    if len(sizes) != 2 or block != sizes or not all(1 <= one <= _MOST_BLOCK for one in sizes):
        allowed = f"two whole numbers up to {_MOST_BLOCK:,}, rows and columns, in config.json"
        raise BadInputError(f"{_QUANTIZATION}.weight_block_size", block, allowed)
    return Quantization("fp8", (sizes[0], sizes[1]))
