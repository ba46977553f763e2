"""Which checkpoint is good: the newest one followed by a step with a sane loss.

The loss of step N + 1 is the first that depends on the parameters after step N, so a checkpoint proves itself one step
after it was saved. Parameters can be finite and absurd: a loss shows that, a test for NaN does not.
"""

ABSURD = 10.0  # times the run's first loss


class Proof:
    """Follows the losses and checkpoints of a run. With local steps each process follows the losses of its nodes.

    Attributes:
      first: the loss of the run's first step; None before.
      newest: step of the newest checkpoint; None if there is none.
      good: step of the newest checkpoint that has proved itself; None if none has.

    Example:
      >>> proof = Proof()
      >>> for step, loss in enumerate([2.3, 2.1, 1e18, 1e18], start=1):
      ...     proof.follow(step, loss)
      ...     proof.saved(step)
      >>> proof.good, proof.newest
      (1, 4)
    """

    def __init__(self, first: float | None = None, newest: int | None = None, good: int | None = None):
        self.first, self.newest, self.good = first, newest, good
        self._before = newest, good

    def follow(self, step: int, loss: float) -> None:
        """Record a step's loss, before its update. Steps count from 1."""
        if self.first is None:
            self.first = loss
        if self.newest is not None and step > self.newest and loss <= ABSURD * self.first:
            self.good = self.newest

    def saved(self, step: int) -> None:
        """Record a checkpoint after a step, which is being written from now on."""
        self._before = self.newest, self.good
        self.newest = step

    def lost(self) -> None:
        """Forget the newest checkpoint: it could not be written."""
        self.newest, self.good = self._before

    def kept(self, folder: object) -> str:
        """Names the last good checkpoint, for the message of a run that must stop."""
        if self.newest is None:
            return "no checkpoint had been made yet"
        if self.good is None:
            return f"the newest checkpoint is that of step {self.newest} in {folder}, and no good step came after it"
        newer = "" if self.good == self.newest else f" (no good step came after that of step {self.newest})"
        return f"the last good checkpoint is that of step {self.good} in {folder}{newer}"
