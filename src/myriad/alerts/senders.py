"""Send one message to one place: HTTP (generic, Slack, Feishu or Lark), SMTP, or a program.

Each `send` is one attempt with a time limit. It raises `RefusedMessageError` for a message that the place
will never take, and ``OSError`` for an error that may pass; neither text holds an address, a token or a
password. Texts come from logs, so from anybody: they are escaped, or sent as plain text.

Slack: docs.slack.dev, "Sending messages using incoming webhooks". Feishu and Lark: open.feishu.cn, "Custom
bot usage guide" (signature: HMAC-SHA256 of nothing, keyed by the timestamp, a newline and the secret).
"""

import base64
import hashlib
import hmac
import http.client
import json
import os
import signal
import smtplib
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from email.message import EmailMessage
from email.utils import formatdate
from typing import Any, Protocol

from myriad.alerts.config import AlertsConfig, ExecConfig, Level, MailConfig, read_secret, server_address
from myriad.alerts.grouping import Message

__all__ = ["RefusedMessageError", "Sender", "feishu_signature", "senders_of"]

_HTTP_SECONDS, _MOST_ANSWER_BYTES = 10.0, 2**16
_WILL_NEVER = (400, 413, 415, 422)
_LONGEST_WAIT_SECONDS = 300.0
_MOST_TITLE, _MOST_TEXT = 150, 2900
"""Slack takes 150 characters in a header and 3,000 in a section."""
_COLOURS = {"critical": "red", "warning": "orange", "info": "blue"}
"""Colours of Feishu's card headers."""


class RefusedMessageError(Exception):
    """The place will never accept this message."""


class RetryLaterError(OSError):
    """The place asks for a pause."""

    def __init__(self, problem: str, seconds: float) -> None:
        super().__init__(problem)
        self.seconds = seconds


class Sender(Protocol):
    """Sends messages to one place."""

    name: str
    level: Level

    def send(self, message: Message) -> None:
        """Send a message, in one attempt. Raises `RefusedMessageError` and ``OSError``."""


def senders_of(alerts: AlertsConfig) -> list[Sender]:
    """Return the places of a job. Raises `BadInputError` for a secret that is missing."""
    found: list[Sender] = []
    hook, slack, feishu = alerts.webhook, alerts.slack, alerts.feishu
    if hook.url is not None:
        token = None if hook.token is None else read_secret("alerts.webhook.token", hook.token)
        url = read_secret("alerts.webhook.url", hook.url)
        found.append(_Hook("webhook", hook.level, url, _webhook_body, token=token))
    if slack.url is not None:
        found.append(_Hook("slack", slack.level, read_secret("alerts.slack.url", slack.url), _slack_body))
    if feishu.url is not None:
        secret = None if feishu.secret is None else read_secret("alerts.feishu.secret", feishu.secret)
        url = read_secret("alerts.feishu.url", feishu.url)
        found.append(
            _Hook("feishu", feishu.level, url, lambda message: _feishu_body(message, secret), _feishu_problem)
        )
    if alerts.mail.server is not None:
        found.append(_Mail(alerts.mail))
    if alerts.exec.command:
        found.append(_Program(alerts.exec))
    return found


def heading(message: Message) -> str:
    """Return the first line of a message: its kind, the run, and the event."""
    kind = "RESOLVED" if message.kind == "resolved" else message.level.upper()
    return f"[{kind}] {message.run}: {message.title}"


# HTTP


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuse redirects: an alarm and its token go only to the given address."""

    def redirect_request(self, *arguments: Any, **options: Any) -> None:
        return None


class _Hook:
    def __init__(
        self,
        name: str,
        level: Level,
        url: str,
        body: Callable[[Message], Mapping[str, Any]],
        problem_of: Callable[[bytes], str] = lambda answer: "",
        *,
        token: str | None = None,
    ) -> None:
        """``problem_of`` returns the error in an answer with status 200; empty: none."""
        self.name, self.level, self._url, self._body, self._problem_of = name, level, url, body, problem_of
        self._headers = {"Content-Type": "application/json; charset=utf-8", "User-Agent": "myriad"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._opener = urllib.request.build_opener(_NoRedirect)

    def send(self, message: Message) -> None:
        """Send the message as an HTTP POST."""
        data = json.dumps(self._body(message), ensure_ascii=False).encode(errors="replace")
        headers = self._headers | {"Idempotency-Key": message.id}
        try:
            request = urllib.request.Request(self._url, data, headers, method="POST")
            with self._opener.open(request, timeout=_HTTP_SECONDS) as answer:
                text = answer.read(_MOST_ANSWER_BYTES)
        except urllib.error.HTTPError as error:
            raise _status_error(error) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise OSError(f"cannot be reached: {_reason(error)}") from None
        if problem := self._problem_of(text):
            raise OSError(problem)


def _status_error(error: urllib.error.HTTPError) -> Exception:
    problem = f"answers with status {error.code}"
    error.close()
    if error.code in _WILL_NEVER:
        return RefusedMessageError(problem)
    after = (error.headers.get("Retry-After") or "").strip()
    if after.isdecimal():
        return RetryLaterError(problem, min(float(after[:9]), _LONGEST_WAIT_SECONDS))
    return OSError(problem)


def _reason(error: Exception) -> str:
    """Describe an error without the request: the text of some errors contains the address."""
    inner = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(inner, TimeoutError):
        return "no answer in time"
    if isinstance(inner, OSError) and inner.strerror:
        return inner.strerror
    return type(inner).__name__


def _webhook_body(message: Message) -> Mapping[str, Any]:
    return message.as_json()


def _slack_body(message: Message) -> Mapping[str, Any]:
    """Return a header, the lines, and the text of the notification."""
    title = heading(message)
    lines = "\n".join(f"• {_slack_text(line)}" for line in message.lines)
    blocks = [{"type": "header", "text": {"type": "plain_text", "text": _cut(title, _MOST_TITLE)}}]
    if lines:
        blocks.append({"type": "section", "text": {"type": "mrkdwn", "text": _cut(lines, _MOST_TEXT)}})
    return {"text": _slack_text(_cut(title, _MOST_TEXT)), "blocks": blocks}


def _slack_text(text: str) -> str:
    """Return text without commands: no link, no <!channel>."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _feishu_body(message: Message, secret: str | None) -> Mapping[str, Any]:
    """Return a card. Its header has the word "myriad", which a bot may require."""
    title = _cut(f"myriad {heading(message)}", _MOST_TITLE)
    colour = "green" if message.kind == "resolved" else _COLOURS[message.level]
    content = _cut("\n".join(message.lines) or message.title, _MOST_TEXT)
    card = {
        "header": {"title": {"tag": "plain_text", "content": title}, "template": colour},
        "elements": [{"tag": "div", "text": {"tag": "plain_text", "content": content}}],
    }
    body: dict[str, Any] = {"msg_type": "interactive", "card": card}
    if secret is not None:
        seconds = str(int(time.time()))
        body |= {"timestamp": seconds, "sign": feishu_signature(seconds, secret)}
    return body


def feishu_signature(timestamp: str, secret: str) -> str:
    """Return the signature of a request to a Feishu or Lark bot at ``timestamp`` (seconds since the
    epoch)."""
    key = f"{timestamp}\n{secret}".encode()
    return base64.b64encode(hmac.new(key, b"", hashlib.sha256).digest()).decode()


def _feishu_problem(answer: bytes) -> str:
    """Return the error in an answer: Feishu uses status 200 also for refusals."""
    try:
        found = json.loads(answer)
        code = found.get("code", found.get("StatusCode", 0)) if isinstance(found, dict) else 0
    except (ValueError, RecursionError):
        return "answers with no JSON"
    return "" if code == 0 else f"answers with code {str(code)[:20]}"


# E-mail


class _Mail:
    name = "mail"

    def __init__(self, mail: MailConfig) -> None:
        self.level, self._mail = mail.level, mail
        address = server_address(mail.server or "")
        assert address is not None, "checked with the job"
        self._address = address
        self._user = None if mail.user is None else read_secret("alerts.mail.user", mail.user)
        password = mail.password
        self._password = None if password is None else read_secret("alerts.mail.password", password)

    def send(self, message: Message) -> None:
        """Send the message by the server. A message that only some receivers accept counts as sent."""
        try:
            with self._connected() as server:
                if self._user is not None and self._password is not None:
                    server.login(self._user, self._password)
                server.send_message(self._text(message))
        except smtplib.SMTPResponseException as error:  # its text may repeat what was sent
            raise OSError(f"the mail server replied with code {error.smtp_code}") from None
        except smtplib.SMTPRecipientsRefused:
            raise OSError("the mail server rejects the addresses in alerts.mail.to") from None
        except (smtplib.SMTPException, ssl.SSLError) as error:
            reason = (
                "its certificate is not trusted" if isinstance(error, ssl.SSLError) else type(error).__name__
            )
            raise OSError(f"the mail server cannot be used: {reason}") from None
        except (OSError, ValueError) as error:
            raise OSError(f"the mail server cannot be reached: {_reason(error)}") from None

    @contextmanager
    def _connected(self) -> Iterator[smtplib.SMTP]:
        host, port = self._address
        context = ssl.create_default_context()
        if self._mail.security == "tls":
            server: smtplib.SMTP = smtplib.SMTP_SSL(host, port, timeout=_HTTP_SECONDS, context=context)
        else:
            server = smtplib.SMTP(host, port, timeout=_HTTP_SECONDS)
        with server:
            if self._mail.security == "starttls":
                server.starttls(context=context)
            yield server

    def _text(self, message: Message) -> EmailMessage:
        host = socket.gethostname()
        text = EmailMessage()
        text["Subject"] = _cut(" ".join(heading(message).split()), _MOST_TITLE)
        text["From"] = self._mail.sender or f"myriad@{host}"
        text["To"] = ", ".join(self._mail.to)
        text["Date"] = formatdate(localtime=True)
        text["Message-ID"] = f"<{_mail_word(message.id)}@{host}>"
        thread = f"<{_mail_word(f'{message.run}-{message.cause}-{message.time:.0f}')}@{host}>"
        text["References"] = thread  # a mail program shows an alarm and its end as one thread
        text["Auto-Submitted"] = "auto-generated"
        text.set_content("\n".join([heading(message), "", *message.lines]) + "\n")
        return text


def _mail_word(text: str) -> str:
    return "".join(char if char.isascii() and (char.isalnum() or char in "._-") else "-" for char in text)


# Programs


class _Program:
    name = "exec"

    def __init__(self, how: ExecConfig) -> None:
        self.level, self._how = how.level, how

    def send(self, message: Message) -> None:
        """Run the program with the message on its input; exit code 0 means success."""
        command = list(self._how.command)
        try:
            program = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                env=os.environ | {"MYRIAD_ALERT_KIND": message.kind, "MYRIAD_ALERT_LEVEL": message.level},
            )
        except OSError as error:
            raise OSError(f"the program cannot be started: {error.strerror}") from None
        try:
            program.communicate(json.dumps(message.as_json()).encode() + b"\n", timeout=self._how.seconds)
        except subprocess.TimeoutExpired:
            raise OSError(f"the program did not end in {self._how.seconds:g} s, and was killed") from None
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(program.pid, signal.SIGKILL)  # and what it has left behind
            program.wait()
        if program.returncode:
            raise OSError(f"the program ended with exit code {program.returncode}")


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
