"""A store that cannot be is refused before anything starts, in one line."""

import importlib.util

import pytest
from hypothesis import given
from hypothesis import strategies as st

from myriad.comm.config import CommConfig
from myriad.comm.rendezvous.redis_address import RedisAddress, check_store, exposure, redis_address
from myriad.comm.rendezvous.rendezvous_store import attempt_name
from myriad.errors import BadInputError
from myriad.job import load_job

HOSTS = st.from_regex(r"[a-z0-9]([a-z0-9.-]{0,20}[a-z0-9])?", fullmatch=True)


@given(HOSTS, st.integers(0, 65535), st.integers(0, 99))
def test_a_redis_url_has_host_port_and_database(host, port, database):
    if port:
        assert redis_address(f"redis://{host}:{port}/{database}") == RedisAddress(host, port, database)
        assert redis_address(f"redis://{host}:{port}") == RedisAddress(host, port, 0)


def test_an_ipv6_host_is_a_host():
    assert redis_address("redis://[::1]:6379/2") == RedisAddress("::1", 6379, 2)


@pytest.mark.parametrize(
    "store",
    [
        "redis", "redis://", "redis://host", "redis://:6379", "redis://host:0", "redis://host:70000",
        "redis://host:port", "redis://host:6379/a", "redis://host:6379/-1", "redis://host:6379/1/2",
        "redis://@host:6379", "redis://host:6379?x=1", "rediss://host", "http://host:1", "TCP", "",
        "redis://[::1:6379", "file:///x",
    ],
)  # fmt: skip
def test_any_other_store_is_refused_with_what_is_allowed(store):
    with pytest.raises(
        BadInputError, match=r"^comm\.store = .*: tcp, or redis\[s\]://\[USER@\]HOST:PORT\[/DB\]$"
    ):
        load_job("tiny", [f'comm.store="{store}"'])


def test_a_user_and_tls_are_part_of_the_address():
    assert redis_address("redis://run%40lab@host:1") == RedisAddress("host", 1, user="run@lab")
    assert redis_address("rediss://host:1/2") == RedisAddress("host", 1, 2, encrypts=True)


@pytest.mark.parametrize("url", ["redis://u:hunter2@host:1", "rediss://:hunter2@host:1", "x://u:hunter2@h"])
def test_a_password_is_refused_and_not_repeated(url):
    """A job is written to plain files and shown on the page."""
    with pytest.raises(BadInputError) as refused:
        load_job("tiny", [f'comm.store="{url}"'])
    assert "hunter2" not in str(refused.value)
    if not url.startswith("x"):
        assert "MYRIAD_REDIS_PASSWORD" in str(refused.value)


def test_certificates_that_cannot_be_read_are_refused_before_the_start(monkeypatch, tmp_path):
    monkeypatch.setenv("MYRIAD_REDIS_CA", str(tmp_path / "missing.pem"))
    with pytest.raises(BadInputError, match=r"MYRIAD_REDIS_CA = .*missing\.pem"):
        check_store(CommConfig(store="rediss://host:6379"))
    check_store(CommConfig(store="redis://host:6379"))


@given(st.text(max_size=30))
def test_no_text_at_all_breaks_the_check(store):
    try:
        redis_address(store)
    except BadInputError as error:
        assert "\n" not in str(error)


def test_without_the_package_the_error_names_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BadInputError, match=r"pip install 'myriad-train\[redis\]'"):
        check_store(CommConfig(store="redis://host:6379"))
    check_store(CommConfig(store="tcp"))


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({"MYRIAD_ATTEMPT_ID": "a", "SLURM_JOB_ID": "7"}, "a"),
        ({"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_RESTART_COUNT": "2"}, "x.2"),
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1", "SLURM_RESTART_COUNT": "3"}, "slurm.7.1.3"),
        ({"SLURM_JOB_ID": "7", "TORCHELASTIC_RUN_ID": "none"}, "slurm.7.0.0"),
    ],
)
def test_whoever_starts_the_ranks_names_the_attempt(environment, name):
    assert attempt_name(environment, "redis://h:1") == name


def test_ranks_whose_attempt_has_no_name_do_not_meet_those_of_another():
    with pytest.raises(BadInputError, match="MYRIAD_ATTEMPT_ID"):
        attempt_name({"TORCHELASTIC_RUN_ID": "none"}, "redis://h:1")


@pytest.mark.parametrize(
    ("address", "password", "words"),
    [
        ("tcp", "", ""),
        ("redis://127.0.0.1:6379", "", ""),
        ("redis://localhost:6379", "", ""),
        ("redis://[::1]:6379", "", ""),
        ("redis://head:6379", "", "without a password (MYRIAD_REDIS_PASSWORD)"),
        ("redis://10.0.0.7:6379/2", "", "without a password"),
        ("rediss://head:6379", "", "without a password"),
        ("redis://ann@head:6379", "word", "crosses the network in clear: use rediss://"),
        ("rediss://ann@head:6379", "word", ""),
    ],
)
def test_a_server_that_others_on_the_network_could_use_is_named_in_a_line(
    monkeypatch: pytest.MonkeyPatch, address: str, password: str, words: str
) -> None:
    monkeypatch.setenv("MYRIAD_REDIS_PASSWORD", password)
    line = exposure(address)
    assert (words in line) if words else line == ""
    assert "\n" not in line
