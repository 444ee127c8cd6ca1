"""Settings of alarms: where they are sent, and which log lines raise one. No torch here.

A secret (the address of a Slack or Feishu hook, a token, a password) must not be in a job file, which is
copied into the run and its checkpoints. The key names its source instead:

    env:SLACK_WEBHOOK             an environment variable of the process that runs `myriad train`
    file:/etc/myriad/password     a file: its text without the last newline
"""

import os
import re
import shutil
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field

from myriad.alerts.log_patterns import LogPatterns, pattern_problem
from myriad.config import Config
from myriad.errors import BadInputError
from myriad.system.whole_file import read_regular

__all__ = [
    "LEVELS",
    "AlertsConfig",
    "ExecConfig",
    "FeishuConfig",
    "Level",
    "MailConfig",
    "SlackConfig",
    "WebhookConfig",
    "check_alert_places",
    "check_alert_values",
    "event_levels",
    "read_secret",
    "server_address",
]

Level = Literal["info", "warning", "critical"]
LEVELS: tuple[Level, ...] = ("info", "warning", "critical")
"""Levels of an alarm, lowest first."""
_SECRET = re.compile(r"env:[A-Za-z_][A-Za-z0-9_]{0,127}|file:.{1,1024}", re.DOTALL)
_MOST_SECRET_BYTES = 4096
_HIDDEN = "(not shown)"
_EVENT = re.compile(r"([a-z_]+(?:/[a-z_ ]+)?)=(off|info|warning|critical)")
_PLACE = "env:NAME or file:PATH: a secret is never written into a job file"


class WebhookConfig(Config):
    """Any HTTP server that takes a JSON object."""

    url: str | None = None
    """http://HOST/PATH or https://...; an address that holds a secret as env:NAME or file:PATH. Off: none."""
    token: str | None = None
    """Sent as "Authorization: Bearer ..."; env:NAME or file:PATH. Off: none."""
    level: Level = "warning"
    """Lowest level that is sent here."""


class SlackConfig(Config):
    """An incoming webhook of Slack."""

    url: str | None = None
    """Address of the webhook, which is a secret: env:NAME or file:PATH. Off: none."""
    level: Level = "warning"
    """Lowest level that is sent here."""


class FeishuConfig(Config):
    """A custom bot of Feishu or Lark."""

    url: str | None = None
    """Address of the bot's webhook, which is a secret: env:NAME or file:PATH. Off: none."""
    secret: str | None = None
    """The bot's signature secret; env:NAME or file:PATH. Off: requests are not signed."""
    level: Level = "warning"
    """Lowest level that is sent here."""


class MailConfig(Config):
    """Alarms by e-mail, sent to an SMTP server."""

    server: str | None = None
    """HOST:PORT of the SMTP server; off: no e-mail."""
    security: Literal["starttls", "tls", "none"] = "starttls"
    """starttls: the connection is encrypted before anything is sent (mostly port 587); tls: from its first
    byte (mostly 465); none: never, and no login."""
    sender: str | None = None
    """Address in From; off: myriad@ and the name of this machine."""
    to: tuple[str, ...] = ()
    """Addresses that get the mail."""
    user: str | None = None
    """Login name, as text, env:NAME or file:PATH; off: no login."""
    password: str | None = None
    """Password of the login; env:NAME or file:PATH. Off: no login."""
    level: Level = "warning"
    """Lowest level that is sent here."""


class ExecConfig(Config):
    """A program on the machine of the driver, started without a shell."""

    command: tuple[str, ...] = ()
    """Program and arguments; each message is a JSON object on its standard input. Empty: none."""
    seconds: float = Field(10.0, gt=0, le=300)
    """Time limit in seconds; then the program is killed with all its children."""
    level: Level = "warning"
    """Lowest level that is sent here."""


class AlertsConfig(Config):
    """Alarms: which log lines and events raise one, and where they are sent."""

    webhook: WebhookConfig = WebhookConfig()
    """Alarms to an HTTP server, as JSON objects."""
    slack: SlackConfig = SlackConfig()
    """Alarms to Slack, through an incoming webhook."""
    feishu: FeishuConfig = FeishuConfig()
    """Alarms to Feishu or Lark, through a custom bot."""
    mail: MailConfig = MailConfig()
    """Alarms by e-mail, sent to an SMTP server."""
    exec: ExecConfig = ExecConfig()
    """Alarms to a program that is started on the driver's machine."""
    group_seconds: float = Field(10.0, ge=0, le=3600)
    """Events of one cause within this many seconds become one message."""
    repeat_seconds: float = Field(300.0, ge=1, le=86400)
    """Seconds between two messages about the same cause while more of its events arrive."""
    per_hour: int = Field(30, ge=1, le=3600)
    """Messages to a place within an hour; the rest is summarised in one message."""
    levels: tuple[str, ...] = ()
    """Levels of events that differ from the default, e.g. ["finish=warning", "health/link=critical",
    "spike=off"]."""
    log_patterns: tuple[str, ...] = ()
    """Regular expressions: a line of a rank's log that one matches is an event, besides the built-in list
    (Xid, ECC, out of memory, CUDA and NCCL errors, full disks)."""
    log_ignore: tuple[str, ...] = ()
    """Regular expressions: a line that one matches is never an event."""

    @property
    def has_places(self) -> bool:
        """Whether messages are sent anywhere."""
        named = (self.webhook.url, self.slack.url, self.feishu.url, self.mail.server)
        return any(one is not None for one in named) or bool(self.exec.command)


def check_alert_values(alerts: AlertsConfig) -> None:
    """Refuse values that are wrong wherever they are read. Raises `BadInputError`."""
    url = alerts.webhook.url
    if url is not None and not _SECRET.fullmatch(url):
        allowed = "http://HOST/PATH or https://... without user, password and query, or env:NAME or file:PATH"
        _need(_is_plain_url(url), "alerts.webhook.url", _HIDDEN, allowed)
    for key, value in (
        ("alerts.webhook.token", alerts.webhook.token),
        ("alerts.slack.url", alerts.slack.url),
        ("alerts.feishu.url", alerts.feishu.url),
        ("alerts.feishu.secret", alerts.feishu.secret),
        ("alerts.mail.password", alerts.mail.password),
    ):
        _need(value is None or bool(_SECRET.fullmatch(value)), key, _HIDDEN, _PLACE)
    _check_mail(alerts.mail)
    _need("" not in alerts.exec.command[:1], "alerts.exec.command", "", "a program and its arguments")
    for one in alerts.levels:
        allowed = "EVENT=LEVEL or EVENT/WHAT=LEVEL, LEVEL being off, info, warning or critical"
        _need(bool(_EVENT.fullmatch(one)), "alerts.levels", one, allowed)
    for key, patterns in (
        ("alerts.log_patterns", alerts.log_patterns),
        ("alerts.log_ignore", alerts.log_ignore),
    ):
        _need(len(patterns) <= LogPatterns.MOST, key, len(patterns), f"at most {LogPatterns.MOST} patterns")
        for pattern in patterns:
            problem = pattern_problem(pattern)
            _need(not problem, key, pattern, problem)


def _check_mail(mail: MailConfig) -> None:
    if mail.server is None:
        return
    known = server_address(mail.server) is not None
    _need(known, "alerts.mail.server", mail.server, "HOST:PORT, for example smtp.example.com:587")
    _need(bool(mail.to), "alerts.mail.to", [], "at least one address")
    addresses = [*mail.to, *([] if mail.sender is None else [mail.sender])]
    for address in addresses:
        _need(bool(re.fullmatch(r"[^\s@<>,;]+@[^\s@<>,;]+", address)), "alerts.mail.to", address, "NAME@HOST")
    encrypted = mail.user is None or mail.security != "none"
    _need(encrypted, "alerts.mail.user", _HIDDEN, "needs alerts.mail.security = starttls or tls")
    has_both = (mail.user is None) == (mail.password is None)
    _need(has_both, "alerts.mail.password", _HIDDEN, "a login needs both alerts.mail.user and .password")


def check_alert_places(alerts: AlertsConfig) -> None:
    """Refuse a job whose secrets or programs are missing on this machine, which sends its alarms. Raises
    `BadInputError`."""
    for key, value in (
        ("alerts.webhook.url", alerts.webhook.url),
        ("alerts.webhook.token", alerts.webhook.token),
        ("alerts.slack.url", alerts.slack.url),
        ("alerts.feishu.url", alerts.feishu.url),
        ("alerts.feishu.secret", alerts.feishu.secret),
        ("alerts.mail.user", alerts.mail.user),
        ("alerts.mail.password", alerts.mail.password),
    ):
        found = None if value is None else read_secret(key, value)
        if found is not None and key.endswith(".url"):
            allowed = f"{value} must hold an address: https://HOST/..."
            _need(_is_url(found), key, _HIDDEN, allowed)
    command = alerts.exec.command
    if command:
        is_there = shutil.which(command[0]) is not None
        _need(is_there, "alerts.exec.command", command[0], "a program that this machine can execute")
    LogPatterns(alerts.log_patterns, alerts.log_ignore).check_speed()


def read_secret(key: str, value: str) -> str:
    """Return the text that a key's value stands for. Raises `BadInputError`, which never shows it."""
    kind, _, place = value.partition(":")
    if not _SECRET.fullmatch(value):
        return value
    if kind == "env":
        found = os.environ.get(place, "")
        _need(bool(found), key, value, f"the environment variable {place} is not set here")
        return found
    try:
        text = read_regular(Path(place), _MOST_SECRET_BYTES).decode()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "is no UTF-8"
        raise BadInputError(key, value, f"the file cannot be read: {why}") from None
    _need(bool(text.strip()), key, value, "the file is empty")
    return text.rstrip("\r\n")


def event_levels(levels: tuple[str, ...]) -> dict[str, Level | None]:
    """Return the level of each event that ``alerts.levels`` names; ``None``: it raises no alarm."""
    found: dict[str, Level | None] = {}
    for one in levels:
        name, _, level = one.rpartition("=")
        found[name] = next((known for known in LEVELS if known == level), None)
    return found


def server_address(text: str) -> tuple[str, int] | None:
    """Return host and port of ``HOST:PORT``; ``None`` if the text is invalid."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536 or re.search(r"[\s/@]", host):
        return None
    return host.removeprefix("[").removesuffix("]"), int(port)


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _is_plain_url(text: str) -> bool:
    """Whether an address probably contains no secret."""
    return _is_url(text) and not re.search(r"[?#\s]", text) and "@" not in urlsplit(text).netloc


def _need(condition: bool, key: str, value: object, allowed: str) -> None:
    if not condition:
        raise BadInputError(key, value, allowed)
