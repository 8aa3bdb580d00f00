"""Input drawn around what is right: whatever is given, a command begins, or says why not.

Every outcome is success, or one line with a status of `errors.ENDINGS`: no traceback, no warning,
no hang. Commands run in this process up to where they would begin to compute (`fuzzing` says
where). The slow tests run 719 cases, the quick ones a few: the same ones in every run. With
`--hypothesis-profile=explore` they run 2,000 others.
"""

import json
import shutil
from functools import reduce
from operator import getitem
from pathlib import Path

import fuzzing
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tim_jax import corrections
from tim_jax.mismatch.dial import ENTRIES

# Values as TOML: of every type, too large, too small, no numbers, too deep, not TOML at all.
VALUES = [
    *("true", "false", "0", "1", "2", "3", "-1", "16", "1000", "0.5", "1.0", "1.5", "-0.5"),
    *("1e-300", "1e300", "-1e300", "5e-324", "nan", "-nan", "inf", "-inf"),
    *(str(2**31 - 1), str(2**31), str(2**32), str(2**63 - 1), str(2**63), str(-(2**63))),
    *("1000000000", "9" * 400, "9" * 5000, "0x" + "f" * 40, "1_0", "0o7", "+1"),
    *('""', '" "', '"x"', '"none"', '"1"', '"nan"', '"é😀"', r'"\u0000"', r'"a\nb"', r'"\u2028"'),
    *('"~"', '"~nobody-here/x"', '"/dev/null"', '"/dev/null/x"', '"/proc/nowhere/x"', '".."'),
    *('"good.toml"', '"rows.jsonl"', '"model"', '"run"', '"a:b:c"', "''", "'''", '"""'),
    *(f'"{"x" * 300}"', f'"{"/x" * 3000}"', '"\U000e0001"', '"\x1b[31m"', r'"\ud800"'),
    *("[]", "[1]", "[0]", "[-1]", "[1, 2, 3]", "[[]]", '["x"]', "[nan]", "[1.5]", "[{}]", "[ "),
    *("{}", "{ a = 1 }", "{ a = nan }", "{ name = 1 }", '{ name = "x" }', '{ "" = 1 }', "{ "),
    *('[{ name = "x" }]', '[{ name = ["x"] }]', "{ a = { b = { c = [[1]] } } }", "{ a.b = 1 }"),
    *("[" * 40 + "]" * 40, "[" * 2000 + "]" * 2000, "{a=" * 40 + "1" + "}" * 40),
    *("1979-05-27", "07:32:00", "1979-05-27T07:32:00Z", "none", "x", "", "=", "1 2", "#", "\x00"),
]
KEYS = fuzzing.keys()
ENTRY_NAMES = [*ENTRIES, *corrections.RECIPES, *corrections.BLOCKS, "x"]
ENTRY_KEYS = ["cap", "floor", "low", "high", "dtype", "std", "by", "updates", "size", "level", "x"]
ENTRY_LISTS = ["learner.corrections", "sampler.mismatch"]
TASK_KEYS = ["digits", "eval_size", "train_size", "seed", "length", "numbers", "largest", "x"]
FEW = 12


def cases(count):
    """The numbers of a test's cases: a few, and slowly `count` of an exploration.

    In every other run these are 36 in 100 of them, always the same.
    """
    assert settings.default is not None
    share = 36 if settings.default.derandomize else 100
    slow = pytest.param(count * share // 100, marks=pytest.mark.slow)
    return pytest.mark.parametrize("count", [FEW, slow])


def explore(count, case, *strategies):
    """Tries so many cases of what is drawn."""
    how = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
    settings(max_examples=count, **how)(given(*strategies)(case))()


@pytest.fixture(scope="module", autouse=True)
def here(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz")
    fuzzing.furnish(folder / "good")
    shutil.copytree(folder / "good", folder / "work")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder / "work")
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        fuzzing.stand(patch)
        yield folder


def command(*arguments):
    """Runs it; what it made or changed is as before."""
    try:
        outcome = fuzzing.run([str(argument) for argument in arguments])
        fuzzing.check(outcome, rows="diagnose" in arguments)
    finally:
        if fuzzing.listing(Path()) != fuzzing.listing(Path("../good")):
            for path in Path().iterdir():
                path.unlink() if path.is_file() else shutil.rmtree(path)
            shutil.copytree("../good", ".", dirs_exist_ok=True)


values = st.sampled_from(VALUES)


@st.composite
def entries(draw):
    """A list of corrections, or of a sampler's differences."""
    name, key = draw(st.sampled_from(ENTRY_NAMES)), draw(st.sampled_from(ENTRY_KEYS))
    more = f", {key} = {draw(values)}" if draw(st.booleans()) else ""
    return f'[{{ name = "{name}"{more} }}]'


@st.composite
def changes(draw):
    """A key, which may be misspelt, and a value for it."""
    which = draw(st.integers(0, 9))
    if which == 0:
        return draw(st.sampled_from(ENTRY_LISTS)), draw(entries())
    if which == 1:
        return f"task.parameters.{draw(st.sampled_from(TASK_KEYS))}", draw(values)
    key = draw(st.sampled_from([*fuzzing.CONFIG] if which < 5 else KEYS))
    if which == 9:
        place = draw(st.integers(0, len(key) - 1))
        key = key[:place] + draw(st.sampled_from(["", "x", ".", "é", '"', key[place] * 2]))
    return key, draw(values)


@st.composite
def configs(draw):
    """The bytes of a config that is nearly right."""
    config = dict(fuzzing.CONFIG)
    for key in draw(st.lists(st.sampled_from([*config]), max_size=2)):
        config.pop(key, None)
    for key, value in draw(st.lists(changes(), max_size=3)):
        config[key] = value
    return draw(spoilt(fuzzing.lines(config)))


@st.composite
def spoilt(draw, text):
    """A text as bytes; of every other one a part is doubled, lost or not the text's encoding."""
    data = text.encode("utf-8", "surrogatepass")
    how, place = draw(st.integers(0, 11)), draw(st.integers(0, max(0, len(data) - 1)))
    rows = text.splitlines(keepends=True) or [""]
    match how:
        case 0:
            row = rows[place % len(rows)]
            return (text + row).encode("utf-8", "surrogatepass")
        case 1:
            return data[:place]
        case 2:
            return data[:place] + draw(st.binary(min_size=1, max_size=3)) + data[place:]
        case 3:
            encoding = draw(st.sampled_from(["utf-16", "utf-8-sig", "utf-32", "cp037"]))
            return text.encode(encoding, "replace")
        case 4:
            return data.replace(b"\n", b"\r")
    return data


def config_case(data, name):
    Path("bad.toml").write_bytes(data)
    options = ["--topology", "v5e:2x2"] if name == "plan" else []
    command(name, "bad.toml", *options, "run.folder=made")


@cases(450)
def test_configs(count):
    explore(count, config_case, configs(), st.sampled_from(["train", "train", "eval", "plan"]))


# Options and arguments of every command, as they may stand after it.
COMMANDS = {
    "train": (["good.toml"], ["--distributed", "--coordinator", "--processes", "--process"]),
    "eval": (["good.toml"], ["--model", "--json"]),
    "generate": (
        ["model", "1+2=", "--max-tokens", "4"],
        [
            *("--samples", "--max-tokens", "--temperature", "--top-k", "--top-p", "--log-probs"),
            *("--family", "--seed", "--plain", "--data", "--fsdp", "--expert", "--tensor"),
        ],
    ),
    "export": (["run", "exported"], ["--step", "--dtype"]),
    "audit": (
        ["model"],
        [
            *("--json", "--quick", "--family", "--interpret", "--sampler", "--markdown"),
            *("--chart", "--dtype", "--prompts", "--samples"),
        ],
    ),
    "plan": (
        ["good.toml", "--topology", "v5e:2x2"],
        ["--topology", "--architecture", "--layers", "--quick", "--json"],
    ),
    "study": (["study.toml"], ["--jobs", "--folder", "--list"]),
    "report": (["study", "run", "--out", "page.html"], ["--out"]),
    "diagnose": (
        ["model", "rollouts.jsonl"],
        [
            *("--format", "--temperature", "--top-k", "--top-p", "--dtype", "--skip-bad"),
            *("--log-probs", "--candidate-weights", "--json", "--html"),
        ],
    ),
}
DONE = ("export", "report")  # the commands that do all
WORDS = [
    *(v.strip('"') for v in VALUES if "\x00" not in v),
    *("4", "8", "4,8", "all", "float32", "bfloat16", "tiles", "native", "pallas_tpu", "qwen3"),
    *("v5e:4x4", "v5e:0x0", "v5e:", "v99:2x2", "v5e:999999x999999", "localhost:1", "--", "-", "-h"),
    *("--x", "--se", "\udcff", "--seed=\udcff", "model/config.json", "run/config.toml"),
    *("study", "study.toml", "gradient.toml", "gradient", "rollouts.jsonl", "plain", "vllm"),
]
words = st.sampled_from(WORDS)


@st.composite
def overrides(draw):
    """A change of the config on the command line, or something like it."""
    key, value = draw(changes())
    form = draw(st.sampled_from(["{}={}"] * 5 + ["{}", "{} = {}", "{}=={}", "={1}", "{}.x={}"]))
    return form.format(key, value).replace("\x00", "")


@st.composite
def command_lines(draw):
    name = draw(st.sampled_from([*COMMANDS]))
    arguments, options = COMMANDS[name]
    line = [name, *arguments]
    for option in draw(st.lists(st.sampled_from(options), max_size=2)):
        line += [option, draw(words)] if draw(st.integers(0, 7)) else [option]
    if "good.toml" in line:
        line += draw(st.lists(overrides(), max_size=2))
        line.append("run.folder=made")
    match draw(st.integers(0, 9)):
        case 0:
            del line[draw(st.integers(0, len(line) - 1))]
        case 1:
            line.insert(draw(st.integers(0, len(line))), draw(words))
        case 2:
            line[draw(st.integers(0, len(line) - 1))] = draw(words)
        case 3:
            line.append(draw(st.sampled_from(line)))
    return line


def command_case(line):
    command(*line)


@cases(600)
def test_command_lines(count):
    explore(count, command_case, command_lines())


# Values as JSON.
JSON = [
    *("null", "true", "false", "0", "1", "2", "-1", "8", "22", "0.5", "1.0", "-0.0", "1e300"),
    *("1e999", "NaN", "Infinity", "-Infinity", "1000000000", str(2**63), "9" * 400, "9" * 5000),
    *('""', '" "', '"x"', '"1+2="', r'"\u0000"', r'"\ud800"', '"é😀"', r'"a\nb"', r'"\u2028"'),
    *('"silu"', '"qwen3"', '"llama"', '"linear"', '"yarn"', '"full_attention"', '"<eos>"'),
    *(r'"\\boxed{1}"', r'"\\boxed{"', '"#### 1"', '"####"', f'"{"x" * 5000}"', '"{prompt}"'),
    *("[]", "[1]", "[-1]", "[null]", "[[1]]", '["x"]', "[1e9]", "[{}]", "[0, 0]", "[true]"),
    *('[{"role": "user", "content": "1+"}]', '[{"role": 1, "content": []}]', '[{"role": "x"}]'),
    *("{}", '{"a": 1}', '{"ground_truth": "1"}', '{"ground_truth": {}}', '{"rope_type": "yarn"}'),
    *('{"rope_type": []}', '{"type": {}}', '{"rope_theta": "x"}', '{"factor": 0}', '{"": 1}'),
    *('{"rope_type": "linear", "factor": -1}', '{"rope_type": "llama3"}', '{"content": "x"}'),
    *("[" * 40 + "]" * 40, "[" * 100_000 + "]" * 100_000, '{"a":' * 40 + "1" + "}" * 40),
    *("", "x", "'x'", "[", "{", "1 2", "\x00", "//", "\ufeff1"),
]
json_values = st.sampled_from(JSON)


def object_text(pairs):
    return "{" + ", ".join(f"{json.dumps(key)}: {value}" for key, value in pairs) + "}"


@st.composite
def rows(draw):
    """The bytes of a file of rows, and what it is called."""
    good = [("prompt", '"1+2="'), ("answer", '"3"')]
    names = ["prompt", "answer", "question", "problem", "solution", "reward_model", "", "é", "x"]
    lines = []
    for number in range(draw(st.integers(0, 5))):
        pairs = [("prompt", f'"{number}+2="'), *good[1:]]
        if draw(st.booleans()):
            pairs += draw(st.lists(st.tuples(st.sampled_from(names), json_values), max_size=3))
        if draw(st.integers(0, 3)) == 0:
            del pairs[draw(st.integers(0, len(pairs) - 1))]
        lines.append(object_text(pairs) if draw(st.integers(0, 9)) else draw(json_values))
    if draw(st.booleans()):
        return draw(spoilt("\n".join(lines))), "bad.jsonl"
    return draw(spoilt(f"[{', '.join(lines)}]")), draw(st.sampled_from(["bad.json", "bad.parquet"]))


DATASET_KEYS = ["prompt_column", "answer_column", "template", "system", "eval_path", "eval_split"]
DATASET_KEYS += ["eval_subset", "eval_share", "eval_limit", "seed", "split", "subset"]
DATASET_KEYS += ["time_limit", "reward"]


def dataset_case(file, changed):
    data, name = file
    Path(name).write_bytes(data)
    # Another kind has other parameters; math-verify is not asked, because nothing is graded.
    task = [f'task={{kind = "dataset", path = "{name}", eval_share = 0.3}}']
    task += [f"task.{key}={value}".replace("\x00", "") for key, value in changed]
    command("train", "good.toml", *task, "run.folder=made")


@cases(300)
def test_datasets(count):
    changed = st.lists(st.tuples(st.sampled_from(DATASET_KEYS), values), max_size=1)
    explore(count, dataset_case, rows(), changed)


# File of a model folder -> keys that are drawn besides those that it has.
MODEL_FILES = {
    "config.json": [
        *("rope_scaling", "rope_parameters", "rope_theta", "layer_types", "sliding_window"),
        *("use_sliding_window", "max_window_layers", "quantization_config", "auto_map", "dtype"),
        *("num_experts", "mlp_bias", "pretraining_tp", "partial_rotary_factor", "qkv_bias"),
        "original_max_position_embeddings",
    ],
    "generation_config.json": ["eos_token_id", "pad_token_id", "temperature", "top_k"],
    "tokenizer_config.json": [
        *("chat_template", "auto_map", "tokenizer_class", "eos_token", "added_tokens_decoder"),
        *("extra_special_tokens", "model_max_length", "bos_token", "add_prefix_space"),
    ],
    "tokenizer.json": ["version", "truncation", "padding", "added_tokens", "normalizer", "model"],
}


@st.composite
def model_files(draw):
    """A file of the model folder, and bytes for it."""
    name = draw(st.sampled_from([*MODEL_FILES, "config.json", "generation_config.json"]))
    good = json.loads(Path("model", name).read_text())
    pairs = [(key, json.dumps(value)) for key, value in good.items()]
    for key in draw(st.lists(st.sampled_from([*good, *MODEL_FILES[name]]), max_size=3)):
        pairs = [pair for pair in pairs if pair[0] != key or draw(st.integers(0, 9)) == 0]
        if draw(st.integers(0, 4)):
            pairs.append((key, draw(json_values)))
    text = object_text(pairs) if draw(st.integers(0, 19)) else draw(json_values)
    return name, draw(spoilt(text))


MODEL_COMMANDS = {
    "generate": ["generate", "spoilt", "1+2=", "--max-tokens", "4"],
    "train": ["train", "good.toml", "model={path = 'spoilt'}", "run.folder=made"],
    "audit": ["audit", "spoilt", "--quick"],
    "ablate": ["audit", "spoilt", "--sampler", "[{name = 'softmax', dtype = 'bfloat16'}]"],
    "plan": [
        *("plan", "good.toml", "--topology", "v5e:2x2"),
        *("--architecture", "spoilt/config.json"),
    ],
}


def model_case(file, name):
    where, data = file
    shutil.copytree("model", "spoilt")
    try:
        Path("spoilt", where).write_bytes(data)
        command(*MODEL_COMMANDS[name])
    finally:
        shutil.rmtree("spoilt", ignore_errors=True)


@cases(300)
def test_models(count):
    names = st.sampled_from([*MODEL_COMMANDS, "generate", "generate"])
    explore(count, model_case, model_files(), names)


@st.composite
def spoilt_json(draw, text):
    """JSON of which up to three values are lost, or other ones."""
    value = json.loads(text)
    raw = []
    for _ in range(draw(st.integers(0, 3))):
        *path, last = draw(st.sampled_from([*places(value)] or [[]])) or [None]
        if last is None:
            break
        within = reduce(getitem, path, value)
        if draw(st.integers(0, 3)) == 0:
            del within[last]
        else:
            within[last] = f"@{len(raw)}@"
            raw.append(draw(json_values))
    text = json.dumps(value)
    for number, instead in enumerate(raw):
        text = text.replace(f'"@{number}@"', instead)
    return text


def places(value):
    """The path of every value inside a value of JSON."""
    keys = value if isinstance(value, dict) else range(len(value) if isinstance(value, list) else 0)
    for key in keys:
        yield [key]
        yield from ([key, *path] for path in places(value[key]))


# The keys of a study that are drawn besides those that it has, and values like theirs.
STUDY_KEYS = [
    *("name", "kind", "arms", "controls", "common", "dial", "correction", "schedule", "objective"),
    *("outcome", "test", "seeds", "common.run.folder", "common.sampler", "common.seed", "dial.x"),
    *("schedule.x.optimizer.schedule", "outcome.not_finite", "source", "remedy", "horizon", "x"),
    *("source.x.mismatch", "remedy.x", "horizon.x", "common.exact", "common.sampler.mismatch"),
]
STUDY_VALUES = [
    *('[{ dial = "fp8" }]', '[{ name = "x" }, { name = "x" }]', '[{ dial = ["fp8"] }]', "[[0]]"),
    *('"training"', '"gradient"', '"where_possible"', '"../x"', '"a/b"', '"study.toml"', '"."'),
    *('"permutation"', '"paired_permutation"', '"fisher"', '"sign"', '"mean"', '[["x", "x"]]'),
    *(str(list(range(40))), '[["fp8+tis"]]', '[{ name = "split_kv" }]', "{ mismatch = 1 }"),
]


@st.composite
def studies(draw):
    """The bytes of a study that is nearly right."""
    study = dict(draw(st.sampled_from([fuzzing.STUDY, fuzzing.STUDY, fuzzing.GRADIENT])))
    keys, several = [*study, *STUDY_KEYS], [*VALUES, *STUDY_VALUES]
    if draw(st.integers(0, 3)) == 0:
        study.pop(draw(st.sampled_from([*study])))
    for _ in range(draw(st.integers(0, 2))):
        key = draw(st.sampled_from(keys))
        if draw(st.integers(0, 9)):  # else TOML would refuse most
            study = {k: v for k, v in study.items() if not k.startswith(f"{key}.")}
        study[key] = draw(st.sampled_from(several))
    if draw(st.integers(0, 3)) == 0:
        key, value = draw(changes())
        study[f"{draw(st.sampled_from(['common', 'dial.fp8', 'horizon.4']))}.{key}"] = value
    text = fuzzing.lines(study)
    return draw(spoilt(text)) if draw(st.integers(0, 3)) == 0 else text.encode()


def study_case(data):
    Path("bad.toml").write_bytes(data)
    command("study", "bad.toml")


@cases(120)
def test_studies(count):
    explore(count, study_case, studies())


RUN_OF_A_STUDY = "study/runs/fp8+tis/seed-1"
REPORTED = [
    *("study/study.json", "gradient/study.json", "gradient/measured.jsonl"),
    *(f"{RUN_OF_A_STUDY}/{name}" for name in ("config.toml", "metrics.jsonl", "samples.jsonl")),
]


@st.composite
def reported(draw):
    """A file that reports are made of, and bytes for it."""
    path = draw(st.sampled_from(REPORTED))
    text = Path(path).read_text()
    if path.endswith(".jsonl"):
        lines = [draw(spoilt_json(line)) for line in text.splitlines()]
        text = "".join(f"{line}\n" for line in lines)
    elif path.endswith(".json"):
        text = draw(spoilt_json(text))
    return path, draw(spoilt(text))


def report_case(file):
    path, data = file
    Path(path).write_bytes(data)
    own = path.partition("/")[0]
    command("report", own, *([RUN_OF_A_STUDY] * (own == "study")), "--out", "page.html")


@cases(90)
def test_reports(count):
    explore(count, report_case, reported())


TOKENS = [{"token": f"token_id:{t}", "logprob": x} for t, x in ((6, -1.5), (7, -0.5))]
ROLLOUTS = [
    *([fuzzing.ROLLOUT] * 3),
    {
        "prompt_token_ids": [3, 4],
        "choices": [{"logprobs": {"content": TOKENS}, "message": {"content": "3;"}}],
    },
    {"prompt_token_ids": [3], "outputs": [{"token_ids": [6], "logprobs": [{"6": -1.0}]}]},
    {
        "text": "3;",
        "meta_info": {
            "output_token_logprobs": [[-1.5, 6, None], [-0.5, 7, None]],
            "input_token_logprobs": [[None, 3, None]],
            "finish_reason": {"type": "stop"},
        },
    },
    {
        "prompts": [[0, 3]],
        "responses": [[6, 7]],
        "attention_mask": [[0, 1, 1, 1]],
        "rollout_log_probs": [[-1.5, -0.5]],
    },
    {"prompt_ids": [[3]], "completion_ids": [[6, 7]], "logprobs": [[[-1.5], [-0.5]]]},
    {"left_padded_prompt_tokens": [0, 3], "tokens": [6, 7], "logprobs": [-1.5, -0.5], "pad_id": 0},
]


@st.composite
def rollouts(draw):
    """The bytes of a file of rollouts, and what it is called."""
    lines = []
    for _ in range(draw(st.integers(0, 3))):
        good = json.dumps(draw(st.sampled_from(ROLLOUTS)))
        lines.append(draw(spoilt_json(good)) if draw(st.integers(0, 9)) else draw(json_values))
    if draw(st.integers(0, 2)):
        return draw(spoilt("\n".join(lines))), "bad.jsonl"
    return draw(spoilt(f"[{', '.join(lines)}]")), draw(st.sampled_from(["bad.json", "bad.parquet"]))


def rollouts_case(file, options):
    data, name = file
    Path(name).write_bytes(data)
    command("diagnose", "model", name, *options)


@cases(140)
def test_rollouts(count):
    options = [[], [], ["--skip-bad"], ["--format", "plain"], ["--top-k", "2"]]
    explore(count, rollouts_case, rollouts(), st.sampled_from(options))


@pytest.mark.parametrize(
    "line",
    [
        *(["train", "good.toml", "run.folder=made"], ["eval", "good.toml", "run.folder=made"]),
        *([name, *arguments] for name, (arguments, _) in COMMANDS.items()),
        *MODEL_COMMANDS.values(),
        ["study", "gradient.toml"],
        ["report", "gradient", "--out", "page.html"],
    ],
    ids=lambda line: " ".join(line[:2]),
)
def test_what_is_right_begins(line):
    """Otherwise nothing above would be near to it."""
    shutil.copytree("model", "spoilt")
    try:
        outcome = fuzzing.run(line)
        assert outcome == (0 if line[0] in DONE else None, ""), outcome
    finally:
        for name in ("made", "exported", "spoilt", "runs"):
            shutil.rmtree(name, ignore_errors=True)
        for path in Path().glob("page*"):
            path.unlink()


def test_a_word_too_many_would_be_found():
    """The check itself can fail: by a traceback, a warning, a second line, an unknown status."""
    fuzzing.check(fuzzing.Outcome(2, "tim-jax: no\n"))
    for outcome in (
        fuzzing.Outcome(2, "tim-jax: no\nand more\n"),
        fuzzing.Outcome(None, "UserWarning: hm\n"),
        fuzzing.Outcome(1, "Traceback (most recent call last):\n"),
        fuzzing.Outcome(7, "tim-jax: no\n"),
        fuzzing.Outcome(2, "no\n"),
        fuzzing.Outcome(2, "tim-jax: \x1b[31m\n"),
    ):
        with pytest.raises(AssertionError):
            fuzzing.check(outcome)
