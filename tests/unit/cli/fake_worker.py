"""A rank that only pretends to train, by the contract of ``python -m myriad.train.worker``."""

import math
import os
import signal
import sys
import time

from myriad.checkpoint.format.checkpoint_manifest import CheckpointManifest
from myriad.checkpoint.storage.checkpoint_folder import CheckpointFolder
from myriad.job import Job
from myriad.run import Run


def save(run: Run, job: Job, step: int) -> None:
    checkpoint = CheckpointFolder(run.checkpoints(job)).begin(step)
    checkpoint.commit(
        CheckpointManifest(step, 0, 0.0, {}, data={}, files={}, layout={}, versions={}, tensors={})
    )
    run.append_event("checkpoint", step=step)


def main() -> None:
    run, rank = Run(sys.argv[1]), int(os.environ["RANK"])
    job, stop = run.job(), []
    signal.signal(signal.SIGINT, lambda *_: stop.append(1))
    if rank:
        return
    done = max((event["step"] for event in run.read_events() if event["event"] == "checkpoint"), default=0)
    run.append_event("start", world=int(os.environ["WORLD_SIZE"]), device="cpu", precision="float32",
                     parameters=3_200_000, flops_per_token=2e7, peak_flops=1.6e11, peak_source="measured",
                     **({"resumed_from": done} if done else {}))  # fmt: skip
    for step in range(done + 1, job.train.steps + 1):
        if os.environ.get("FAKE_NAN_STEP") == str(step):
            sys.exit(f"myriad: error: loss = nan: step {step}, rank 0, first bad tensor blocks.1.mlp.up")
        if os.environ.get("FAKE_STOP_STEP") == str(step):
            os.kill(int(os.environ["MYRIAD_ENGINE_PID"]), signal.SIGINT)
            while not stop:
                time.sleep(0.01)
        run.append_metrics({"time": time.time(), "step": step, "loss": 2 + 6 * math.exp(-step / 9),
                            "tokens": 100 * step,
                            "tokens_per_second": 1000.0, "step_seconds": 0.1, "mfu": 0.4})  # fmt: skip
        if step == job.train.steps:
            run.append_event("validation", step=step, loss=2.5, bits_per_byte=1.25)
        if stop or step == job.train.steps:
            save(run, job, step)
        if stop:
            return run.append_event("interrupted", step=step)
    run.append_event("sample", prompt="def ", text="main():\n    [bold]pass[/bold]")
    run.append_event("finish", step=job.train.steps)


if __name__ == "__main__":
    main()
