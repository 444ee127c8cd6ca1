"""The plain peer of `faults_against_torchrun.py`: what an honest training script looks like.

    torchrun --standalone --nproc-per-node 2 --max-restarts 3 benchmarks/peers/torchrun_loop.py FOLDER

DDP over gloo, AdamW, gradients clipped (and refused when they are not finite), torch.distributed.checkpoint
every few steps, resumed from the newest at the start. Beside that it writes down what is measured, and does
to itself what FOLDER/fault.json says, once (an exception: in every attempt).

    FOLDER/steps.jsonl      rank 0: a line for each start and each step, with times
    FOLDER/caused.jsonl     the fault, before it is done
    FOLDER/pids             of all ranks, of all attempts
    FOLDER/final.json       a digest of each rank's weights at the end
"""

import argparse
import ctypes
import hashlib
import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[1]))

from peers.plain_gpt import PlainGPT, mean_loss
from peers.work import Work

WORK = Work(layers=4, hidden=64, heads=4, vocabulary=512, sequence=64, global_batch=8)


def append(path: Path, **fields: Any) -> None:
    with path.open("a") as file:
        file.write(json.dumps({"time": time.time(), **fields}) + "\n")


class Fault:
    """What this rank does to itself, and when."""

    def __init__(self, folder: Path) -> None:
        path, self._log = folder / "fault.json", folder / "caused.jsonl"
        told = json.loads(path.read_text()) if path.exists() else {}
        mine = told.get("rank") == dist.get_rank()
        self._kind: str = told.get("kind", "") if mine else ""
        self._step: int = told.get("step", -1)

    def due(self, step: int, *kinds: str) -> bool:
        wanted = self._kind in kinds and step == self._step
        if wanted and (self._kind == "exception" or not self._log.exists()):
            append(self._log, step=step)
            return True
        return False

    def before_step(self, step: int, model: torch.nn.Module) -> None:
        if self.due(step, "kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.due(step, "segv"):
            ctypes.string_at(0)
        if self.due(step, "stop"):
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.due(step, "hang"):
            time.sleep(1e6)
        if self.due(step, "exception"):
            raise RuntimeError("an error of the program")
        if self.due(step, "flip"):
            flip(next(model.parameters()).data)


def flip(values: torch.Tensor) -> None:
    """The highest bit of one number's fraction."""
    words = values.view(torch.int32).view(-1)
    words[len(words) // 2] ^= 1 << 22


def batch_of(step: int, rank: int, world: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(step)
    tokens = torch.randint(WORK.vocabulary, (WORK.global_batch, WORK.sequence + 1), generator=draw)
    return tokens.chunk(world)[rank]


class Saved:
    """Checkpoints of the model and the optimizer, whole when their metadata is there."""

    def __init__(self, folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._folder, self._model, self._optimizer = folder, model, optimizer

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._model, self._optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, step: int) -> None:
        dcp.save(self._state(), checkpoint_id=self._folder / f"step-{step}")

    def resume(self) -> int:
        found = [int(path.parent.name.removeprefix("step-")) for path in self._folder.glob("*/.metadata")]
        if not found:
            return 0
        state = self._state()
        dcp.load(state, checkpoint_id=self._folder / f"step-{max(found)}")
        set_state_dict(
            self._model,
            self._optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        return max(found)


def train(folder: Path, steps: int, every: int) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(PlainGPT(WORK))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    saved, fault = Saved(folder / "checkpoints", model, optimizer), Fault(folder)
    begun = saved.resume()
    if rank == 0:
        append(folder / "steps.jsonl", resumed=begun)
    for step in range(begun + 1, steps + 1):
        fault.before_step(step, model)
        tokens = batch_of(step, rank, world)
        loss = mean_loss(model(tokens[:, :-1]), tokens[:, 1:])
        if fault.due(step, "nan"):
            loss = loss * float("nan")
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        optimizer.step()
        if rank == 0:
            append(folder / "steps.jsonl", step=step, loss=loss.item())
        if step % every == 0:
            saved.save(step)
    finish(folder, model)


def finish(folder: Path, model: torch.nn.Module) -> None:
    digest = hashlib.blake2s()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    digests: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(digests, digest.hexdigest())
    if dist.get_rank() == 0:
        (folder / "final.json").write_text(json.dumps(digests))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--timeout", type=float, help="seconds of a collective; off: torch's own, 30 minutes")
    options = parser.parse_args()
    append(options.folder / "pids", pid=os.getpid())  # before it meets the others, which may be never
    torch.set_num_threads(1)
    limit = None if options.timeout is None else timedelta(seconds=options.timeout)
    dist.init_process_group("gloo", timeout=limit)
    try:
        train(options.folder, options.steps, options.every)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
