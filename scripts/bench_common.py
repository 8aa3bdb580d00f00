"""What the benchmarks share: what they run, how they time, how they name the machine."""

import argparse
import json
import os
import pathlib
import platform
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import jax
import numpy as np

RESULTS = pathlib.Path(__file__).parent.parent / "docs" / "results"
BATCHES = (8, 32, 64)
DTYPES = ("float32", "bfloat16")
GROUP = 4  # samples of a prompt in a GRPO step
_COMPILING = "/jax/core/compile/backend_compile_duration"  # also of a program from a cache
_QUIET = 0.5  # load average above which figures are not to be trusted


@dataclass(frozen=True)
class Sizes:
    """A Qwen3 with tied embeddings, and what is drawn from it: no response ends early."""

    layers: int = 8
    hidden: int = 256
    intermediate: int = 768
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    vocabulary: int = 8192
    prompt: int = 32
    response: int = 128
    longest: int = 512  # tokens of the longest response where lengths are skewed
    limit: int | None = None  # tokens that ours pads prompts to; None: as many as they have
    note: str = ""

    def text(self) -> str:
        """One sentence for a results page."""
        return (
            f"Model: Qwen3, {self.layers} layers, hidden size {self.hidden}, intermediate"
            f" {self.intermediate}, {self.heads} heads and {self.kv_heads} key heads of"
            f" {self.head_dim}, vocabulary {self.vocabulary:,}, tied embeddings, random weights."
            f" Prompts of {self.prompt} tokens, {self.response} new tokens, temperature 1, no stop"
            f" token.{self.note}"
        )


SMALL = Sizes()
SMOKE = Sizes(
    layers=2,
    hidden=32,
    intermediate=48,
    heads=4,
    kv_heads=2,
    head_dim=8,
    vocabulary=256,
    prompt=8,
    response=8,
    longest=16,
)
# What the peer's page has rows of.
SHAPES = {
    "small": SMALL,
    "smoke": SMOKE,
    "wide": Sizes(
        layers=12,
        hidden=512,
        intermediate=1536,
        head_dim=64,
        vocabulary=32768,
        prompt=128,
        response=256,
        longest=256,
    ),
    "llama-135m": Sizes(
        layers=6,
        hidden=576,
        intermediate=1536,
        heads=9,
        kv_heads=3,
        head_dim=64,
        vocabulary=49152,
        prompt=45,
        response=28,
        longest=28,
        limit=96,
        note=" These are the sizes of a Llama of 135M parameters, which has 30 layers. Ours pads"
        " prompts to 96 tokens.",
    ),
}
SHAPE_BATCHES = {"small": BATCHES, "smoke": (8,), "wide": (16,), "llama-135m": (64,)}


def cases(shape: str) -> tuple[tuple[int, str], ...]:
    """(batch, dtype) of each row of a table."""
    return tuple((batch, dtype) for batch in SHAPE_BATCHES[shape] for dtype in DTYPES)


class CompiledError(RuntimeError):
    """Something was compiled while time was taken."""


@contextmanager
def compilations() -> Iterator[list[str]]:
    """The names of the functions that JAX compiles, or takes from a cache on disk, meanwhile."""
    names: list[str] = []

    def note(event: str, _: float, **facts: Any) -> None:
        if event == _COMPILING:
            names.append(str(facts.get("fun_name", "a program")))

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(note)


@contextmanager
def warm(what: str) -> Iterator[None]:
    """Around whatever is timed: raises `CompiledError` if anything is compiled inside."""
    with compilations() as names:
        yield
    if names:
        raise CompiledError(f"{what} was timed while JAX compiled {', '.join(names)}")


class Gate:
    """Has a peer's trainer, which runs in a thread of its own, make one step when told to.

    The trainer calls `hold` before each step, so that a step begins where the one before has ended.
    """

    def __init__(self):
        self._go: queue.Queue[None] = queue.Queue()
        self._waiting: queue.Queue[BaseException | None] = queue.Queue()

    def hold(self) -> None:
        """Says that the trainer stands before a step, and waits until it may make it."""
        self._waiting.put(None)
        self._go.get()

    def begin(self, train: Callable[[], Any]) -> None:
        """Starts the trainer, up to its first step."""

        def run() -> None:
            try:
                train()
            except BaseException as fault:
                self._waiting.put(fault)

        threading.Thread(target=run, daemon=True).start()
        self._wait()

    def step(self) -> float:
        """Seconds of one step. Raises what the trainer raised."""
        start = time.perf_counter()
        self._go.put(None)
        self._wait()
        return time.perf_counter() - start

    def _wait(self) -> None:
        fault = self._waiting.get()
        if fault is not None:
            raise fault


def interleaved(
    calls: Mapping[str, Callable[[], float]], repeats: int
) -> dict[str, tuple[float, ...]]:
    """Seconds of each call, `repeats` of each, taken in turns whose order alternates.

    A and B next to each other meet the same machine; A B B A cancels what drifts. Raises
    `CompiledError` if one of them compiles: it must have run before.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats):
        for name in list(calls) if repeat % 2 == 0 else reversed(list(calls)):
            with warm(str(name)):
                times[name].append(calls[name]())
    return {name: tuple(values) for name, values in times.items()}


def ratios(over: Sequence[float], under: Sequence[float]) -> tuple[float, float]:
    """The median of the ratios of neighbours, and the ratio of the two best times."""
    pairs = zip(over, under, strict=True)
    return statistics.median(a / b for a, b in pairs), min(over) / min(under)


def skewed(count: int, longest: int) -> np.ndarray:
    """i32[count], log-normal lengths of mean `longest` / 4, from 2 to `longest`."""
    drawn = np.random.default_rng(0).lognormal(sigma=1.0, size=count)
    low, high = 0.0, float(longest)
    for _ in range(50):  # the scale at which the lengths, cut, have the mean
        scale = (low + high) / 2
        lengths = np.clip(np.round(drawn * scale), 2, longest)
        low, high = (scale, high) if lengths.mean() < longest / 4 else (low, scale)
    lengths[np.argmax(drawn)] = longest
    return lengths.astype(np.int32)


def slots(batch: int) -> tuple[int, ...]:
    """How many sequences are drawn side by side where lengths are skewed."""
    return batch // 4, batch


def load_average() -> float:
    """The machine's load over the last minute. Take it before starting work of one's own."""
    return os.getloadavg()[0]


def machine_text(load: float, versions: Mapping[str, str], *, timed: bool = True) -> list[str]:
    """Markdown lines: processor, versions by name, load at the start.

    With a warning if figures of time cannot be trusted at that load.
    """
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    lines = [
        f"Machine: {cpu_model()}, {os.cpu_count()} cores; {named}; load average at"
        f" the start {load:.2f}.",
        "",
    ]
    if timed and load > _QUIET:
        lines += [
            f"**Warning: the machine was not idle (load average {load:.2f} > {_QUIET}); these"
            " figures are not to be relied on.**",
            "",
        ]
    return lines


def versions(*packages: str) -> dict[str, str]:
    """This interpreter's version and those of its packages."""
    found = {"Python": platform.python_version()}
    return found | {name: metadata.version(name) for name in packages}


def cpu_model() -> str:
    """The processor's name, with the instruction sets that decide which kernels run."""
    info = pathlib.Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor() or platform.machine()
    fields = {}
    for line in info.read_text().splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    flags = fields.get("flags", fields.get("Features", "")).split()  # of x86, of ARM
    wanted = "avx2", "avx512f", "avx512_bf16", "amx_bf16", "sve", "bf16"
    known = ", ".join(name for name in wanted if name in flags)
    return fields.get("model name", platform.machine()) + (f" ({known})" if known else "")


def parser(description: str, page: pathlib.Path) -> argparse.ArgumentParser:
    """Arguments that every benchmark has."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--repeats", type=int, default=5, help="timed calls of each (default 5)")
    options.add_argument("--smoke", action="store_true", help="tiny sizes: does the script run?")
    options.add_argument(
        "--out", type=pathlib.Path, help=f"page to write (default {page.name}; smoke: none)"
    )
    return options


def publish(lines: Sequence[str], options: argparse.Namespace, page: pathlib.Path) -> None:
    """Prints the page, and writes it to --out or, but for a smoke test, to its own place."""
    text = "\n".join(lines).rstrip() + "\n"
    print(text)
    target = options.out or (None if options.smoke else page)
    if target is not None:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)


def between_marks(text: str, measured: str, mark: str = "measured") -> str:
    """A page's text with `measured` between its marks; what stands outside is a person's."""
    begin, end = f"<!-- {mark}: begin -->", f"<!-- {mark}: end -->"
    before, begun, rest = text.partition(begin)
    _, ended, after = rest.partition(end)
    if not (begun and ended):
        raise SystemExit(f"the page needs the lines {begin} and {end}")
    return f"{before}{begin}\n\n{measured}\n{end}{after}"


def with_section(page: str, section: str) -> str:
    """The page with this section in place of the one with its title, or at the end."""
    title = section.partition("\n")[0]
    before, found, after = page.partition(f"{title}\n")
    after = after.partition("\n## ")
    rest = f"\n{after[1].strip()} {after[2]}" if found and after[1] else ""
    return f"{before.rstrip()}\n\n{section}{rest}"


def put_section(page: pathlib.Path, section: str) -> None:
    """Prints a section, and writes it into its page, which is made if it is not there."""
    print(section)
    page.write_text(with_section(page.read_text() if page.exists() else "", section))


def read_rows(path: pathlib.Path) -> list[dict[str, Any]]:
    """The lines of a file of JSON lines; none if it is not there."""
    return [json.loads(line) for line in path.open(encoding="utf-8")] if path.exists() else []


def keep(path: pathlib.Path, row: Mapping[str, Any]) -> None:
    """Appends a line to such a file."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def publish_plans(
    description: str, page: pathlib.Path, cases: Sequence[Any], lines: Callable
) -> None:
    """Writes the page of plans, or prints it for a smoke test: of the last case.

    A case names a `file` for its plan, and the `words` behind `tim-jax plan`; `lines` makes the
    page of (case, plan) pairs and the load average.
    """
    options = parser(description, page)
    options.add_argument("--keep", type=pathlib.Path, help="folder for the plans' JSON")
    chosen = options.parse_args()
    load = load_average()
    with tempfile.TemporaryDirectory() as temporary:
        folder = chosen.keep or pathlib.Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        some = cases[-1:] if chosen.smoke else cases
        plans = [(case, _planned(case, folder.resolve())) for case in some]
    publish(lines(plans, load), chosen, page)


def _planned(case: Any, folder: pathlib.Path) -> dict[str, Any]:
    """The plan's JSON; compiled, unless the folder has it."""
    file = folder / case.file
    if not file.exists():
        command = [sys.executable, "-m", "tim_jax", "plan", "--json", str(file), *case.words]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        found = subprocess.run(command, check=False, cwd=RESULTS.parents[1], env=environment)
        if not file.exists():
            raise SystemExit(f"tim-jax plan ended with status {found.returncode}")
    return json.loads(file.read_text())


def generated(
    model: Any, prompts: Iterable[list[int]], *, samples: int, stops: Sequence[int], **how: Any
) -> list[dict[str, Any]]:
    """Rows that transformers' `generate` draws with its cache, with the log-probs that it drew by.

    `raw` has those of the logits before temperature and truncation. `how`: further options of it.
    """
    import torch

    rows = []
    for prompt in prompts:
        given = torch.tensor([prompt] * samples)
        options = {"do_sample": True, "top_k": 0, "eos_token_id": list(stops), **how}
        outputs = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
        made = model.generate(given, attention_mask=torch.ones_like(given), **options, **outputs)
        drawn = made.sequences[:, len(prompt) :]
        own, raw = (
            torch.log_softmax(torch.stack(x, dim=1).float(), dim=-1).gather(2, drawn[..., None])
            for x in (made.scores, made.logits)
        )
        each = zip(drawn.tolist(), own[..., 0].tolist(), raw[..., 0].tolist(), strict=True)
        for ids, log_probs, before in each:
            length = next((i + 1 for i, x in enumerate(ids) if x in stops), len(ids))
            row = {"response_token_ids": ids, "logprobs": log_probs, "raw": before}
            cut = {name: values[:length] for name, values in row.items()}
            rows.append({"prompt_token_ids": prompt, **cut})
    return rows


def share_even(completion: str) -> float:
    """The peer benchmark's reward: the share of even numbers among the words of a completion."""
    words = completion.split()
    return sum(int(word) % 2 == 0 for word in words) / max(1, len(words))


def serve(make_worker: Callable[[Sizes, int, str], Any], description: str) -> None:
    """A worker's life, which is one row of the table, as its arguments say.

    Reads the name of a method a line, perhaps with a number, and answers with JSON a line. An
    answer that takes time names what was compiled meanwhile. Whatever libraries print goes to
    stderr, so that answers stand alone on stdout.
    """
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--batch", type=int, required=True)
    options.add_argument("--dtype", choices=DTYPES, required=True)
    options.add_argument("--shape", choices=SHAPES, required=True)
    chosen = options.parse_args()
    worker = make_worker(SHAPES[chosen.shape], chosen.batch, chosen.dtype)
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        for line in sys.stdin:
            operation, *number = line.split()
            with compilations() as compiled:
                answer = getattr(worker, operation)(*map(int, number))
            if "seconds" in answer:
                answer["compiled"] = compiled
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
    # The peer's idle threads would keep the process alive.
    os._exit(0)
