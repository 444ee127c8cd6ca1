"""If this fails, other users of a machine read weights, logs or traces; or a group cannot, that should.
`test_socket_table` looks at the modes of all files of a run that trains."""

import os
import stat
from pathlib import Path

from myriad.job import load_job
from myriad.run import Run


def test_the_group_of_the_folder_above_stays(tmp_path: Path) -> None:
    tmp_path.chmod(0o2770)
    run = Run(tmp_path / "run")
    before = os.umask(0o022)
    try:
        with run.lock():
            run.create_or_resume(load_job("tiny", ["run.mode=0750"]))
            assert os.umask(0o777 & ~0o750) == 0o027, "files of this run follow its folder"
        assert os.umask(0o022) == 0o022, "and no others"
    finally:
        os.umask(before)
    for path in (run.path, run.logs_path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o2750
