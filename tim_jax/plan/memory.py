"""How much of a device's memory a compiled program takes."""

import re
from dataclasses import dataclass
from typing import Any

from tim_jax.errors import InputError

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_REFUSED = re.compile(r"memory required for HLO temporaries \(([\d.]+)([KMGT]?)\) exceeds")


@dataclass(frozen=True)
class Memory:
    """Bytes on one device."""

    arguments: int = 0
    outputs: int = 0
    temporaries: int = 0
    aliased: int = 0  # outputs that take the place of arguments
    code: int = 0
    together: int = 0  # of a program that the compiler refused: all of it, and nothing else

    @property
    def total(self) -> int:
        own = self.arguments + self.outputs + self.temporaries - self.aliased + self.code
        return own + self.together


def of(compiled: Any) -> Memory:
    """That of a compiled program.

    Raises:
      InputError: this compiler does not say.
    """
    found = compiled.memory_analysis()
    if found is None:
        raise InputError("plan: this compiler does not say how much memory a program takes")
    return Memory(
        arguments=found.argument_size_in_bytes,
        outputs=found.output_size_in_bytes,
        temporaries=found.temp_size_in_bytes,
        aliased=found.alias_size_in_bytes,
        code=found.generated_code_size_in_bytes,
    )


def of_refusal(message: str) -> Memory | None:
    """What the TPU compiler says of a program that does not fit: one sum, to a hundredth of its
    unit, which it calls temporaries and which has arguments and outputs in it. None if the message
    is about something else."""
    found = _REFUSED.search(message)
    if not found:
        return None
    return Memory(together=round(float(found[1]) * _UNITS[found[2]]))
