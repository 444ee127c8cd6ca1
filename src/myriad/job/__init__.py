"""The whole job as one typed value: read, checked, saved with the run.

    job = load_job("tiny", ["layout.tp=2", "layout.pp=2"])     a path or the name of a recipe, then overrides
    job.check()                                                every cross-field rule; one line when it fails

`typed_job` reads a job, `job_values` declares its values, `job_rules` the rules that span sections,
`model_rules` those of the model's keys, and `job_changes` the keys that a resume may change. No torch here: a
job can be read, checked and explained on a machine that cannot run it.
"""

from myriad.checkpoint.config import CheckpointConfig
from myriad.config import dump_toml
from myriad.job.job_values import (
    SPIKE_STEPS_AFTER,
    SPIKE_STEPS_BEFORE,
    ResilienceConfig,
    TrainConfig,
    work_of,
)
from myriad.job.typed_job import (
    RENAMED_KEYS,
    RENAMED_VALUES,
    Job,
    is_name_of,
    job_keys,
    load_job,
    load_job_to_plan,
    parse_job,
    suggest_key,
)
from myriad.recipes import recipe_names

__all__ = [
    "RENAMED_KEYS",
    "RENAMED_VALUES",
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
