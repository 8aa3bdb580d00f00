"""Whether the rewards of a run teach anything, said to the person who watches it."""

from dataclasses import dataclass, field

from tim_jax.app.run.display import Display
from tim_jax.rl.loop import Step


@dataclass
class RewardWatch:
    """Counts the steps whose rewards teach nothing, and says so."""

    steps: int = 0
    without: int = 0
    rewards: set[float] = field(default_factory=set)  # two of those seen at most

    def add(self, step: Step, display: Display) -> None:
        """Counts a step; the first one without signal is said."""
        self.steps += 1
        for sample in step.samples:
            if len(self.rewards) < 2:
                self.rewards.add(sample.reward)
        if step.metrics["without_signal"]:
            self.without += 1
            if self.without == 1:
                display.note(
                    f"step {step.number} teaches nothing: no reward differs from its baseline"
                    " (without_signal counts such steps)"
                )

    def sum_up(self, display: Display) -> None:
        """Says how many steps taught nothing, and warns if no reward ever differed."""
        if self.steps == self.without > 0 and len(self.rewards) == 1:
            display.note(
                f"warning: all completions of {self.steps} steps had the same reward,"
                f" {next(iter(self.rewards)):g}: there was nothing to learn; look at the reward"
            )
        elif self.without:
            display.note(f"{self.without} of {self.steps} steps taught nothing")
