"""If these fail, an alarm does not arrive where a person looks, or a secret stands where others can read it.
Each place is a real server on loopback."""

import base64
import email
import email.policy
import hashlib
import hmac
import json
import sys
import time
from pathlib import Path

import pytest
from alert_servers import HookServer, MailServer, certificate

from myriad.alerts.config import AlertsConfig, check_alert_places, check_alert_values
from myriad.alerts.grouping import Message
from myriad.alerts.outbox import Outbox
from myriad.alerts.senders import RefusedMessageError, Sender, feishu_signature, senders_of
from myriad.config import dump_toml
from myriad.errors import BadInputError
from myriad.job import load_job

LINES = ("log_match: <!channel> & <https://evil.example|click> in the log of rank 3", "x" * 4000)
ALARM = Message("run-1", "alarm", "critical", "gpt", "fault", "rank 3 was killed", LINES, 100.0, 2)
OVER = Message("run-2", "resolved", "critical", "gpt", "fault", "ranks at work", ("ended after 9 s",), 100.0)
SECRET = "T0P-s3cret"


def sender_of(**places: dict[str, object]) -> Sender:
    alerts = AlertsConfig.model_validate(places)
    check_alert_values(alerts)
    check_alert_places(alerts)
    (sender,) = senders_of(alerts)
    return sender


def test_a_webhook_gets_a_documented_object_and_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOK_TOKEN", SECRET)
    server = HookServer()
    with server.serving() as url:
        sender_of(webhook={"url": f"{url}/alerts", "token": "env:HOOK_TOKEN"}).send(ALARM)
    ((headers, body),) = server.requests
    assert headers["Authorization"] == f"Bearer {SECRET}" and headers["Idempotency-Key"] == "run-1"
    names = {"id", "kind", "level", "run", "cause", "title", "lines", "time", "count", "source"}
    assert body.keys() == names
    assert (body["level"], body["kind"], body["source"]) == ("critical", "alarm", "myriad")


def test_slack_gets_blocks_within_its_limits_and_no_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    server = HookServer()
    with server.serving() as url:
        monkeypatch.setenv("SLACK", f"{url}/services/{SECRET}")
        sender = sender_of(slack={"url": "env:SLACK"})
        sender.send(ALARM)
        sender.send(OVER)
    alarm, over = server.bodies
    header, section = alarm["blocks"]
    assert header["text"]["text"] == "[CRITICAL] gpt: rank 3 was killed"
    assert len(header["text"]["text"]) <= 150 and len(section["text"]["text"]) <= 3000
    assert "<" not in section["text"]["text"] and "&lt;!channel&gt;" in section["text"]["text"]
    assert over["text"].startswith("[RESOLVED] gpt")


def test_feishu_gets_a_signed_card(tmp_path: Path) -> None:
    server, url_file, secret_file = HookServer(), tmp_path / "url", tmp_path / "secret"
    server.answers = [(200, '{"code":0,"msg":"success","data":{}}', {})]
    with server.serving() as url:
        url_file.write_text(f"{url}/open-apis/bot/v2/hook/x\n")
        secret_file.write_text(SECRET + "\n")
        sender = sender_of(feishu={"url": f"file:{url_file}", "secret": f"file:{secret_file}"})
        sender.send(ALARM)
        server.answers = [
            (200, '{"code":19021,"msg":"sign match fail or timestamp is not within one hour"}', {})
        ]
        with pytest.raises(OSError, match="code 19021"):
            sender.send(ALARM)
    body = server.bodies[0]
    key = f"{body['timestamp']}\n{SECRET}".encode()
    assert body["sign"] == base64.b64encode(hmac.new(key, b"", hashlib.sha256).digest()).decode()
    assert abs(int(body["timestamp"]) - time.time()) < 60 and body["msg_type"] == "interactive"
    assert body["card"]["header"]["template"] == "red"
    assert "myriad [CRITICAL] gpt" in body["card"]["header"]["title"]["content"]
    # The example of Feishu's own documentation of custom bots.
    assert feishu_signature("1599360473", "demo") == "l1N0gAcBjdwBvGm1xMjOF0XSyaLRpR7tuO5dHfhAYc8="


def test_mail_goes_by_starttls_after_a_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pem = certificate(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(pem))
    monkeypatch.setenv("SMTP_PASSWORD", SECRET)
    server = MailServer(pem, "ops", SECRET)
    place = {"to": ["a@example.com", "b@example.com"], "user": "ops", "password": "env:SMTP_PASSWORD"}
    with server.serving() as address:
        sender = sender_of(mail={"server": address, **place})
        sender.send(ALARM)
        sender.send(OVER)
        monkeypatch.setenv("SMTP_PASSWORD", "another")
        with pytest.raises(OSError, match="replied with code 535") as caught:
            sender_of(mail={"server": address, **place}).send(ALARM)
    assert SECRET not in str(caught.value) and "another" not in str(caught.value)
    (receivers, text), (_, later) = server.mails
    mail = email.message_from_string(text, policy=email.policy.default)
    assert receivers == ["a@example.com", "b@example.com"]
    assert mail["Subject"] == "[CRITICAL] gpt: rank 3 was killed" and LINES[0] in mail.get_content()
    assert mail["References"] == email.message_from_string(later, policy=email.policy.default)["References"]


@pytest.mark.parametrize("security", ["starttls", "tls"])
def test_mail_is_not_sent_to_a_server_whose_certificate_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, security: str
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    server = MailServer(certificate(tmp_path))
    server.is_tls_from_start = security == "tls"
    with server.serving() as address:
        with pytest.raises(OSError, match="certificate is not trusted"):
            sender_of(mail={"server": address, "to": ["a@example.com"], "security": security}).send(ALARM)
    assert server.mails == []


def test_mail_without_encryption_is_for_servers_that_need_no_login() -> None:
    server = MailServer(None)
    with server.serving() as address:
        sender = sender_of(mail={"server": address, "to": ["a@example.com"], "security": "none"})
        sender.send(ALARM)
        server.refuses = 451
        with pytest.raises(OSError, match="replied with code 451"):
            sender.send(ALARM)
    assert len(server.mails) == 1


def test_a_program_gets_the_message_without_a_shell_and_within_its_time(tmp_path: Path) -> None:
    script, out = tmp_path / "page.py", tmp_path / "out"
    script.write_text(f"import sys, os; open({str(out)!r}, 'w').write(sys.stdin.read() + sys.argv[1])")
    sender_of(exec={"command": [sys.executable, str(script), "$HOME; `id`"]}).send(ALARM)
    text = out.read_text()
    assert text.endswith("$HOME; `id`") and json.loads(text.partition("\n")[0])["title"] == ALARM.title
    with pytest.raises(OSError, match="exit code 3"):
        sender_of(exec={"command": [sys.executable, "-c", "raise SystemExit(3)"]}).send(ALARM)
    hangs = "import os, time; os.fork(); time.sleep(60)"
    began = time.monotonic()
    with pytest.raises(OSError, match=r"did not end in 0\.3 s"):
        sender_of(exec={"command": [sys.executable, "-c", hangs], "seconds": 0.3}).send(ALARM)
    assert time.monotonic() - began < 20.0


@pytest.mark.parametrize(
    ("answer", "error", "told"),
    [
        ((400, "invalid_payload", {}), RefusedMessageError, "status 400"),
        ((403, f"no {SECRET}", {}), OSError, "status 403"),
        ((500, "", {}), OSError, "status 500"),
        ((302, "", {"Location": "http://127.0.0.1:1/else"}), OSError, "status 302"),
    ],
)
def test_answers_that_are_no_success_are_errors_without_secrets(
    monkeypatch: pytest.MonkeyPatch, answer: tuple[int, str, dict[str, str]], error: type, told: str
) -> None:
    server = HookServer()
    server.answers = [answer]
    with server.serving() as url:
        monkeypatch.setenv("SLACK", f"{url}/{SECRET}")
        with pytest.raises(error, match=told) as caught:
            sender_of(slack={"url": "env:SLACK"}).send(ALARM)
    assert SECRET not in str(caught.value) and "127.0.0.1" not in str(caught.value)


def test_a_place_that_fails_is_tried_again_and_reports_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    server, reports = HookServer(), list[tuple[str, str]]()
    server.answers = [(500, "", {}), (429, "", {"Retry-After": "0"}), (503, "", {}), (200, "ok", {})]
    with server.serving() as url:
        monkeypatch.setenv("SLACK", url)
        outbox = Outbox(
            sender_of(slack={"url": "env:SLACK"}),
            30,
            lambda: None,
            lambda *told: reports.append(told),
            first_wait_seconds=0.01,
        )
        outbox.start()
        outbox.offer(ALARM, time.time())
        outbox.offer(OVER, time.time())
        assert outbox.close(time.monotonic() + 30) == 0
    assert [body["text"][:10] for body in server.bodies] == ["[CRITICAL]"] * 4 + ["[RESOLVED]"]
    assert reports == [("slack", "answers with status 500"), ("slack", "")]


def test_a_message_that_is_refused_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    server = HookServer()
    server.answers = [(400, "", {}), (200, "ok", {})]
    with server.serving() as url:
        monkeypatch.setenv("SLACK", url)
        outbox = Outbox(sender_of(slack={"url": "env:SLACK"}), 30, lambda: None, lambda *told: None)
        outbox.start()
        outbox.offer(ALARM, time.time())
        outbox.offer(OVER, time.time())
        assert outbox.close(time.monotonic() + 30) == 0
    assert len(server.bodies) == 2 and outbox.num_sent == 1


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("alerts.slack.url=https://hooks.slack.com/services/T0P-s3cret", "a secret is never written"),
        ("alerts.feishu.secret=T0P-s3cret", "a secret is never written"),
        ("alerts.webhook.url=http://me:T0P-s3cret@host/x", "without user, password and query"),
        ("alerts.webhook.url=ftp://host/x", "http://HOST/PATH"),
        ("alerts.webhook.token=T0P-s3cret", "a secret is never written"),
        ("alerts.mail.server=smtp.example.com", "HOST:PORT"),
        ("alerts.levels=['finish=loud']", "EVENT=LEVEL"),
        ("alerts.log_patterns=['(a+)+']", "a repetition inside of a repetition"),
        ("alerts.log_ignore=['[']", "is no regular expression"),
        ("alerts.slack.level=loud", 'must be "info", "warning" or "critical"'),
    ],
)
def test_bad_values_are_refused_and_no_secret_is_shown(override: str, told: str) -> None:
    with pytest.raises(BadInputError) as caught:
        load_job("tiny", [override])
    assert told in str(caught.value) and SECRET not in str(caught.value)


def test_a_mail_place_needs_all_that_a_mail_needs() -> None:
    server = "alerts.mail.server=smtp.example.com:587"
    to, user = "alerts.mail.to=['ops@example.com']", "alerts.mail.user=ops"
    for overrides, told in (
        ([server], "at least one address"),
        ([server, "alerts.mail.to=['x']"], "NAME@HOST"),
        ([server, to, user], "needs both"),
        ([server, to, user, "alerts.mail.password=env:P", "alerts.mail.security=none"], "starttls or tls"),
    ):
        with pytest.raises(BadInputError, match=told):
            load_job("tiny", overrides)


def test_missing_secrets_and_programs_are_refused_before_a_run_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_SUCH", raising=False)
    for override, told in (
        ("alerts.slack.url=env:NO_SUCH", "NO_SUCH is not set"),
        (f"alerts.slack.url=file:{tmp_path}/none", "cannot be read"),
        ("alerts.exec.command=['no-such-program']", "that this machine can execute"),
        ("alerts.log_patterns=['.*.*.*x']", "takes over 50 ms"),
    ):
        with pytest.raises(BadInputError, match=told):
            check_alert_places(load_job("tiny", [override]).alerts)
    monkeypatch.setenv("NO_SUCH", SECRET)
    with pytest.raises(BadInputError, match="must hold an address") as caught:
        check_alert_places(load_job("tiny", ["alerts.slack.url=env:NO_SUCH"]).alerts)
    assert SECRET not in str(caught.value)
    assert SECRET not in dump_toml(load_job("tiny", ["alerts.slack.url=env:NO_SUCH"]))
