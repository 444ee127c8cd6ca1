"""An error of all ranks is one line on standard error, whoever started them."""

from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from myriad.comm.layout import Layout
from myriad.errors import BadInputError, RunFailedError
from myriad.train.worker import one_line_errors, report_error

_REFUSED = BadInputError("layout.tp", 3, "must divide model.heads = 4")


def test_of_ranks_that_torchrun_started_one_reports_what_all_found(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=10), wait_for_workers=False)
    agent = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    for name, value in agent.items():
        monkeypatch.setenv(name, value)
    assert [report_error(_REFUSED) for _ in range(4)] == [2] * 4
    assert report_error(RunFailedError("rank 3: lost the connection to rank 1")) == 1
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    report_error(_REFUSED)
    refused = "myriad: error: layout.tp = 3: must divide model.heads = 4"
    lost = "myriad: error: rank 3: lost the connection to rank 1"
    assert capfd.readouterr().err.splitlines() == [refused, lost, refused]


def test_without_a_store_each_rank_reports(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    assert [report_error(_REFUSED), report_error(_REFUSED)] == [2, 2]
    assert len(capfd.readouterr().err.splitlines()) == 2


def test_a_script_ends_with_a_line_and_an_exit_code(capfd: pytest.CaptureFixture[str]) -> None:
    not_a_number, unknown = 'dp = "two": must be a whole number', 'x = "1": unknown key'
    for keys, told in [({"dp": "two"}, not_a_number), ({"x": "1"}, unknown)]:
        with pytest.raises(SystemExit) as ended, one_line_errors():
            Layout.model_validate(keys)
        assert ended.value.code == 2 and capfd.readouterr().err == f"myriad: error: {told}\n"
    with pytest.raises(SystemExit) as ended, one_line_errors():
        raise KeyboardInterrupt
    assert ended.value.code == 130
    with pytest.raises(ZeroDivisionError), one_line_errors():  # a fault of the script keeps its traceback
        raise ZeroDivisionError
