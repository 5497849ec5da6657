"""The learning signal of the groups that finished last, and when a run that gets none has to end.

Independent of slots, versions and the journal.
"""

from __future__ import annotations

from collections import deque

from agentrl.errors import NoLearningSignal
from agentrl.report.learning_signal import LearningSignal


class RecentSignal:
    """Adds up the signal of the last `num_groups` groups, and of those since the last `pop_new`.

    >>> recent = RecentSignal(2)
    >>> for useful in (1, 0, 0):
    ...     recent.add(LearningSignal(groups=1, useful=useful))
    >>> recent.of_last.groups, recent.of_last.useful, recent.pop_new().groups
    (2.0, 0.0, 3.0)
    """

    def __init__(self, num_groups: int) -> None:
        self._groups: deque[LearningSignal] = deque(maxlen=num_groups)
        self.of_last = LearningSignal()
        """The sum over the last `num_groups` groups."""
        self._new = LearningSignal()
        self._num_useless = 0  # that finished since the last useful one

    def add(self, signal: LearningSignal) -> None:
        """A group has finished."""
        self.of_last += signal
        self._new += signal
        if len(self._groups) == self._groups.maxlen:
            self.of_last -= self._groups[0]
        self._groups.append(signal)
        self._num_useless = 0 if signal.useful else self._num_useless + 1

    def pop_new(self) -> LearningSignal:
        """Of the groups that finished since the last call."""
        new, self._new = self._new, LearningSignal()
        return new

    def require_any(self) -> None:
        """Raises NoLearningSignal where the last `num_groups` groups, and no fewer, were all without signal.

        Such a run would otherwise wait forever (or spin) silently.
        """
        if self._num_useless >= (self._groups.maxlen or 0):
            raise NoLearningSignal(
                f"the last {len(self._groups)} groups each had equal rewards, from which nothing can be learned: "
                + self.of_last.diagnosis()
            )
