"""One process of Myriad against a plain PyTorch loop: the same GPT, batch and precision, on the same cores.

    python benchmarks/training/single_process.py              12M parameters, a vocabulary of 4,096
    python benchmarks/training/single_process.py --vocabulary 50304    30M, nanoGPT's own vocabulary
    python benchmarks/training/single_process.py --gains      Myriad alone: with all it does, and without each

Contenders take turns, so that whatever else the machine does hits all of them. A contender's figure is its
median step (the fastest is printed too); the ratio is to the best setting of the peers. The peak of MFU
is a matrix product of 1024 x 1024 in the same precision and threads, also measured in every round.

With `--gains` the model has rotary positions and RMSNorm, and each contender has one of Myriad's CPU paths
replaced by what PyTorch does (`plain_operators.py`); its ratio is of the processor time of its median step,
which other work on the machine disturbs less than it does the time.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from myriad.comm.layout import Layout
from myriad.model.config import ModelConfig
from myriad.model.gpt import GPT
from myriad.optim.config import OptimizerConfig
from myriad.optim.precision import resolve_precision
from myriad.parallel.batch import Batch
from myriad.train.fit import fit
from myriad.train.metrics import find_peak

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "common"))

from peers import nanogpt_loop
from plain_operators import OPERATORS, OPTIMIZER, plain_operators

SIZES = {"layers": 6, "hidden": 384, "heads": 6, "vocabulary": 4096, "sequence": 256}
"""Default dimensions of the model."""


@dataclass
class Contender:
    """A name, one training step, and the seconds that its steps took."""

    name: str
    step: Callable[[], float]
    seconds: list[float] = field(default_factory=list)
    processor_seconds: list[float] = field(default_factory=list)
    loss: float = 0.0

    def run(self, num_steps: int) -> None:
        """Some timed steps."""
        for _ in range(num_steps):
            start, processor = time.perf_counter(), time.process_time()
            self.loss = self.step()
            self.seconds.append(time.perf_counter() - start)
            self.processor_seconds.append(time.process_time() - processor)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (
        ("layers", 6),
        ("hidden", 384),
        ("heads", 6),
        ("vocabulary", 4096),
        ("sequence", 256),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--batch", type=int, default=8, help="sequences in a step")
    parser.add_argument("--precision", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2, help="steps of each contender in a round")
    parser.add_argument("--no-compile", action="store_true", help="leave out the compiled peer")
    parser.add_argument("--gains", action="store_true", help="what each CPU path brings; no peers")
    return parser.parse_args()


def myriad_steps(config: ModelConfig, batch: Batch, precision: str, num_steps: int) -> Iterator[float]:
    """Myriad's own loop: runtime, clipping, AdamW."""
    size = batch.inputs.shape[0]
    steps = fit(
        GPT(config, seed=1),
        lambda step, rows: Batch(*(part[rows.start : rows.stop] for part in vars(batch).values())),
        Layout(micro_batch=size),
        OptimizerConfig(learning_rate=1e-3, decay="constant"),
        steps=num_steps,
        global_batch=size,
        precision=precision,
        device="cpu",
    )
    for _, result in steps:
        yield result.loss


def build_contenders(settings: argparse.Namespace, config: ModelConfig, precision: str) -> list[Contender]:
    """Myriad first, then the plain loop in each setting."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocabulary, (settings.batch, config.sequence + 1), generator=generator)
    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), torch.arange(settings.batch))
    steps = myriad_steps(config, batch, precision, settings.steps * (settings.rounds + 1))
    contenders = [Contender("myriad", partial(next, steps))]
    for name, model in peer_models(config):
        for compiled in (False,) if settings.no_compile else (False, True):
            step = nanogpt_loop.build_step(model(), precision=precision, compiled=compiled)
            label = f"{name}, compiled" if compiled else name
            contenders.append(Contender(label, partial(step, batch.inputs, batch.targets)))
    return contenders


def build_gains(settings: argparse.Namespace, config: ModelConfig, precision: str) -> list[Contender]:
    """Everything; each path replaced; all of them at once; the other precision, where this one is not it."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocabulary, (settings.batch, config.sequence + 1), generator=generator)
    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), torch.arange(settings.batch))
    num_steps = settings.steps * (settings.rounds + 1)

    def contender(name: str, without: tuple[str, ...], kind: str) -> Contender:
        steps = myriad_steps(config, batch, kind, num_steps)

        def step() -> float:
            if not without:
                return next(steps)
            with plain_operators(*without):
                return next(steps)

        return Contender(name, step)

    paths = [*OPERATORS, *OPTIMIZER]
    if precision != "float32":  # those two are for float32 alone
        paths = [path for path in paths if path != "attention in blocks"]
    contenders = [contender("all", (), precision)]
    contenders += [contender(f"without {path}", (path,), precision) for path in paths]
    contenders.append(contender("without any", tuple(paths), precision))
    if precision != "float32":
        contenders.append(contender("without bfloat16", (), "float32"))
    return contenders


def report_gains(contenders: list[Contender], tokens: int) -> None:
    """The table."""
    whole = statistics.median(contenders[0].processor_seconds)
    print(f"{'':36}{'fastest':>12}{'processor s':>14}{'ratio':>8}   loss")
    for contender in contenders:
        processor, fastest = statistics.median(contender.processor_seconds), min(contender.seconds)
        figures = f"{tokens / fastest:>8.0f} t/s{processor:>14.3f}{processor / whole:>8.2f}"
        print(f"{contender.name:36}{figures}   {contender.loss:.3f}")


def peer_models(config: ModelConfig) -> Iterator[tuple[str, Callable[[], torch.nn.Module]]]:
    """The plain loop's own model, and litgpt's where that is installed."""
    dimensions = config.sequence, config.padded_vocabulary(), config.layers, config.heads, config.hidden
    peer = nanogpt_loop.GPTConfig(*dimensions)
    yield "plain loop", partial(nanogpt_loop.GPT, peer)
    try:
        from peers.litgpt_loop import LitGPT
    except ImportError:
        print("litgpt is not installed: left out")
        return
    yield "litgpt", partial(LitGPT, peer)


def report(contenders: list[Contender], config: ModelConfig, tokens: int, peak: float) -> None:
    """The table."""
    ours, *peers = (statistics.median(contender.seconds) for contender in contenders)
    print(f"{'':24}{'median':>12}{'fastest':>12}{'GFLOP/s':>10}{'MFU':>8}{'ratio':>8}   loss")
    for contender in contenders:
        median, fastest = statistics.median(contender.seconds), min(contender.seconds)
        flops = config.flops_per_token() * tokens / median
        print(
            f"{contender.name:24}{tokens / median:>8.0f} t/s{tokens / fastest:>8.0f} t/s{flops / 1e9:>10.1f}"
            f"{flops / peak:>8.1%}{median / ours:>8.2f}   {contender.loss:.3f}"
        )
    print(f"myriad is {min(peers) / ours:.2f} x the best peer (medians)")


def main() -> None:
    """Measures and prints."""
    settings = parse()
    torch.set_num_threads(settings.threads)
    os.environ["OMP_NUM_THREADS"] = str(settings.threads)  # what a rank of Myriad goes by
    kinds = {} if settings.gains else {"position": "learned", "norm": "layer"}
    config = ModelConfig(**{name: getattr(settings, name) for name in SIZES}, **kinds)
    dtype = resolve_precision(settings.precision, torch.device("cpu"))
    precision = str(dtype).removeprefix("torch.")
    print(f"{config.num_parameters() / 1e6:.1f}M parameters, {precision}, {settings.threads} threads")
    build = build_gains if settings.gains else build_contenders
    contenders = build(settings, config, precision)
    peak = 0.0
    for contender in contenders:
        contender.run(settings.steps)  # compiles, warms up
        contender.seconds.clear()
        contender.processor_seconds.clear()
    for _ in range(settings.rounds):
        if not settings.gains:
            peak = max(peak, find_peak(torch.device("cpu"), dtype).flops_per_second)
        for contender in contenders:
            contender.run(settings.steps)
    if settings.gains:
        report_gains(contenders, settings.batch * config.sequence)
        return
    print(f"peak: {peak / 1e9:.0f} GFLOP/s, {precision} matrix product")
    report(contenders, config, settings.batch * config.sequence, peak)


if __name__ == "__main__":
    main()
