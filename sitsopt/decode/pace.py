"""How many tokens to propose, and when to propose none because it does not pay."""

from __future__ import annotations

from collections.abc import Sequence

SMOOTH = 0.2  # weight of the newest measurement
PAUSE = 8  # tokens without proposals after the first time it did not pay; doubled each time again
LONGEST_PAUSE = 256
GAIN = 1.02  # a block must be worth this many plain steps for each token it gives


class Speeds:
    """Seconds of each size of a call, smoothed; the first call of a size may compile and does not count."""

    def __init__(self) -> None:
        self._seen: dict[int, float | None] = {}

    def add(self, rows: int, seconds: float) -> None:
        """One call of so many rows."""
        if rows not in self._seen:
            self._seen[rows] = None
            return
        old = self._seen[rows]
        # An interruption by something else on the machine is no property of the call.
        new = seconds if old is None else min(seconds, 3 * old)
        self._seen[rows] = new if old is None else (1 - SMOOTH) * old + SMOOTH * new

    def get(self, rows: int) -> float | None:
        """Seconds of a call, or None where it was not measured."""
        return self._seen.get(rows)


class Pace:
    """The length of the next proposal. Grows while everything is accepted and falls to what was accepted; pauses while
    blocks cost more than the plain steps they save.

    most: tokens at once. speeds: shared by all answers of one model.
    """

    def __init__(self, most: int, speeds: Speeds | None = None, adapt: bool = True) -> None:
        self.most, self.speeds, self.adapt = most, speeds or Speeds(), adapt
        self.wanted = float(min(most, 4))
        self.pause, self.next_pause = 0, PAUSE
        self.paid: float | None = None  # tokens per block over what the block cost, in plain steps
        self.plain = 0

    def length(self) -> int:
        """Tokens to propose now; 0 for a plain step."""
        if not self.adapt:
            return self.most
        if self.pause > 0:
            self.pause -= 1
            return 0
        if self.speeds.get(1) is None:
            return 0  # what a plain step costs comes first: nothing pays or does not without it
        return max(1, round(self.wanted))

    def step(self, seconds: float) -> None:
        """A plain step was taken."""
        self.speeds.add(1, seconds)

    def block(self, rows: int, proposed: int, accepted: int, seconds: float) -> None:
        """A block of `rows` was checked, drafting included in `seconds`; `accepted` of its proposals were right."""
        self.speeds.add(rows, seconds)
        if accepted == proposed:
            self.wanted = min(self.most, 2 * self.wanted)
        else:
            self.wanted = max(1.0, 0.5 * self.wanted + 0.5 * (accepted + 1))
        block, plain = self.speeds.get(rows), self.speeds.get(1)
        if block is None or plain is None:
            return
        worth = (accepted + 1) * plain / block
        self.paid = worth if self.paid is None else 0.7 * self.paid + 0.3 * worth
        if not self.adapt:
            return
        if self.paid < GAIN:
            self.pause, self.next_pause = self.next_pause, min(LONGEST_PAUSE, 2 * self.next_pause)
            self.paid = None  # it gets a new chance afterwards
        elif self.paid > 1.2:
            self.next_pause = PAUSE


def rows_of(count: int, blocks: Sequence[int]) -> int:
    """Rows of the call that checks `count` tokens."""
    return next((b for b in blocks if b >= count), count)
