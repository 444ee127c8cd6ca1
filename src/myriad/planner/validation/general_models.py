"""The model of a row of the general form: by its recipe or name, with the row's own numbers on top."""

import re
from collections.abc import Callable, Mapping
from functools import cache
from importlib import resources
from typing import Any

from myriad.config import parse_toml
from myriad.model.config import ModelConfig
from myriad.planner.cost.stage_layers import layer_parameters
from myriad.planner.validation.general_cells import GeneralCells

__all__ = ["model_of"]


_KEYS = {
    "layers": "layers",
    "hidden": "hidden",
    "ffn": "ffn_hidden",
    "heads": "heads",
    "kv_heads": "kv_heads",
    "vocab": "vocabulary",
    "seq": "sequence",
    "experts": "experts",
    "experts_per_token": "experts_per_token",
    "expert_ffn": "expert_hidden",
    "shared_experts": "shared_experts",
}
"""Keys of a model by the column that gives them."""
_PLAIN = re.compile(r"gpt|mpt|bloom|opt\b|nemotron|falcon|pythia|megatron", re.IGNORECASE)
"""Names of models whose MLP has no gate. Models with other names have Llama's blocks."""
_GPT: Mapping[str, Any] = {"position": "learned", "norm": "layer", "bias": True, "activation": "gelu"}
_MPT: dict[str, Any] = {"position": "none", "norm": "layer", "bias": True, "activation": "gelu"}
_LLAMA: Mapping[str, Any] = {"position": "rotary", "norm": "rms", "activation": "swiglu", "tied": False}


def model_of(read: GeneralCells, recipe: Callable[[str], Mapping[str, Any] | None]) -> ModelConfig:
    """Return the model of a row. ``recipe`` returns the keys of a model by its name. Raises
    `BadInputError`."""
    name = re.sub(r"[ _]", "-", read.word("model").split("/")[0].strip().lower())
    known = _known(name, recipe)
    values: dict[str, Any] = dict(known or _family(name))
    sparse = "experts" in values
    if read.has("activation"):
        values["activation"] = read.word("activation")
    for column, key in _KEYS.items():
        if not read.has(column) or (column.startswith("expert") and known and sparse):
            continue
        if column == "ffn" and sparse and "expert_hidden" in values:
            continue  # Tables of experts give the width of one, which the recipe has.
        values[key] = read.whole(column)
    values |= read.model_keys()
    for key in ("layers", "hidden", "dense_layers"):
        if type(values.get(key, 0)) is not int:
            raise read.refused(f"model.{key}", "a whole number")
    for column in ("layers", "hidden", "seq"):
        if _KEYS[column] not in values:
            raise read.refused(column, f"needed: there is no recipe of the model {read.word('model')!r}")
    values.setdefault("heads", _usual_heads(values["hidden"], read.whole("tp", 1)))
    if "vocabulary" not in values:
        raise read.refused("vocab", f"needed: there is no recipe of the model {read.word('model')!r}")
    if values.get("dense_layers", 0) >= values["layers"]:
        values["dense_layers"] = values["layers"] - 1
    _share_width(read, values)
    model = ModelConfig(**values)
    if known is None and read.has("params_B"):
        return _as_large(model, read.number("params_B") * 1e9)
    return model


def _as_large(model: ModelConfig, parameters: float) -> ModelConfig:
    """Return the model with tied embeddings or without, and with experts also with a shared one if none is
    stated, whichever has nearly as many parameters."""
    shared = (
        {model.shared_experts, 1} if model.experts and not model.shared_experts else {model.shared_experts}
    )
    every = [
        model.model_copy(update={"tied": tied, "shared_experts": number})
        for number in sorted(shared)
        for tied in (model.tied, not model.tied)
    ]

    def difference(one: ModelConfig) -> float:
        return abs(sum(layer_parameters(one)) - one.tied * _vocabulary_parameters(one) - parameters)

    return min(every, key=difference)


def _vocabulary_parameters(model: ModelConfig) -> int:
    """Return the parameters of the embedding, which the head counts too where they are tied."""
    return model.padded_vocabulary() * model.hidden


def _family(name: str) -> Mapping[str, Any]:
    """Return the keys that models of a name have in common."""
    if re.search(r"mpt|bloom", name):
        return _MPT
    return _GPT if _PLAIN.search(name) else _LLAMA


_MOST_HEADS = 2**16
"""Largest number of heads of a model."""


def _usual_heads(hidden: int, tp: int) -> int:
    """Return the number of heads whose width is nearest to 128, of those that ``tp`` ranks can share."""
    most = min(hidden, _MOST_HEADS)
    possible = [number for number in range(tp, most + 1, tp) if hidden % number == 0] or [1]
    return min(possible, key=lambda number: abs(number - hidden / 128))


def _share_width(read: GeneralCells, values: dict[str, Any]) -> None:
    """Read the width of all shared experts together, where the notes give that."""
    if "experts" not in values or not read.has("shared_width") or "shared_experts" in values:
        return
    widths = (values.get(key) for key in ("expert_hidden", "ffn_hidden"))
    each = next((width for width in widths if isinstance(width, int) and width > 0), 1)
    values["shared_experts"] = max(1, read.whole("shared_width") // each)


def _known(name: str, recipe: Callable[[str], Mapping[str, Any] | None]) -> Mapping[str, Any] | None:
    """Return the keys of a model by its recipe, or by the names of published tables."""
    found = _named_models().get(name)
    if found is None:
        return recipe(name)
    base = recipe(found["recipe"]) if "recipe" in found else {}
    return {**(base or {}), **{key: value for key, value in found.items() if key != "recipe"}}


@cache
def _named_models() -> Mapping[str, Any]:
    """Return the models of published tables whose names are no recipes, by their names there."""
    text = (resources.files("myriad.planner.validation") / "tables" / "models.toml").read_text("utf-8")
    return parse_toml(text)
