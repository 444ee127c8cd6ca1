"""Keys that a resume may change, in one table, and the differences between two jobs.

The state of a run is its parameters, its optimizer's moments and step count, and the number of samples read.
A key may change when that state stays valid under the new value, which then holds from the first step after
the resume. `docs/guide/resume.md` shows the table; a test keeps both equal.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from myriad.errors import BadInputError, toml_value
from myriad.job.job_steps import JobSteps
from myriad.job.job_values import JobValues

__all__ = [
    "RESUME_RULES",
    "JobChange",
    "ResumeRule",
    "changes_between",
    "check_resume",
    "flat_values",
    "rule_of",
]


class ResumeRule(NamedTuple):
    """Whether a resume may change some keys, and why."""

    keys: tuple[str, ...]
    """Keys of a job; ``section.*`` is a whole section."""
    may_change: bool
    why: str
    """The effect of a change, or the reason why it is refused."""


RESUME_RULES: tuple[ResumeRule, ...] = (
    ResumeRule(
        ("layout.*", "overlap.*", "train.threads", "train.device", "train.kernels", "train.deterministic",
         "train.cuda_graphs", "train.memory_budget", "train.memory_offload",
         "train.collect_garbage_every", "comm.store", "train.keep_float8_weights", "comm.timeout_seconds",
         "comm.max_ctas",
         "comm.hierarchy", "comm.node_size", "comm.island_size", "comm.node_order", "comm.switch_size",
         "comm.node_bandwidth", "comm.network_bandwidth", "comm.switch_bandwidth"),
        True,
        "how an iteration is computed; its result stays. Only layout.dp is fixed while comm.sync_every > 1",
    ),
    ResumeRule(
        ("checkpoint.*", "resilience.*", "telemetry.*", "alerts.*", "eval.*", "train.validate_every",
         "train.validate_ema", "train.sample_prompt", "data.prefetch", "data.cache", "data.cache_bytes",
         "data.on_bad_block", "data.tokenizer_threads", "data.on_bad_record", "data.max_bad_blocks"),
        True,
        "what is kept and reported, and how faults are handled",
    ),
    ResumeRule(
        ("run.mode",),
        True,
        "who may read the run's folder, the files that exist included",
    ),
    ResumeRule(
        ("train.steps",),
        True,
        "the run is longer or shorter; the learning-rate schedule ends at the new last step",
    ),
    ResumeRule(
        ("optimizer.learning_rate", "optimizer.final_learning_rate_ratio", "optimizer.decay",
         "optimizer.decay_ratio", "optimizer.warmup_steps", "optimizer.beta1", "optimizer.beta2",
         "optimizer.epsilon", "optimizer.weight_decay", "optimizer.clip_norm",
         "optimizer.muon_momentum", "optimizer.muon_nesterov", "optimizer.muon_iterations",
         "optimizer.muon_precision", "optimizer.muon_scaling", "optimizer.qk_clip",
         "optimizer.ema_decay", "optimizer.ema_every"),
        True,
        "hold from the next step; moments and step count stay. The schedule counts steps from the start of "
        "the run",
    ),
    ResumeRule(
        ("data.corpus", "data.mixture", "data.documents", "data.tokenizer", "data.text_key", "data.held_out",
         "data.shuffle_bytes", "data.validation_batches", "data.validation_sets"),
        True,
        "hold from the next step; sample numbers continue, in the order of the new corpora, which must have "
        "the same tokenizer",
    ),
    ResumeRule(
        ("train.global_batch",),
        True,
        "holds from the next step; each state says how many samples came before it, and the next one "
        "follows: none is left out or repeated. Learning rate and its schedule stay, counted in steps",
    ),
    ResumeRule(
        ("phases", "train.batch_ramp.start", "train.batch_ramp.increment", "train.batch_ramp.until_samples",
         "train.batch_ramp.until_tokens", "train.batch_ramp.until_steps"),
        True,
        "hold for the steps that are not done. With phases or a ramp, the samples of the steps that are done "
        "are a function of the job, so neither these keys nor train.global_batch, data.corpus and "
        "data.mixture may change them: add a phase instead",
    ),
    ResumeRule(
        ("train.precision",),
        True,
        "holds from the next step; parameters and moments are stored in float32 in every precision",
    ),
    ResumeRule(
        ("loss_scale.*",),
        True,
        "hold from the next step; the scale and its counter are part of the state, so loss_scale.initial is "
        "for states without them",
    ),
    ResumeRule(
        ("model.vocabulary_multiple",),
        True,
        "rows of padding in memory; checkpoints hold the real rows alone",
    ),
    ResumeRule(("model.*",), False, "the parameters have the shapes and the meaning that it gives them"),
    ResumeRule(("optimizer.name",), False, "moments of one optimizer mean something else to another"),
    ResumeRule(("train.seed",), False, "it gives the order of the samples"),
    ResumeRule(("data.vocabulary",), False, "the model has learned the tokens of one tokenizer"),
    ResumeRule(
        ("comm.compress_gradients", "comm.compress_parameters", "comm.sync_every",
         "comm.outer_learning_rate", "comm.outer_momentum"),
        False,
        "each replica holds state of its own for lossy communication",
    ),
    ResumeRule(
        ("train.replay_routing",),
        True,
        "whose experts tokens get from the next step on",
    ),
    ResumeRule(("name", "train.init_from"), False, "they say how the run began"),
)  # fmt: skip
"""Every key of a job is in exactly one rule; one that names a key comes before that of its section."""

_START_KEYS = ("checkpoint.restart_from_scratch",)
"""Keys that apply to one start and are not stored with the run."""


class JobChange(NamedTuple):
    """A key whose value differs between two jobs."""

    key: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.key} = {toml_value(self.before)} -> {toml_value(self.after)}"


def rule_of(key: str) -> ResumeRule:
    """Return the rule of a key. Raises ``KeyError`` for an unknown key."""
    for rule in RESUME_RULES:
        if any(re.fullmatch(known.replace(".", r"\.").replace("*", ".*"), key) for known in rule.keys):
            return rule
    raise KeyError(key)


def changes_between(old: JobValues, new: JobValues) -> list[JobChange]:
    """Return the keys whose values differ, in the order of the job, without those that apply to one start."""
    before = flat_values(old)
    return [
        JobChange(key, before[key], value) for key, value in flat_values(new).items() if before[key] != value
    ]


def flat_values(job: JobValues) -> dict[str, Any]:
    """Return the values of a job by dotted key, in its order, without those that apply to one start."""
    tree = job.model_dump(mode="json")
    return {key: value for key, value in _flatten(tree) if key not in _START_KEYS}


def check_resume(
    old: JobValues, new: JobValues, run: str, steps_done: Callable[[], int] = lambda: 0
) -> list[JobChange]:
    """Return what a resume of ``run`` with the job ``new`` changes. ``steps_done`` returns the number of
    steps of the run. Raises `BadInputError` for a key that a resume cannot change."""
    changes = changes_between(old, new)
    _check_past(old, new, changes, steps_done)
    for change in changes:
        rule = rule_of(change.key)
        if not rule.may_change:
            weights = (
                "" if change.key.startswith("model.") else f"; --init-from {run} begins with its weights"
            )
            was = f"{run} was started with {change.key} = {toml_value(change.before)}"
            allowed = f"{was}, which a resume cannot change ({rule.why}); choose another --run{weights}"
            raise BadInputError(change.key, change.after, allowed)
        if change.key == "layout.dp" and old.comm.sync_every > 1:
            allowed = (
                f"must stay {change.before}: with comm.sync_every > 1 each replica has a state of its own"
            )
            raise BadInputError(change.key, change.after, allowed)
    return changes


def _check_past(
    old: JobValues, new: JobValues, changes: Sequence[JobChange], steps_done: Callable[[], int]
) -> None:
    """Refuse a change of what the steps that are done have read, if the job has phases or a batch ramp."""
    keys = ("phases", "train.batch_ramp.", "train.global_batch", "data.corpus", "data.mixture")
    change = next((one for one in changes if one.key.startswith(keys)), None)
    if change is None or not any(job.phases or job.train.batch_ramp.start for job in (old, new)):
        return
    done = steps_done()
    if JobSteps(old).past(done) != JobSteps(new).past(done):
        allowed = f"it changes the samples of the {done} steps that are done; add a phase instead"
        raise BadInputError(change.key, change.after, allowed)


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
