"""Read a job from a file or recipe with overrides: current names, types, then every rule.

    TOML tree ──► former names replaced ──► overrides ──► model recipe expanded ──► `Job` ──► rules

Errors name the key as the user typed it, and suggest the key that an unknown name probably means.
"""

import difflib
import functools
import logging
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from myriad.comm.attempt_layout import AttemptLayout
from myriad.comm.layout import Layout
from myriad.config import explain, parse_override, set_dotted
from myriad.errors import BadInputError, need
from myriad.job.job_rules import PLANNING_RULES, RULES
from myriad.job.job_values import JobValues
from myriad.job.model_rules import settings_of
from myriad.job.phase_values import PHASE_KEYS
from myriad.recipes import read_recipe

__all__ = [
    "RENAMED_KEYS",
    "RENAMED_VALUES",
    "Job",
    "is_name_of",
    "job_keys",
    "load_job",
    "load_job_to_plan",
    "parse_job",
    "read_layout",
    "suggest_key",
]


_LOG = logging.getLogger(__name__)
_JOB_FILE, _CONFIG_FILE = "job.toml", "config.json"

RENAMED_KEYS = {
    "overlap.partition": "overlap.message_bytes",
    "overlap.credit": "overlap.max_in_flight_bytes",
    "resilience.patience": "resilience.timeout_scale",
    "loss_scale.most_skips": "loss_scale.max_skips",
}
"""Keys by their former name, which is accepted until the next release."""

RENAMED_VALUES = {
    "resilience.on_slow": {"tell": "report"},
    "resilience.on_spike": {"tell": "report"},
}
"""Values by their former name, by key; accepted until the next release."""


class Job(JobValues):
    """Every value that a run depends on."""

    def in_attempt(self, changed: AttemptLayout) -> "Job":
        """Return the job of an attempt: the same batches in another layout, on the nodes that its ranks need.
        Raises `BadInputError` if the layout does not fit."""
        layout, how = changed.of(self.layout), self.resilience
        update: dict[str, Any] = {"layout": layout}
        if layout.world != self.layout.world:
            each = self.layout.world // how.nodes
            whole = how.nodes == 1 or layout.world % each == 0
            need(whole, "layout.dp", layout.dp, f"must fill nodes of {each} ranks")
            update["resilience"] = how.model_copy(update={"nodes": max(1, layout.world // each)})
            update["comm"] = self.comm.model_copy(update={"node_order": None})
        if (holders := self.checkpoint.holders) is not None:
            fewer = {"holders": min(holders, layout.num_shard_groups)}
            update["checkpoint"] = self.checkpoint.model_copy(update=fewer)
        return self.model_copy(update=update).check()

    def check(self) -> "Job":
        """Check every rule that spans fields, and return the job. Raises `BadInputError`."""
        for rule in RULES:
            rule(self)
        return self


def _expand_model(tree: dict[str, Any]) -> None:
    """Replace ``model = "name"`` or ``model.recipe = "name"`` by the recipe's values, which other model keys
    override. The name ``weights`` stands for the model of the initial weights."""
    model = tree.get("model")
    if isinstance(model, str):
        model = {"recipe": model}
    if isinstance(model, dict) and "recipe" in model:
        own = {key: value for key, value in model.items() if key != "recipe"}
        name = str(model["recipe"])
        values = _model_of_weights(tree) if name == "weights" else read_recipe("models", name, "model")
        tree["model"] = values | own


def _model_of_weights(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the model keys of ``train.init_from``: of a run's ``job.toml``, or of a Hugging Face folder's
    ``config.json``. Raises `BadInputError`."""
    from myriad.checkpoint.foreign.hugging_face_config import model_of, read_json

    train = tree.get("train")
    source = train.get("init_from") if isinstance(train, dict) else None
    allowed = "a run, one of its checkpoints, or a Hugging Face folder: the model is that of these weights"
    if not isinstance(source, str):
        raise BadInputError("train.init_from", "off" if source is None else source, allowed)
    for folder in (Path(source).expanduser(), Path("runs") / source):
        if (folder / _JOB_FILE).is_file():
            found = load_job(str(folder.absolute() / _JOB_FILE)).model
        elif (folder / _CONFIG_FILE).is_file():
            try:
                fields = read_json(folder / _CONFIG_FILE)
            except BadInputError as error:
                raise BadInputError(
                    "train.init_from", source, f"a readable {_CONFIG_FILE}: {error}"
                ) from error
            found = model_of(fields)
        else:
            continue
        return found.model_dump(mode="json", exclude_defaults=True)
    raise BadInputError("train.init_from", source, allowed)


def load_job(name_or_path: str, overrides: Sequence[str] = ()) -> Job:
    """Read and check a job from a file or recipe with ``key=value`` overrides. Raises `BadInputError`."""
    tree = read_recipe("jobs", name_or_path, "job")
    return _job_of(tree, overrides)


def load_job_to_plan(name_or_path: str, overrides: Sequence[str] = ()) -> Job:
    """Return a job for the planner, which chooses the layout. Raises `BadInputError`.

    The file's ``[layout]`` is ignored, so that a recipe's layout never restricts a plan: `Job.layout` holds
    only the overrides (its ``model_fields_set``). So is ``overlap.pairs``, which not every layout can have.
    Rules that need a layout are not checked.
    """
    tree = read_recipe("jobs", name_or_path, "job")
    tree.pop("layout", None)
    if isinstance(overlap := tree.get("overlap"), dict):
        overlap.pop("pairs", None)
    job = _validated(tree, overrides)
    for rule in PLANNING_RULES:
        rule(job)
    return job


def parse_job(text: str, source: str, overrides: Sequence[str] = ()) -> Job:
    """Read and check a job from TOML text; errors call it ``source``. Raises `BadInputError`."""
    try:
        return _job_of(tomllib.loads(text), overrides)
    except tomllib.TOMLDecodeError as error:
        raise BadInputError("job", source, f"not valid TOML: {error}") from None


def read_layout(overrides: Sequence[str], base: Layout) -> Layout:
    """Return ``base`` with ``layout.KEY=VALUE`` overrides; each value is checked by itself. Raises
    `BadInputError`."""
    return _validated({"layout": base.model_dump()}, overrides).layout


def _job_of(tree: dict[str, Any], overrides: Sequence[str]) -> Job:
    return _validated(tree, overrides).check()


def _validated(tree: dict[str, Any], overrides: Sequence[str]) -> Job:
    """Return the typed values; each is checked by itself."""
    _use_current_names(tree)
    typed = dict(_current_name(*parse_override(override)) for override in overrides)
    for key, value in typed.items():
        set_dotted(tree, key, value)
    _use_current_names(tree)  # an override may be a whole section
    _expand_model(tree)
    _drop_settings(tree, typed)
    try:
        return Job.model_validate(tree)
    except ValidationError as error:
        raise _as_bad_input(error.errors()[0]) from None


def _drop_settings(tree: dict[str, Any], typed: Mapping[str, Any]) -> None:
    """Drop what a file says about a part of the model that an override turns off. Keys that are overrides
    themselves stay, and are refused."""
    for key, value in typed.items():
        section, _, name = key.partition(".")
        for unused in settings_of(name, value) if section == "model" else ():
            *parents, last = unused.split(".")
            table = tree["model"]
            for parent in parents:
                table = table.get(parent) if isinstance(table, dict) else None
            if isinstance(table, dict) and f"model.{unused}" not in typed:
                table.pop(last, None)


def _use_current_names(tree: dict[str, Any]) -> None:
    """Replace former names of keys and values in a job's tree.

    Raises `BadInputError` if a key is given under both names."""
    for old, new in RENAMED_KEYS.items():
        section, key = old.split(".")
        values = tree.get(section)
        if isinstance(values, dict) and key in values:
            current = new.partition(".")[2]
            if current in values:
                raise BadInputError(old, values[key], f"is the former name of {new}, which is given as well")
            values[current] = values.pop(key)
            _warn_renamed(old, new)
    for dotted in RENAMED_VALUES:
        section, key = dotted.split(".")
        values = tree.get(section)
        if isinstance(values, dict) and key in values:
            values[key] = _current_name(dotted, values[key])[1]


def _current_name(key: str, value: Any) -> tuple[str, Any]:
    """Return a key and its value by their current names."""
    current = RENAMED_KEYS.get(key, key)
    if current != key:
        _warn_renamed(key, current)
    values = RENAMED_VALUES.get(current, {})
    if isinstance(value, str) and value in values:
        _warn_renamed(f"{current} = {value}", f"{current} = {values[value]}")
        value = values[value]
    return current, value


@functools.cache  # one line a process, however often the job is read
def _warn_renamed(old: str, new: str) -> None:
    _LOG.warning("%s is now %s; the former name is accepted until the next release", old, new)


def _as_bad_input(error: ErrorDetails) -> BadInputError:
    key, value = ".".join(str(part) for part in error["loc"]), error["input"]
    if error["type"] == "extra_forbidden":
        while isinstance(value, dict) and value:  # unknown section: report its first key, as typed
            name, value = next(iter(value.items()))
            key = f"{key}.{name}"
        if error["loc"][0] == "phases" and len(error["loc"]) > 1:
            can = ", ".join(f"{section}.{name}" for section, names in PHASE_KEYS.items() for name in names)
            return BadInputError(key, value, f"not a key that a phase can change: {can}")
        return BadInputError(key, value, f"unknown key; {_hint(key)}")
    if error["type"] == "model_type":
        keys = ", ".join(known for known, _ in job_keys() if known.startswith(f"{key}."))
        return BadInputError(key, value, f"is a section with the keys {keys}")
    return BadInputError(key, value, explain(error))


_SYNONYMS = {
    "optimizer.learning_rate": "lr max_lr peak_lr base_lr learningrate",
    "optimizer.final_learning_rate_ratio": "min_lr final_lr lr_min min_lr_ratio",
    "optimizer.decay": "lr_decay lr_schedule lr_scheduler scheduler lr_decay_style",
    "optimizer.warmup_steps": "warmup warmup_iters lr_warmup_iters num_warmup_steps lr_warmup_steps",
    "optimizer.weight_decay": "wd decay_weight",
    "optimizer.clip_norm": "clip clip_grad grad_clip max_grad_norm gradient_clipping max_norm clip_gradients",
    "optimizer.epsilon": "eps adam_eps adam_epsilon",
    "optimizer.beta1": "b1 adam_beta1",
    "optimizer.beta2": "b2 adam_beta2",
    "optimizer.name": "optim opt optimizer_type",
    "train.global_batch": "gbs bs batch batch_size global_batch_size train_batch_size global_bs",
    "train.steps": "max_steps train_steps iters max_iters train_iters num_steps total_steps iterations",
    "train.seed": "random_seed",
    "train.precision": "dtype bf16 fp16 mixed_precision",
    "train.device": "accelerator",
    "train.threads": "num_threads cpu_threads",
    "train.validate_every": "eval_interval eval_every eval_steps val_interval val_check_interval",
    "train.init_from": "load pretrained pretrained_model init",
    "layout.micro_batch": "mbs micro_batch_size microbatch micro_bs per_device_train_batch_size",
    "layout.dp": "dp_size data_parallel data_parallel_size replicas",
    "layout.tp": "tp_size tensor_parallel tensor_parallel_size tensor_model_parallel_size mp",
    "layout.pp": "pp_size pipeline_parallel pipeline_parallel_size pipeline_model_parallel_size stages",
    "layout.cp": "cp_size context_parallel context_parallel_size",
    "layout.ep": "ep_size expert_parallel expert_parallel_size expert_model_parallel_size",
    "layout.etp": "etp_size expert_tensor_parallel expert_tensor_parallel_size expert_tensor_parallel_degree",
    "layout.zero": "zero_stage fsdp sharding",
    "layout.virtual_stages": "vpp virtual_pp num_layers_per_virtual_pipeline_stage",
    "layout.recompute": "activation_checkpointing gradient_checkpointing checkpointing remat",
    "layout.schedule": "pipeline_schedule pp_schedule",
    "model.sequence": "seq seq_len seq_length sequence_length ctx ctx_len context context_length block_size "
    "max_seq_len max_position_embeddings",
    "model.hidden": "d_model dim hidden_size n_embd embedding_dim width",
    "model.layers": "n_layers n_layer num_layers num_hidden_layers depth",
    "model.heads": "n_heads n_head num_heads num_attention_heads",
    "model.kv_heads": "n_kv_heads num_kv_heads num_key_value_heads num_query_groups",
    "model.head_dim": "head_size kv_channels",
    "model.ffn_hidden": "d_ff ffn intermediate_size ffn_hidden_size mlp_hidden ffn_dim",
    "model.rotary_scaling.kind": "type rope_type rope_scaling_type",
    "model.activation": "hidden_act act_fn activation_function",
    "model.prediction_layers": "mtp mtp_num_layers num_nextn_predict_layers mtp_layers",
    "model.prediction_weight": "mtp_loss_scaling_factor mtp_loss_weight",
    "model.mup_base_width": "mup_base_hidden_size base_width mup_width_multiplier",
    "model.rotary_base": "rope_theta rope_base rotary_theta",
    "model.norm_epsilon": "norm_eps rms_norm_eps layer_norm_eps layernorm_epsilon",
    "model.tied": "tie_word_embeddings tie_embeddings weight_tying tie_weights",
    "model.vocabulary": "vocab vocab_size n_vocab",
    "data.corpus": "dataset data_path dataset_path data_dir",
    "checkpoint.every": "save_every save_interval save_steps checkpoint_interval checkpoint_every",
    "checkpoint.url": "save ckpt_dir checkpoint_dir output_dir save_dir",
    "checkpoint.keep": "save_total_limit keep_last",
    "telemetry.loggers": "logger wandb tensorboard report_to",
    "resilience.nodes": "nnodes num_nodes",
}
"""Names that other frameworks use, by key."""
_SPELLINGS = {"optimiser": "optimizer", "initialise": "initialize", "parallelise": "parallelize"}


def suggest_key(typed: str) -> str | None:
    """Return the key that an unknown name probably means, or ``None``."""
    name = typed.lower().replace("-", "_")
    for british, ours in _SPELLINGS.items():
        name = name.replace(british, ours)
    known = _known_keys()
    section, _, last = name.rpartition(".")
    near = [key for key in known if key == name or key.endswith(f".{last}")]
    near += [key for key, words in _SYNONYMS.items() if last in words.split()]
    near = near or difflib.get_close_matches(name, known, 1, 0.5 if section else 0.6)
    if not near:
        by_last = {key.rpartition(".")[2]: key for key in reversed(known)}
        near = [by_last[one] for one in difflib.get_close_matches(last, by_last, 1, 0.7)]
    return min(near, key=lambda key: not key.startswith(f"{section}.")) if near else None


@functools.cache
def _known_keys() -> tuple[str, ...]:
    return tuple(dotted for dotted, _ in job_keys())


def is_name_of(word: str, key: str) -> bool:
    """Whether a word is the last part of the key or a synonym of it, not only similar."""
    return key.rpartition(".")[2] == word or word in _SYNONYMS.get(key, "").split()


def _hint(key: str) -> str:
    if (near := suggest_key(key)) is not None:
        return f"did you mean {near}?"
    return f"top-level keys are {', '.join(Job.model_fields)}"


def job_keys(config: type[BaseModel] = Job, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every key of a job as ``(dotted name, pydantic FieldInfo)``, in order."""
    for name, field in config.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from job_keys(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, field
