"""A plan for another framework as the shell script that starts it: `myriad plan --framework X --out FILE.sh`.

    megatron-lm        torchrun pretrain_gpt.py --tensor-model-parallel-size 4 ...
    megatron-bridge    torchrun scripts/training/run_recipe.py --recipe $RECIPE
                       model.tensor_model_parallel_size=4 ...
    torchtitan         torchrun -m torchtitan.train --module $MODULE --config $CONFIG
                       --parallelism.tensor_parallel_degree 4 ...
    nanotron           torchrun run_train.py --config-file FILE.yaml, which the script writes
    deepspeed          deepspeed $TRAIN --deepspeed FILE.json, which the script writes
    maxtext            python3 -m maxtext.trainers.pre_train.train model_name=$MODEL ici_fsdp_parallelism=8
    ...

A script is complete: a configuration file that the framework reads is a here-document in it. What belongs
to the user and not to a plan (data, tokenizer, checkpoints) are variables of the environment or arguments
of the script. Each framework is a row of `_SYSTEMS` and a module beside this one.
"""

import textwrap
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from myriad.errors import BadInputError
from myriad.forecasts.launch.deepspeed_options import deepspeed_script
from myriad.forecasts.launch.launch_options import KEY, LaunchScript, planned_type
from myriad.forecasts.launch.maxtext_options import maxtext_script
from myriad.forecasts.launch.megatron_model import model_arguments
from myriad.forecasts.launch.megatron_options import (
    BRIDGE_PRECISIONS,
    PRECISIONS,
    megatron_bridge_script,
    megatron_script,
)
from myriad.forecasts.launch.nanotron_options import nanotron_model, nanotron_script
from myriad.forecasts.launch.torchtitan_options import torchtitan_script
from myriad.job import Job
from myriad.model.config import ModelConfig
from myriad.planner import Cluster, Framework
from myriad.planner.frameworks import Launcher

__all__ = ["SCRIPT_HEAD", "check_launch", "launch_text"]

SCRIPT_HEAD = "#!/usr/bin/env bash\n"
_WIDTH = 110
"""Characters of a line of comments."""


@dataclass(frozen=True)
class _System:
    """How a framework is started."""

    script: Callable[[Job, Framework, Cluster], LaunchScript]
    precisions: Collection[str]
    """Types in which it computes."""
    describe: Callable[[ModelConfig], object] | None = None
    """Describes the model to it, or raises `BadInputError`; ``None``: the user names one that it has."""
    decays: Collection[str] = ("cosine", "linear", "wsd", "constant")
    """Shapes of its schedule of learning rates."""


_SYSTEMS: Mapping[Launcher, _System] = {
    "megatron-lm": _System(megatron_script, PRECISIONS, model_arguments),
    "megatron-bridge": _System(megatron_bridge_script, BRIDGE_PRECISIONS),
    "torchtitan": _System(torchtitan_script, ("bfloat16", "float32")),
    "nanotron": _System(nanotron_script, ("bfloat16", "float32"), nanotron_model),
    "deepspeed": _System(deepspeed_script, ("bfloat16", "float16", "float32")),
    "maxtext": _System(maxtext_script, ("bfloat16", "float32", "float8"), decays=("cosine", "wsd")),
}


def check_launch(job: Job, framework: Framework) -> None:
    """Raise `BadInputError` if no script can start this job's model in the framework."""
    if framework.launcher is None:
        allowed = "without --framework, or with one whose file names a launcher, such as megatron-core"
        raise BadInputError(KEY, framework.name, allowed)
    system = _SYSTEMS[framework.launcher]
    if framework.profile.quantization == "nvfp4" and not framework.launcher.startswith("megatron"):
        raise BadInputError(KEY, "quantization = nvfp4", "a launcher of Megatron-LM or Megatron-Bridge")
    if system.describe is not None:
        system.describe(job.model)
    if job.optimizer.name != "adamw":
        raise BadInputError(KEY, f"optimizer.name = {job.optimizer.name}", "adamw, for another framework")
    for key, given, known in (
        ("train.precision", planned_type(job), system.precisions),
        ("optimizer.decay", job.optimizer.decay, system.decays),
    ):
        if given not in known:
            raise BadInputError(KEY, f"{key} = {given}", f"one of {', '.join(known)}")


def launch_text(job: Job, framework: Framework, cluster: Cluster, head: str) -> str:
    """Return the script. ``job``: with the planned layout and overlap. ``head``: lines of comments. Raises
    `BadInputError`."""
    check_launch(job, framework)
    assert framework.launcher is not None
    script = _SYSTEMS[framework.launcher].script(job, framework, cluster)
    notes = textwrap.fill(script.notes, _WIDTH, initial_indent="# ", subsequent_indent="# ") + "\n"
    exported = "".join(
        f'export {name}="${{{name}:-{value}}}"\n' for name, value in script.environment.items()
    )
    options = "".join(f"    {line}\n" for line in script.options)
    arguments = f"ARGUMENTS=(\n{options})\n" if options else ""
    command = " \\\n    ".join(script.command)
    return (
        f"{SCRIPT_HEAD}{head}{notes}set -euo pipefail\n{exported}{_config_file(script)}{arguments}{command}\n"
    )


def _config_file(script: LaunchScript) -> str:
    """Return the lines that write the configuration file beside the script. It is renamed into place, so
    that nodes of one file system can start together."""
    if script.config is None:
        return ""
    suffix, text = script.config
    return (
        f'CONFIG="${{CONFIG:-${{0%.sh}}{suffix}}}"\n'
        f'WRITTEN="$(mktemp "$CONFIG.XXXXXX")"\n'
        f'cat > "$WRITTEN" <<CONFIGURATION\n{text}CONFIGURATION\n'
        f'mv "$WRITTEN" "$CONFIG"\n'
    )
