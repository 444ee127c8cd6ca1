"""Convert Megatron-LM's arguments to a job.

    --tensor-model-parallel-size 4 --bf16 ...      a command line, a shell script's text, or a saved namespace
        │  read_command_line                       flags to names and values, as its argparse does
        ▼
    {"tensor_model_parallel_size": 4, ...}
        │  translate_arguments                     `KEYS`, the model's, then rules for several arguments
        ▼
    Translation                                    keys of a job; `INSTEAD`; unknown

Names are those of ``megatron/training/arguments.py``.
"""

import ast
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from myriad.checkpoint.foreign.megatron_args import MODEL_ARGUMENTS, check_numbers, model_of_arguments
from myriad.checkpoint.foreign.megatron_layers import unused_arguments
from myriad.errors import BadInputError
from myriad.job.job_steps import JobSteps
from myriad.job.job_values import JobValues
from myriad.job.phase_values import BatchRamp, TrainConfig
from myriad.job.translation.megatron_table import ALIASES, HANDLED, INSTEAD, KEYS, NEGATIONS, STATE
from myriad.job.translation.outcome import Translation, plain_text

__all__ = ["read_command_line", "translate_arguments"]

_KEY = "CONFIG"
_TEXT_BYTES = 2**20


def read_command_line(text: str) -> dict[str, Any]:
    """Return the arguments in a command line or shell script: every ``--name``, also in bash arrays.

    Variables that the script sets to a plain value are expanded. Raises `BadInputError` if a needed value
    contains any other variable."""
    if len(text) > _TEXT_BYTES:
        raise BadInputError(_KEY, f"{len(text)} characters", f"at most {_TEXT_BYTES}")
    joined = re.sub(r"\\\s*\n", " ", text)
    for name, value in dict(re.findall(r"(?m)^\s*(?:export\s+)?(\w+)=([^\s($`]+)\s*$", joined)).items():
        joined = re.sub(rf"\$(?:\{{{name}\}}|{name}\b)", value.strip("\"'").replace("\\", ""), joined)
    try:
        words = shlex.split(joined, comments=True)
    except ValueError as error:
        raise BadInputError(_KEY, text.strip()[:60], f"not a command line ({error})") from None
    found: dict[str, Any] = {}
    option: str | None = None
    values: list[str] = []
    for word in [*words, "--"]:
        if word.startswith("--"):
            if option is not None:
                found |= _argument(option, values)
            head, equals, value = word[2:].partition("=")
            option, values = head.replace("-", "_") or None, [value] if equals else []
        elif word == ")" and option is not None:  # the end of a bash array
            found |= _argument(option, values)
            option = None
        elif option is not None and not re.fullmatch(r"\w+=.*|\$\{\w+\[@\]\}|\S+\.py", word):
            values.append(word)
    if not found:
        raise BadInputError(_KEY, text.strip()[:60], "holds no argument of the form --name")
    return found


def _argument(name: str, values: list[str]) -> dict[str, Any]:
    needed = name not in INSTEAD and name not in ("data_path",)
    if needed and any("$" in value for value in values):
        allowed = (
            f"--{name.replace('_', '-')} holds a shell variable that the text does not set: write its value"
        )
        raise BadInputError(_KEY, " ".join(values)[:60], allowed)
    if name in NEGATIONS:
        return {NEGATIONS[name]: False}
    name = ALIASES.get(name, name)
    parsed = [_value(value) for value in values]
    return {name: True if not parsed else parsed[0] if len(parsed) == 1 else tuple(parsed)}


def _value(text: str) -> Any:
    """Return a number, tuple or constant in Python syntax as its value, and other text unchanged."""
    if len(text) < 100 and re.fullmatch(r"[-+\d.eE_]+|\([-+\d., ]*\)|True|False|None", text):
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError):
            return text
    return text


def translate_arguments(arguments: Mapping[str, Any], *, namespace: bool = False) -> Translation:
    """Return arguments as a job. Raises `BadInputError`.

    ``namespace``: the arguments are a saved namespace, which has every argument with its default. Arguments
    that are off and entries that are not settings are then left out of the lists."""
    arguments = {ALIASES.get(name, name): value for name, value in arguments.items()}
    check_numbers(
        arguments, [*KEYS, *HANDLED, "initial_loss_scale", "loss_scale_window", "min_loss_scale"], _KEY
    )
    made = Translation("Megatron-LM")
    model, differences = model_of_arguments(arguments, _KEY)
    defaults = type(model)().model_dump(mode="json")
    for name, value in model.model_dump(mode="json").items():
        if value != defaults[name]:
            made.keys[f"model.{name}"] = value
    unused = {} if namespace else unused_arguments(arguments)
    for option in sorted((MODEL_ARGUMENTS & arguments.keys()) - unused.keys()):
        made.translated[option] = "model.*"
    for option, text in unused.items():
        made.instead(option, text)
    if "vocabulary" not in model.model_fields_set:
        made.instead("vocabulary", "not stated there: set model.vocabulary to the tokenizer's")
    for number, text in enumerate(differences):
        made.instead(f"model ({number + 1})", text)
    for option, key in KEYS.items():
        if arguments.get(option) is not None:
            made.put(option, key, arguments[option])
    _precision(made, arguments)
    _schedule(made, arguments)
    _ramp(made, arguments)
    _layout(made, arguments)
    _rest(made, arguments)
    for option, value in arguments.items():
        if option in made.translated or option in made.without or (option in STATE and namespace):
            continue
        if namespace and (option.startswith("_") or value in (None, False, 0, "", [], ())):
            continue
        if option in INSTEAD:
            made.instead(option, INSTEAD[option])
        elif option not in HANDLED or value not in (None, False):
            made.unknown[option] = plain_text(value)
    return made


def _precision(made: Translation, arguments: Mapping[str, Any]) -> None:
    if arguments.get("fp8"):
        blocks = arguments.get("fp8_recipe") in ("blockwise", "mxfp8")
        made.put("fp8", "train.precision", "float8-blocks" if blocks else "float8")
        made.put_same("fp8", ("fp8_recipe", "bf16"), arguments)
    elif arguments.get("bf16"):
        made.put("bf16", "train.precision", "bfloat16")
    elif arguments.get("fp16"):
        made.put("fp16", "train.precision", "float16")
        keys = {
            "initial_loss_scale": "initial",
            "loss_scale_window": "growth_interval",
            "min_loss_scale": "minimum",
        }
        made.put_loss_scale({option: (key, arguments.get(option)) for option, key in keys.items()})
    else:
        made.keys["train.precision"] = "float32"


_DECAYS = {"cosine": "cosine", "linear": "linear", "WSD": "wsd", "constant": "constant"}


def _schedule(made: Translation, arguments: Mapping[str, Any]) -> None:
    steps, batch = arguments.get("train_iters"), arguments.get("global_batch_size")
    if (
        steps is None
        and isinstance(samples := arguments.get("train_samples"), int)
        and isinstance(batch, int)
        and batch > 0
    ):
        steps = -(-samples // batch)
        made.put("train_samples", "train.steps", steps)
    peak, low = arguments.get("lr"), arguments.get("min_lr", 0.0)
    if isinstance(peak, int | float) and peak > 0 and isinstance(low, int | float):
        made.put("min_lr", "optimizer.final_learning_rate_ratio", low / peak)
    style = arguments.get("lr_decay_style", "linear")
    if isinstance(style, str) and style in _DECAYS:
        made.put("lr_decay_style", "optimizer.decay", _DECAYS[style])
    else:
        made.put("lr_decay_style", "optimizer.decay", "cosine")
        made.instead("lr_decay_style", f"{style} is not built; cosine")
    fraction = arguments.get("lr_warmup_fraction")
    if isinstance(fraction, float | int) and isinstance(steps, int):
        over = arguments.get("lr_decay_iters") or steps
        if not isinstance(over, int | float):
            raise BadInputError(_KEY, str(over)[:60], "lr_decay_iters must be a whole number")
        made.put("lr_warmup_fraction", "optimizer.warmup_steps", int(fraction * over))
    warm = arguments.get("lr_warmup_samples")
    if isinstance(warm, int) and isinstance(batch, int) and warm and batch > 0:
        made.put("lr_warmup_samples", "optimizer.warmup_steps", warm // batch)
    if isinstance(falls := arguments.get("lr_wsd_decay_iters"), int) and isinstance(steps, int) and steps:
        made.put("lr_wsd_decay_iters", "optimizer.decay_ratio", min(1.0, falls / steps))
    over = arguments.get("lr_decay_iters")
    if over is not None and steps is not None and over != steps:
        made.instead("lr_decay_iters", f"the schedule ends with the run, at step {steps}, not {over}")
    elif over is not None:
        made.translated["lr_decay_iters"] = f"train.steps = {steps}"
    if arguments.get("lr_decay_samples") is not None:
        made.instead("lr_decay_samples", "the schedule ends with the run")
    if "clip_grad" in arguments:
        clip = arguments["clip_grad"]
        made.put("clip_grad", "optimizer.clip_norm", clip if clip else None)
    made.instead(
        "learning rate of step k",
        "k + 1 of the schedule, where Megatron-LM takes k: its first step has rate 0",
    )


def _ramp(made: Translation, arguments: Mapping[str, Any]) -> None:
    """Convert ``--rampup-batch-size START INCREMENT SAMPLES``."""
    option, numbers = "rampup_batch_size", arguments.get("rampup_batch_size")
    if numbers is None:
        return
    whole = isinstance(numbers, list | tuple) and all(str(one).isdecimal() for one in numbers)
    if not whole or len(numbers) != len(_RAMP_KEYS):
        raise BadInputError(_KEY, str(numbers)[:60], "rampup_batch_size must be three whole numbers")
    values = [int(one) for one in numbers]
    if values[0] >= (arguments.get("global_batch_size") or 0) or not all(values):
        made.instead(option, "no ramp: it begins with the batch that it ends with")
        return
    for key, value in zip(_RAMP_KEYS, values, strict=True):
        made.put(option, f"train.batch_ramp.{key}", value)
    shown = ", ".join(f"{key} = {value}" for key, value in zip(_RAMP_KEYS, values, strict=True))
    made.translated[option] = f"train.batch_ramp: {shown}"
    samples = arguments.get("train_samples")
    if arguments.get("train_iters") is None and isinstance(samples, int):
        made.put("train_samples", "train.steps", _steps_of(samples, arguments["global_batch_size"], values))


def _steps_of(samples: int, batch: int, ramp: Sequence[int]) -> int:
    """Return the number of steps that take this many samples, with a ramp. Raises `BadInputError`."""
    values = dict(zip(_RAMP_KEYS, ramp, strict=True))
    train = TrainConfig(steps=samples, global_batch=batch, batch_ramp=BatchRamp(**values))
    segments = JobSteps(JobValues(train=train)).segments
    last = next(one for one in reversed(segments) if one.first_sample < samples)
    return last.first_step - (last.first_sample - samples) // last.global_batch


def _context(made: Translation, arguments: Mapping[str, Any], cp: int) -> None:
    """Translate how ranks that share sequences communicate: ``p2p`` is the ring, ``a2a`` are heads."""
    kind = arguments.get("cp_comm_type")
    kinds = {kind} if isinstance(kind, str) else {*(kind or ())}
    sizes = arguments.get("hierarchical_context_parallel_sizes")
    whole = isinstance(sizes, list | tuple) and all(isinstance(one, int) for one in sizes)
    if sizes is not None and not whole:
        raise BadInputError(_KEY, str(sizes), "hierarchical_context_parallel_sizes are whole numbers")
    if cp > 1 and kinds == {"a2a"}:
        made.put("cp_comm_type", "layout.ulysses", cp)
    elif cp > 1 and kinds == {"a2a+p2p"} and sizes:
        made.put("cp_comm_type", "layout.ulysses", sizes[0])
    elif kind is not None:
        made.translated["cp_comm_type"] = "layout.ulysses = 1: a ring"
    if sizes is not None:
        made.translated["hierarchical_context_parallel_sizes"] = "layout.cp, layout.ulysses"


_RAMP_KEYS = ("start", "increment", "until_samples")


def _layout(made: Translation, arguments: Mapping[str, Any]) -> None:
    tp, pp = (
        arguments.get("tensor_model_parallel_size") or 1,
        arguments.get("pipeline_model_parallel_size") or 1,
    )
    cp, world = arguments.get("context_parallel_size") or 1, arguments.get("world_size")
    if not all(isinstance(one, int) for one in (tp, pp, cp)):
        raise BadInputError(_KEY, f"{tp}, {pp}, {cp}", "parallel sizes are whole numbers")
    if arguments.get("data_parallel_size"):
        made.put("data_parallel_size", "layout.dp", arguments["data_parallel_size"])
        made.translated["world_size"] = made.translated["data_parallel_size"]
    elif isinstance(world, int):
        made.put("world_size", "layout.dp", max(1, world // (tp * pp * cp)))
    _context(made, arguments, cp)
    _virtual(made, arguments, pp)
    if (made_ep := arguments.get("expert_model_parallel_size")) not in (None, 1):
        made.put("expert_model_parallel_size", "layout.ep", made_ep)
    elif made_ep == 1:
        made.translated["expert_model_parallel_size"] = "layout.ep = 1"
    if arguments.get("use_torch_fsdp2") or arguments.get("use_megatron_fsdp"):
        levels = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
        level = levels.get(arguments.get("data_parallel_sharding_strategy", "optim_grads_params"), 3)
        option = "use_torch_fsdp2" if arguments.get("use_torch_fsdp2") else "use_megatron_fsdp"
        made.put(option, "layout.zero", level)
        made.put_same(option, ("data_parallel_sharding_strategy", "use_distributed_optimizer"), arguments)
    elif arguments.get("use_distributed_optimizer"):
        made.put("use_distributed_optimizer", "layout.zero", 1)
        if "data_parallel_sharding_strategy" in arguments:
            made.instead("data_parallel_sharding_strategy", "holds with FSDP alone")


def _virtual(made: Translation, arguments: Mapping[str, Any], pp: int) -> None:
    each = arguments.get("num_layers_per_virtual_pipeline_stage")
    layers = arguments.get("num_layers")
    if isinstance(each, int) and isinstance(layers, int) and each > 0:
        made.put(
            "num_layers_per_virtual_pipeline_stage", "layout.virtual_stages", max(1, layers // pp // each)
        )
    layout = arguments.get("pipeline_model_parallel_layout")
    if isinstance(layout, str) and pp > 1 and (stages := _num_stages(layout)) >= pp:
        made.put("pipeline_model_parallel_layout", "layout.virtual_stages", stages // pp)
    for option in ("num_virtual_stages_per_pipeline_rank", "virtual_pipeline_model_parallel_size"):
        if arguments.get(option):
            made.put(option, "layout.virtual_stages", arguments[option])


def _num_stages(layout: str) -> int:
    """Return the stages of a layout such as ``Et*3|(t*2|)*29tL``, which are separated by bars."""
    if len(layout) > _LONGEST_LAYOUT:
        allowed = f"pipeline_model_parallel_layout of at most {_LONGEST_LAYOUT:,} characters"
        raise BadInputError(_KEY, f"{layout[:40]}...", allowed)
    groups = re.findall(r"\(([^()]*)\)\*(\d{1,4})", layout)
    repeated = sum(group.count("|") * (int(times) - 1) for group, times in groups)
    return layout.count("|") + repeated + 1


_LONGEST_LAYOUT = 10_000
"""Characters of the longest description of stages that is read."""


def _rest(made: Translation, arguments: Mapping[str, Any]) -> None:
    granularity = arguments.get("recompute_granularity")
    if arguments.get("recompute_activations"):
        granularity = "selective"
    if granularity is not None:
        option = (
            "recompute_granularity" if arguments.get("recompute_granularity") else "recompute_activations"
        )
        made.put(option, "layout.recompute", granularity)
    for option in ("recompute_method", "recompute_num_layers"):
        if arguments.get(option) is not None:
            made.instead(option, "layout.recompute_ratio: the first layers of each stage, as a share")
    name = arguments.get("optimizer", "adam")
    if name != "adam":
        made.instead("optimizer", f"{name} is not built; adamw, whose decay is decoupled")
    else:
        made.put("optimizer", "optimizer.name", "adamw")
    if arguments.get("decoupled_weight_decay") is False:
        made.instead("decoupled_weight_decay", "weight decay is always decoupled")
    elif "decoupled_weight_decay" in arguments:
        made.translated["decoupled_weight_decay"] = "optimizer.name = adamw"
    if arguments.get("overlap_p2p_comm") is False:
        made.put("overlap_p2p_comm", "overlap.pipeline", False)
    elif "overlap_p2p_comm" in arguments:
        made.instead("overlap_p2p_comm", "overlap.pipeline is on by default")
    path = arguments.get("data_path")
    if isinstance(path, str):
        made.put("data_path", "data.corpus", path)
    elif isinstance(path, list | tuple) and len(path) == 1:
        made.put("data_path", "data.corpus", str(path[0]))
    elif isinstance(path, list | tuple) and path:
        _mixture(made, path)
    _graphs(made, arguments)


def _mixture(made: Translation, path: Sequence[Any]) -> None:
    """Set data.mixture from alternating weights and prefixes; prefixes without weights are not converted."""
    weights = [one for one in path[::2] if isinstance(one, int | float) and not isinstance(one, bool)]
    if len(path) % 2 == 0 and len(weights) == len(path) // 2:
        pairs = zip(weights, path[1::2], strict=True)
        made.put("data_path", "data.mixture", [{"path": str(at), "weight": float(w)} for w, at in pairs])
    else:
        made.instead("data_path", "prefixes without weights: give each a weight in data.mixture")


def _graphs(made: Translation, arguments: Mapping[str, Any]) -> None:
    if arguments.get("enable_cuda_graph") or arguments.get("cuda_graph_impl") not in (None, "none"):
        option = "enable_cuda_graph" if arguments.get("enable_cuda_graph") else "cuda_graph_impl"
        made.put(option, "train.cuda_graphs", True)
