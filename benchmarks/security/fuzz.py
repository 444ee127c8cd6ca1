"""Fuzz every decoder of data that Myriad does not trust (`decoders`), guided by coverage.

    python -m pip install atheris==3.0.0        in an environment of its own: Python 3.11 to 3.13
    python benchmarks/security/fuzz.py --inputs 1000000 --seconds 600 --results FOLDER

Each decoder runs in a process of its own, one after the other, with bounded memory: an input that makes
it take 1 GiB more fails. Half of the first inputs (``--guided``) are mutations of values (`mutations`), the
others libFuzzer's, with a right hash and size in formats that have them. Following the coverage takes up to
two thirds of the time and finds little after that, so all later inputs are mutations of values: of the
examples, and of the inputs that reached more code. Without atheris, all inputs are mutations of the examples.
Prints a table, and a line for each error that is not a documented one.

``--results`` keeps the figures of each decoder, and the inputs that reached more code. The same command then
goes on where it was interrupted, the fastest decoders first.
"""

import argparse
import contextlib
import difflib
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from decoders import Target

_HEAD_BYTES = 2**30
"""Address space that an input may take."""
_LONGEST_SECONDS = 60
_SAVE_SECONDS = 10
_INPUTS_OF_A_CHECK = 16
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
    """Decodes inputs, and counts and keeps those with errors.

    ``earlier`` is the outcome so far, and ``known`` the inputs at the start that it has counted already."""

    def __init__(
        self,
        target: "Target",
        options: argparse.Namespace,
        earlier: Outcome | None = None,
        known: int = 0,
    ) -> None:
        from decoders import check

        self._target, self._check, self._options = target, check, options
        self._until = time.monotonic() + options.seconds
        self.found = earlier or Outcome(target.name)
        self._errors, self._grown_mib = Counter(self.found.errors), self.found.grown_mib
        self._begun, self._memory = time.process_time() - self.found.seconds, 0.0
        self._known, self._taken, self._parent = known, 0, os.getppid()
        self._next_save = time.monotonic() + _SAVE_SECONDS

    def is_done(self) -> bool:
        """Whether there were enough inputs, or the time is over."""
        if self._taken % _INPUTS_OF_A_CHECK and self.found.inputs < self._options.inputs:
            return False
        now = time.monotonic()
        if now > self._next_save:
            self._next_save = now + _SAVE_SECONDS
            _save(self.outcome(), self._options.results)
            if os.getppid() != self._parent:  # the command was interrupted
                return True
        return self.found.inputs >= self._options.inputs or now > self._until

    def take(self, data: bytes) -> None:
        """Decode an input, and record its outcome, time and memory."""
        found, begun = self.found, time.monotonic()
        accepted = self._is_accepted(data)
        if time.monotonic() - begun > found.slowest_seconds:  # slow, or other processes ran: which one?
            begun = time.process_time()  # a system call that takes longer than many inputs
            self._is_accepted(data)
            seconds = time.process_time() - begun
            if seconds > found.slowest_seconds:
                found.slowest_seconds, found.slowest_bytes = seconds, len(data)
        self._taken += 1
        if self._taken > self._known:
            found.inputs += 1
            found.accepted += accepted
        if self._taken == 1000:
            self._memory = _largest_mib()

    def _is_accepted(self, data: bytes) -> bool:
        try:
            return self._check(self._target, data)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self._note(error, data)
            return False

    def _note(self, error: BaseException, data: bytes) -> None:
        frames = traceback.extract_tb(error.__traceback__)
        ours = [frame for frame in frames if f"{os.sep}myriad{os.sep}" in frame.filename] or frames
        place = f"{type(error).__name__} at {Path(ours[-1].filename).name}:{ours[-1].lineno}"
        if place not in self._errors:
            print(f"{self._target.name}: {place}: {str(error)[:200]!r}: {data[:200]!r}", file=sys.stderr)
            if self._options.keep is not None:
                (self._options.keep / _slug(f"{self._target.name}-{place}")).write_bytes(data)
        self._errors[place] += 1

    def outcome(self) -> Outcome:
        """Return what was found so far."""
        self.found.seconds = time.process_time() - self._begun
        if self._memory:
            self._grown_mib = max(self._grown_mib, _largest_mib() - self._memory)
        self.found.grown_mib = self._grown_mib
        self.found.errors = dict(self._errors)
        return self.found


def _slug(name: str) -> str:
    return "".join(one if one.isalnum() else "-" for one in name)


def _save(found: Outcome, results: Path | None) -> None:
    if results is not None:
        path = results / f"{_slug(found.name)}.json"
        path.with_suffix(".new").write_text(json.dumps(asdict(found)))
        path.with_suffix(".new").replace(path)


def _earlier(name: str, results: Path | None) -> Outcome | None:
    path = None if results is None else results / f"{_slug(name)}.json"
    return None if path is None or not path.is_file() else Outcome(**json.loads(path.read_text()))


def _largest_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _bound_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + _HEAD_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _fuzz_one(options: argparse.Namespace) -> None:
    """Fuzz one decoder in this process, and print its outcome as the last line."""
    earlier = _earlier(options.target[0], options.results)
    atheris = _atheris() if options.guided else None
    with atheris.instrument_imports(include=["myriad"]) if atheris else contextlib.nullcontext():
        from decoders import TARGETS, check

        (target,) = (one for one in TARGETS if one.name == options.target[0])
        examples = list(target.examples())
        target = replace(target, codec=replace(target.codec, load=lru_cache(4096)(target.codec.load)))
        read = [check(target, one) for one in examples]
        assert all(read) or not target.examples_are_read, "an example is refused"
    difflib.get_close_matches = _suggest_first  # type: ignore[assignment]
    seed = (options.seed + (earlier.inputs if earlier else 0)) % 2**31
    with tempfile.TemporaryDirectory() as scratch:
        corpus = Path(scratch) if options.results is None else options.results / _slug(target.name)
        corpus.mkdir(exist_ok=True)
        for number, example in enumerate(examples):
            (corpus / str(number)).write_bytes(example)
        known = len(list(corpus.iterdir())) if earlier and atheris else 0
        recorder = Recorder(target, options, earlier, known)
        _bound_memory()
        if atheris is None:
            draw, kept = Random(seed), [path.read_bytes() for path in sorted(corpus.iterdir())]
            while not recorder.is_done():
                recorder.take(_mutated(target, draw.choice(kept), draw))
            _end(recorder)
        _with_coverage(atheris, target, recorder, str(corpus), seed)


def _suggest_first(word: str, possibilities: Iterable[str], n: int = 3, cutoff: float = 0.6) -> list[str]:
    """Stand in for ``difflib.get_close_matches``, which takes longer than all else in a refused job file."""
    return list(possibilities)[:n] if len(word) % 2 else []


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

    arguments = [
        sys.argv[0],
        corpus,
        f"-seed={max(1, seed)}",
        f"-timeout={_LONGEST_SECONDS}",
        "-rss_limit_mb=0",
    ]
    arguments += [
        f"-max_len={target.most_bytes}",
        "-len_control=0",
        "-verbosity=0",
        f"-artifact_prefix={corpus}/",
    ]
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

    names = [one.name for one in TARGETS]
    if options.target:
        names = [name for name in names if any(one in name for one in options.target)]
    return [_fuzz_in_a_process(name, options) for name in sorted(names, key=lambda one: -_rate(one, options))]


def _rate(name: str, options: argparse.Namespace) -> float:
    """Return the inputs per second of processor time so far; decoders without a result come first."""
    earlier = _earlier(name, options.results)
    return math.inf if earlier is None else earlier.inputs / max(0.001, earlier.seconds)


def _fuzz_in_a_process(name: str, options: argparse.Namespace) -> Outcome:
    outcome = _earlier(name, options.results)
    guided = options.inputs if options.results is None else min(options.guided, options.inputs)
    for inputs in sorted({guided, options.inputs}):
        if outcome is not None and (outcome.died or outcome.inputs >= inputs):
            continue
        command = [sys.executable, __file__, "--one", "--target", name, "--inputs", str(inputs)]
        command += ["--guided", str(inputs if inputs == guided else 0)]
        command += ["--seconds", str(options.seconds), "--seed", str(options.seed)]
        command += [] if options.keep is None else ["--keep", str(options.keep)]
        command += [] if options.results is None else ["--results", str(options.results)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        for line in done.stderr.splitlines()[-200:]:
            if line.startswith(f"{name}: ") or (done.returncode and not line.startswith("INFO")):
                print(line, file=sys.stderr, flush=True)
        lines, outcome = done.stdout.splitlines(), Outcome(name, died=f"exit code {done.returncode}")
        if done.returncode == 0 and lines:
            outcome = Outcome(**json.loads(lines[-1]))
            _save(outcome, options.results)
    assert outcome is not None
    print(_row(outcome), flush=True)
    return outcome


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
    parser.add_argument(
        "--guided", type=int, default=100_000, help="inputs guided by coverage, with --results"
    )
    parser.add_argument("--seconds", type=float, default=600.0, help="most seconds for each decoder")
    parser.add_argument("--target", action="append", help="part of the name of a decoder; default: all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="existing folder for inputs with errors")
    parser.add_argument("--results", type=Path, help="existing folder for figures and inputs, to go on later")
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
