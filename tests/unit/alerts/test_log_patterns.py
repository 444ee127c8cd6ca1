"""If these fail, an error in a log is missed, a healthy log raises alarms, or a user's pattern stops the
search of all logs of a node. Lines are as they stand in public reports of NVIDIA's driver, NCCL and
PyTorch."""

import time

import pytest

from myriad.alerts.log_patterns import MOST_LINE_BYTES, LogPatterns, normalised, pattern_problem
from myriad.errors import BadInputError

ERRORS = {
    "Xid": "NVRM: Xid (PCI:0000:17:00): 79, pid=48213, GPU has fallen off the bus",
    "ECC": "RuntimeError: uncorrectable ECC error encountered",
    "OOM": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    "CUDA error": "RuntimeError: CUDA error: an illegal memory access was encountered",
    "NCCL": "gpu-7:312:400 [3] misc/socket.cc:538 NCCL WARN Net : Connection closed by remote peer",
    "storage": "OSError: [Errno 28] No space left on device: '/data/step-10'",
}
MORE = [
    ("OOM", "Memory cgroup out of memory: Killed process 1234 (python) total-vm:9kB"),
    ("OOM", "MemoryError: Unable to allocate 3.1 GiB for an array"),
    ("CUDA error", "RuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
    ("NCCL", "[rank3]:[E] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=2)"),
    ("NCCL", "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1331"),
    ("NCCL", "ncclSystemError: System call (e.g. socket, malloc) or external library call failed"),
    ("ECC", "EDAC MC0: 1 UE memory read error ECC uncorrectable"),
]
HEALTHY = [
    "gpu-7:312:400 [3] NCCL INFO Channel 00/02 : 0 1 2 3",
    "NCCL version 2.21.5+cuda12.4",
    "step 40 loss 3.2 lr 0.001 seconds 0.4",
    "ECC mode: enabled",
    "CUDNN_STATUS_SUCCESS",
    "the job aborted early on purpose",
    "",
]


@pytest.mark.parametrize(("what", "line"), [*ERRORS.items(), *MORE])
def test_error_lines_are_found_by_name(what: str, line: str) -> None:
    chunk = "\n".join([HEALTHY[0], line, HEALTHY[2]]).encode()
    assert [(one.what, one.line.decode()) for one in LogPatterns().matches(chunk)] == [(what, line)]


def test_healthy_lines_are_not() -> None:
    assert list(LogPatterns().matches("\n".join(HEALTHY).encode())) == []


def test_a_jobs_own_patterns_are_added_and_its_exceptions_left_out() -> None:
    patterns = LogPatterns(["loss scale .* too small"], ["known bug", "Tried to allocate"])
    lines = [
        "loss scale 2 too small",
        "loss scale 4 too small (known bug)",
        ERRORS["OOM"],
        ERRORS["Xid"],
    ]
    found = [one.what for one in patterns.matches("\n".join(lines).encode())]
    assert found == ["loss scale .* too small", "Xid"]


def test_a_line_counts_to_its_limit() -> None:
    late = b"x" * MOST_LINE_BYTES + ERRORS["Xid"].encode()
    early = ERRORS["Xid"].encode() + b"x" * 10**6
    assert [len(one.line) for one in LogPatterns().matches(late + b"\n" + early)] == [MOST_LINE_BYTES]


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("[", "is no regular expression"),
        ("(a+)+$", "a repetition inside of a repetition"),
        ("(?:x*y)*z", "a repetition inside of a repetition"),
        (r"(a)\1", "back-references"),
        ("a*", "matches an empty line"),
        ("", "1 to 256 characters"),
        ("x" * 257, "1 to 256 characters"),
    ],
)
def test_bad_patterns_are_refused_with_the_reason(pattern: str, why: str) -> None:
    assert why in pattern_problem(pattern)


@pytest.mark.parametrize("pattern", ["(a|aa)+b", ".*.*.*x", "(.*)(.*)(.*)="])
def test_patterns_that_are_slow_are_refused_before_a_run_starts(pattern: str) -> None:
    assert pattern_problem(pattern) == ""
    with pytest.raises(BadInputError, match="log_patterns"):
        LogPatterns([pattern]).check_speed()
    with pytest.raises(BadInputError, match="log_ignore"):
        LogPatterns([], [pattern]).check_speed()


def test_usual_patterns_are_fast_enough() -> None:
    LogPatterns(["loss scale .* small", r"\bretry \d+ of \d+\b", "^E[0-9]{4} "], ["foo|bar"]).check_speed()


def test_a_pattern_that_is_slow_on_a_line_is_interrupted_and_not_used_again() -> None:
    patterns, line = LogPatterns(["(a|aa)+b"]), b"a" * 60
    began = time.process_time()
    assert list(patterns.matches(line)) == []
    assert patterns.disabled == ["(a|aa)+b"]
    assert list(patterns.matches(line * 20)) == []
    assert time.process_time() - began < 5.0, "it was not interrupted"


def test_what_differs_from_time_to_time_is_left_out_of_a_message() -> None:
    one = normalised("2026-11-23 10:01:02,123 rank 7: CUDA error at 0x7f3a55 after 12.5 s")
    assert one == normalised("2026-11-24 23:59:59.001 rank 512: CUDA error at 0x10 after 0.1 s")
    assert one != normalised("2026-11-23 10:01:02,123 rank 7: NCCL error at 0x7f3a55 after 12.5 s")
