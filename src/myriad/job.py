"""The whole job as one typed value: read, checked across its parts, saved with the run.

    job = load_job("tiny", ["layout.tp=2", "layout.pp=2"])     a path or the name of a recipe, then overrides
    job.check()                                                every cross-field rule; one line when it fails

What it holds is in `myriad.job_values`, what must hold across it in `myriad.job_rules`. No torch here: a job
can be read, checked and explained on a machine that cannot run it.
"""

import difflib
import tomllib
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from myriad.checkpoint.config import CheckpointConfig
from myriad.comm.attempt_layout import AttemptLayout
from myriad.errors import BadInputError
from myriad.job_rules import PLANNING_RULES, RULES, need
from myriad.job_values import (
    SPIKE_STEPS_AFTER,
    SPIKE_STEPS_BEFORE,
    JobValues,
    ResilienceConfig,
    TrainConfig,
    work_of,
)
from myriad.recipes import read_recipe, recipe_names
from myriad.toml_text import dump_toml, parse_override, set_dotted

__all__ = [
    "SPIKE_STEPS_AFTER",
    "SPIKE_STEPS_BEFORE",
    "CheckpointConfig",
    "Job",
    "ResilienceConfig",
    "TrainConfig",
    "dump_toml",
    "job_keys",
    "load_job",
    "load_job_to_plan",
    "parse_job",
    "recipe_names",
    "work_of",
]


class Job(JobValues):
    """Everything a run depends on."""

    def in_attempt(self, changed: AttemptLayout) -> "Job":
        """As the ranks of an attempt compute it: the same batches in another layout, on as many nodes as hold
        its ranks. Raises `BadInputError` for what it cannot be."""
        layout, how = changed.of(self.layout), self.resilience
        update: dict[str, Any] = {"layout": layout}
        if layout.world != self.layout.world:
            each = self.layout.world // how.nodes
            whole = how.nodes == 1 or layout.world % each == 0
            need(whole, "layout.dp", layout.dp, f"must fill nodes of {each} ranks")
            update["resilience"] = how.model_copy(update={"nodes": max(1, layout.world // each)})
            update["comm"] = self.comm.model_copy(update={"node_order": None})
        return self.model_copy(update=update).check()

    def check(self) -> "Job":
        """Every rule that spans fields. Raises `BadInputError`."""
        for rule in RULES:
            rule(self)
        return self


def _expand_model(tree: dict[str, Any]) -> None:
    """``model = "name"`` or ``model.recipe = "name"`` become the recipe's values, own keys on top."""
    model = tree.get("model")
    if isinstance(model, str):
        model = {"recipe": model}
    if isinstance(model, dict) and "recipe" in model:
        own = {key: value for key, value in model.items() if key != "recipe"}
        tree["model"] = read_recipe("models", str(model["recipe"]), "model") | own


def load_job(name_or_path: str, overrides: Sequence[str] = ()) -> Job:
    """A job from a file or recipe with ``key=value`` overrides, checked. Raises `BadInputError`."""
    tree = read_recipe("jobs", name_or_path, "job")
    return _job_of(tree, overrides)


def load_job_to_plan(name_or_path: str, overrides: Sequence[str] = ()) -> Job:
    """Return a job whose layout is still to be chosen. Raises `BadInputError`.

    The file's ``[layout]`` is left out, so a recipe's layout never restricts a plan: `Job.layout` holds only
    the keys among the overrides (its ``model_fields_set``), and only rules that need no layout are checked.
    """
    tree = read_recipe("jobs", name_or_path, "job")
    tree.pop("layout", None)
    job = _validated(tree, overrides)
    for rule in PLANNING_RULES:
        rule(job)
    return job


def parse_job(text: str, source: str, overrides: Sequence[str] = ()) -> Job:
    """A job from the text of a file, checked; ``source`` names it in messages. Raises `BadInputError`."""
    try:
        return _job_of(tomllib.loads(text), overrides)
    except tomllib.TOMLDecodeError as error:
        raise BadInputError("job", source, f"not valid TOML: {error}") from None


def _job_of(tree: dict[str, Any], overrides: Sequence[str]) -> Job:
    return _validated(tree, overrides).check()


def _validated(tree: dict[str, Any], overrides: Sequence[str]) -> Job:
    """The typed values, each checked by itself."""
    for override in overrides:
        set_dotted(tree, *parse_override(override))
    _expand_model(tree)
    try:
        return Job.model_validate(tree)
    except ValidationError as error:
        raise _as_bad_input(error.errors()[0]) from None


def _as_bad_input(error: ErrorDetails) -> BadInputError:
    key, value = ".".join(str(part) for part in error["loc"]), error["input"]
    if error["type"] == "extra_forbidden":
        while isinstance(value, dict) and value:  # of an unknown section: its first key is what was typed
            name, value = next(iter(value.items()))
            key = f"{key}.{name}"
        return BadInputError(key, value, f"unknown key; {_hint(key)}")
    if error["type"] == "model_type":
        keys = ", ".join(known for known, _ in job_keys() if known.startswith(f"{key}."))
        return BadInputError(key, value, f"is a section with the keys {keys}")
    message = error["msg"][0].lower() + error["msg"][1:]
    return BadInputError(key, value, message.removeprefix("input ").removeprefix("value error, "))


def _hint(key: str) -> str:
    known = [dotted for dotted, _ in job_keys()]
    last = key.rpartition(".")[2]
    near = [dotted for dotted in known if dotted.endswith(f".{last}")]
    near = near or difflib.get_close_matches(key, known, 1, 0.5)
    if near:
        return f"did you mean {near[0]}?"
    return f"top-level keys are {', '.join(Job.model_fields)}"


def job_keys(config: type[BaseModel] = Job, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key of a job as ``(dotted name, pydantic FieldInfo)``, in order."""
    for name, field in config.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from job_keys(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, field
