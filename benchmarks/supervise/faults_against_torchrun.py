"""The same faults under stock torchrun and under Myriad: seen when, back when, at what cost, by whom.

    python benchmarks/supervise/faults_against_torchrun.py [--only kill,hang] [--who torchrun,myriad] [--json]

torchrun    `torchrun --standalone --nproc-per-node 2 --max-restarts 3`, all its settings at their defaults
tuned       the same with what helps: collectives give up after 15 s, each restart has a store of its own
            (TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1)
myriad      the ready scenario of `myriad faults run`, as it is

torchrun runs a plain loop (`peers/torchrun_loop.py`): DDP over gloo, torch.distributed.checkpoint every 10
steps, resumed at the start. All models have 4 layers of 64. Who does nothing for `--patience` seconds after a
fault has not noticed it. The full disk (free again after 2 s) needs root.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from myriad.errors import MyriadError
from myriad.faults.scenario import load_scenario
from myriad.faults.storage_faults import fill, flip_a_bit, free, small_disk
from myriad.faults.trial import try_scenario
from myriad.recipes import recipe_names
from myriad.run import Run
from myriad.system.jsonl import JsonlTail

LOOP = Path(__file__).parents[1] / "peers" / "torchrun_loop.py"
SCENARIOS = {
    "kill": ("SIGKILL of a rank", "kill-rank"),
    "segv": ("SIGSEGV of a rank", "segv-rank"),
    "stop": ("SIGSTOP of a rank", "stop-rank"),
    "launcher": ("SIGKILL of the command that was typed", ""),
    "executor": ("SIGKILL of who starts ranks", "kill-executor"),
    "hang": ("a rank never enters the collective", "hang-rank"),
    "exception": ("the same exception in every attempt", "exception"),
    "disk-full": ("the checkpoints' disk is full for 2 s", "disk-full"),
    "damage": ("a bit of the newest checkpoint flips, and it is needed", "damage"),
    "nan": ("a loss of one rank is not a number, once", "nan-once"),
    "flip": ("a bit of one rank's weights flips", "flip"),
}
WHO = ("torchrun", "tuned", "myriad")
SAME_PROCESS = "executor"
"""torchrun's agent is the command that was typed."""
STEP, STEPS, FULL_SECONDS, END_SECONDS = 25, 120, 2.0, 120.0
TUNED = ["--timeout", "15"], {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
SIGN = re.compile(r"exitcode|Signal \d|Traceback|Error\b|[Ff]ailed|CheckpointException")


@dataclass
class Row:
    """What became of one fault."""

    scenario: str
    who: str
    noticed_seconds: float | None = None
    """First sign, after the fault."""
    back_seconds: float | None = None
    """All ranks train again, after the fault; 0: they never stopped."""
    steps_lost: int | None = None
    equal: bool | None = None
    """Weights at the end, to those of the undisturbed run."""
    person: bool = True
    """Needed: to start again, or because the end is wrong."""
    said: str = ""


class Torchrun:
    """One run of the plain loop."""

    def __init__(self, folder: Path, *, tuned: bool) -> None:
        folder.mkdir(parents=True)
        (folder / "checkpoints").mkdir()
        self.folder = folder
        arguments, variables = TUNED if tuned else ([], {})
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += ["--max-restarts", "3", str(LOOP), str(folder), "--steps", str(STEPS), *arguments]
        self._command, self._environment = command, os.environ | variables
        self.signs: list[tuple[float, str]] = []

    def start(self) -> None:
        self.process = subprocess.Popen(
            self._command, env=self._environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        with (self.folder / "output").open("w") as log:
            for line in self.process.stdout:
                log.write(line)
                if SIGN.search(line):
                    self.signs.append((time.time(), line.strip()))

    def lines(self, name: str = "steps.jsonl") -> list[dict[str, float]]:
        return JsonlTail(self.folder / name).poll()

    def step(self) -> int:
        return max((int(line["step"]) for line in self.lines() if "step" in line), default=0)

    def pids(self) -> list[int]:
        return [int(line["pid"]) for line in self.lines("pids")]

    def alive(self) -> bool:
        return any(self._is_rank(pid) for pid in self.pids())

    def _is_rank(self, pid: int) -> bool:
        with suppress(OSError):
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            return state != "Z" and str(self.folder) in Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        return False

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pid in filter(self._is_rank, self.pids()):
            os.kill(pid, signal.SIGKILL)

    @property
    def digests(self) -> list[str] | None:
        path = self.folder / "final.json"
        return json.loads(path.read_text()) if path.exists() else None


class Deed:
    """What is done from outside; the rest the loop does to itself."""

    def __init__(self, run: Torchrun, kind: str) -> None:
        self._run, self._kind, self._free_at = run, kind, 0.0
        self.at: float | None = None

    def poll(self) -> None:
        """Does it when its time has come."""
        checkpoints = self._run.folder / "checkpoints"
        if self._free_at and time.time() > self._free_at:
            self._free_at = 0.0
            free(checkpoints)
        if self.at is None and (caused := self._run.lines("caused.jsonl")):
            self.at = caused[0]["time"]
        if self.at is None and self._kind in ("launcher", "disk-full", "damage") and self._run.step() >= STEP:
            self.at = time.time()
            self._do(checkpoints)

    def _do(self, checkpoints: Path) -> None:
        if self._kind == "launcher":
            self._run.process.kill()
        elif self._kind == "disk-full":
            fill(checkpoints)
            self._free_at = time.time() + FULL_SECONDS
        else:
            newest = max(checkpoints.glob("*/.metadata"), key=lambda path: path.stat().st_mtime).parent
            flip_a_bit(newest)
            os.kill(self._run.pids()[-1], signal.SIGKILL)


def try_torchrun(kind: str, folder: Path, expected: list[str], patience: float, *, tuned: bool) -> Row:
    run = Torchrun(folder, tuned=tuned)
    inside = {"kind": kind, "rank": 1, "step": STEP}
    (folder / "fault.json").write_text(json.dumps(inside))
    with ExitStack() as stack:
        if kind == "disk-full":
            stack.enter_context(small_disk(folder / "checkpoints"))
        run.start()
        stack.callback(run.end)
        deed = Deed(run, kind)
        began = time.time()
        while not is_over(run, deed, began, patience):
            deed.poll()
            time.sleep(0.02)
        return row_of(kind, "tuned" if tuned else "torchrun", run, deed, expected, patience)


def is_over(run: Torchrun, deed: Deed, began: float, patience: float) -> bool:
    now = time.time()
    if run.process.poll() is not None and not run.alive():
        return True
    if deed.at is None:
        return now - began > END_SECONDS
    goes_on = any(line["time"] > now - patience for line in run.lines())
    stuck = now - deed.at > patience and not goes_on
    return stuck or now - deed.at > patience + END_SECONDS


def row_of(kind: str, who: str, run: Torchrun, deed: Deed, expected: list[str], patience: float) -> Row:
    row, lines, code = Row(kind, who), run.lines(), run.process.poll()
    if deed.at is None:
        row.said = "the fault was never caused"
        return row
    signs = [(at, text) for at, text in run.signs if at >= deed.at]
    if kind == "launcher":
        row.noticed_seconds = 0.0  # the shell has its prompt back
    elif signs:
        row.noticed_seconds = signs[0][0] - deed.at
    row.back_seconds, row.steps_lost = back_and_lost(lines, deed.at)
    finished = run.digests is not None
    if row.back_seconds == 0 and not finished:  # some steps more, until it was stuck
        row.back_seconds = row.steps_lost = None
    row.equal = run.digests == expected if finished else None
    row.person = not (finished and row.equal)
    row.said = in_words(run, row, code, patience)
    return row


def back_and_lost(lines: Sequence[dict[str, float]], caused: float) -> tuple[float | None, int | None]:
    """The first step of the first start after the fault that came to one; without a start, the next step."""
    before = max(
        (int(line["step"]) for line in lines if "step" in line and line["time"] <= caused), default=0
    )
    after = [line for line in lines if line["time"] > caused]
    starts = [place for place, line in enumerate(after) if "resumed" in line]
    if not starts:
        return (0.0, 0) if after and after[-1].get("step", 0) > before + 2 else (None, None)
    for start, stop in zip(starts, [*starts[1:], len(after)], strict=True):
        if stop - start > 1:
            done = max([before, *(int(line["step"]) for line in after[: starts[0]] if "step" in line)])
            return after[start + 1]["time"] - caused, max(0, done - int(after[start]["resumed"]))
    return None, None


def in_words(run: Torchrun, row: Row, code: int | None, patience: float) -> str:
    if row.scenario == "launcher":
        return "ranks went on without it, unwatched" if run.digests else "the ranks ended with it"
    if code is None:
        return (
            f"not noticed in {patience:.0f} s" if row.noticed_seconds is None else "stuck after it was seen"
        )
    if code != 0:
        return f"ended at step {run.step()}, after its restarts"
    if row.equal is False:
        return "finished; nobody knows that it is wrong"
    return "restarted" if row.back_seconds else "went on"


def try_myriad(kind: str, folder: Path) -> Row:
    """The ready scenario."""
    if kind == "launcher":
        return kill_command(folder)
    row, name = Row(kind, "myriad"), SCENARIOS[kind][1]
    if name not in recipe_names("faults"):
        row.said = f"no scenario {name} here"
        return row
    report = try_scenario(name, load_scenario(name), folder, lambda text: None)
    grade = report.grades[0]
    row.noticed_seconds, row.steps_lost, row.equal = grade.detected_seconds, grade.steps_lost, report.equal
    if grade.trains_seconds is not None and grade.detected_seconds is not None:
        row.back_seconds = grade.detected_seconds + grade.trains_seconds
    elif report.outcome == "finished":
        row.back_seconds = 0.0
    row.person = report.outcome != "finished" or report.equal is not True
    row.said = grade.report if report.outcome == "finished" else "stopped with the reason"
    return row


def kill_command(folder: Path) -> Row:
    """`myriad train`, and typed again as soon as nothing of it is left: that takes a person."""
    row, run = Row("launcher", "myriad", noticed_seconds=0.0), Run(folder / "command")
    overrides = (
        f"--{override.replace('=', ' ', 1)}" for override in load_scenario("kill-executor").overrides
    )
    words = [word for override in overrides for word in override.split()]
    command = [sys.executable, "-m", "myriad.cli.main", "train", "tiny", "--run", str(run.path), "--json"]
    first = subprocess.Popen([*command, *words], stdout=subprocess.DEVNULL)
    while first.poll() is None and last_step(run) < STEP:
        time.sleep(0.01)
    first.kill()
    first.wait()
    killed, done = time.time(), last_step(run)
    subprocess.run([*command, *words], stdout=subprocess.DEVNULL, timeout=END_SECONDS, check=False)
    again = [event for event in run.read_events() if event["time"] > killed]
    started = next((event["time"] for event in again if event["event"] == "start"), None)
    resumed = next((event["step"] for event in again if event["event"] == "resume"), 0)
    row.back_seconds = None if started is None else started - killed
    row.steps_lost = max(0, done - resumed)
    losses = [[line["loss"] for line in one.read_metrics()] for one in (run, *kept_undisturbed(folder))]
    row.equal = losses[0] in losses[1:] if len(losses) > 1 else None
    row.said = "all ended with it; typed again at once"
    return row


def last_step(run: Run) -> int:
    lines = run.read_metrics()
    return int(lines[-1]["step"]) if lines else 0


def kept_undisturbed(folder: Path) -> list[Run]:
    """Return undisturbed runs of earlier scenarios with the same job."""
    return [Run(path) for path in (folder / "undisturbed").glob("*") if path.is_dir()]


def table(rows: Sequence[Row]) -> list[str]:
    heads = ["fault", "under", "noticed after", "trains again after", "steps lost", "equal", "person", "how"]
    cells = [heads, ["---"] * len(heads)]
    for row in rows:
        back = "went on" if row.back_seconds == 0 else seconds(row.back_seconds)
        lost = "-" if row.steps_lost is None else str(row.steps_lost)
        equal = {True: "yes", False: "no", None: "-"}[row.equal]
        person = "needed" if row.person else "no"
        told = row.said.partition("\n")[0][:70]
        title = SCENARIOS[row.scenario][0]
        cells.append([title, row.who, seconds(row.noticed_seconds), back, lost, equal, person, told])
    return [f"| {' | '.join(line)} |" for line in cells]


def seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s" if value >= 1 else f"{value:.2f} s"


def undisturbed(folder: Path) -> list[str]:
    run = Torchrun(folder, tuned=True)
    run.start()
    try:
        run.process.wait(END_SECONDS)
    finally:
        run.end()
    if run.digests is None:
        sys.exit(f"the undisturbed run of torchrun failed: {folder / 'output'}")
    return run.digests


def try_all(kinds: Sequence[str], who: Sequence[str], folder: Path, patience: float) -> list[Row]:
    rows: list[Row] = []
    expected = undisturbed(folder / "undisturbed-torchrun") if set(who) - {"myriad"} else []
    for kind in kinds:
        for one in who:
            try:
                if one == "myriad":
                    row = try_myriad(kind, folder)
                elif kind == SAME_PROCESS:
                    continue
                else:
                    tuned = one == "tuned"
                    row = try_torchrun(kind, folder / f"{kind}-{one}", expected, patience, tuned=tuned)
            except MyriadError as error:  # no root, for one
                row = Row(kind, one, said=str(error))
            rows.append(row)
            print(table([row])[-1], file=sys.stderr, flush=True)
    return rows


def chosen(text: str, among: Sequence[str], option: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in among]:
        sys.exit(f"{option} {unknown[0]}: one of {', '.join(among)}")
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default=",".join(SCENARIOS), help="faults, with commas")
    parser.add_argument("--who", default=",".join(WHO), help="torchrun, tuned, myriad, with commas")
    parser.add_argument("--patience", type=float, default=90.0, help="seconds until a fault is unnoticed")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    kinds = chosen(options.only, list(SCENARIOS), "--only")
    who = chosen(options.who, WHO, "--who")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # and nothing of it is left behind
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        rows = try_all(kinds, who, Path(folder), options.patience)
    print(json.dumps([asdict(row) for row in rows]) if options.json else "\n".join(table(rows)))


if __name__ == "__main__":
    main()
