"""The account of a real run, from its files: the ledger of its time, its faults and its attempts.

    launch ── starting ──► start ── training, saving, validating ──► fault ── restarting ──► start ── ...
                                          last sign ── detecting ──┘
    finish or stop ── planned ──► launch            failed, or killed with its launcher ── person ──► launch

The cursor of the ledger moves only at what begins or ends a class; everything else is a sign of life. A step
is training until a later attempt begins before it: then it is lost, and doing it again is training. A step
that was not finished is lost, too. Steps count by their numbers. Some may have no line (the disk was full);
they get the time until the next line. Time that no file explains counts against the run: silence after the
last sign, until a person starts the run again, is a wait for a person.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import dropwhile

from myriad.supervise.accounting.ledger import Account, Attempt, FaultRecord, Kind, Moment

__all__ = ["account_of"]


@dataclass
class _Done:
    """Training that counts so far: of a line in metrics.jsonl, or of a step in progress."""

    first: int
    step: int
    """The last step; steps between `first` and this one have no line."""
    seconds: float
    tokens: int
    whole: bool
    lines: int = 0

    @property
    def steps(self) -> int:
        return self.step - self.first + 1

    def cut(self, step: int) -> "_Done":
        """Split after an inner step: return the later part, and keep the earlier one."""
        share = (step - self.first + 1) / self.steps
        after = _Done(step + 1, self.step, self.seconds * (1 - share), self.tokens, self.whole, self.lines)
        self.tokens = self.tokens * step // self.step if self.whole else self.tokens
        self.step, self.seconds, self.lines, self.whole = step, self.seconds * share, 0, True
        return after


def account_of(moments: Sequence[Moment], now: float | None = None) -> Account:
    """Return the account of a run. ``now``: present time of a running run; ``None``: the run has ended with
    its last entry."""
    # a weight import may be days older
    known = list(dropwhile(lambda moment: moment.what == "import", moments))
    reader = _Reader(known[0].time if known else 0.0)
    for moment in known:
        reader.take(moment)
    return reader.close(now)


class _Reader:
    """Builds the account of one run from its moments."""

    def __init__(self, began: float) -> None:
        self.account = Account(began)
        self._ledger = self.account.ledger
        self._doing: Kind = "person"
        self._sign = 0.0
        """Time of the last sign of life."""
        self._done: list[_Done] = []
        self._saving, self._validating, self._checking, self._diagnosed = 0.0, 0.0, 0.0, -1.0
        self._launching = self._watched = self._evicted = self._announced = False
        self._open: list[FaultRecord] = []
        """Faults from which the run has not recovered yet."""
        self._spares, self._spares_since = 0, 0.0
        self._handlers: dict[str, Callable[[float, Moment], None]] = {
            "corpus": self._launch,
            "launch": self._launch,
            "attempt": self._attempt,
            "restart": self._attempt,
            "start": self._start,
            "resume": self._resume,
            "step": self._step,
            "validation": self._validation,
            "validation_set": self._validation,
            "evaluation": self._validation,
            "check": self._check,
            "diagnosis": self._diagnosis,
            "eviction": self._eviction,
            "fault": self._fault,
            "interrupted": self._stop,
            "finish": self._stop,
            "end": self._end,
            "spares": self._set_spares,
        }

    def take(self, moment: Moment) -> None:
        """Process the next moment; moments must be in the order of time."""
        at = max(moment.time - self.account.began, self._ledger.now)
        handle = self._handlers.get(moment.what)
        if handle is not None:
            handle(at, moment)
        self._sign = max(self._sign, at)

    def close(self, now: float | None) -> Account:
        """Return the account after the last moment."""
        account = self.account
        account.running = now is not None and not self._stands
        if account.running and now is not None:
            self._go_on(max(now - account.began, self._ledger.now))
        else:
            self._go_on(max(self._sign, self._ledger.now))
            self._drop_unfinished()
        self._charge_spares(self._ledger.now)
        whole = [one for one in self._done if one.whole]
        account.steps = whole[-1].step if whole else 0
        account.steps_without_line = account.steps - sum(one.lines for one in whole)
        account.tokens = whole[-1].tokens if whole else 0
        return account

    # The launcher and its driver

    def _launch(self, at: float, moment: Moment) -> None:
        """Record a launch. It may have two moments: `myriad train` checks the job, and then the launcher
        starts."""
        if self._launching and moment.what == "launch":
            self._go_on(at)
        else:
            self._stand_still(at)
        self._doing, self._launching = "starting", moment.what == "corpus"
        self._watched, self._evicted = moment.what == "launch", False
        if moment.what == "launch":
            self._ledger.attempt = moment.count("first_epoch", self._ledger.attempt)

    def _attempt(self, at: float, moment: Moment) -> None:
        """Record an attempt. The journal and the events may both report the same one."""
        if self._stands:
            self._stand_still(at)
        else:
            self._go_on(at)
        self._doing = "starting" if self._doing == "starting" else "restarting"
        self._evicted, self._launching = False, False
        self._ledger.attempt = moment.count("epoch", self._ledger.attempt)
        for fault in self._open:
            if fault.ending_seconds is None:
                fault.ending_seconds = at - (fault.reported - self.account.began)

    def _end(self, at: float, moment: Moment) -> None:
        outcome = moment.fields.get("outcome")
        if self._stands or (self._doing == "training" and outcome != "failed"):
            self._tail(at)
        else:
            self._go_on(at)
        self._doing = "person" if outcome == "failed" else "planned"
        self._charge_spares(at)
        self._spares = 0
        self._drop_unfinished()
        self._end_attempt(str(outcome))

    # The ranks

    def _start(self, at: float, moment: Moment) -> None:
        """Record that rank 0 is about to train."""
        known = self._watched and self._doing == "training"
        if self._doing == "training" and not known:
            self._stand_still(at)
        self._ledger.until(at, "restarting" if known else self._doing)
        attempts, number = self.account.attempts, self._ledger.attempt
        if not self._watched or number < 1 or (attempts and attempts[-1].number >= number):
            number = attempts[-1].number + 1 if attempts else max(1, number)
        self._ledger.attempt = number
        self._end_attempt("replaced")
        step = moment.count("resumed_from", 0)
        world = moment.count("world", 0)
        attempts.append(Attempt(number=number, began=moment.time, world=world, resumed_from=step))
        lost = self._go_back(step)
        self._note_done(step)
        for index, fault in enumerate(self._open):
            fault.steps_lost = 0 if index else lost
            begun = fault.reported - self.account.began + (fault.ending_seconds or 0.0)
            fault.ending_seconds = fault.ending_seconds or 0.0
            fault.starting_seconds, fault.loading_seconds = max(0.0, at - begun), 0.0
        self._announced, self._saving, self._validating = bool(self._open), 0.0, 0.0
        self._checking = 0.0
        self._doing, self._launching = "training", False

    def _resume(self, at: float, moment: Moment) -> None:
        """Split the start into starting and loading. The event with the loading time comes later."""
        for fault in self._open:
            loading = min(moment.seconds("seconds"), fault.starting_seconds or 0.0)
            fault.starting_seconds = (fault.starting_seconds or 0.0) - loading
            fault.loading_seconds = loading
        if self._announced:
            self._open, self._announced = [], False

    def _step(self, at: float, moment: Moment) -> None:
        if self._announced:
            self._open, self._announced = [], False
        step = moment.count("step", 0)
        self._saving += moment.seconds("checkpoint_wait_seconds")
        if self._doing != "training":
            self._step_unannounced(max(self._ledger.now, at - moment.seconds("step_seconds")))
        if not (self._done and self._done[-1].step == step and not self._done[-1].whole):
            self._go_back(step - 1)
        self._train(at, step)
        tokens = moment.count("tokens", 0)
        self._done[-1] = replace(self._done[-1], step=step, whole=True, tokens=tokens, lines=1)
        if self.account.attempts:
            self.account.attempts[-1].last_step = step

    def _step_unannounced(self, begun: float) -> None:
        """Record a step without the start of its attempt: the start was not written, or the step ended while
        another rank's exit was being reported."""
        if any(fault.ending_seconds is None for fault in self._open):
            return
        if self._stands:
            self._stand_still(begun)
        else:
            self._go_on(begun)
        self._doing, self._open = "training", []

    def _validation(self, at: float, moment: Moment) -> None:
        self._validating += moment.seconds("seconds")

    def _check(self, at: float, moment: Moment) -> None:
        self._checking += moment.seconds("seconds")

    def _stop(self, at: float, moment: Moment) -> None:
        """Record that the last step is done and saved."""
        step = moment.count("step", 0)
        if self._doing != "training" or step > self._last_step:
            self._go_on(at)
        else:
            self._tail(at)
        self._note_done(step)
        self._doing = "planned"
        self._end_attempt("finished" if moment.what == "finish" else "interrupted")

    # Faults

    def _diagnosis(self, at: float, moment: Moment) -> None:
        """Record the diagnosis of a hang, which comes before its fault; other diagnoses do not."""
        if moment.fields.keys().isdisjoint(("verdict", "culprit")):
            self._diagnosed = at

    def _eviction(self, at: float, moment: Moment) -> None:
        if self._doing in ("starting", "restarting"):
            self._go_on(at)
        self._evicted = True

    def _fault(self, at: float, moment: Moment) -> None:
        fields = moment.fields
        fault = FaultRecord(
            reported=moment.time, problem=str(fields.get("problem", "")), cause=str(fields.get("cause", ""))
        )
        for name in ("rank", "node", "step"):
            setattr(fault, name, moment.count(name, -1) if name in fields else None)
        self.account.faults.append(fault)
        if fault.cause:
            self._stopped(at, moment, fault)

    def _stopped(self, at: float, moment: Moment, fault: FaultRecord) -> None:
        """Record that all ranks have ended because of a fault."""
        evidence = moment.fields.get("evidence")
        details = Moment(moment.time, "evidence", evidence if isinstance(evidence, dict) else {})
        silent = max(details.seconds("idle_seconds"), details.seconds("silent_seconds"))
        begun = max(self._ledger.now, at - silent)
        self._go_on(begun)
        if begun <= self._diagnosed <= at:
            self._ledger.until(self._diagnosed, "detecting")
            self._ledger.until(at, "diagnosing")
            fault.detected_seconds = self._diagnosed - begun
        else:
            self._ledger.until(at, "detecting")
            fault.detected_seconds = at - begun
        self._doing = "restarting"
        self._open = [] if self._announced else self._open
        self._open.append(fault)
        self._announced = False
        self._end_attempt(fault.cause)

    # Time

    def _set_spares(self, at: float, moment: Moment) -> None:
        """Record the number of idle spares from now on; they do not count as time of the run."""
        self._charge_spares(at)
        self._spares = max(0, moment.count("nodes", 0))

    def _charge_spares(self, until: float) -> None:
        self._ledger.spare_node_seconds += self._spares * max(0.0, until - self._spares_since)
        self._spares_since = max(self._spares_since, until)

    @property
    def _stands(self) -> bool:
        return self._doing in ("planned", "person")

    def _go_on(self, at: float) -> None:
        """Charge the time until now to the present activity."""
        if self._doing == "training":
            self._train(at)
        elif self._doing in ("starting", "restarting") and self._evicted:
            self._ledger.until(at, "waiting")
        else:
            self._ledger.until(at, self._doing)

    def _stand_still(self, at: float) -> None:
        """Record that no process ran until now, since the last sign of life or since the run was stopped."""
        kind: Kind = self._doing if self._stands else "person"
        self._charge_spares(self._sign)
        self._spares, self._spares_since = 0, at
        self._go_on(max(self._sign, self._ledger.now))
        self._ledger.until(max(at, self._ledger.now), kind)
        self._drop_unfinished()
        self._end_attempt("silence")
        self._doing, self._open = kind, []

    def _train(self, until: float, step: int | None = None) -> None:
        """Classify the time of a step, done or in progress. The stalls within it are known by now."""
        seconds = until - self._ledger.now
        saving = min(seconds, self._saving)
        validating = min(seconds - saving, self._validating)
        checking = min(seconds - saving - validating, self._checking)
        self._saving = self._validating = self._checking = 0.0
        training = max(0.0, seconds - saving - validating - checking)
        if seconds > 0:
            stalls: dict[Kind, float] = {"saving": saving, "validating": validating, "checking": checking}
            shares: dict[Kind, float] = {kind: stall / seconds for kind, stall in stalls.items() if stall}
            self._ledger.until(until, {**shares, "training": max(0.0, 1.0 - sum(shares.values()))})
        first = self._done[-1].step + 1 if self._done else 1
        if self._done and not self._done[-1].whole:
            self._done[-1].seconds += training
        else:
            tokens = self._done[-1].tokens if self._done else 0
            self._done.append(_Done(first, first if step is None else step, training, tokens, whole=False))

    def _tail(self, at: float) -> None:
        """Classify the time after the last step: validation, and saving the state."""
        seconds = at - self._ledger.now
        validating = min(seconds, self._validating)
        self._validating = self._saving = self._checking = 0.0
        if seconds > 0:
            share = validating / seconds
            self._ledger.until(at, {"validating": share, "saving": 1.0 - share})

    def _go_back(self, step: int) -> int:
        """Count the steps after ``step`` as lost; return how many they are."""
        lost, seconds = 0, 0.0
        while self._done and self._done[-1].step > step:
            one = self._done[-1]
            one = one.cut(step) if one.first <= step else self._done.pop()
            lost, seconds = lost + one.steps * one.whole, seconds + one.seconds
        self._ledger.lose(seconds)
        self.account.steps_lost += lost
        return lost

    def _note_done(self, step: int) -> None:
        """Record that ``step`` steps are done, with or without lines: a full disk may have refused some."""
        before, last = self._last_step, self._done[-1] if self._done else None
        if step <= before:
            return
        tokens = last.tokens * step // before if last is not None and before else 0
        if last is not None and not last.whole:
            self._done[-1] = replace(last, step=step, tokens=tokens, whole=True)
        else:
            self._done.append(_Done(before + 1, step, 0.0, tokens, whole=True))

    @property
    def _last_step(self) -> int:
        """Number of the newest finished step; 0 if there is none."""
        return next((one.step for one in reversed(self._done) if one.whole), 0)

    def _drop_unfinished(self) -> None:
        if self._done and not self._done[-1].whole:
            self._ledger.lose(self._done.pop().seconds)

    def _end_attempt(self, by: str) -> None:
        attempts = self.account.attempts
        if attempts and not attempts[-1].ended:
            attempts[-1].ended = by
