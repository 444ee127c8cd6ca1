"""Fuzz every decoder of data that Myriad does not trust (`decoders`), guided by coverage.

    python -m pip install atheris==3.0.0        in an environment of its own: Python 3.11 to 3.13
    python benchmarks/security/fuzz.py --inputs 1000000 --seconds 600

Each decoder runs in a process of its own, one after the other, with bounded memory: an input that makes
it take 1 GiB more fails. Half of the inputs are mutations of values (`mutations`), the others libFuzzer's,
with a right hash and size in formats that have them. Without atheris, all inputs are mutations of the
examples. Prints a table, and a line for each error that is not a documented one.
"""

import argparse
import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from decoders import Target

_HEAD_BYTES = 2**30
"""Address space that an input may take."""
_LONGEST_SECONDS = 60
_STRUCTURED = 2
"""One of so many inputs is a mutation of values."""


@dataclass
class Outcome:
    """The result of one decoder."""

    name: str
    inputs: int = 0
    accepted: int = 0
    seconds: float = 0.0
    """Processor time of all inputs."""
    slowest_seconds: float = 0.0
    slowest_bytes: int = 0
    grown_mib: float = 0.0
    """Growth of the largest memory of the process after the first 1,000 inputs."""
    errors: dict[str, int] = field(default_factory=dict)
    """How often each error came that is not a documented one, by type and line."""
    died: str = ""


class Recorder:
    """Decodes inputs, and counts and keeps those with errors."""

    def __init__(self, target: "Target", inputs: int, seconds: float, keep: Path | None) -> None:
        from decoders import check

        self._target, self._check, self._most, self._keep = target, check, inputs, keep
        self._until = time.monotonic() + seconds
        self.found, self._errors = Outcome(target.name), Counter[str]()
        self._begun, self._memory = time.process_time(), 0.0

    def is_done(self) -> bool:
        """Whether there were enough inputs, or the time is over."""
        return self.found.inputs >= self._most or time.monotonic() > self._until

    def take(self, data: bytes) -> None:
        """Decode an input, and record its outcome, time and memory."""
        found, begun = self.found, time.process_time()
        try:
            found.accepted += self._check(self._target, data)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self._note(error, data)
        seconds = time.process_time() - begun
        if seconds > found.slowest_seconds:
            found.slowest_seconds, found.slowest_bytes = seconds, len(data)
        found.inputs += 1
        if found.inputs == 1000:
            self._memory = _largest_mib()

    def _note(self, error: BaseException, data: bytes) -> None:
        frames = traceback.extract_tb(error.__traceback__)
        ours = [frame for frame in frames if f"{os.sep}myriad{os.sep}" in frame.filename] or frames
        place = f"{type(error).__name__} at {Path(ours[-1].filename).name}:{ours[-1].lineno}"
        if place not in self._errors:
            print(f"{self._target.name}: {place}: {str(error)[:200]!r}: {data[:200]!r}", file=sys.stderr)
            if self._keep is not None:
                name = "".join(one if one.isalnum() else "-" for one in f"{self._target.name}-{place}")
                (self._keep / name).write_bytes(data)
        self._errors[place] += 1

    def outcome(self) -> Outcome:
        """Return what was found so far."""
        self.found.seconds = time.process_time() - self._begun
        self.found.grown_mib = max(0.0, _largest_mib() - self._memory)
        self.found.errors = dict(self._errors)
        return self.found


def _largest_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _bound_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + _HEAD_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _fuzz_one(options: argparse.Namespace) -> None:
    """Fuzz one decoder in this process, and print its outcome as the last line."""
    atheris = _atheris()
    with atheris.instrument_imports(include=["myriad"]) if atheris else contextlib.nullcontext():
        from decoders import TARGETS, check

        (target,) = (one for one in TARGETS if one.name == options.target[0])
        examples = list(target.examples())
        read = [check(target, one) for one in examples]
        assert all(read) or not target.examples_are_read, "an example is refused"
    recorder = Recorder(target, options.inputs, options.seconds, options.keep)
    _bound_memory()
    if atheris is None:
        draw = Random(options.seed)
        while not recorder.is_done():
            recorder.take(_mutated(target, draw.choice(examples), draw))
        _end(recorder)
    with tempfile.TemporaryDirectory() as corpus:
        for number, example in enumerate(examples):
            (Path(corpus) / str(number)).write_bytes(example)
        _with_coverage(atheris, target, recorder, corpus, options.seed)


def _atheris() -> Any:
    with contextlib.suppress(ImportError):
        import atheris

        return atheris
    return None


def _mutated(target: "Target", data: bytes, draw: Random) -> bytes:
    from mutations import mutate

    for _ in range(draw.choice((1, 1, 2))):
        data = mutate(data, target.codec, draw)
    return data


def _with_coverage(atheris: Any, target: "Target", recorder: Recorder, corpus: str, seed: int) -> None:
    def take(data: bytes) -> None:
        recorder.take(data)
        if recorder.is_done():
            _end(recorder)

    arguments = [sys.argv[0], corpus, f"-seed={seed}", f"-timeout={_LONGEST_SECONDS}", "-rss_limit_mb=0"]
    arguments += ["-max_len=32768", "-len_control=0", "-verbosity=0", f"-artifact_prefix={corpus}/"]
    atheris.Setup(arguments, take, custom_mutator=_mutator(atheris, target))
    atheris.Fuzz()


def _mutator(atheris: Any, target: "Target") -> Callable[[bytes, int, int], bytes]:
    def mutated(data: bytes, most: int, seed: int) -> bytes:
        if seed % _STRUCTURED == 0:
            return _mutated(target, data, Random(seed))[:most]
        found: bytes = atheris.Mutate(data, most)
        if target.codec.sealed and seed % 4 == 1:
            with contextlib.suppress(Exception):  # not parsed: it stays as it is
                return target.codec.dump(target.codec.load(found))[:most]
        return found

    return mutated


def _end(recorder: Recorder) -> None:
    """Print the outcome and end, before libFuzzer reports its own figures."""
    print(json.dumps(asdict(recorder.outcome())), flush=True)
    os._exit(0)


def _fuzz_all(options: argparse.Namespace) -> list[Outcome]:
    from decoders import TARGETS

    found = []
    for target in TARGETS:
        if options.target and not any(one in target.name for one in options.target):
            continue
        command = [
            sys.executable,
            __file__,
            "--one",
            "--target",
            target.name,
            "--inputs",
            str(options.inputs),
        ]
        command += ["--seconds", str(options.seconds), "--seed", str(options.seed)]
        command += [] if options.keep is None else ["--keep", str(options.keep)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        lines = done.stdout.splitlines()
        for line in done.stderr.splitlines()[-200:]:
            if line.startswith(f"{target.name}: ") or (done.returncode and not line.startswith("INFO")):
                print(line, file=sys.stderr, flush=True)
        outcome = Outcome(target.name, died=f"exit code {done.returncode}")
        if done.returncode == 0 and lines:
            outcome = Outcome(**json.loads(lines[-1]))
        found.append(outcome)
        print(_row(outcome), flush=True)
    return found


def _row(found: Outcome) -> str:
    wrong = found.died or ", ".join(f"{place} ({count})" for place, count in found.errors.items()) or "0"
    share = f"{100 * found.accepted / max(1, found.inputs):.0f} %"
    slowest = f"{found.slowest_seconds * 1e3:.0f} ms ({found.slowest_bytes:,} bytes)"
    return (
        f"| {found.name} | {found.inputs:,} | {share} | {found.seconds:.0f} | {wrong} | {slowest} "
        f"| {found.grown_mib:.0f} MiB |"
    )


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--inputs", type=int, default=1_000_000, help="inputs of each decoder")
    parser.add_argument("--seconds", type=float, default=600.0, help="most seconds for each decoder")
    parser.add_argument("--target", action="append", help="part of the name of a decoder; default: all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="existing folder for inputs with errors")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Fuzz, and return 1 if a decoder raised an error that is not a documented one."""
    options = _options(arguments)
    if options.one:
        _fuzz_one(options)
    guided = "guided by coverage (atheris)" if _atheris() else "without coverage: atheris is not installed"
    print(f"{guided}; Python {sys.version.split()[0]}, {os.cpu_count()} CPUs\n")
    print("| decoder | inputs | accepted | seconds | other errors | slowest input | memory |")
    print("|---|---|---|---|---|---|---|")
    found = _fuzz_all(options)
    return int(any(one.errors or one.died for one in found))


if __name__ == "__main__":
    sys.exit(main())
