"""The whole job as one typed value: read, checked across its parts, saved with the run.

    job = load_job("tiny", ["layout.tp=2", "layout.pp=2"])     a path or the name of a recipe, then overrides
    job.check()                                                every cross-field rule; one line when it fails

No torch here: a job can be read, checked and explained on a machine that cannot run it.
"""

import difflib
import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError
from pydantic_core import ErrorDetails

from myriad.comm.layout import Layout
from myriad.config import Config
from myriad.data.config import DataConfig
from myriad.errors import BadInputError
from myriad.model.config import ModelConfig
from myriad.optim.config import OptimizerConfig, Precision

__all__ = ["CheckpointConfig", "Job", "TrainConfig", "dump_toml", "load_job", "recipe_names"]


class TrainConfig(Config):
    """How long, how much at a time, on what."""

    steps: int = Field(100, ge=1)
    """Iterations of the whole run."""
    global_batch: int = Field(8, ge=1)
    """Sequences in one iteration, over all ranks and micro-batches."""
    seed: int = Field(1, ge=0)
    """Of initial weights, sample order and dropout."""
    precision: Precision = "auto"
    """float32, bfloat16, or auto: bfloat16 where the device multiplies it natively."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where there is one."""
    threads: int = Field(0, ge=0)
    """Threads of each rank on CPU; 0: the cores divided among the node's ranks."""
    validate_every: int = Field(0, ge=0)
    """Steps between validations (the last step always validates when the data has held-out text); 0: only the last."""
    sample_prompt: str | None = None
    """Text to continue at the end; off: no sample."""


class CheckpointConfig(Config):
    """What is kept."""

    every: int = Field(0, ge=0)
    """Steps between checkpoints; 0: only the last step and on Ctrl-C."""
    keep: int = Field(2, ge=1)
    """Newest checkpoints kept."""


class Job(Config):
    """Everything a run depends on."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run folder under runs/."""
    model: ModelConfig = ModelConfig()
    """The transformer; in a job file also the name of a recipe: model = "gpt2-124m"."""
    data: DataConfig = DataConfig()
    """What it reads."""
    layout: Layout = Layout()
    """How it is spread over ranks."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """How parameters move."""
    train: TrainConfig = TrainConfig()
    """How long, how much at a time, on what."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """What is kept."""

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of one rank in one iteration."""
        return self.train.global_batch // (self.layout.dp * self.layout.micro_batch)

    def check(self) -> "Job":
        """Every rule that spans fields. Raises `BadInputError`."""
        for rule in _RULES:
            rule(self)
        return self


def _refuse_unless(condition: bool, key: str, value: object, allowed: str) -> None:
    if not condition:
        raise BadInputError(key, value, allowed)


def _check_heads(job: Job) -> None:
    model, tp = job.model, job.layout.tp
    if model.head_dim is None:
        allowed = f"must be divisible by model.heads = {model.heads}, or give model.head_dim"
        _refuse_unless(model.hidden % model.heads == 0, "model.hidden", model.hidden, allowed)
    allowed = f"must be divisible by model.kv_heads = {model.num_kv_heads}"
    _refuse_unless(model.heads % model.num_kv_heads == 0, "model.heads", model.heads, allowed)
    if model.position == "rotary":
        _refuse_unless(model.head_width % 2 == 0, "model.head_dim", model.head_width, "rotary needs an even width")
    divides = [tp_ok for tp_ok in range(1, model.num_kv_heads + 1) if model.num_kv_heads % tp_ok == 0]
    allowed = f"must divide the key/value heads ({model.num_kv_heads}): one of {', '.join(map(str, divides))}"
    _refuse_unless(model.num_kv_heads % tp == 0, "layout.tp", tp, allowed)


def _check_tensor_parallel(job: Job) -> None:
    model, tp = job.model, job.layout.tp
    _refuse_unless(model.ffn_width % tp == 0, "layout.tp", tp, f"must divide model.ffn_hidden = {model.ffn_width}")
    _refuse_unless(model.sequence % tp == 0, "layout.tp", tp, f"must divide model.sequence = {model.sequence}")
    model.padded_vocabulary(tp)


def _check_axes_not_built(job: Job) -> None:
    _refuse_unless(job.layout.cp == 1, "layout.cp", job.layout.cp, "only 1: context parallelism is not built yet")
    _refuse_unless(job.layout.ep == 1, "layout.ep", job.layout.ep, "only 1: expert parallelism is not built yet")


def _check_stages(job: Job) -> None:
    layout, pieces = job.layout, job.model.layers + 2
    allowed = f"at most {pieces} stages (pp x virtual_stages) for {job.model.layers} blocks, embedding and head"
    _refuse_unless(layout.num_stages <= pieces, "layout.pp x layout.virtual_stages", layout.num_stages, allowed)
    if layout.schedule in ("1f1b", "zero-bubble"):
        allowed = f"1 with schedule {layout.schedule}; interleaved and gpipe take more"
        _refuse_unless(layout.virtual_stages == 1, "layout.virtual_stages", layout.virtual_stages, allowed)


def _check_partition(job: Job) -> None:
    partition = job.layout.partition
    kind, _, rest = partition.partition(":")
    allowed = "uniform, parameters, profile, type:REGEX or manual:B1,B2,... (first layer of each later stage)"
    if kind == "type":
        try:
            re.compile(rest)
        except re.error as error:
            raise BadInputError("layout.partition", partition, f"not a regular expression: {error}") from None
        _refuse_unless(bool(rest), "layout.partition", partition, allowed)
    elif kind == "manual":
        _refuse_unless(re.fullmatch(r"\d+(,\d+)*", rest) is not None, "layout.partition", partition, allowed)
        cuts, pieces = [int(cut) for cut in rest.split(",")], job.model.layers + 2
        rising = all(a < b for a, b in zip([0, *cuts], [*cuts, pieces], strict=True))
        allowed = f"{job.layout.num_stages - 1} rising cuts between 1 and {pieces - 1}"
        _refuse_unless(rising and len(cuts) == job.layout.num_stages - 1, "layout.partition", partition, allowed)
    else:
        _refuse_unless(partition in ("uniform", "parameters", "profile"), "layout.partition", partition, allowed)


def _check_batch(job: Job) -> None:
    layout, batch = job.layout, job.train.global_batch
    unit = layout.dp * layout.micro_batch
    allowed = f"must be a multiple of layout.dp x layout.micro_batch = {unit}"
    _refuse_unless(batch % unit == 0, "train.global_batch", batch, allowed)
    if layout.schedule_name == "interleaved" and layout.pp > 1:
        allowed = f"interleaved needs micro-batches ({job.num_micro_batches}) in multiples of layout.pp = {layout.pp}"
        _refuse_unless(job.num_micro_batches % layout.pp == 0, "train.global_batch", batch, allowed)


def _check_window(job: Job) -> None:
    window = job.model.window
    allowed = f"at most model.sequence = {job.model.sequence}; leave it out for full attention"
    _refuse_unless(window is None or window <= job.model.sequence, "model.window", window, allowed)
    _refuse_unless(len(job.model.window_pattern) > 0, "model.window_pattern", [], "at least one of true, false")


def _check_warmup(job: Job) -> None:
    warmup, steps = job.optimizer.warmup_steps, job.train.steps
    _refuse_unless(warmup <= steps, "optimizer.warmup_steps", warmup, f"at most train.steps = {steps}")


_RULES: tuple[Callable[[Job], None], ...] = (
    _check_axes_not_built,
    _check_heads,
    _check_tensor_parallel,
    _check_stages,
    _check_partition,
    _check_batch,
    _check_window,
    _check_warmup,
)


def recipe_names(kind: Literal["jobs", "models", "clusters"]) -> list[str]:
    """Names of the ready-made TOML files of one kind."""
    folder = resources.files("myriad") / "recipes" / kind
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def _read_recipe(kind: Literal["jobs", "models", "clusters"], name_or_path: str, key: str) -> dict[str, Any]:
    path = Path(name_or_path)
    if name_or_path.endswith(".toml") or "/" in name_or_path:
        if not path.is_file():
            raise BadInputError(key, name_or_path, "no such file")
        text = path.read_text()
    elif name_or_path in (names := recipe_names(kind)):
        text = (resources.files("myriad") / "recipes" / kind / f"{name_or_path}.toml").read_text()
    else:
        near = difflib.get_close_matches(name_or_path, names, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise BadInputError(key, name_or_path, f"{hint}a .toml file or one of {', '.join(names)}")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadInputError(key, name_or_path, f"not valid TOML: {error}") from None


def _set_dotted(tree: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, last = dotted.split(".")
    for parent in parents:
        child = tree.setdefault(parent, {})
        if not isinstance(child, dict):
            child = tree[parent] = {"recipe": child} if parent == "model" else {}
        tree = child
    tree[last] = value


def _parse_override(override: str) -> tuple[str, Any]:
    dotted, equals, text = override.partition("=")
    if not equals or not dotted:
        raise BadInputError("override", override, "written as KEY=VALUE, for example layout.tp=2")
    try:
        return dotted, tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return dotted, None if text.lower() in ("none", "off") else text


def _expand_model(tree: dict[str, Any]) -> None:
    """``model = "name"`` or ``model.recipe = "name"`` become the recipe's values, own keys on top."""
    model = tree.get("model")
    if isinstance(model, str):
        model = {"recipe": model}
    if isinstance(model, dict) and "recipe" in model:
        own = {key: value for key, value in model.items() if key != "recipe"}
        tree["model"] = _read_recipe("models", str(model["recipe"]), "model") | own


def load_job(name_or_path: str, overrides: Sequence[str] = ()) -> Job:
    """A job from a file or recipe with ``key=value`` overrides, checked. Raises `BadInputError`."""
    tree = _read_recipe("jobs", name_or_path, "job")
    for override in overrides:
        _set_dotted(tree, *_parse_override(override))
    _expand_model(tree)
    try:
        job = Job.model_validate(tree)
    except ValidationError as error:
        raise _as_bad_input(error.errors()[0]) from None
    return job.check()


def _as_bad_input(error: ErrorDetails) -> BadInputError:
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] != "extra_forbidden":
        return BadInputError(key, error["input"], error["msg"][0].lower() + error["msg"][1:])
    known = [dotted for dotted, _ in job_keys()]
    near = difflib.get_close_matches(key, known, 1, 0.5)
    last = str(error["loc"][-1])
    near = near or [dotted for dotted in known if dotted.endswith("." + last)]
    hint = f"unknown key; did you mean {near[0]}?" if near else f"unknown key; sections are {', '.join(Job.model_fields)}"
    return BadInputError(key, error["input"], hint)


def job_keys(config: type[BaseModel] = Job, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key of a job as ``(dotted name, pydantic FieldInfo)``, in order."""
    for name, field in config.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from job_keys(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, field


def dump_toml(job: BaseModel) -> str:
    """A config as TOML with every value; keys that are off are left out."""
    plain = job.model_dump(mode="json", exclude_none=True)
    return "\n".join(_toml_lines(plain, "")) + "\n"


def _toml_lines(table: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for key, value in table.items():
        if not isinstance(value, dict):
            yield f"{key} = {_toml_value(value)}"
    for key, value in table.items():
        if isinstance(value, dict):
            yield f"\n[{prefix}{key}]"
            yield from _toml_lines(value, f"{prefix}{key}.")


def _toml_value(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml_value(item)}" for key, item in value.items()) + " }"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False)
