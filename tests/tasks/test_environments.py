"""Environments of the user's: a hostile one costs an episode, in a way that is documented."""

import asyncio
import json
import os
import pickle
import re
import resource
import time
from collections import Counter
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from tim_jax.common.errors import InputError
from tim_jax.tasks import environments, guard, worker
from tim_jax.tasks.base import Completion, Failure, Message, Outcome, Packed, Reply, Turn
from tim_jax.tasks.environments import Asker, Guarded, Here, Recorded

HOSTILE = """
import asyncio, math, os, resource, signal, subprocess, sys, threading, time
from dataclasses import dataclass

import numpy as np

import tim_jax as tim


@dataclass
class Count:
    turns: int = 0


class Odd:
    def __reduce__(self):
        raise RuntimeError("not to be pickled")

    def __repr__(self):
        raise RuntimeError("not to be shown")

    def __float__(self):
        raise RuntimeError("no number")


class Rude(str):
    def encode(self, *_):
        os._exit(4)


def deep():
    nested = []
    for _ in range(100_000):
        nested = [nested]
    return nested


def raises(error):
    raise error


RESULTS = {
    "nothing": lambda s: None,
    "odd": lambda s: Odd(),
    "reply alone": lambda s: tim.Reply("x"),
    "too much": lambda s: (s, tim.Reply("x"), 1),
    "text for a reply": lambda s: (s, "x"),
    "nan": lambda s: (s, tim.Reply("x", math.nan)),
    "infinite": lambda s: (s, tim.Reply("x", -math.inf)),
    "huge reward": lambda s: (s, tim.Reply("x", 1e300)),
    "huge whole reward": lambda s: (s, tim.Reply("x", 10**400)),
    "text for a reward": lambda s: (s, tim.Reply("x", "1.0")),
    "no reward": lambda s: (s, tim.Reply("x", None)),
    "complex reward": lambda s: (s, tim.Reply("x", 1j)),
    "odd reward": lambda s: (s, tim.Reply("x", Odd())),
    "text for done": lambda s: (s, tim.Reply("x", 0.0, "no")),
    "number for done": lambda s: (s, tim.Reply("x", 0.0, 1)),
    "no content": lambda s: (s, tim.Reply(None)),
    "bytes": lambda s: (s, tim.Reply(b"x")),
    "a number": lambda s: (s, tim.Reply(3)),
    "a set": lambda s: (s, tim.Reply({1, 2})),
    "a mapping": lambda s: (s, tim.Reply({"role": "user", "content": "x"})),
    "floats": lambda s: (s, tim.Reply([1.5, 2.0])),
    "negative": lambda s: (s, tim.Reply([-1])),
    "beyond": lambda s: (s, tim.Reply([1 << 40])),
    "both": lambda s: (s, tim.Reply([1, {"role": "user", "content": "x"}])),
    "no role": lambda s: (s, tim.Reply([{"content": "x"}])),
    "no text": lambda s: (s, tim.Reply([{"role": "user", "content": 3}])),
    "no JSON": lambda s: (s, tim.Reply([{"role": "user", "content": "x", "extra": Odd()}])),
    "surrogate": lambda s: (s, tim.Reply("\\ud800")),
    "surrogate in a message": lambda s: (s, tim.Reply([{"role": "user", "content": "\\ud800"}])),
    "huge text": lambda s: (s, tim.Reply("x" * (2 << 20))),
    "huge tokens": lambda s: (s, tim.Reply([1] * (2 << 20))),
    "huge array": lambda s: (s, tim.Reply(np.ones(2 << 20, np.int32))),
    "huge messages": lambda s: (s, tim.Reply([{"role": "user", "content": "x" * (2 << 20)}])),
    "an array of floats": lambda s: (s, tim.Reply(np.ones(3))),
    "a table": lambda s: (s, tim.Reply(np.ones((2, 2), np.int32))),
    "state that cannot be pickled": lambda s: (Odd(), tim.Reply("x")),
    "a lock for a state": lambda s: (threading.Lock(), tim.Reply("x")),
    "a function for a state": lambda s: (lambda: 0, tim.Reply("x")),
    "a deep state": lambda s: (deep(), tim.Reply("x")),
    "a huge state": lambda s: (b"x" * (17 << 20), tim.Reply("x")),
    "raises": lambda s: raises(KeyError("no such thing\\nsecond line")),
    "raises nothing to say": lambda s: raises(ValueError()),
    "raises a surrogate": lambda s: raises(ValueError("\\ud800")),
    "ends": lambda s: sys.exit(3),
    "leaves": lambda s: os._exit(3),
    "interrupts": lambda s: raises(KeyboardInterrupt()),
    "stops iterating": lambda s: raises(StopIteration()),
    "stops a generator": lambda s: raises(GeneratorExit()),
    "no memory": lambda s: raises(MemoryError()),
    "never ends to call itself": lambda s: RESULTS["never ends to call itself"](s),
    "exits rudely": lambda s: (s, tim.Reply(Rude("x"))),
    "is killed": lambda s: os.kill(os.getpid(), signal.SIGKILL),
    "crashes": lambda s: os.kill(os.getpid(), signal.SIGSEGV),
    "aborts": lambda s: os.abort(),
    "closes its files": lambda s: os.closerange(3, 300),
    "writes into its socket": lambda s: [os.write(n, b"x" * 9) for n in sockets()],
    "sleeps": lambda s: time.sleep(60),
    "is busy": lambda s: [0 for _ in iter(int, 1)],
    "waits for a program": lambda s: subprocess.run(["sleep", "60"]),
    "takes memory": lambda s: bytearray(3 << 30),
    "waits for itself": lambda s: threading.Lock().acquire() and threading.Event().wait(),
}


def sockets():
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket"):
                yield int(name)
        except OSError:
            pass


def respond(state, completion):
    if completion.text in RESULTS:
        return RESULTS[completion.text](state)
    return Count(getattr(state, "turns", 0) + 1), tim.Reply(f"{state}", reward=0.5)


def optional(state, completion, lowest=5):
    return state, tim.Reply(reward=float(np.sum(lowest)), done=True)


def keyed(state, completion, key):
    return state, tim.Reply([int(part) for part in key], done=np.bool_(completion.thinking))


def forks(state, completion):
    if os.fork() == 0:  # a log in the background, which nobody waits for
        time.sleep(0.1)
        if completion.text != "returns":
            sys.exit(0)
    return state, tim.Reply(f"to {completion.text}", os.getpid())


async def waits(state, completion):
    text = completion.text
    if text.startswith("/"):
        open(*text.split())  # a named pipe: until another process opens its other end
        return state, tim.Reply(text)
    if text == "swallows":
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                pass
    if text == "blocks":
        time.sleep(60)
    if text == "raises":
        raise KeyError("x")
    if text == "cancels":
        raise asyncio.CancelledError
    if text == "ends":
        sys.exit(3)
    await asyncio.sleep(float(text))
    return state, tim.Reply(text)
"""
TOOLS = """
from tim_jax.tasks.tools import calculator, tools


def bare(x):
    return x


def reward(state, completion):
    return 1.0


respond = tools([calculator], reward=reward)
bad = tools([bare], reward=reward)
"""
FATAL = {  # each in a process of its own, which takes time
    "is killed": "crash",
    "crashes": "crash",
    "aborts": "crash",
    "closes its files": "crash",
    "writes into its socket": "crash",
    "sleeps": "time limit",
    "is busy": "time limit",
    "waits for a program": "time limit",
    "waits for itself": "time limit",
}
RAISED = {
    "raises",
    "raises nothing to say",
    "raises a surrogate",
    "ends",
    "leaves",
    "interrupts",
    "stops iterating",
    "stops a generator",
    "no memory",
    "takes memory",
    "never ends to call itself",
}
NAMES = re.findall(r'^    "([^"]+)": lambda', HOSTILE, re.MULTILINE)
SECONDS = 2.0


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("environment") / "hostile_environment.py"
    path.write_text(HOSTILE)
    return path


@pytest.fixture(scope="module")
def guarded(source):
    made = Guarded(f"{source}:respond", seconds=SECONDS, workers=4, memory=2)
    yield made
    made.close()


def turn(text, state: Any = 0, key=(1, 2), number=0):
    completion = Completion(text, np.arange(3, dtype=np.int32), True)
    return Turn(0, 0, number, completion, state, np.array(key, np.uint32))


@pytest.fixture(scope="module")
def hostile(guarded):
    """300 hostile texts and as many good ones; the answers to them, and the seconds they took."""
    cheap = [name for name in NAMES if name not in FATAL]
    texts = [*FATAL, *(cheap[i % len(cheap)] for i in range(300 - len(FATAL)))]
    good = [f"good {i}" for i in range(20)]
    asked = [text for pair in zip(texts, good * 15, strict=True) for text in pair]
    began = time.monotonic()
    answers = list(guarded.answers([turn(text, "before") for text in asked]))
    return asked, answers, time.monotonic() - began


def test_300_hostile_replies_each_end_in_one_outcome(hostile):
    asked, answers, seconds = hostile
    assert seconds < 30
    assert sorted(index for index, _ in answers) == list(range(len(asked)))
    kinds = Counter()
    for index, answer in answers:
        text = asked[index]
        if text.startswith("good"):
            assert (answer.failure, answer.reward, answer.content) == (None, 0.5, "before")
            assert not answer.done
            continue
        assert (answer.state, answer.reward, answer.done) == ("before", 0.0, True), text
        kind, _, what = answer.failure.partition(": ")
        assert kind in get_args(Failure)
        assert what
        assert len(what) < 400
        assert "\n" not in what
        expected = FATAL.get(text, "raised" if text in RAISED else "reply")
        assert kind == expected, (text, answer.failure)
        kinds[kind] += 1
    assert kinds.total() == 300
    assert set(kinds) == set(get_args(Failure))


def test_what_failures_say(hostile):
    asked, answers, _ = hostile
    said = {asked[index]: answer.failure for index, answer in answers}
    assert said["nan"] == "reply: reward must be a finite number of at most 1e+15 in size, got nan"
    assert said["takes memory"].startswith("raised: MemoryError")
    assert said["raises"] == "raised: KeyError: 'no such thing\\nsecond line'"
    assert re.fullmatch(
        r"time limit: no reply within 2 s, in .*hostile_environment\.py, line \d+", said["sleeps"]
    )
    assert said["is killed"] == "crash: it was killed by signal 9"
    assert said["surrogate"].startswith("reply: content is no text: UnicodeEncodeError")
    assert said["huge text"].endswith("2,097,152 characters, at most 1,048,576 are allowed")
    assert said["text for a reply"].startswith("reply: respond must return (state, tim_jax.Reply)")


def test_states_go_from_turn_to_turn_unopened(guarded):
    state, content = 5, None
    for number in range(3):
        [(_, answer)] = guarded.answers([turn("go on", state, number=number)])
        state, content = answer.state, answer.content
        assert type(state) is Packed
    assert content == "Count(turns=2)"
    assert isinstance(state, Packed)
    assert b"hostile_environment" in state  # a class of the user's file, which only it has loaded


def test_outcomes_come_as_they_are_there(guarded):
    asked = [turn("sleeps"), *(turn(f"good {i}") for i in range(8))]
    order = [index for index, _ in guarded.answers(asked)]
    assert order[0] != 0
    left = guarded.answers(asked[1:])
    next(left)
    left.close()  # what a caller leaves
    assert len(list(guarded.answers(asked[1:]))) == 8


@pytest.mark.slow
def test_closing_while_turns_are_answered_asks_none_of_them_again(source):
    asked = [turn("sleeps")] * 8
    for _ in range(4):
        environment = Guarded(f"{source}:respond", seconds=20.0, workers=4, memory=2)
        with ThreadPoolExecutor(1) as threads:
            answers = threads.submit(lambda one: list(one.answers(asked)), environment)
            time.sleep(1)
            began = time.monotonic()
            environment.close()
            assert time.monotonic() - began < 10
            assert isinstance(answers.exception(), CancelledError)


def test_an_option_with_a_default_is_not_the_key(source):
    with closing(Guarded(f"{source}:optional", seconds=5.0, workers=1)) as environment:
        [(_, answer)] = environment.answers([turn("x", key=(7, 9))])
    assert answer.reward == 5.0


def test_a_turn_has_its_key_and_its_completion_is_whole(source):
    environment = Guarded(f"{source}:keyed", seconds=5.0, workers=1)
    asked = turn("x", key=(7, 9))
    thinking = replace(asked, completion=replace(asked.completion, thinking=True))
    [(_, answer)] = environment.answers([thinking])
    assert (answer.content, answer.done, answer.failure) == ([7, 9], True, None)
    environment.close()


def test_a_child_that_the_code_forks_answers_nothing_and_ends(source):
    with closing(Guarded(f"{source}:forks", seconds=5.0, workers=1)) as environment:
        for text in ("one", "two", "returns", "four", "five"):
            [(_, answer)] = environment.answers([turn(text)])
            assert answer.content == f"to {text}"
            group, deadline = int(answer.reward), time.monotonic() + 10
            while _living(group) and time.monotonic() < deadline:
                time.sleep(0.05)
            assert not _living(group)


def _living(parent):
    """The children of a process that have not ended; nobody waits for them, so zombies remain."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            state, above = (
                (Path("/proc") / name / "stat").read_text().rpartition(")")[2].split()[:2]
            )
        except OSError:
            continue
        if int(above) == parent and state != "Z":
            found.append(name)
    return found


def test_a_later_process_that_cannot_import_ends_in_one_line(source, monkeypatch):
    monkeypatch.chdir(source.parent)
    (source.parent / "once.py").write_text(
        "import os, time\n"
        "import tim_jax as tim\n"
        "os.open('taken', os.O_CREAT | os.O_EXCL)\n"
        "def respond(state, completion):\n"
        "    time.sleep(0.5)\n"
        "    return state, tim.Reply('x')\n"
    )
    said = pytest.raises(InputError, match=r"each of the 2 processes of task.environment_workers")
    with closing(Guarded("once.py:respond", seconds=5.0, workers=2)) as environment, said:
        list(environment.answers([turn("a"), turn("b"), turn("c")]))


def test_a_process_that_starts_too_slowly_is_named(source, monkeypatch):
    monkeypatch.chdir(source.parent)
    (source.parent / "slow.py").write_text("import time; time.sleep(60)")
    monkeypatch.setattr(guard, "START_SECONDS", 0.3)
    monkeypatch.setattr(guard, "GRACE_SECONDS", 2.0)
    with pytest.raises(InputError, match=r"did not start; the last one took longer than 0.3 s"):
        Guarded("slow.py:respond", workers=1)


def test_coroutines_wait_side_by_side(source):
    environment = Guarded(f"{source}:waits", seconds=3.0, workers=1)
    asked = [turn(text) for text in ("0.4", "0.3", "0.2", "60", "raises", "cancels", "ends")]
    answers = dict(environment.answers(asked))
    assert [answers[i].content for i in range(3)] == ["0.4", "0.3", "0.2"]
    assert list(answers).index(2) < list(answers).index(0)
    assert answers[3].failure == "time limit: no reply within 3 s"
    assert answers[4].failure == "raised: KeyError: 'x'"
    assert answers[5].failure == "raised: CancelledError"
    assert answers[6].failure == "raised: SystemExit: 3"
    environment.close()


@pytest.mark.slow
def test_a_coroutine_that_holds_all_others_fails_alone(source, monkeypatch):
    monkeypatch.setattr(guard, "GRACE_SECONDS", 0.5)
    environment = Guarded(f"{source}:waits", seconds=0.3, workers=1)
    answers = dict(environment.answers([turn(text) for text in ("0.1", "swallows", "blocks")]))
    assert answers[0].content == "0.1"
    for index in (1, 2):
        failure = answers[index].failure
        assert failure is not None
        assert failure.startswith("time limit: no reply within 0.3 s")
    assert re.search(r", in .*hostile_environment\.py, line \d+$", failure)  # where it blocks
    environment.close()


@pytest.mark.slow
def test_turns_that_waited_beside_one_that_blocks_are_asked_again_side_by_side(source, monkeypatch):
    monkeypatch.setattr(guard, "GRACE_SECONDS", 0.5)
    pipe = source.parent / "pipe"
    os.mkfifo(pipe)
    environment = Guarded(f"{source}:waits", seconds=4.0, workers=2)
    answers = dict(environment.answers([turn(f"{pipe} r"), turn(f"{pipe} w")]))
    assert [answers[i].content for i in range(2)] == [f"{pipe} r", f"{pipe} w"]
    environment.close()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.py:respond", "no such file: .*missing.py"),
        ("{}:nothing", "hostile_environment.py has no function 'nothing'"),
        ("no_such_module_here:respond", "No module named 'no_such_module_here'"),
        ("broken.py:respond", "running broken.py raised ZeroDivisionError"),
        ("ends.py:respond", "running ends.py raised SystemExit"),
        (
            "dies.py:respond",
            "dies.py:respond': 3 processes in a row did not start; the last one ended with code -9",
        ),
    ],
)
def test_environments_that_cannot_be_loaded(source, name, message, monkeypatch):
    monkeypatch.chdir(source.parent)
    (source.parent / "broken.py").write_text("1 / 0")
    (source.parent / "ends.py").write_text("raise SystemExit(3)")
    (source.parent / "dies.py").write_text("import os, signal; os.kill(os.getpid(), 9)")
    with pytest.raises(InputError, match=message) as caught:
        Guarded(name.format(source), workers=1)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_environments_declare_their_tools(source):
    path = source.parent / "with_tools.py"
    path.write_text(TOOLS)
    environment = Guarded(f"{path}:respond", workers=1)
    assert environment.roles == ("tool",)
    assert [schema["function"]["name"] for schema in environment.tools] == ["calculator"]
    text = '<tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}</tool_call>'
    [(_, answer)] = environment.answers([turn(text)])
    assert answer.content == [{"role": "tool", "name": "calculator", "content": "42"}]
    environment.close()
    with pytest.raises(InputError, match=r"with_tools.py:bad': tool bare: "):
        Guarded(f"{path}:bad", workers=1)


def count(state, completion):
    state["turns"].append(completion.text)
    return state, Reply(str(len(state["turns"])), reward=np.float32(0.5), done=False)


def test_a_function_here_has_states_of_its_own():
    environment, row = Here(count), {"turns": []}
    (_, first), (_, second) = environment.answers([turn("a", row), turn("b", row)])
    for answer in (first, second):
        assert (answer.content, answer.reward) == ("1", 0.5)
    assert row == {"turns": []}
    [(_, again)] = environment.answers([turn("c", second.state)])
    assert again.content == "2"
    assert pickle.loads(again.state) == {"turns": ["b", "c"]}


def test_a_function_here_fails_as_elsewhere():
    cases = {
        "raised: KeyError: 'x'": lambda state, completion: {}["x"],
        "raised: SystemExit: 3": lambda state, completion: exit(3),
        "reply: done must be True or False, got 'no'": lambda s, c: (
            s,
            Reply(done="no"),  # pyright: ignore[reportArgumentType]
        ),
    }
    for expected, function in cases.items():
        [(_, answer)] = Here(function).answers([turn("a", "before")])
        assert (answer.failure, answer.state, answer.done) == (expected, "before", True)


def test_an_interrupt_is_for_the_program():
    def interrupted(state, completion):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(Here(interrupted).answers([turn("a")]))


def test_a_coroutine_here_works_where_a_loop_runs_already():
    async def slow(state, completion):
        await asyncio.sleep(float(completion.text))
        return state, Reply(completion.text)

    async def notebook():
        return list(Here(slow, seconds=1.5).answers([turn("0.1"), turn("60"), turn("0.0")]))

    answers = asyncio.run(notebook())
    assert [index for index, _ in answers] == [2, 0, 1]
    assert answers[2][1].failure == "time limit: no reply within 1.5 s"


def test_messages_and_tokens_are_read():
    contents = {
        "messages": [Message("user", "a"), {"role": "tool", "content": "b", "name": "f"}],
        "tokens": np.array([1, 2], np.int64),
        "nothing": (),
    }
    environment = Here(lambda state, completion: (state, Reply(contents[completion.text])))
    answers = [a.content for _, a in environment.answers([turn(text) for text in contents])]
    assert answers == [
        [{"role": "user", "content": "a"}, {"role": "tool", "content": "b", "name": "f"}],
        [1, 2],
        [],
    ]
    assert all(type(token) is int for token in answers[1])


def test_a_coroutine_here_that_holds_all_others_fails_alone(monkeypatch):
    async def blocks(state, completion):
        time.sleep(float(completion.text))
        return state, Reply(completion.text)

    monkeypatch.setattr(environments, "LATER", 0.1)
    answers = dict(Here(blocks, seconds=0.1).answers([turn("1.0"), turn("0.0")]))
    assert answers[0].failure == "time limit: no reply within 0.1 s"
    assert answers[1].content == "0.0"


class Slow:
    """An environment that takes a twentieth of a second for each turn."""

    def outcomes(self, turns):
        for index, _ in enumerate(turns):
            time.sleep(0.05)
            yield index, Outcome(None, np.zeros(0, np.int32))


def test_waiting_is_counted_where_nothing_else_is_at_work():
    turns = [(row, turn("a", "state", key=(5, row))) for row in range(4)]
    with Asker(Slow()) as asker:
        asker.ask(turns)
        assert [row for row, _ in asker.replies(least=True)][:1] == [0]
        waited = asker.seconds
        assert waited > 0
        time.sleep(0.2)  # as the devices' work, while replies come
        assert len(list(asker.replies(waited_for=False))) > 0
        assert asker.seconds == waited
        for _ in asker.replies(least=True):  # what is done with a reply is no waiting
            time.sleep(1.0)
        assert asker.seconds - waited < 1.0
        assert not list(asker.replies(least=True))


class Fails:
    """An environment in which every second turn fails, the first time that it is asked."""

    def __init__(self):
        self.asked = []

    def outcomes(self, turns):
        for index, one in enumerate(turns):
            self.asked.append(int(one.key[1]))
            failure = "time limit: no reply within 1 s" if one.key[1] % 2 else None
            tokens = np.arange(3, dtype=np.int32)
            yield index, Outcome("after", tokens, 0.5, failure is not None, failure)


def test_failures_are_repeated_on_resume(tmp_path):
    path = tmp_path / "environment.jsonl"
    turns = [turn("a", "before", key=(5, number)) for number in range(4)]
    first = dict(Recorded(Fails(), path).outcomes(turns))
    path.write_text(path.read_text() + '{"turn": "0000')  # a run that was killed as it wrote
    source = Fails()
    again = dict(Recorded(source, path).outcomes(turns))
    assert source.asked == [0, 2]
    assert [again[i].failure for i in range(4)] == [first[i].failure for i in range(4)]
    assert (again[1].done, again[1].reward, again[1].tokens.size) == (True, 0.0, 0)
    other = [turn("a", key=(5, 7))]
    dict(Recorded(Fails(), path).outcomes(other))
    known = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    assert [entry["turn"][-1] for entry in known] == ["1", "3", "7"]


def test_failures_that_cannot_be_written_are_an_error_in_one_line(tmp_path):
    recorded = Recorded(Fails(), tmp_path / "failures.jsonl")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with pytest.raises(InputError, match=r"cannot write .*/failures\.jsonl: File too large"):
            list(recorded.outcomes([turn("a", key=(5, 1))]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_no_address_space_is_bounded_where_none_can_be(monkeypatch):
    """macOS refuses such a bound, and each process would end at its start."""

    def setrlimit(kind, _):
        if kind == resource.RLIMIT_AS:
            raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(worker.resource, "setrlimit", setrlimit)
    with pytest.raises(ValueError, match="exceeds maximum"):
        worker.limit_memory(2**32)
    monkeypatch.setattr(worker.sys, "platform", "darwin")
    worker.limit_memory(2**32)
