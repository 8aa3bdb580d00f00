"""Mathematical answers graded by `math-verify` (extra `math`), in guarded worker processes."""

from collections.abc import Sequence
from importlib.util import find_spec

from tim_jax.common.errors import InputError
from tim_jax.tasks.base import Example, Grade
from tim_jax.tasks.guard import Guard, Limits, grade_of


class MathGrader:
    """Reward 1 for a completion whose final answer equals the example's answer, else 0.

    The answer is what `math_verify.parse` finds in the completion: a final-answer phrase, a
    `\\boxed{}`, mathematics in dollars or a plain number, usually the last one. `1/2`, `0.5` and
    `\\frac{2}{4}` are equal. Two boxes close to each other are read as a set, so that a corrected
    answer is wrong; letters are read as a product, in any order. A grade depends only on (answer,
    completion): not on the batch, the number of workers or what they graded before.

    Raises:
      InputError: when made, if `math-verify` is not installed.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        if find_spec("math_verify") is None:
            raise InputError("grading mathematics needs math-verify: pip install 'tim-jax[math]'")
        self._guard = Guard("math", {}, limits or Limits())
        self._guard.start()

    def __call__(self, examples: Sequence[Example], completions: Sequence[str]) -> list[Grade]:
        pairs = zip(examples, completions, strict=True)
        return [
            grade_of(outcome)
            for outcome in self._guard.map(
                [{"answer": example.answer, "completion": text} for example, text in pairs]
            )
        ]

    def close(self) -> None:
        """Ends the workers; a later call starts new ones."""
        self._guard.close()

    def __enter__(self) -> "MathGrader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
