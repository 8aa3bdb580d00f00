"""How the values of arguments are read: what argparse calls with an argument's text."""

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from tim_jax import inputs
from tim_jax.errors import InputError


class RefusedError(Exception):
    """The value of an argument is wrong. No `ValueError`, of which argparse would make its own."""


def add_whole(
    parser: ArgumentParser, option: str, least: int, below: int = 2**31, **options: Any
) -> None:
    """Adds an option that is a whole number from `least` to `below` - 1."""

    def read(text: str) -> int:
        digits = text[1:] if text[:1] in ("+", "-") else text
        if not (digits.isascii() and digits.isdecimal()):
            raise RefusedError(f"{option} must be a whole number, got {inputs.shown(text)}")
        value = int(text) if len(digits) < 20 else None
        if value is None or value >= below:
            raise RefusedError(f"{option} must be less than {below}, got {inputs.shown(text)}")
        if value < least:
            raise RefusedError(f"{option} must be at least {least}, got {value}")
        return value

    parser.add_argument(option, type=read, **options)


def add_number(parser: ArgumentParser, option: str, **options: Any) -> None:
    """Adds an option that is a finite number."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise RefusedError(f"{option} must be a number, got {inputs.shown(text)}") from None
        wrong = inputs.wrong_number(value)
        if wrong is not None:
            raise RefusedError(f"{option} {wrong[-1]}, got {text}")
        return value

    parser.add_argument(option, type=read, **options)


def path(text: str) -> Path:
    """Reads a path, as `inputs.expanded`."""
    try:
        return inputs.expanded(text)
    except InputError as error:
        raise RefusedError(f"{error}") from None


def name(text: str) -> str:
    """Reads the name of a model or run, as `inputs.expanded_name`."""
    try:
        return inputs.expanded_name(text)
    except InputError as error:
        raise RefusedError(f"{error}") from None
