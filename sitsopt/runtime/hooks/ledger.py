"""Everything that was changed, in order, with what it was before; and the promise to give it back.

A ledger is held open from the first change on: at the end of the process, at an error that ends it, and at the
signals that would end it silently, every setting becomes what it was, the last change first. What has changed
hands meanwhile (somebody else wrote the setting since) is left alone and said.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import threading
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any

from .host import Host
from .plan import Action, Refused, Scope
from .settings import CannotSet, Setting, setting

log = logging.getLogger("sitsopt")

# SIGINT ends a process through KeyboardInterrupt, which atexit sees; these would end it at once.
SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGINT") if hasattr(signal, name)
)


@dataclass(frozen=True)
class Applied:
    """A change that was made."""

    hook: str
    key: str
    before: Any
    after: Any
    scope: Scope
    why: str


class Ledger:
    """Changes settings of one host and reverts them. `scopes` are those that may be touched at all; `new_process`
    collects variables for a process yet to be started instead of refusing them."""

    def __init__(
        self, host: Host, scopes: tuple[Scope, ...] = ("process",), new_process: bool = False
    ) -> None:
        self.host, self.scopes, self.new_process = host, scopes, new_process
        self.applied: list[Applied] = []
        self.refused: list[tuple[str, Refused]] = []
        self.left: list[str] = []  # what could not be given back, and why
        self._settings: list[Setting] = []
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._before: dict[int, Any] = {}

    def apply(self, action: Action, hook: str) -> bool:
        """Make one change. What may or can not be made is noted with its reason, never raised."""
        why = self._forbidden(action)
        if not why:
            why = self._change(action, hook)
        if why:
            self.refused.append((hook, Refused(f"{action.key} = {action.value}", why)))
        return not why

    def _forbidden(self, action: Action) -> str:
        taken = next((a for a in self.applied if a.key == action.key), None)
        if taken is not None:
            return f"the hook {taken.hook} has set it already"
        if action.scope == "start" and self.new_process:
            return ""
        if action.scope not in self.scopes:
            return {
                "system": "it concerns other processes too: `sitsopt doctor --apply` does it",
                "start": "it is read once, when a process starts: `sitsopt doctor --apply -- COMMAND` sets it",
                "process": "this is a dry run",
            }[action.scope]
        return ""

    def _change(self, action: Action, hook: str) -> str:
        try:
            with self._lock:
                one = setting(action.key, self.host)
                before = one.read()
                if before == action.value:
                    return "it is so already"
                self._hold()
                entry = Applied(hook, action.key, before, action.value, action.scope, action.why)
                # Noted first: a signal between the two finds a change to revert, at worst one that was not made.
                self.applied.append(entry)
                self._settings.append(one)
                try:
                    one.write(action.value)
                except BaseException:
                    self.applied.pop()
                    self._settings.pop()
                    raise
            return ""
        except (CannotSet, OSError, ValueError) as error:
            return str(error) or type(error).__name__

    def revert(self) -> None:
        """Give everything back. Harmless when there is nothing, or when it was done before."""
        if os.getpid() != self._process:
            return  # a fork has a copy of this ledger, not of the settings' ownership
        with self._lock:
            while self.applied:
                self._give_back(self.applied[-1], self._settings[-1])
                self.applied.pop()
                self._settings.pop()
            self._let_go()

    def _give_back(self, entry: Applied, one: Setting) -> None:
        try:
            now = one.read()
            if str(now) == str(entry.before):
                return
            if str(now) != str(entry.after):
                self.left.append(f"{entry.key} is {now} now, which is not what {entry.hook} set")
                return
            one.write(entry.before)
        except (CannotSet, OSError, ValueError) as error:
            self.left.append(f"{entry.key} stays {entry.after}: {error}")
            log.warning("%s could not be set back: %s", entry.key, error)

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *error: Any) -> None:
        self.revert()

    def _hold(self) -> None:
        """From the first change on, be told of the end."""
        if self.applied:
            return
        atexit.register(self.revert)
        if threading.current_thread() is not threading.main_thread():
            return  # only the main thread may; atexit remains
        for number in SIGNALS:
            before = signal.getsignal(number)
            # An ignored signal ends nothing, and Python's own SIGINT raises KeyboardInterrupt.
            if before in (signal.SIG_IGN, None, signal.default_int_handler):
                continue
            self._before[number] = before
            signal.signal(number, self._signalled)

    def _let_go(self) -> None:
        atexit.unregister(self.revert)
        if threading.current_thread() is threading.main_thread():
            for number, before in self._before.items():
                if signal.getsignal(number) == self._signalled:
                    signal.signal(number, before)
            self._before.clear()

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        """Revert, then let the signal do what it would have done."""
        before = self._before.get(number, signal.SIG_DFL)
        self.revert()
        if callable(before):
            before(number, frame)
            return
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def json(self) -> dict[str, Any]:
        return {
            "applied": [asdict(entry) for entry in self.applied],
            "refused": [{"hook": hook, **asdict(refused)} for hook, refused in self.refused],
            "left": list(self.left),
        }
