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
from myriad.config import explain
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
    "is_name_of",
    "job_keys",
    "load_job",
    "load_job_to_plan",
    "parse_job",
    "recipe_names",
    "suggest_key",
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
    "layout.ep": "ep_size expert_parallel expert_parallel_size",
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
"""Words of other frameworks and of everyday speech for keys, by key."""
_SPELLINGS = {"optimiser": "optimizer", "initialise": "initialize", "parallelise": "parallelize"}


def suggest_key(typed: str) -> str | None:
    """Return the key that was probably meant by a name that is none, or ``None``."""
    name = typed.lower().replace("-", "_")
    for british, ours in _SPELLINGS.items():
        name = name.replace(british, ours)
    known = [dotted for dotted, _ in job_keys()]
    section, _, last = name.rpartition(".")
    near = [key for key in known if key == name or key.endswith(f".{last}")]
    near += [key for key, words in _SYNONYMS.items() if last in words.split()]
    near = near or difflib.get_close_matches(name, known, 1, 0.5 if section else 0.6)
    if not near:
        by_last = {key.rpartition(".")[2]: key for key in reversed(known)}
        near = [by_last[one] for one in difflib.get_close_matches(last, by_last, 1, 0.7)]
    return min(near, key=lambda key: not key.startswith(f"{section}.")) if near else None


def is_name_of(word: str, key: str) -> bool:
    """Whether a word is the key's last part or a synonym of it, not only something like it."""
    return key.rpartition(".")[2] == word or word in _SYNONYMS.get(key, "").split()


def _hint(key: str) -> str:
    if (near := suggest_key(key)) is not None:
        return f"did you mean {near}?"
    return f"top-level keys are {', '.join(Job.model_fields)}"


def job_keys(config: type[BaseModel] = Job, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key of a job as ``(dotted name, pydantic FieldInfo)``, in order."""
    for name, field in config.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from job_keys(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, field
