"""Tools: calls that are read in several forms, bad ones, and Python that the system isolates."""

import ast
import asyncio
import json
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from tim_jax.common.errors import InputError
from tim_jax.tasks import sandbox
from tim_jax.tasks.base import Completion, Turn, state_of
from tim_jax.tasks.bridges import Bridge
from tim_jax.tasks.builtin import ALPHABET, builtin_task
from tim_jax.tasks.environments import TOGETHER, Here
from tim_jax.tasks.text import character_tokenizer
from tim_jax.tasks.tools import Call, calculator, python, read_calls, tools

ISOLATES = pytest.mark.skipif(bool(sandbox.check()), reason="this machine cannot isolate")
NO_TOKENS = np.zeros(1, np.int32)


def add(a: int, b: int = 1) -> int:
    """Adds.

    Args:
        a: One number.
        b: Another.
    """
    return a + b


def fail(text: str) -> str:
    """Fails.

    Args:
        text: Why.
    """
    raise RuntimeError(text)


def right(state, completion):
    return float(completion.text == state)


def say(text, message=None):
    return Completion(text, NO_TOKENS, True, message)


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def ask(environment, completion, state="3"):
    turn = Turn(0, 0, 0, completion, state, np.zeros(2, np.uint32))
    [(_, answer)] = environment.answers([turn])
    assert answer.failure is None
    return answer


def results(environment, text):
    return [message["content"] for message in ask(environment, say(text)).content]


def test_calls_are_run_and_answers_graded():
    environment = Here(tools([add, fail], reward=right))
    answer = ask(environment, say(f"I add. {call('add', a=1, b=2)} And: {call('add', a=5)}"))
    assert answer.content == [
        {"role": "tool", "name": "add", "content": "3"},
        {"role": "tool", "name": "add", "content": "6"},
    ]
    assert (answer.reward, answer.done) == (0.0, False)
    last = ask(environment, say("3"), answer.state)
    assert (last.reward, last.done) == (1.0, True)
    assert ask(environment, say("4")).reward == 0.0


def test_tools_are_declared_as_templates_are_told_of_them():
    environment = Here(tools([add], reward=right, role="user"))
    [schema] = environment.tools
    assert environment.roles == ("user",)
    assert schema["function"]["name"] == "add"
    assert schema["function"]["parameters"]["required"] == ["a"]
    assert json.loads(json.dumps(schema)) == schema  # it goes from one process to another


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("<tool_call>nonsense</tool_call>", "the call is no JSON"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "the call is no JSON"),
        ('<tool_call>{"name": "add", "arguments": {"a"', "the call has no </tool_call>"),
        ("<tool_call>[1]</tool_call>", 'a call needs a "name" and "arguments"'),
        ('<tool_call>{"name": 3}</tool_call>', 'a call needs a "name" and "arguments"'),
        (
            '<tool_call>{"name": "add", "parameters": {"a": 1}}</tool_call>',
            'a call needs a "name" and "arguments"',
        ),
        ('<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', "no tool '\\ud800'"),
        (call("fail", text="half \ud83d"), "RuntimeError: half ?"),
        (call("ad", a=1), "no tool 'ad'; did you mean 'add'"),
        (call("add", c=1), "add: missing a required argument: 'a'"),
        (call("add", a=1, c=1), "add: got an unexpected keyword argument 'c'"),
        (call("add", a="x"), "TypeError: can only concatenate str"),
        (call("fail", text="because"), "RuntimeError: because"),
    ],
)
def test_a_bad_call_is_told_its_error(text, error):
    [said] = results(Here(tools([add, fail], reward=right)), text)
    assert said.startswith("error: ")
    assert error in said


def test_a_turn_that_is_a_call_of_llama_s_is_read():
    called = '{"type": "function", "name": "add", "parameters": {"a": 1}}'
    assert read_calls(say(f" {called}\n")) == [Call("add", {"a": 1})]
    for text in (
        f"I call {called}",
        '{"name": "add", "parameters": 3}',
        "[1]",
        "9" * 9999,
        "[" * 9999,
    ):
        assert read_calls(say(text)) == []


def test_calls_in_thoughts_are_none():
    assert read_calls(say(f"<think>{call('add', a=1)}</think> 3")) == []
    assert read_calls(say(f"<think>?</think>{call('add', a=1)}")) == [Call("add", {"a": 1})]
    assert read_calls(say(f"<think>I might {call('add', a=1)} but")) == []  # it was cut
    assert read_calls(say(f"{call('add', a=1)}<think>")) == [Call("add", {"a": 1})]


def test_marks_of_thoughts_in_an_argument_are_text():
    asked = {"a": "strip <think> and </think>"}
    for text in (call("add", **asked), f"<think>?</think>{call('add', **asked)}"):
        assert read_calls(say(text)) == [Call("add", asked)]
    for text in ("strip <think> and </think>", "split at </think>"):
        called = json.dumps({"name": "add", "parameters": {"a": text}})
        assert read_calls(say(called)) == [Call("add", {"a": text})]
        assert read_calls(say(f"so: {call('add', a=text)}")) == [Call("add", {"a": text})]
    called = json.dumps({"name": "add", "parameters": asked})
    assert read_calls(replace(say(f"?</think>{called}"), thinking=True)) == [Call("add", asked)]


def test_calls_in_a_thought_that_the_template_opened_are_none():
    called = [Call("add", {"a": 1})]
    for text, calls in ((call("add", a=1), []), (f"</think>{call('add', a=1)}", called)):
        assert read_calls(replace(say(text), thinking=True)) == calls
        assert read_calls(say(text)) == called


def test_calls_as_a_response_template_reads_them():
    """By `transformers`, with a template in the form of Hermes, from tokens."""
    tokenizer = character_tokenizer(ALPHABET)
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "#",
        "fields": {
            "content": {},
            "tool_calls": {
                "open": "(",
                "close": ")",
                "repeats": True,
                "transform": {
                    "type": "function",
                    "function": {"name": "add", "arguments": {"a": "{content}"}},
                },
                "content": "int",
            },
        },
    }
    bridge = Bridge(tokenizer, stop_tokens=[1], templated=False, options={})

    def read(text):
        tokens = np.array(tokenizer.encode(text, add_special_tokens=False), np.int32)
        return bridge.read(Completion(text, tokens, True))

    assert read_calls(read("1+(12)")) == [Call("add", {"a": 12})]
    assert read_calls(read("12")) == []
    [bad] = read_calls(read("(1+)"))
    assert "cannot be read" in bad.error
    assert read_calls(say("x", {"tool_calls": [{"name": "f", "arguments": {}}]})) == [Call("f")]


def test_long_results_are_cut():
    def long() -> str:
        """Says much."""
        return "x" * 10_000

    [said] = results(Here(tools([long], reward=right, most_characters=5)), call("long"))
    assert said == "xxxxx ... (9995 more characters)"


def test_coroutine_functions_are_waited_for():
    async def later(text: str) -> str:
        """Says it later.

        Args:
            text: What.
        """
        await asyncio.sleep(0.01)
        return text

    assert results(Here(tools([later, add], reward=right)), call("later", text="a")) == ["a"]


def undocumented(a: int) -> int:
    return a


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ([], "need functions of different names, got none"),
        ([add, add], r"need functions of different names, got \['add'\]"),
        ([undocumented], "tool undocumented: "),
    ],
)
def test_tools_that_cannot_be_declared(functions, message):
    with pytest.raises(InputError, match=message):
        _ = Here(tools(functions, reward=right)).tools


def test_a_reward_that_would_have_to_be_waited_for_is_refused():
    async def late(state, completion):
        return 1.0

    with pytest.raises(InputError, match="reward must be a plain function"):
        tools([add], reward=late)  # pyright: ignore[reportArgumentType]


def test_the_calculator_computes_as_fractions_do():
    rng = random.Random(0)
    for _ in range(300):
        terms = [str(rng.randint(1, 99)) for _ in range(rng.randint(1, 6))]
        text = terms[0] + "".join(rng.choice(["+", "-", "*", " + (-1) * "]) + t for t in terms[1:])
        assert calculator(text) == str(eval(text))
    assert Fraction(calculator("1/4 + 2**10")) == Fraction(4097, 4)
    assert [calculator(text) for text in ("7//2", "-7 % 3", "1e3", "(1+2)*3")] == [
        "3",
        "2",
        "1000",
        "9",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "()",
        "a",
        "__import__('os').getpid()",
        "9**9**9",
        "10**101",
        "1/0",
        "True",
        "'a'*9",
        "1j",
        "(-8)**0.5",
        "1<2",
        "[1]",
        "(" * 400 + "1" + ")" * 400,
        "1" * 2000,
        "1e400",
    ],
)
def test_the_calculator_refuses_everything_else(text):
    with pytest.raises((ValueError, ZeroDivisionError)):
        calculator(text)


def test_arithmetic_is_a_task_with_a_calculator():
    task = builtin_task("arithmetic", {"eval_size": 32})
    assert task.environment is not None
    for example in task.evaluation:
        assert isinstance(example.prompt, str)
        question = example.prompt.removeprefix("What is ").partition("?")[0]
        assert str(eval(compile(ast.parse(question, mode="eval"), "", "eval"))) == example.answer
        answers = {"": 0.0, f"It is {example.answer}.": 1.0, f"{example.answer} or 12345": 0.0}
        for text, reward in answers.items():
            answer = ask(task.environment, say(text), state_of(example))
            assert (answer.reward, answer.done) == (reward, True)
        [said] = results(task.environment, call("calculator", expression=question))
        assert said == example.answer


@ISOLATES
def test_python_is_isolated():
    code = f"""
import os, signal, socket

def tried(what):
    try:
        return what()
    except OSError as error:
        return error

number = socket.socket()
number.settimeout(1)
print(6 * 7)
print(os.getuid() != 0, os.listdir("."), os.path.exists("/etc"))
print(tried(lambda: number.connect(("1.1.1.1", 53))))
print(tried(lambda: open({__file__!r})))
print(tried(lambda: open("/usr/x", "w")))
open("x", "w").write("a")
print(open("x").read())
print(tried(lambda: os.kill(1, 9)), os.getpid())
"""
    ran = sandbox.run(code)
    shown, looked, called, opened, written, scratch, own = ran.output.splitlines()
    assert (shown, looked, ran.end) == ("42", "True [] False", "")
    assert "Network is unreachable" in called
    assert f"No such file or directory: '{__file__}'" in opened
    assert "Read-only file system" in written
    assert scratch == "a"
    assert own.endswith(" 2")  # of its own, and nothing outside has a number there
    assert sandbox.run("import os; print(os.listdir('.'))").output == "[]\n"


@ISOLATES
def test_python_has_limits_of_time_and_memory():
    assert sandbox.run("while True: pass", seconds=1).end == "it took longer than 1 s"
    assert "MemoryError" in sandbox.run("bytearray(1 << 31)").output


@ISOLATES
def test_python_imports_numpy_without_a_thread_for_each_core():
    alone = "import resource; resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))"
    ran = sandbox.run(f"{alone}\nimport numpy; print(numpy.arange(3).sum())")
    assert (ran.output, ran.end) == ("3\n", "")


@ISOLATES
@pytest.mark.slow
def test_python_has_limits_of_processes_and_files():
    assert "Resource temporarily" in sandbox.run("import os\nwhile True: os.fork()").output
    assert "File too large" in sandbox.run("open('x', 'wb').write(b'x' * (20 << 20))").output
    assert sandbox.run("import os; os.kill(os.getpid(), 11)").end == "it was killed by signal 11"
    assert sandbox.run("raise SystemExit(120)").end == "it ended with exit status 1"
    long = sandbox.run("print('x' * (2 << 20))")
    assert (len(long.output), long.end) == (1 << 20, "")
    left = sandbox.run("import os, time\nif os.fork() == 0: time.sleep(60)\nelse: print('gone')")
    assert (left.output, left.end) == ("gone\n", "")


@ISOLATES
def test_python_sees_what_is_installed():
    """Of a virtual environment too, which is no part of the interpreter's own folder."""
    assert (
        sandbox.run(f"import os\nprint(len(os.listdir({sandbox.PACKAGES!r})) > 0)").output
        == "True\n"
    )


@ISOLATES
def test_python_goes_on_after_a_signal_to_all_processes_of_a_job():
    code = "import time\ntime.sleep(2)\nprint(42)"
    with ThreadPoolExecutor(1) as thread:
        ran = thread.submit(sandbox.run, code)
        while not (running := processes_of_the_sandbox()):
            time.sleep(0.01)
        for process in running:
            os.kill(process, signal.SIGTERM)
        assert ran.result() == sandbox.Ran("42\n")


@ISOLATES
def test_python_ends_its_own_programs():
    code = (
        "import subprocess, sys\n"
        "sleeper = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "sleeper.terminate()\nprint(sleeper.wait())"
    )
    assert sandbox.run(code) == sandbox.Ran("-15\n")
    itself = "import os\nprint('begun', flush=True)\nos.kill(os.getpid(), 15)"
    assert sandbox.run(itself) == sandbox.Ran("begun\n", "it was killed by signal 15")


def processes_of_the_sandbox() -> list[int]:
    """All of them once the code is running, and none before; only of this process."""
    found = [os.getpid()]
    for parent in found:
        children = Path(f"/proc/{parent}/task").glob("*/children")
        found += [int(child) for path in children for child in path.read_text().split()]
    command = Path(f"/proc/{found[-1]}/cmdline").read_bytes()
    return found[1:] if command.endswith(b"-P\0-s\0-\0") else []


@ISOLATES
def test_python_is_a_tool():
    environment = Here(tools([python], reward=right))
    assert results(environment, call("python", code="print(6 * 7)")) == ["42"]
    [said] = results(environment, call("python", code="1 / 0"))
    assert said.endswith("ZeroDivisionError: division by zero\nit ended with exit status 1")


def test_programs_of_all_turns_run_at_once(monkeypatch):
    together = threading.Barrier(TOGETHER)
    monkeypatch.setattr(sandbox, "check", lambda: "")
    monkeypatch.setattr(sandbox, "run", lambda code: sandbox.Ran(f"{together.wait(10) >= 0}"))
    environment = Here(tools([python], reward=right))
    said = say(call("python", code="print(1)"))
    turns = [Turn(0, i, 0, said, "3", np.zeros(2, np.uint32)) for i in range(TOGETHER)]
    ran = {"role": "tool", "name": "python", "content": "True"}
    assert [answer.content for _, answer in environment.answers(turns)] == [[ran]] * TOGETHER


def test_python_is_refused_where_it_cannot_be_isolated(monkeypatch):
    monkeypatch.setattr(sandbox, "REFUSED", 0)  # any end of the first process is a refusal
    message = "the Python tool cannot be isolated on this machine: "
    with pytest.raises(InputError, match=message):
        tools([python], reward=right)
    monkeypatch.setattr(sandbox.sys, "platform", "darwin")
    with pytest.raises(InputError, match=f"{message}it needs Linux's namespaces, this is darwin"):
        tools([python], reward=right)
