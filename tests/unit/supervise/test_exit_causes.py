"""If these fail, the user gets a wrong reason, or a healthy node is evicted for a bug."""

from pathlib import Path

import pytest

from myriad.errors import BAD_DATA
from myriad.supervise.exit_causes import cause_of, count_memory_kills, error_excerpt


@pytest.mark.parametrize(
    ("code", "error", "memory_killed", "cause"),
    [
        (0, "", False, "done"),
        (-9, "", False, "killed"),
        (-9, "", True, "host memory"),
        (-2, "", False, "interrupted"),
        (1, "Traceback\nKeyboardInterrupt", False, "interrupted"),
        (-11, "Fatal Python error: Segmentation fault", False, "crash"),
        (-6, "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)", False, "peer"),
        (-6, "double free or corruption (out)", False, "crash"),
        (1, "Traceback\nDistBackendError: NCCL error in: a.cpp:3, remote process exited or there was a "
         "network error, NCCL version 2.27.5", False, "peer"),
        (2, "layout.tp = 3: must divide", False, "input"),
        (1, "Traceback\nValueError: the moon is full", False, "user"),
        (1, "Traceback\nRuntimeError: [gloo] Connection closed by peer [127.0.0.1]:123", False, "peer"),
        (1, "data loader: the rank that owns it has exited", False, "peer"),
        (1, "Traceback\nmyriad.wire.socket_channel.Closed: the other end is gone", False, "killed"),
        (1, "Traceback\ntorch.OutOfMemoryError: CUDA out of memory.", False, "device memory"),
        (1, "Traceback\nRuntimeError: CUDA error: uncorrectable ECC error encountered", False, "device"),
        (1, "Traceback\nOSError: [Errno 28] No space left on device: 'x'", False, "disk"),
        (1, "Traceback\nMemoryError", False, "host memory"),
        (1, f"data loader: {BAD_DATA}a/train-00000.bin: the 65536 bytes from byte 0 on", False, "data"),
        (1, "data loader: a/train-00000.bin, byte 0: cannot be read: Input/output error", False, "user"),
    ],
)  # fmt: skip
def test_the_cause_is_read_from_status_log_and_counter(
    code: int, error: str, memory_killed: bool, cause: str
) -> None:
    assert cause_of(code, error, memory_killed=memory_killed) == cause


@pytest.mark.parametrize(
    ("files", "count"),
    [
        ({"proc/self/cgroup": "0::/job", "sys/fs/cgroup/job/memory.events": "oom 9\noom_kill 3\n"}, 3),
        ({"proc/self/cgroup": "4:memory:/a\n", "sys/fs/cgroup/memory/a/memory.oom_control": "oom_kill 2"}, 2),
        ({"proc/self/cgroup": "0::/\n", "proc/vmstat": "pgfault 5\noom_kill 7\n"}, 7),
        ({}, 0),
    ],
)  # fmt: skip
def test_the_counter_is_found_in_either_version_of_control_groups(
    tmp_path: Path, files: dict[str, str], count: int
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert count_memory_kills(tmp_path) == count


def test_the_error_of_nccls_watchdog_is_found_above_its_stack(tmp_path: Path) -> None:
    said = (
        "[PG ID 0 Rank 1] Process group watchdog thread terminated with exception: [Rank 1] Watchdog caught "
    )
    said += "collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE) ran for 600001 milliseconds "
    frames = "".join(
        f"frame #{n}: c10d::ProcessGroupNCCL::run() + 0x7d (0x7f in libtorch.so)\n" for n in range(40)
    )
    log = tmp_path / "rank-1.log"
    log.write_text(
        "[rank1]:[E1124 12:00:00.1 ProcessGroupNCCL.cpp:632] [Rank 1] Watchdog caught collective operation\n"
        "terminate called after throwing an instance of 'c10::DistBackendError'\n"
        f"  what():  {said}before timing out.\nException raised from checkTimeout at a.cpp:3\n{frames}"
    )
    error = error_excerpt(log)
    assert error == f"{said}before timing out."
    assert cause_of(-6, error, memory_killed=False) == "peer"
