"""A run with the weights of the seed, and a tokenizer: as small as a model can be."""

from pathlib import Path

from myriad.checkpoint.checkpoint_files import save
from myriad.checkpoint.storage.checkpoint_folder import CheckpointFolder
from myriad.data.tokenizer import Tokenizer
from myriad.job import parse_job
from myriad.model.gpt import GPT
from myriad.model.tensor_shard import TensorShard
from myriad.run import Run

TEXT = "def f(x):\n    return x + 1\n\nfor i in range(10):\n    print(f(i))\n"
_MODEL = "layers = 2\nhidden = 32\nheads = 4\nvocabulary = 300\nsequence = 24\n"


def make_run(folder: Path) -> Path:
    """Make the run in ``folder``, and return its path."""
    job = parse_job(f"[data]\nvocabulary = 300\n[model]\n{_MODEL}", "job.toml", [])
    run = Run(folder / "run")
    run.create_or_resume(job)
    Tokenizer.train([TEXT] * 4, 280).save(run.path)
    definition = GPT(job.model, job.train.seed)
    shards = [
        TensorShard(f"model.{prefix}.{name}", tuple(values.shape), (0,) * values.dim(), values)
        for index, prefix in enumerate(definition.names)
        for name, values in definition.initial(index).items()
        if f"{prefix}.{name}" not in definition.tied
    ]
    save(CheckpointFolder(run.checkpoints_path), 0, shards, {"step": 0, "optimizer_steps": 0})
    return run.path
