"""Group alarms into messages. Pure: by the clock of the caller, and stored as JSON.

    first alarm of a cause ──group_seconds──► one message about all of them until then
    more of that cause     ──repeat_seconds since the last message──► one message: "43 more"
                             group_seconds, where the level rises
    all have ended         ──group_seconds without another──► "resolved"; or, if the first message was not
                             due yet, one message that says both
    none for repeat_seconds, and the cause does not last ──► forgotten, without a message

So a link that flaps a hundred times, or a fault that 10,000 ranks report, is one or two messages.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from myriad.alerts.conditions import ABOUT_PLACE, ALL_CAUSES, Alarm
from myriad.alerts.config import LEVELS, Level
from myriad.alerts.log_patterns import normalised

__all__ = ["AlarmGroups", "Kind", "Message", "message_from"]

Kind = Literal["alarm", "update", "resolved", "summary", "test"]
_MOST_CAUSES, _MOST_LINES, _MOST_OPEN = 64, 10, 1000


@dataclass(frozen=True)
class Message:
    """A message that is sent to a place."""

    id: str
    """The same for each attempt: a receiver can drop a second copy."""
    kind: Kind
    level: Level
    run: str
    cause: str
    title: str
    lines: tuple[str, ...]
    time: float
    """Seconds since the epoch, of the first event."""
    count: int = 1
    """Number of events in the message."""
    not_to: str = ""
    """The place that the message is about; it does not get the message."""

    def as_json(self) -> dict[str, Any]:
        """Return the object for a generic webhook or a program, documented in docs/guide/alerts.md."""
        found = asdict(self) | {"source": "myriad", "lines": list(self.lines)}
        del found["not_to"]
        return found


def message_from(found: Mapping[str, Any]) -> Message:
    """Return a stored message. Raises ``KeyError``, ``TypeError``, ``ValueError``."""
    return Message(**{**found, "lines": tuple(map(str, found["lines"]))})


@dataclass
class _Line:
    text: str
    count: int = 1


@dataclass
class _Group:
    """Alarms of one cause."""

    cause: str
    level: Level
    began: float
    due: float
    """When the next message is due, if there is anything to report."""
    lines: dict[str, _Line] = field(default_factory=dict)
    """Lines added since the last message, by their text without numbers."""
    num_new: int = 0
    """Alarms since the last message."""
    num_all: int = 0
    open: list[str] = field(default_factory=list)
    """Subjects whose condition lasts."""
    lasts: bool = False
    sent_at: float = 0.0
    """Time of the last message; 0: none was sent."""
    sent_level: Level | None = None
    over_at: float = 0.0
    """When the last condition ended; 0: one lasts."""
    over_text: str = ""
    last: float = 0.0


class AlarmGroups:
    """The causes that are open, or had a message recently."""

    def __init__(self, run: str, group_seconds: float, repeat_seconds: float) -> None:
        self._run, self._wait, self._repeat = run, group_seconds, repeat_seconds
        self._groups: dict[str, _Group] = {}
        self._number = 0

    def add(self, alarm: Alarm, now: float) -> None:
        """Add the alarm of an event."""
        if alarm.ends:
            self._end(alarm, now)
        else:
            self._begin(alarm, now)

    def _begin(self, alarm: Alarm, now: float) -> None:
        group = self._groups.get(alarm.cause)
        if group is None:
            self._make_room()
            group = _Group(alarm.cause, alarm.level, alarm.time or now, now + self._wait)
            self._groups[alarm.cause] = group
        elif LEVELS.index(alarm.level) > LEVELS.index(group.level):
            group.level, group.due = alarm.level, min(group.due, now + self._wait)
        elif not group.num_new:
            group.due = max(now + self._wait, group.sent_at + self._repeat)
        group.num_new, group.num_all, group.last = group.num_new + 1, group.num_all + 1, now
        _add_line(group, alarm.text)
        if alarm.lasts:
            group.lasts, group.over_at = True, 0.0
            if alarm.subject not in group.open and len(group.open) < _MOST_OPEN:
                group.open.append(alarm.subject)

    def _end(self, alarm: Alarm, now: float) -> None:
        causes = list(self._groups) if alarm.cause == ALL_CAUSES else [alarm.cause]
        for cause in causes:
            group = self._groups.get(cause)
            if group is None or not group.lasts or not group.open:
                continue
            # An event of another name ends all; one of the same name ends its own subject.
            every = not alarm.lasts
            group.open = [] if every else [one for one in group.open if one != alarm.subject]
            if not group.open:
                group.over_at, group.over_text = now, alarm.text

    def _make_room(self) -> None:
        if len(self._groups) >= _MOST_CAUSES:
            oldest = min(self._groups.values(), key=lambda group: group.last)
            del self._groups[oldest.cause]

    def due(self, now: float, *, all_now: bool = False) -> list[Message]:
        """Return the messages that are due. ``all_now``: no more events will come, so all messages are
        due."""
        found: list[Message] = []
        for group in list(self._groups.values()):
            group.due = min(group.due, now + max(self._wait, self._repeat))  # the clock was set back
            found += self._of_group(group, now, all_now=all_now)
        return found

    def _of_group(self, group: _Group, now: float, *, all_now: bool) -> list[Message]:
        is_over = group.over_at > 0
        quiet = all_now or now >= group.over_at + self._wait
        if is_over and quiet and (group.sent_at or group.num_new):
            del self._groups[group.cause]
            return [self._resolved(group, now)]
        if group.num_new and (all_now or now >= group.due) and not is_over:
            return [self._sent(group, now)]
        if not group.lasts and not group.num_new and now >= group.last + self._repeat:
            del self._groups[group.cause]
        return []

    def _sent(self, group: _Group, now: float) -> Message:
        kind: Kind = "update" if group.sent_at else "alarm"
        message = self._message(group, kind, group.level, self._title(group))
        group.sent_at, group.sent_level = now, group.level
        group.lines, group.num_new = {}, 0
        group.due = now + self._repeat
        return message

    def _resolved(self, group: _Group, now: float) -> Message:
        seconds = max(0.0, group.over_at - group.began)
        ended = f"ended after {seconds:.0f} s: {group.over_text}"
        if not group.sent_at:  # begun and ended before the first message was due
            message = self._message(group, "alarm", group.level, self._title(group))
        else:
            title = f"{group.cause}: {group.over_text}"
            message = self._message(group, "resolved", group.sent_level or group.level, title)
        return Message(**{**vars(message), "lines": (*message.lines, ended)})

    def _title(self, group: _Group) -> str:
        first = next(iter(group.lines.values())).text
        rest = group.num_new - 1
        more = f" (and {rest} more event{'s' if rest > 1 else ''} of {group.cause})" if rest else ""
        return first + more

    def _message(self, group: _Group, kind: Kind, level: Level, title: str) -> Message:
        self._number += 1
        lines = [
            one.text + (f" ({one.count} times)" if one.count > 1 else "") for one in group.lines.values()
        ]
        unseen = group.num_new - sum(one.count for one in group.lines.values())
        if unseen > 0:
            lines.append(f"and {unseen} other events")
        return Message(
            id=f"{self._run}-{group.began:.0f}-{self._number}",
            kind=kind,
            level=level,
            run=self._run,
            cause=group.cause,
            title=title,
            lines=tuple(lines),
            time=group.began,
            count=max(1, group.num_new),
            not_to=group.cause.removeprefix(ABOUT_PLACE) if group.cause.startswith(ABOUT_PLACE) else "",
        )

    def test_message(self, kind: Kind, now: float, level: Level) -> Message:
        """Return a message that says it is a test."""
        self._number += 1
        title = "test alarm" if kind == "test" else "test alarm: the condition has ended"
        lines = ("Sent by `myriad alerts test`: alarms of this job arrive here.",)
        return Message(
            f"{self._run}-test-{now:.0f}-{self._number}", kind, level, self._run, "test", title, lines, now
        )

    @property
    def causes(self) -> list[dict[str, Any]]:
        """Open causes: cause, level, time of the first event, number of events."""
        return [
            {"cause": one.cause, "level": one.level, "since": one.began, "events": one.num_all}
            for one in self._groups.values()
            if one.open or one.num_new
        ]

    def as_json(self) -> dict[str, Any]:
        """Return the state for `restore`."""
        return {"number": self._number, "groups": [asdict(one) for one in self._groups.values()]}

    def restore(self, found: Mapping[str, Any]) -> None:
        """Restore the state that `as_json` returned. Raises ``KeyError``, ``TypeError``, ``ValueError``."""
        groups: Sequence[Mapping[str, Any]] = found["groups"]
        restored = {}
        for one in groups[:_MOST_CAUSES]:
            lines = {str(key): _Line(**line) for key, line in one["lines"].items()}
            group = _Group(**{**one, "lines": lines})
            restored[group.cause] = group
        self._groups, self._number = restored, int(found["number"])


def _add_line(group: _Group, text: str) -> None:
    key = normalised(text)
    if key in group.lines:
        group.lines[key].count += 1
    elif len(group.lines) < _MOST_LINES:
        group.lines[key] = _Line(text)
