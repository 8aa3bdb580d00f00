"""Bad input of all kinds: one clear line, its own exit status, and nothing that hangs or lies."""

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import tiny

from tim_jax.app import cli
from tim_jax.app.config import toml
from tim_jax.app.jobs import train
from tim_jax.app.run.display import RewardWatch
from tim_jax.common import waiting
from tim_jax.common.errors import ENDINGS, InputError
from tim_jax.model import hf
from tim_jax.model.execution import Execution, Sampling, check_compiler_options
from tim_jax.rl.drawing import Sample, Text
from tim_jax.rl.loop import Step
from tim_jax.tasks import custom
from tim_jax.tasks.base import Example, Grade, Message, Task
from tim_jax.tasks.builtin import builtin_task
from tim_jax.tasks.custom import IsolatedReward, isolated_task
from tim_jax.tasks.rows import read_rows
from tim_jax.tasks.text import character_tokenizer

REWARDS = r"""
import ctypes, os, re, signal, sys, time

calls = 0

def counts(prompts, completions, answers):
    global calls
    calls += 1
    return [calls + (c == a) / 2 for c, a in zip(completions, answers)]

def shapes(prompts, completions, answers):
    return [len(prompts[0]), float(prompts[1][0]["role"] == "system")]

def leaves(prompts, completions, answers):
    sys.exit(0)

def speaks(prompts, completions, answers):
    sys.exit("stop\nplease")

def vanishes(prompts, completions, answers):
    os._exit(0)

def vanishes_in_c(prompts, completions, answers):
    ctypes.CDLL(None)._exit(0)

def is_killed(prompts, completions, answers):
    os.kill(os.getpid(), signal.SIGKILL)

def closes(prompts, completions, answers):
    os.closerange(0, 256)
    return [1.0 for c in completions]

def closes_and_hangs(prompts, completions, answers):
    os.closerange(0, 256)
    time.sleep(600)

def closes_all_but_output(prompts, completions, answers):
    os.closerange(3, 256)
    return [1.0 for c in completions]

def generator_exit(prompts, completions, answers):
    raise GeneratorExit

def interrupts(prompts, completions, answers):
    raise KeyboardInterrupt

def sleeps(prompts, completions, answers):
    return [time.sleep(60) if c == "x" else 0.0 for c, a in zip(completions, answers)]

def never_matches(prompts, completions, answers):
    return [bool(re.match(r"(a*)*b", "a" * 40 if c == "x" else c)) for c in completions]

def stuck_later(prompts, completions, answers):
    rewards = [0.0 for c in completions]
    time.sleep(60)

def starts_a_program(prompts, completions, answers):
    import subprocess
    child = subprocess.Popen(["sleep", "1000"])
    with open("child", "w") as file:
        file.write(str(child.pid))
    child.wait()

def endless(prompts, completions, answers):
    while True:
        yield 1.0

def table(prompts, completions, answers):
    return {0: 1.0, 1: 2.0}

async def later(prompts, completions, answers):
    return [1.0 for c in completions]

def later_each(prompts, completions, answers):
    return [later(p, c, a) for p, c, a in zip(prompts, completions, answers)]

def large(prompts, completions, answers):
    return [0.0, -1e300]

def digits(prompts, completions, answers):
    return [0.0, 10**5000]
"""
BROKEN = {
    "my_leaves": "import sys; sys.exit(0)",
    "my_vanishes": "import os; os._exit(0)",
    "my_sleeps": "import time; time.sleep(60)",
}
FACTORIES = """
import ctypes, os, time
from tim_jax.tasks.base import Example, Generated, Grade, Message, Task

def vanishes():
    os._exit(0)

def vanishes_in_c():
    ctypes.CDLL(None)._exit(0)

def sleeps():
    time.sleep(60)

def graded_by(how):
    examples = [Example(str(i), "") for i in range(8)]
    return Task("mine", examples, examples, {
        "vanishing": lambda examples, completions: os._exit(0),
        "numbers": lambda examples, completions: [1.0 for c in completions],
        "nan": lambda examples, completions: [Grade(float("nan")) for c in completions],
        "vanishing in C": lambda examples, completions: ctypes.CDLL(None)._exit(0),
        "sleeping": lambda examples, completions: [time.sleep(60) if c == "x" else Grade(0.0)
                                                   for e, c in zip(examples, completions)],
    }[how])

def made_of(**words):
    def example(i):
        if i == 7:
            time.sleep(60)
        prompt = (Message("system", "s"), Message("user", str(i))) if i % 2 else str(i)
        return Example(prompt, str(i) if i < 6 else i, {"hidden": i}, "worked" if i else None)

    def grade(examples, completions):
        return [Grade(e.data["hidden"] + len(words), "error" if c == "x" else None)
                for e, c in zip(examples, completions)]

    return Task("made", Generated(example, 8), (example(1), example(2)), grade, ("a note",))

class Own:
    closed = False

    def __len__(self):
        return 3

    def __getitem__(self, i):
        return Example("1", "1") if i == 0 else [1, 2][i + 4]

    def close(self):
        Own.closed = True

def wrong(part, what):
    good = Example("1", "1")
    rows = {
        "text": [good, "1+1="],
        "answer": (good, Example("1", 1)),
        "prompt": [good, Example(5, "1")],
        "message": [good, Example((Message("user", None),), "1")],
        "made": Generated(lambda i: good if i == 0 else None, 2),
        "own": Own(),
        "no length": (x for x in [good]),
    }[what]
    return Task("mine", **{"train": [good], "evaluation": [], part: rows}, grade=lambda e, c: [])
"""
EXAMPLES = [Example("p", "1"), Example((Message("system", "s"), Message("user", "u")), "2")]
COMPLETIONS = ["1", "x"]


@pytest.fixture(scope="module", autouse=True)
def here(tmp_path_factory):
    folder = tmp_path_factory.mktemp("project")
    (folder / "bad_rewards.py").write_text(REWARDS)
    (folder / "bad_factories.py").write_text(FACTORIES)
    for name, text in BROKEN.items():
        (folder / f"{name}.py").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        yield folder
        for name in ("bad_rewards", "bad_factories", *BROKEN):
            sys.modules.pop(name, None)


@pytest.fixture
def isolated():
    """Makes isolated rewards of the module, and ends them."""
    made = []

    def make(name, seconds=20.0):
        made.append(IsolatedReward(f"bad_rewards:{name}", seconds=seconds))
        return made[-1]

    yield make
    for reward in made:
        reward.close()


def child_of(reward):
    """The child process of an isolated reward."""
    worker = reward._there._worker
    assert worker is not None
    return worker._process


def refused(grade):
    with pytest.raises(InputError) as caught:
        grade(EXAMPLES, COMPLETIONS)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_isolated_reward_is_called_as_any_other_and_keeps_its_state(isolated):
    reward = isolated("counts")
    assert reward(EXAMPLES, ["1", "x"]) == [Grade(1.5), Grade(1.0)]
    assert reward(EXAMPLES, ["1", "2"]) == [Grade(2.5), Grade(2.5)]
    reward.close()
    assert reward(EXAMPLES, ["x", "2"]) == [Grade(1.0), Grade(1.5)]  # from a new start
    assert isolated("shapes")(EXAMPLES, COMPLETIONS) == [Grade(1.0), Grade(1.0)]


# Name -> what the line says. They end in a moment: none may wait for its limit.
ENDED = {
    "leaves": "bad_rewards:leaves raised SystemExit: 0",
    "speaks": "bad_rewards:speaks raised SystemExit: stop",
    "vanishes": "bad_rewards:vanishes raised SystemExit: 0",
    "vanishes_in_c": "vanishes_in_c: a call ended its process (exit status 0) or closed its files;"
    " 2 completions, the first for prompt 'p'",
    "is_killed": "bad_rewards:is_killed: a call was killed by signal 9",
    "closes": "bad_rewards:closes: a call ended its process",
    "closes_and_hangs": "bad_rewards:closes_and_hangs: a call closed its files and went on",
    "generator_exit": "bad_rewards:generator_exit raised GeneratorExit",
    "interrupts": "bad_rewards:interrupts raised KeyboardInterrupt",
    "endless": "bad_rewards:endless returned more than 2 rewards for 2 completions",
}


@pytest.mark.parametrize("name", ENDED)
def test_a_reward_that_ends_its_process_does_not_end_ours(name, isolated):
    started = time.monotonic()
    assert ENDED[name] in refused(isolated(name, 300.0))
    assert time.monotonic() - started < 60


# Name -> where the line says that time ran out.
STUCK = {
    "sleeps": ("time.sleep(60) if", "; at 1: prompt [{'role': 'system'"),
    "never_matches": ("re.match", "; at 1: prompt [{'role': 'system'"),
    "stuck_later": ("    time.sleep(60)", "; 2 completions, the first for prompt 'p'"),
}


@pytest.mark.parametrize("name", STUCK)
def test_a_reward_that_never_returns_is_ended_and_its_example_named(name, isolated):
    line = refused(isolated(name, 0.7))
    assert "took longer than task.reward_time_limit = 0.7 s, in " in line
    code, example = STUCK[name]
    number = next(n for n, text in enumerate(REWARDS.splitlines(), 1) if code in text)
    assert f"bad_rewards.py, line {number}{example}" in line


def test_a_program_that_a_reward_started_ends_with_it(isolated):
    assert "took longer" in refused(isolated("starts_a_program", 3.0))
    until = time.monotonic() + 20
    while is_running(Path("/proc", Path("child").read_text(), "status")):
        assert time.monotonic() < until
        time.sleep(0.05)


def is_running(status):
    """Whether a process is; one that has ended may be there until somebody waits for it."""
    try:
        return "State:\tZ" not in status.read_text()
    except OSError:
        return False


def test_a_long_call_says_what_is_waited_for(isolated, monkeypatch, capsys):
    reward = isolated("sleeps", 0.9)
    monkeypatch.setattr(waiting, "SECONDS", 0.2)
    with waiting.shown():
        refused(reward)
    assert capsys.readouterr().err == (
        "tim-jax: still waiting for reward bad_rewards:sleeps: a call after 0.2 s (at most"
        " task.reward_time_limit, 0.9 s)\n"
    )


IMPORTS = {
    "my_leaves": "importing my_leaves raised SystemExit: 0",
    "my_vanishes": "importing my_vanishes raised SystemExit: 0",
    "my_sleeps": "importing it took longer than task.reward_time_limit = 1 s, in ",
}


@pytest.mark.parametrize("name", IMPORTS)
def test_an_import_that_ends_or_holds_the_program(name):
    with pytest.raises(InputError) as caught:
        IsolatedReward(f"{name}:f", seconds=1)
    assert IMPORTS[name] in str(caught.value)


def test_sigterm_to_the_whole_job_does_not_end_the_reward(isolated):
    """A scheduler sends it to all processes; the run finishes its step first."""
    reward = isolated("counts")
    os.kill(child_of(reward).pid, signal.SIGTERM)
    assert reward(EXAMPLES, COMPLETIONS) == [Grade(1.5), Grade(1.0)]


def test_a_reward_process_ends_with_its_owner():
    reward = IsolatedReward("bad_rewards:counts", seconds=20.0)
    child = child_of(reward)
    del reward
    assert child.wait(10) is not None


# In the run's own process too, but for what leaves Python.
IN_PROCESS = {
    **{name: ENDED[name] for name in ("leaves", "speaks", "vanishes", "generator_exit", "endless")},
    "table": "must return a sequence of 2 numbers, got {0: 1.0, 1: 2.0}",
    "later": "must be a plain function, not async",
    "later_each": "must be a plain function, not async",
    "large": "must return numbers of at most 1e+15 in size, got -1e+300 at 1",
    "digits": "must return finite numbers, got <int> at 1",
}


@pytest.mark.parametrize("name", IN_PROCESS)
@pytest.mark.filterwarnings("error")
def test_what_a_reward_does_wrong_is_one_line(name, recwarn):
    leave = os._exit
    assert IN_PROCESS[name] in refused(custom.load_reward(f"bad_rewards:{name}"))
    assert os._exit is leave
    assert not recwarn.list


@pytest.mark.parametrize("name", ["my_leaves", "my_vanishes"])
def test_an_import_in_process_that_exits(name):
    with pytest.raises(InputError, match=f"importing {name} raised SystemExit: 0"):
        custom.load_function(f"{name}:f")


def test_a_reward_that_closes_files_leaves_no_noise_behind(isolated, capfd):
    line = refused(isolated("closes_all_but_output", 300.0))
    assert "a call ended its process (exit status 1) or closed its files" in line
    assert capfd.readouterr() == ("", "")


def test_a_forked_child_may_leave_as_it_does():
    with custom.user_code("this"):
        child = os.fork()
        if child == 0:
            os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


GRADERS = {
    "vanishing": "the grader of task.factory bad_factories:graded_by raised SystemExit: 0",
    "numbers": r"must return 2 tim_jax.tasks.base.Grade, got \[1.0, 1.0\]",
    "nan": "must return finite numbers, got nan at 0",
}


def test_a_users_task_that_exits_or_grades_wrongly():
    with pytest.raises(InputError, match="bad_factories:vanishes raised SystemExit"):
        custom.make_task("bad_factories:vanishes", {})
    for how, words in GRADERS.items():
        task = custom.make_task("bad_factories:graded_by", {"how": how})
        assert isinstance(task, Task)
        with pytest.raises(InputError, match=words):
            task.grade(EXAMPLES, COMPLETIONS)


# What a factory gives as examples: what -> what the line says.
ILL_MADE = {
    "text": "example 1 of {} must be a tim_jax.tasks.base.Example with text or messages as its"
    " prompt and text as its answer, got '1+1='",
    "answer": "example 1 of {} must be a tim_jax.tasks.base.Example",
    "prompt": "example 1 of {} must be a tim_jax.tasks.base.Example",
    "message": "example 1 of {} must be a tim_jax.tasks.base.Example",
    "made": "example 1 of {} must be a tim_jax.tasks.base.Example",
    "own": "example 1 of {} raised IndexError: list index out of range",
    "no length": "{} raised TypeError: object of type 'generator' has no len()",
}


@pytest.mark.parametrize("part", ["train", "evaluation"])
@pytest.mark.parametrize("what", ILL_MADE)
def test_a_users_task_with_examples_that_are_none(what, part):
    """Said when it is made if they are at hand, else when they are read."""
    words = {"part": part, "what": what}
    line = f"task.factory bad_factories:wrong: {ILL_MADE[what].format(part)}"
    if what in ("made", "own"):
        examples = getattr(custom.make_task("bad_factories:wrong", words), part)
        assert examples[0] == Example("1", "1")
        assert examples[-len(examples)] == examples[0]
        assert examples[:1] == (examples[0],)
        with pytest.raises(InputError, match=re.escape(line)):
            list(examples)
        with pytest.raises(IndexError):
            examples[len(examples)]
    else:
        with pytest.raises(InputError, match=re.escape(line)):
            custom.make_task("bad_factories:wrong", words)


def test_a_users_task_closes_the_source_of_its_examples():
    task = custom.make_task("bad_factories:wrong", {"part": "train", "what": "own"})
    task.close()
    assert sys.modules["bad_factories"].Own.closed


# The same in a process of its own: how -> what the line says, after what.
THERE = {
    "vanishing": "the grader of task.factory bad_factories:graded_by raised SystemExit: 0",
    "numbers": "must return 2 tim_jax.tasks.base.Grade, got [1.0, 1.0]",
    "vanishing in C": "task.factory bad_factories:graded_by: its grader ended its process (exit"
    " status 0) or closed its files; 2 completions, the first for prompt '0'",
    "sleeping": "graded_by: its grader took longer than task.reward_time_limit = 2 s, in ",
}


@pytest.mark.parametrize("how", THERE)
def test_a_users_task_is_kept_apart_as_a_reward_is(how):
    task = isolated_task("bad_factories:graded_by", {"how": how}, seconds=2)
    with pytest.raises(InputError) as caught:
        task.grade(task.train[:2], COMPLETIONS)
    task.close()
    line = str(caught.value)
    assert THERE[how] in line
    assert "\n" not in line
    if how == "sleeping":
        assert line.endswith("; at 1: prompt '1', completion 'x'")


@pytest.mark.slow
def test_a_users_task_in_a_process_of_its_own_is_the_same_task():
    task = isolated_task("bad_factories:made_of", {"a": 1, "b": [2]}, seconds=2)
    here = custom.make_task("bad_factories:made_of", {"a": 1, "b": [2]})
    assert (task.name, task.notes, len(task.train)) == ("made", ("a note",), 8)

    def known(examples):
        return [(e.prompt, e.answer, e.solution) for e in examples]

    assert known(task.train[:6]) == known(here.train[:6])
    assert known([task.train[-4], *task.evaluation]) == known([here.train[4], *here.evaluation])
    with pytest.raises(IndexError):
        task.train[8]
    examples = [task.train[5], task.evaluation[1], task.train[0]]
    grades = [Grade(7.0), Grade(4.0, "error"), Grade(2.0)]
    assert task.grade(examples, ["", "x", ""]) == grades
    with pytest.raises(InputError, match=r"example 6 of train must be a .* text as its answer"):
        task.train[6]
    with pytest.raises(InputError, match=r"making its train examples took longer than task\.rew"):
        task.train[7]
    task.close()


MADE = {
    "vanishes": "task.factory bad_factories:vanishes raised SystemExit: 0",
    "vanishes_in_c": "task.factory bad_factories:vanishes_in_c: importing it ended its process",
    "sleeps": "bad_factories:sleeps: importing it took longer than task.reward_time_limit = 1 s",
}


@pytest.mark.parametrize("name", MADE)
def test_a_factory_that_ends_or_holds_the_program(name):
    with pytest.raises(InputError) as caught:
        isolated_task(f"bad_factories:{name}", {}, seconds=1)
    assert MADE[name] in str(caught.value)


# Numbers, paths and nesting, wherever they stand in a config.
NINES, DEEP = "9" * 5000, "[" * 1000 + "]" * 1000
CONFIGS = {
    "nan": ("steps=nan", "steps = nan: must be finite"),
    "inf passed on": (
        "task.parameters.digits=[1, inf]",
        "task.parameters.digits[1] = inf: must be",
    ),
    "inf in an entry": (
        "learner.corrections=[{name = 'token_tis', cap = inf}]",
        "learner.corrections[0].cap = inf: must be finite",
    ),
    "many digits": (f"seed={NINES}", "a number has thousands of digits"),
    "hexadecimal": (f"seed=0x{'f' * 5000}", "seed = <int>: must be a number of at most 64 bits"),
    "65 bits": (f"task.parameters.digits={2**64}", "must be a number of at most 64 bits"),
    "deep": (f"task.parameters.x={DEEP}", "lists and tables lie too deep"),
    "less deep": (f"task.parameters.x={'[' * 50}{']' * 50}", "must lie at most 32 deep"),
    "no such user": ("run.folder=~nobody-here/x", "~nobody-here is no user's home folder"),
    "long name": (f"run.folder={'x' * 300}", "a name has at most 255 bytes"),
    "NUL": (r'run.folder="a\u0000b"', "has a NUL character"),
    "URL": ("run.folder=gs://my-bucket/run", "is a URL, not a path on this machine; mount the"),
    "option's type": (
        "numerics.compiler_options={a = 1.5}",
        "numerics.compiler_options.a = 1.5: must be text, true or false, or a whole number",
    ),
    "samples": ("sampling.samples=1000000000", "sampling.samples = 10000"),
    "prompts": ("learner.prompts_per_step=1000000000", "learner.prompts_per_step = 1000000000"),
    "refills": ("learner.refills=1000000000", "learner.refills = 1000000000: must be 1000 or less"),
    "buckets": ("learner.length_buckets=1000000000", "must be 32 or less"),
    "epochs": ("learner.epochs=1000000000", "must be 1000 or less"),
    "halvings": ("sampler.halvings=1000000000", "must be 31 or less"),
    "limit": ("task={kind = 'builtin', reward_time_limit = 1e300}", "must be 1000000.0 or less"),
}


@pytest.mark.parametrize("what", CONFIGS)
def test_a_config_that_is_senseless(what):
    override, words = CONFIGS[what]
    with pytest.raises(InputError) as caught:
        toml.load(None, [override])
    line = str(caught.value)
    assert line.startswith("command line: ")
    assert words in line
    assert "\n" not in line
    assert len(line) < 300


def test_a_deep_config_file_and_one_with_a_long_number(tmp_path):
    path = tmp_path / "c.toml"
    for text, words in ((f"x = {DEEP}", "too deep"), (f"seed = {NINES}", "thousands of digits")):
        path.write_text(text)
        with pytest.raises(InputError, match=words):
            toml.load(path)
    with pytest.raises(InputError, match="has a NUL"):
        toml.load("a\0b.toml")


def test_none_leaves_a_key_out(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text("[task]\nkind = 'dataset'\npath = 'x'\nsubset = 'main'\n[run]\nkeep = 7\n")
    config = toml.load(path, ["task.subset=none", "run.keep=none", "run.wandb_project=none"])
    assert config.task.kind == "dataset"
    assert config.task.subset is None
    assert (config.run.keep, config.run.wandb_project) == (2, "tim-jax")
    project = toml.load(path, ["run.wandb_project='none'", "run.sinks=[]"]).run.wandb_project
    assert project == "none"


def test_none_makes_no_section(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text("[placement]\nfsdp = 4\n")
    config = toml.load(path, ["lora.rank=none", "placement.sampler.data=none", "task.subset=none"])
    assert config.lora is None
    assert config.placement.sampler is None
    path.write_text("[model]\npreset = 'tiny'\n[model.template_options]\nthink = true\nx = 1\n")
    config = toml.load(path, ["model.template_options.think=none"])
    assert config.model.template_options == {"x": 1}
    free = ["task.parameters.x=none", "learner.objective.loss_options.ratio_cap=none"]
    assert toml.load(None, free) == toml.load(None)


def test_options_that_no_template_reads_are_said():
    config = toml.load(None, ['model={preset="tiny", template_options={enable_thinking=false}}'])
    text, execution = Text(character_tokenizer("1"), 8), SimpleNamespace(lora=None)
    programs = SimpleNamespace(training=SimpleNamespace(describe_sampler=lambda: []))
    job: Any = SimpleNamespace(config=config, text=text, execution=execution, programs=programs)
    (line,) = train._describe_run(job)
    assert line == "model.template_options.enable_thinking: no prompt depends on it"


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("learner.micro_bacth", "learner.micro_bacth: unknown key; did you mean 'micro_batch'?"),
        ("task.eval_splt", "task.eval_splt: unknown key; did you mean 'eval_split'?"),
        ("lerner.micro_batch", "lerner: unknown key; did you mean 'learner'?"),
        ("learner.samples", "learner.samples: unknown key; did you mean 'sampling.samples'?"),
        ("steps.many", "steps.many: unknown key"),
    ],
)
def test_none_of_an_unknown_key_is_refused(tmp_path, override, line):
    path = tmp_path / "c.toml"
    path.write_text("[task]\nkind = 'dataset'\npath = 'x'\n[learner]\nmicro_batch = 8\n")
    with pytest.raises(InputError) as caught:
        toml.load(path, [f"{override}=none"])
    assert str(caught.value) == f"command line: {line}"


def test_a_key_of_another_kind_of_task_is_no_hint_to_itself():
    with pytest.raises(InputError, match=r"task\.eval_size = 3: unknown key; did you mean 'eval_"):
        toml.load(None, ["task.kind=dataset", "task.path=x", "task.eval_size=3"])


def test_a_home_folder_is_expanded(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "c.toml").write_text("seed = 3\n[run]\nfolder = '~/runs/a'\n")
    config = toml.load("~/c.toml")
    assert (config.seed, config.run.folder) == (3, str(tmp_path / "runs" / "a"))
    arguments = cli._arguments(["export", "~/a", "~/b"])
    assert (arguments.source, arguments.folder) == (str(tmp_path / "a"), tmp_path / "b")
    arguments = cli._arguments(["audit", "Qwen/Qwen3-0.6B", "--json", "~/a.json"])
    assert (arguments.model, arguments.json) == ("Qwen/Qwen3-0.6B", tmp_path / "a.json")


ARGUMENTS = {
    "temperature nan": (
        ["generate", "m", "p", "--temperature", "nan"],
        "--temperature must be fin",
    ),
    "temperature inf": (
        ["generate", "m", "p", "--temperature=-inf"],
        "--temperature must be finite",
    ),
    "top-p": (["generate", "m", "p", "--top-p", "x"], "--top-p must be a number, got 'x'"),
    "seed -1": (["generate", "m", "p", "--seed", "-1"], "--seed must be at least 0, got -1"),
    "seed of 33 bits": (
        ["generate", "m", "p", "--seed", str(2**32)],
        "--seed must be less than 4294",
    ),
    "digits": (["generate", "m", "p", "--seed", NINES], "--seed must be less than 4294967296, got"),
    "samples": (["generate", "m", "p", "--samples", "3000000000"], "--samples must be less than"),
    "no samples": (["generate", "m", "p", "--samples", "0"], "--samples must be at least 1, got 0"),
    "tokens": (["generate", "m", "p", "--max-tokens", "0"], "--max-tokens must be at least 1"),
    "top-k": (["generate", "m", "p", "--top-k", "-3"], "--top-k must be at least 0, got -3"),
    "prompt": (["generate", "m", ""], "the prompt is empty"),
    "user": (["generate", "~nobody-here/m", "p"], "~nobody-here is no user's home folder"),
    "long": (["export", "run", "x" * 300], "a name has at most 255 bytes"),
    "URL": (["export", "run", "gs://b/m"], "path 'gs://b/m': is a URL, not a path on this machine"),
    "URL of a dataset": (["diagnose", "m", "s3://b/r.jsonl"], "path 's3://b/r.jsonl': is a URL"),
    "config": (["train", "~nobody-here/c.toml"], "~nobody-here is no user's home folder"),
    "no folder": (
        ["audit", "qwen3", "--json", "nowhere/r.json"],
        "--json: cannot write 'nowhere/r.json': there is no folder 'nowhere'",
    ),
    "folder": (["diagnose", "m", "r", "--html", "/"], "--html: cannot write '/': it is a folder"),
    "scores": (["eval", "c.toml", "--json", "nowhere/s.json"], "there is no folder 'nowhere'"),
    "plan": (
        ["plan", "c.toml", "--topology", "v5e:2x2", "--json", "nowhere/p.json"],
        "there is no folder 'nowhere'",
    ),
    "chart": (
        ["audit", "qwen3", "--sampler", "[]", "--chart", "x.gif"],
        "--chart: cannot write 'x.gif': its name must end in .png, .pdf, .svg",
    ),
    "dial": (["audit", "qwen3", "--sampler", "[{name = 'kv_cache', x = nan}]"], "x = nan: must be"),
}


@pytest.mark.parametrize("what", ARGUMENTS)
def test_an_argument_that_is_senseless(what, capsys):
    arguments, words = ARGUMENTS[what]
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("tim-jax: ")
    assert words in captured.err
    assert captured.err.count("\n") == 1
    assert len(captured.err) < 300


def test_a_result_that_may_not_be_written_is_refused_before_the_work(tmp_path, monkeypatch, capsys):
    """A read-only file, or a new one in a read-only folder; root may write to both."""
    old = tmp_path / "old.json"
    old.touch()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    for file, words in ((old, "you may not write to it"), (tmp_path / "new", "to the folder")):
        assert cli.main(["audit", "qwen3", "--json", str(file)]) == 2
        assert words in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


FILES = {
    "deep": ('{"a": ' + DEEP * 100 + "}", "lists and objects lie too deep"),
    "deep enough": ('{"a": ' + "[" * 50 + "]" * 50 + "}", "must lie at most 32 deep"),
    "digits": ('{"a": ' + NINES + "}", "a number has thousands of digits"),
    "nan": ('{"rms_norm_eps": NaN}', "rms_norm_eps = nan: must be finite"),
    "eos text": ('{"eos_token_id": "</s>"}', "eos_token_id must be a token id or a list of them"),
    "eos table": ('{"eos_token_id": {"a": 1}}', "eos_token_id must be a token id or a list of"),
    "eos nested": ('{"eos_token_id": [[1]]}', "eos_token_id must be a token id or a list of them"),
}


@pytest.mark.parametrize("what", FILES)
def test_a_models_json_that_is_senseless(what, tmp_path):
    text, words = FILES[what]
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(InputError) as caught:
        hf.load_generation_config(tmp_path)
    assert words in str(caught.value)
    if what.startswith("eos"):
        return
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError) as caught:
        hf.load_config(tmp_path)
    assert words in str(caught.value)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_a_row_that_is_too_deep_or_has_a_long_number(name, tmp_path):
    path = tmp_path / name
    for value, words in ((DEEP * 100, "too deep"), (NINES, "thousands of digits")):
        row = f'{{"prompt": "p", "answer": {value}}}'
        path.write_text(f"[{row}]" if name.endswith("json") else row)
        with pytest.raises(InputError, match=words):
            read_rows(str(path))


def test_paths_of_models_and_data_that_no_file_can_have():
    for path, words in (("~nobody-here/m", "home folder"), ("a/" + "x" * 300, "255 bytes")):
        for read in (hf.resolve, read_rows):
            with pytest.raises(InputError, match=words):
                read(path)


SIZES = {
    "digits": ("running_sums", {"digits": (4, 10**9)}),
    "train_size": ("sorting", {"train_size": 10**9}),
    "eval_size": ("sorting", {"eval_size": 10**9}),
    "numbers": ("countdown", {"numbers": (10**9, 10**9)}),
    "largest_target": ("countdown", {"largest_target": 2**62}),
}


@pytest.mark.parametrize("what", SIZES)
def test_a_task_of_a_senseless_size_is_refused_at_once(what):
    name, parameters = SIZES[what]
    with pytest.raises(InputError, match=what):
        builtin_task(name, parameters)


def test_countdown_that_has_hardly_any_problem_is_refused():
    parameters = {"numbers": (16, 16), "largest": 1000, "largest_target": 1000}
    with pytest.raises(InputError, match="hardly ever stay within largest_target=1000"):
        builtin_task("countdown", parameters)


OPTIONS = {
    "unknown": ({"xla_nope": True}, "No such compile option"),
    "type": ({"xla_backend_optimization_level": "two"}, "is not a valid int32"),
}


@pytest.mark.parametrize("what", OPTIONS)
def test_an_option_that_xla_refuses(what):
    options, words = OPTIONS[what]
    with pytest.raises(InputError, match=words) as caught:
        check_compiler_options(options)
    assert "numerics.compiler_options: xla_" in str(caught.value)
    check_compiler_options({"xla_backend_optimization_level": 1})


def test_a_temperature_and_top_k_that_make_no_distribution():
    for temperature in (float("nan"), float("inf")):
        with pytest.raises(InputError, match="temperature must be >= 0 and finite"):
            Sampling(temperature=temperature)
    sampling = Sampling(top_k=tiny.CONFIG.vocab_size)
    Execution(tiny.CONFIG, tiny.NUMERICS, sampling)
    with pytest.raises(InputError, match="top_k must be at most the vocabulary's 23 tokens"):
        Execution(tiny.CONFIG, tiny.NUMERICS, replace(sampling, top_k=24))


class Notes(list):
    """What a display shows as lines."""

    note = list.append


def watched(*steps, **metrics):
    """The notes about steps of (without signal, rewards), with more metrics."""
    watch, notes, nothing = RewardWatch(), cast(Any, Notes()), cast(Any, None)
    for number, (without, rewards) in enumerate(steps, 1):
        samples = [Sample("p", "c", "a", reward) for reward in rewards]
        metrics |= {"without_signal": without}
        step = Step(number, nothing, nothing, dict(metrics), {}, samples)
        watch.add(step, notes)
    watch.sum_up(notes)
    return notes


def test_steps_without_signal_are_said_once_and_counted():
    assert watched((0.0, [0.0, 1.0])) == []
    assert watched() == []
    first, last = watched((0.0, [0.0, 1.0]), (1.0, [1.0, 1.0]), (1.0, [0.0, 0.0]))
    assert first.startswith("step 2 teaches nothing")
    assert last == "2 of 3 steps taught nothing"
    first, last = watched((1.0, [0.5, 0.5]), (1.0, [0.5, 0.5]))
    assert last.startswith("warning: all completions of 2 steps had the same reward, 0.5")


def test_a_step_whose_episodes_all_fail_is_said_once():
    differ = 0.0, [0.0, 1.0]  # a turn before the failure had a reward
    failures = "environment/failures"
    [line] = watched(differ, differ, **{failures: 2.0})
    assert line == (
        "step 1: the environment failed in all 2 episodes; failures.jsonl says why; a resumed run"
        " repeats what stands there, so once the environment is mended, delete that file and resume"
    )
    assert watched(differ, **{failures: 1.0}) == []
    refilled = {"refill/rounds": 1.0}
    assert watched(differ, **{failures: 2.0}, **refilled) == []
    assert watched(differ, **{failures: 4.0}, **refilled) == [line]


# Whatever a command raises -> its status and the last line.
RAISED = {
    "exit": (SystemExit(0), 2, "tim-jax: not done: code that the command called raised SystemExit"),
    "generator exit": (GeneratorExit(), 2, "tim-jax: not done: "),
    "several lines": (InputError("one\ntwo"), 2, "tim-jax: one two"),
    "permission": (
        PermissionError(13, "Permission denied", "x"),
        2,
        "tim-jax: x: Permission denied",
    ),
    "memory": (MemoryError("4 TB"), 6, "tim-jax: out of memory on this machine: 4 TB"),
    "interrupt": (KeyboardInterrupt(), 130, "tim-jax: interrupted; "),
}


@pytest.mark.parametrize("what", RAISED)
def test_a_command_that_is_not_done_never_has_the_status_of_success(what, monkeypatch, capsys):
    error, status, line = RAISED[what]

    def run(arguments):
        raise error

    monkeypatch.setattr(cli, "_train", run)
    assert cli.main(["train", "any.toml"]) == status
    err = capsys.readouterr().err
    assert err.startswith(line)
    assert err.count("\n") == 1


INTERRUPTED_WHILE_COLLECTING = """
import gc, signal, time
from tim_jax.app import cli

def collect(*_):
    gc.callbacks.remove(collect)
    signal.raise_signal(signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
cli._quiet()
gc.callbacks.append(collect)
try:
    gc.collect()
    time.sleep(20)
except KeyboardInterrupt:
    print("interrupted")
"""
INTERRUPTED_AT_THE_END = """
import atexit, signal
from tim_jax.app import cli

atexit.register(signal.raise_signal, signal.SIGINT)
cli.main = lambda: 130
cli.run_and_exit()
"""


def test_an_interrupt_while_garbage_is_collected_comes_again():
    """JAX's own callback of the collector would lose it."""
    code = [sys.executable, "-c", INTERRUPTED_WHILE_COLLECTING]
    done = subprocess.run(code, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("interrupted\n", "")


def test_only_what_arrays_say_after_a_failed_save_is_left_out():
    said = []
    for words in ("Event loop is closed", "another"):
        error: Any = SimpleNamespace(exc_type=RuntimeError, exc_value=RuntimeError(words))
        cli._report_unraisable(error, otherwise=said.append)
    assert [str(error.exc_value) for error in said] == ["another"]


def test_an_interrupted_command_goes_on_only_if_it_has_checkpoints(monkeypatch, capsys):
    def run(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_audit", run)
    assert cli.main(["audit", "qwen3"]) == 130
    assert capsys.readouterr().err == "tim-jax: interrupted\n"


def test_a_second_interrupt_at_the_end_says_nothing_more():
    code = [sys.executable, "-c", INTERRUPTED_AT_THE_END]
    done = subprocess.run(code, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_a_command_shows_no_warnings_of_libraries_unless_asked():
    code = "import warnings; from tim_jax.app import cli; cli._quiet(); warnings.warn('noise')"
    for flags, wanted in (([], False), (["-W", "default"], True)):
        done = subprocess.run(
            [sys.executable, *flags, "-c", code], capture_output=True, text=True, check=True
        )
        assert ("noise" in done.stderr) == wanted


def test_the_documented_statuses_are_those_of_the_code(request):
    page = (request.config.rootpath / "docs" / "runs.md").read_text()
    table = page.partition("|--:|---|---|\n")[2].partition("<!-- statuses: end -->")[0]
    for row, ending in zip(table.splitlines(), ENDINGS, strict=True):
        line = f"`{ending.line.replace('{}', '...')}`" if ending.line else ""
        assert row == f"| {ending.status} | {ending.meaning} | {line} |"
    statuses = [ending.status for ending in ENDINGS]
    assert statuses == sorted(set(statuses))
