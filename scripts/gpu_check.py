"""The first hour on a GPU: checks in order, safe settings first, then each part turned on by itself.

    python scripts/gpu_check.py                              all checks that this machine has GPUs for
    python scripts/gpu_check.py --list                       the plan: what each check shows, and for how long
    python scripts/gpu_check.py --only plain overlap-data    some of them
    python scripts/gpu_check.py --device cpu --only plain    the same harness on a CPU

One GPU takes about 20 minutes; checks for two or more come after those. Each check is a command of its own
with a time limit, and a failed one does not end the others. Checks that train compare their losses with those
of `plain` (one rank, PyTorch's own kernels, nothing overlapped). Everything goes into one folder: REPORT.md,
report.json, the machine's facts, and the output and the run of each check.

Exit code: 0 all passed, 1 some failed, 2 bad input or no GPU.
"""

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
MYRIAD = (sys.executable, "-m", "myriad")
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
NCCL_TESTS = ROOT / "tests" / "gpu" / "test_nccl.py"
STEPS, LAST = 30, 5
SAFE = {
    "train.kernels": "plain",
    "overlap.pipeline": "false",
    "overlap.data": "false",
    "overlap.tensor": "off",
    "overlap.optimizer": "false",
    "overlap.checkpoint": "false",
    "checkpoint.memory_every": "0",
}
"""Nothing overlaps, and no memory is pinned for snapshots."""
ALL_ON = {"overlap.pipeline": "true"}
"""As it is by default."""
NCCL = {"NCCL_DEBUG": "INFO", "TORCH_NCCL_DESYNC_DEBUG": "1", "TORCH_FR_BUFFER_SIZE": "20000"}
"""What a hang is explained with."""
_MINUTES = 60.0


@dataclass(frozen=True)
class Check:
    """One command, and what its result means."""

    name: str
    shows: str
    """What is known when it has passed."""
    otherwise: str
    """Where to look when it has not."""
    keys: dict[str, str] = field(default_factory=dict)
    """Job keys of a run that is compared with `plain`; empty: ``command`` is run."""
    command: tuple[str, ...] = ()
    gpus: int = 1
    seconds: float = 3 * _MINUTES
    """Limit."""
    tolerance: float = 2e-2
    """Largest relative difference of a loss from `plain`'s."""
    needs_cuda: bool = False
    """Means nothing on a CPU."""


def _one_gpu() -> Iterator[Check]:
    yield Check(
        "doctor",
        "driver, memory, products and copies of each device are as its data sheet has them",
        "the finding says which; a slow device is not a fault of the training",
        command=(*MYRIAD, "doctor", "--folder", "."),
        seconds=4 * _MINUTES,
    )
    yield Check(
        "kernels",
        "Triton's kernels, float32 and captured graphs give the numbers of a CPU",
        "train with --train.kernels plain; the failing kernel is named by the test",
        command=(*PYTEST, str(ROOT / "tests" / "gpu"), "--ignore", str(NCCL_TESTS)),
        seconds=6 * _MINUTES,
        needs_cuda=True,
    )
    yield Check("plain", "one rank trains with PyTorch's own kernels", "nothing else will run", keys=SAFE)
    fused = {key: value for key, value in SAFE.items() if key != "train.kernels"}
    yield Check("kernels-on", "the fused kernels train as PyTorch's do", "train.kernels = plain", keys=fused)
    yield Check(
        "snapshots",
        "snapshots in pinned memory beside the training",
        "checkpoint.memory_every = 0; how much memory may be pinned is in `ulimit -l`",
        keys={key: value for key, value in fused.items() if "checkpoint" not in key},
    )
    yield Check("defaults", "one rank with all defaults", "the parts above, one by one", keys=ALL_ON)
    for precision in ("float16", "float8", "float8-blocks"):
        yield Check(
            precision,
            f"{precision} on this device's tensor cores",
            "a device without the type refuses in one line (float8: Ada, Hopper and newer)",
            keys={"train.precision": precision},
            tolerance=5e-2,
            needs_cuda=True,
        )
    for recompute in ("selective", "full"):
        yield Check(
            f"recompute-{recompute}",
            f"{recompute} recomputation gives the same losses",
            "layout.recompute = none",
            keys={"layout.recompute": recompute},
        )
    graphs = {"train.cuda_graphs": "true", "checkpoint.memory_every": "0"}
    yield Check("graphs", "captured steps are those that were not", "train.cuda_graphs = false", keys=graphs,
                needs_cuda=True)  # fmt: skip
    fixed = {"train.deterministic": "true"}
    yield Check("deterministic", "operators have a fixed order", "train.deterministic = false", keys=fixed,
                needs_cuda=True)  # fmt: skip
    yield Check(
        "recovery",
        "a killed rank is replaced and the run ends with the bits of one that was not disturbed",
        "RUN/events.jsonl says what was found when; docs/guide/recovery.md",
        command=(*MYRIAD, "faults", "run", "kill-rank", "--folder", "faults"),
        gpus=2,
        seconds=6 * _MINUTES,
    )
    yield Check(
        "attention",
        "each way of computing attention, timed; the quickest of each shape is kept for this device",
        "a way that raises is named; attention_choice goes by its rule then",
        command=(sys.executable, str(ROOT / "benchmarks" / "kernels" / "gpu.py"), "--choose"),
        seconds=4 * _MINUTES,
        needs_cuda=True,
    )
    yield Check(
        "benchmark",
        "kernels and training beside their peers and the planner's prediction",
        "compare with the table of predictions in docs/benchmarks/gpu-predictions.md",
        command=(sys.executable, str(ROOT / "benchmarks" / "kernels" / "gpu.py")),
        seconds=10 * _MINUTES,
        needs_cuda=True,
    )


def _several_gpus() -> Iterator[Check]:
    """First without any overlap, then with one kind at a time: what hangs was turned on last."""
    layouts = {
        "data": {"layout.dp": "2"},
        "data-zero3": {"layout.dp": "2", "layout.zero": "3"},
        "tensor": {"layout.tp": "2"},
        "pipeline": {"layout.pp": "2"},
    }
    for name, layout in layouts.items():
        part = f"overlap.{name.split('-')[0]}"
        yield Check(f"{name}-safe", f"{name} parallelism over NCCL, nothing overlapped",
                    "the last lines of the ranks' logs (NCCL INFO) say which communicator was being made",
                    keys=SAFE | layout, gpus=2)  # fmt: skip
        kept = {key: value for key, value in SAFE.items() if key != part}
        yield Check(f"{name}-overlapped", f"{name} parallelism with {part}", f"{part} = false (off)",
                    keys=kept | layout, gpus=2)  # fmt: skip
    for schedule in ("zero-bubble", "zero-bubble-v", "dualpipe-v", "interleaved"):
        more = {"layout.pp": "2", "layout.schedule": schedule}
        more |= {} if schedule == "zero-bubble" else {"layout.virtual_stages": "2"}
        shows = f"schedule {schedule} with all defaults"
        yield Check(f"pipeline-{schedule}", shows, "overlap.pipeline = false", keys=more, gpus=2)
    yield Check(
        "nccl",
        "each schedule, ZeRO stage and axis gives one GPU's losses in float32",
        "the checks above say which kind; the failing layout is named by the test",
        command=(*PYTEST, str(NCCL_TESTS)),
        seconds=8 * _MINUTES,
        gpus=2,
        needs_cuda=True,
    )
    captured = {"train.cuda_graphs": "true", "checkpoint.memory_every": "0"}
    for name in ("tensor", "pipeline"):
        yield Check(f"graphs-{name}-safe", f"captured stages with {name} parallelism, nothing overlapped",
                    "train.cuda_graphs = false with this axis",
                    keys=SAFE | layouts[name] | captured, gpus=2, needs_cuda=True)  # fmt: skip
        yield Check(f"graphs-{name}", "the same with all defaults", f"overlap.{name} = false (off)",
                    keys=layouts[name] | captured, gpus=2, needs_cuda=True)  # fmt: skip
    few = SAFE | {"layout.tp": "2", "comm.max_ctas": "8"}
    yield Check("few-blocks", "messages that take 8 multiprocessors at most", "comm.max_ctas = off", keys=few,
                gpus=2, needs_cuda=True)  # fmt: skip
    slices = {"layout.tp": "2", "overlap.tensor": "slices"}
    yield Check("tensor-slices", "products in slices with symmetric memory", "overlap.tensor = turns",
                keys=slices, gpus=2, needs_cuda=True)  # fmt: skip
    yield Check("all-of-them", "dp, tp and pp at once with all defaults", "the parts above, one by one",
                keys={"layout.dp": "2", "layout.tp": "2", "layout.pp": "2"}, gpus=8)  # fmt: skip


PLAN = (*_one_gpu(), *_several_gpus())


@dataclass
class Result:
    """What one check showed."""

    name: str
    outcome: str
    """passed, failed, timed out or skipped."""
    seconds: float = 0.0
    detail: str = ""
    """Last line of its output, the reason why it was skipped, or how far its losses are from `plain`'s."""


class Folder:
    """Where everything that is found goes."""

    def __init__(self, path: Path, device: str) -> None:
        self.path, self.device = path.resolve(), device
        self.path.mkdir(parents=True, exist_ok=True)

    def run(self, check: Check) -> Result:
        """Run one check in its own folder; its output goes into ``NAME/output.txt``."""
        place = self.path / check.name
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        began = time.monotonic()
        words = check.command or self._training(check, place)
        around = {
            **NCCL,
            "PYTHONUNBUFFERED": "1",
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *_python_path()]),
        }
        with (place / "output.txt").open("wb") as output:
            status = _run_for(words, check.seconds, output, around, place)
        result = Result(check.name, "passed", round(time.monotonic() - began, 1))
        if status != 0:
            result.outcome = "timed out" if status is None else "failed"
            result.detail = _last_line(place / "output.txt")
        elif check.keys:
            self._compare(check, result)
        return result

    def _training(self, check: Check, place: Path) -> tuple[str, ...]:
        keys = {
            "train.steps": str(STEPS),
            "optimizer.warmup_steps": "5",
            "train.validate_every": "0",
            "train.sample_prompt": "off",
            "train.device": self.device,
            **check.keys,
        }
        given = [word for key, value in keys.items() for word in (f"--{key}", value)]
        more = ["--oversubscribe"] if self.device == "cpu" else []
        return (*MYRIAD, "train", "embedded-gpt", "--run", str(place / "run"), *more, *given)

    def _losses(self, name: str) -> list[float]:
        path = self.path / name / "run" / "metrics.jsonl"
        if not path.is_file():
            return []
        return [float(json.loads(line)["loss"]) for line in path.read_text(encoding="utf-8").splitlines()]

    def _compare(self, check: Check, result: Result) -> None:
        """Set the outcome by the losses: as many as there are steps, falling, and near those of `plain`."""
        losses, plain = self._losses(check.name), self._losses("plain")
        if len(losses) != STEPS:
            result.outcome, result.detail = "failed", f"{len(losses)} of {STEPS} steps have a loss"
            return
        if not sum(losses[-LAST:]) < sum(losses[:LAST]):
            result.outcome, result.detail = "failed", "the loss does not fall"
            return
        if len(plain) != STEPS:
            result.detail = f"last loss {losses[-1]:.4f}; not compared, as `plain` has not passed"
            return
        furthest = max(abs(one / other - 1) for one, other in zip(losses, plain, strict=True))
        result.detail = f"losses within {furthest:.2g} of plain's"
        if not furthest <= check.tolerance:
            result.outcome, result.detail = (
                "failed",
                f"{result.detail}, at most {check.tolerance:g} is rounding",
            )

    def write(self, results: Sequence[Result], facts: dict[str, str]) -> None:
        """Write REPORT.md and report.json; after each check, so that nothing is lost with the machine."""
        whole = {"facts": facts, "checks": [asdict(one) for one in results]}
        (self.path / "report.json").write_text(json.dumps(whole, indent=1), encoding="utf-8")
        meaning = {check.name: check for check in PLAN}
        lines = [
            "# What ran on this machine",
            "",
            *(f"- {name}: {value}" for name, value in facts.items()),
            "",
        ]
        lines += ["| check | outcome | seconds | found | it shows |", "|---|---|---|---|---|"]
        for one in results:
            found = one.detail.replace("|", "/")
            lines.append(
                f"| {one.name} | {one.outcome} | {one.seconds} | {found} | {meaning[one.name].shows} |"
            )
        failed = [one for one in results if one.outcome in ("failed", "timed out")]
        lines += ["", *(f"- {one.name} {one.outcome}: {meaning[one.name].otherwise}" for one in failed)]
        (self.path / "REPORT.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _python_path() -> list[str]:
    return [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one]


def _run_for(
    words: Sequence[str], seconds: float, output: object, around: dict[str, str], place: Path
) -> int | None:
    """Return the exit status; ``None``: it did not end in time, and it and its processes were killed."""
    process = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=around, cwd=place,
        start_new_session=True,
    )  # type: ignore[call-overload] # fmt: skip
    try:
        return int(process.wait(seconds))
    except subprocess.TimeoutExpired:
        for number in (signal.SIGINT, signal.SIGKILL):  # a run that is interrupted writes where it stands
            os.killpg(process.pid, number)
            try:
                process.wait(15)
                break
            except subprocess.TimeoutExpired:
                continue
        return None
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise


def _last_line(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1][:200] if lines else "no output"


def machine_facts(folder: Path) -> dict[str, str]:
    """Return what the machine and its libraries are; the driver's own report goes into the folder."""
    import torch

    facts = {"python": platform.python_version(), "torch": torch.__version__, "machine": platform.platform()}
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(one) for one in range(torch.cuda.device_count())]
        facts["devices"] = ", ".join(f"{names.count(name)} x {name}" for name in sorted(set(names)))
        facts["cuda"] = str(torch.version.cuda)
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    if tool := shutil.which("nvidia-smi"):
        for name, words in (("nvidia-smi.txt", ("-q",)), ("topology.txt", ("topo", "-m"))):
            with (folder / name).open("wb") as output:
                subprocess.run(
                    [tool, *words], stdout=output, stderr=subprocess.STDOUT, timeout=60, check=False
                )
    return facts


def count_gpus() -> int:
    """Count the devices that a rank could use."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def why_skipped(check: Check, gpus: int, device: str) -> str:
    """Return why a check cannot run here; empty: it can."""
    if device == "cpu":
        return "needs a GPU" if check.needs_cuda else ""
    return f"needs {check.gpus} GPUs, there are {gpus}" if gpus < check.gpus else ""


def show_plan() -> None:
    """Print each check with what it shows."""
    for gpus in sorted({check.gpus for check in PLAN}):
        print(f"{gpus} GPU{'s' if gpus > 1 else ''}")
        for check in (one for one in PLAN if one.gpus == gpus):
            print(f"  {check.name:22} {check.shows} (at most {check.seconds:.0f} s)")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("gpu-check"), help="where everything goes")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", metavar="CHECK", help="these alone, in the plan's order")
    parser.add_argument("--list", action="store_true", help="print the plan")
    return parser.parse_args()


def main() -> int:
    """Run the plan; return the exit status."""
    given = parse()
    if given.list:
        show_plan()
        return 0
    unknown = set(given.only or ()) - {check.name for check in PLAN}
    if unknown:
        print(f"--only {' '.join(sorted(unknown))}: no such check; --list names them", file=sys.stderr)
        return 2
    gpus = count_gpus() if given.device == "cuda" else 0
    if given.device == "cuda" and not gpus:
        print(
            "no GPU that PyTorch can use: a driver, and a build of PyTorch for CUDA, are needed",
            file=sys.stderr,
        )
        return 2
    folder = Folder(given.folder, given.device)
    facts, results = machine_facts(folder.path), list[Result]()
    chosen = [check for check in PLAN if not given.only or check.name in given.only]
    for number, check in enumerate(chosen, 1):
        print(f"{number:2} of {len(chosen)}  {check.name:22}", end=" ", flush=True)
        reason = why_skipped(check, gpus, given.device)
        results.append(Result(check.name, "skipped", detail=reason) if reason else folder.run(check))
        print(f"{results[-1].outcome:9} {results[-1].seconds:6.1f} s  {results[-1].detail}", flush=True)
        folder.write(results, facts)
    print(f"{folder.path / 'REPORT.md'}")
    return int(any(one.outcome in ("failed", "timed out") for one in results))


if __name__ == "__main__":
    sys.exit(main())
