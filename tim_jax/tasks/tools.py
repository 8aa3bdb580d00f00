"""Tools: functions that a policy calls between its turns, and an environment that runs them.

    def right(answer, completion):
        return float(answer in completion.text)

    respond = tools([calculator], reward=right)

A turn with calls is replied to with what the functions return, one message each, or with its error,
so that the policy can try again. A turn without one is the answer, which is graded and ends the
episode. Calls are what the tokenizer's response template reads in a completion. Without one they
are read as Hermes and Qwen2.5 or Qwen3 write them, or as Llama does, whose whole turn is one call.

    <tool_call>
    {"name": "calculator", "arguments": {"expression": "12*7"}}
    </tool_call>

    {"name": "calculator", "parameters": {"expression": "12*7"}}
"""

import ast
import asyncio
import inspect
import json
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from tim_jax.common.errors import InputError, check_choice, did_you_mean
from tim_jax.tasks import sandbox
from tim_jax.tasks.base import ChatMessage, Completion, Reply, first_line, is_json
from tim_jax.tasks.custom import described
from tim_jax.tasks.environments import TOGETHER

MOST_CHARACTERS = 4000  # of a result
OPENS, CLOSES = "<think>", "</think>"  # a thought
# Whichever begins first has what the other writes inside it.
_THOUGHT = f"{OPENS}.*?(?:{CLOSES}|$)"
_OF_CALL = "<tool_call>(?P<call>.*?)(?P<closed></tool_call>|$)"
_CALL, _PART = (re.compile(x, re.DOTALL) for x in (_OF_CALL, f"{_THOUGHT}|{_OF_CALL}"))
_FIRST_THOUGHT = re.compile(rf"\A\s*{_THOUGHT}", re.DOTALL)


@dataclass(frozen=True)
class Call:
    """A call of a tool, or how it is none."""

    name: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""


def tools(
    functions: Sequence[Callable[..., Any]],
    *,
    reward: Callable[[Any, Completion], float],
    role: Literal["tool", "user"] = "tool",
    most_characters: int = MOST_CHARACTERS,
) -> Callable[..., Any]:
    """Returns an environment in which the policy calls functions until it answers.

    Its prompts declare the functions, as far as the chat template does. It is a coroutine function
    if one of them is.

    Args:
      functions: with type hints and a docstring that explains each argument under `Args:`, as
        `transformers` takes them as tools. They are functions of their arguments: what an episode
        is about is not told to them.
      reward: (state, completion of the last turn) -> a finite number.
      role: of the messages with results; `user` for templates that know no tools.
      most_characters: of a result; the rest is left out.

    Raises:
      InputError: no functions, two of one name, a reward to be awaited, or the Python tool where it
        cannot be isolated; when they are declared, if one says too little about itself.
    """
    check_choice("tools: role", role, ("tool", "user"))
    if inspect.iscoroutinefunction(reward):
        raise InputError("tools: reward must be a plain function; it is a coroutine function")
    known = {function.__name__: function for function in functions}
    if not known or len(known) < len(functions):
        raise InputError(f"tools: need functions of different names, got {list(known) or 'none'}")
    if python in functions and (reason := sandbox.check()):
        raise InputError(f"the Python tool cannot be isolated on this machine: {reason}")
    use = _Use(known, reward, role, most_characters)

    async def waiting(state: Any, completion: Completion) -> tuple[Any, Reply]:
        return await use.respond(state, completion)

    def plain(state: Any, completion: Completion) -> tuple[Any, Reply]:
        try:
            use.respond(state, completion).send(None)
        except StopIteration as end:  # without a coroutine function it waits for nothing
            return end.value
        raise InputError(f"tools: one of {', '.join(known)} returned what it has to wait for")

    respond = waiting if any(map(inspect.iscoroutinefunction, functions)) else plain
    declared = {"roles": (role,), "tools": lambda: list(map(schema, functions))}
    respond.__dict__.update(declared, reads_calls=role == "tool")
    return respond


@dataclass(frozen=True)
class _Use:
    functions: Mapping[str, Callable[..., Any]]
    reward: Callable[[Any, Completion], float]
    role: str
    most_characters: int

    async def respond(self, state: Any, completion: Completion) -> tuple[Any, Reply]:
        """Runs the calls of a turn, or grades the answer."""
        calls = read_calls(completion)
        if not calls:
            return state, Reply(reward=self.reward(state, completion), done=True)
        return state, Reply([self._message(call, await self._result(call)) for call in calls])

    def _message(self, call: Call, result: str) -> ChatMessage:
        if len(result) > self.most_characters:
            left_out = len(result) - self.most_characters
            result = f"{result[: self.most_characters]} ... ({left_out} more characters)"
        # JSON escapes half of a surrogate pair, which is no text.
        name, content = (x.encode(errors="replace").decode() for x in (call.name, result))
        return {"role": self.role, "name": name, "content": content}

    async def _result(self, call: Call) -> str:
        if call.error:
            return f"error: {call.error}"
        if call.name not in self.functions:
            hint = did_you_mean(call.name, self.functions)
            return f"error: no tool {call.name!r}{hint}; there are: {', '.join(self.functions)}"
        function = self.functions[call.name]
        try:
            inspect.signature(function).bind(**call.arguments)
        except TypeError as error:
            return f"error: {call.name}: {error}"
        try:
            value = function(**call.arguments)
            value = await value if inspect.isawaitable(value) else value
            return value if isinstance(value, str) else json.dumps(value, default=str)
        except Exception as error:
            return f"error: {described(error)}"


def schema(function: Callable[..., Any]) -> Mapping[str, Any]:
    """Returns a function as chat templates are told of it.

    Raises:
      InputError: a type hint or the explanation of an argument is missing.
    """
    from transformers.utils.chat_template_utils import get_json_schema  # it imports torch

    try:
        return get_json_schema(function)
    except Exception as error:  # of several types
        raise InputError(f"tool {function.__name__}: {first_line(error)}") from error


def read_calls(completion: Completion) -> list[Call]:
    """Returns the calls in a completion, those that are bad too; none if it is an answer.

    Calls in thoughts are none, also where a thought does not end.
    """
    message = completion.message
    if message is None:
        text = completion.text
        if completion.thinking or _ends_a_thought(text):
            text = OPENS + text
        found = [one for one in _PART.finditer(text) if one["call"] is not None]
        return [_read_text(one["call"], one["closed"]) for one in found] or _whole(text)
    if "error" in message:
        return [Call(error=f"the call cannot be read: {message['error']}")]
    return list(map(_read_value, message.get("tool_calls") or ()))


def _ends_a_thought(text: str) -> bool:
    """Whether it goes on with a thought, which the template opened ahead of it."""
    head, closes, _ = text.partition(CLOSES)
    if not closes or OPENS in head or _whole(text):
        return False
    calls = (one for one in _CALL.finditer(text) if one.start() < len(head) < one.end())
    return not any(is_json(one["call"]) for one in calls)


def _read_text(text: str, closed: str) -> Call:
    if not closed:
        return Call(error="the call has no </tool_call>")
    try:
        return _read_value(json.loads(text))
    except (ValueError, RecursionError) as error:
        return Call(error=f"the call is no JSON: {first_line(error)}")


def _whole(text: str) -> list[Call]:
    """The call that a text is as a whole, as Llama writes it; none if it is something else."""
    with suppress(ValueError, RecursionError):
        match json.loads(_FIRST_THOUGHT.sub("", text)):
            case {"name": str(name), "parameters": {**arguments}}:
                return [Call(name, arguments)]
    return []


def _read_value(value: Any) -> Call:
    if isinstance(value, Mapping):
        value = value.get("function", value)
    match value:
        case {"name": str(name), "arguments": {**arguments}}:
            return Call(name, arguments)
        case {"name": str(name)} if not value.keys() - {"name", "id", "type"}:
            return Call(name)
    return Call(error='a call needs a "name" and "arguments" by name')


# Tools that need nothing else.

_LARGEST = 10**100
_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


def calculator(expression: str) -> str:
    """Computes an arithmetic expression.

    Args:
        expression: Numbers, parentheses and the operators + - * / // % **.
    """
    if len(expression) > 1000:
        raise ValueError("the expression is too long")
    try:
        value = arithmetic_value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError("this is no arithmetic expression") from None
    return repr(int(value) if value == int(value) else value)


def arithmetic_value(node: ast.expr, *, largest: int = _LARGEST) -> int | float:
    """Returns the value of a parsed expression, which is not run; no part of it is above `largest`.

    Raises:
      ValueError: it is no arithmetic, or its value or an exponent is too large.
    """
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _bounded(value, largest)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -arithmetic_value(operand, largest=largest)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return arithmetic_value(operand, largest=largest)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            a, b = (arithmetic_value(side, largest=largest) for side in (left, right))
            if isinstance(sign, ast.Pow) and abs(b) > 1000:
                raise ValueError("the exponent is too large")
            return _bounded(_OPERATORS[type(sign)](a, b), largest)
    raise ValueError("only numbers, parentheses and + - * / // % ** are allowed")


def _bounded(value: Any, largest: int) -> int | float:
    if isinstance(value, complex) or not math.isfinite(value) or abs(value) > largest:
        raise ValueError("the value is too large, or no real number")
    return value


# As many as a process waits for turns at once, so that no turn waits for the programs of others.
_THREADS = ThreadPoolExecutor(TOGETHER, "python-tool")


async def python(code: str) -> str:
    """Runs a Python program and returns what it prints. It has no network and no other files.

    Args:
        code: The program.
    """
    ran = await asyncio.get_running_loop().run_in_executor(_THREADS, sandbox.run, code)
    return "\n".join(part for part in (ran.output.rstrip("\n"), ran.end) if part)
