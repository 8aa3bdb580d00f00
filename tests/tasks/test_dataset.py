import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tim_jax.common.errors import InputError
from tim_jax.tasks.base import Grade, Message
from tim_jax.tasks.dataset import DatasetSource, dataset_task, state_text, truth_in


def no_grade(examples, completions):
    return [Grade(0.0) for _ in completions]


def write_lines(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return str(path)


def load(path, **options):
    return dataset_task(DatasetSource(str(path), **options), no_grade)


def everything(task):
    return sorted([*task.train, *task.evaluation], key=lambda e: str(e.prompt))


GSM8K = [
    {"question": f"What is {i} + 1000?", "answer": f"Add them.\n<<{i}+1000>>\n#### {i + 1000:,}"}
    for i in range(200)
]
MATH = [
    {"problem": f"Halve ${i}$.", "level": "1", "solution": f"So $\\boxed{{\\frac{{{i}}}{{2}}}}$."}
    for i in range(200)
]
DAPO = [
    {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": f"Solve {i}."}],
        "ability": "MATH",
        "reward_model": {"ground_truth": str(i), "style": "rule"},
        "extra_info": {"index": i},
    }
    for i in range(200)
]


@pytest.mark.parametrize(
    ("rows", "prompt", "answer"),
    [
        (GSM8K, "What is 0 + 1000?", "1,000"),
        (MATH, "Halve $0$.", "\\frac{0}{2}"),
        ([{"problem": "p", "solution": "So $\\boxed 2$."}] * 2, "p", "2"),
        (DAPO, (Message("user", "Solve 0."),), "0"),
        ([{"problem": "p", "solution": "long", "answer": "7"}] * 2, "p", "7"),
        ([{"prompt": "p", "answer": 7}] * 2, "p", "7"),
        ([{"prompt": "p", "solution": "\\boxed{7}", "id": 1}] * 2, "p", "7"),
        ([{"prompt": "p", "reward_model": {"ground_truth": "7"}, "answer": "8"}] * 2, "p", "7"),
    ],
)
def test_layouts(tmp_path, rows, prompt, answer):
    task = load(write_lines(tmp_path / "a.jsonl", rows), eval_share=0.0)
    assert (task.train[0].prompt, task.train[0].answer) == (prompt, answer)
    assert len(task.train) == len(rows)
    assert [e.where for e in task.train[:2]] == [
        f"{tmp_path / 'a.jsonl'}, line {i}" for i in (1, 2)
    ]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("72", "72"),
        (" x #### 5 \n", "5"),
        ("#### 1\n#### 2", "2"),
        ("So \\boxed{8} first.\n#### 1,234 km", "1,234 km"),
        ("#### First\n3 + 4\n#### Then\nwe have \\boxed{7}.", "7"),
        ("It is \\boxed{7}.\n#### Done", "7"),
        ("##### Steps\n\\boxed{2}", "2"),
        ("#### The answer is \\boxed{9}", "9"),
        ("#### \\frac{1}{2}", "\\frac{1}{2}"),
        ("\\boxed{1} then \\boxed{\\frac{1}{\\sqrt{2}}}.", "\\frac{1}{\\sqrt{2}}"),
        ("$\\boxed{\\{1, 2\\}}$", "\\{1, 2\\}"),
        ("\\boxed{broken", "\\boxed{broken"),
        ("First $\\boxed{3}$, so $n=\\boxed 5$. Then $x$.", "5"),
        ("So \\(\\boxed \\frac12\\).", "\\frac12"),
        ("In all $\\boxed12$ ways.", "12"),
        ("$\\boxed {3}$", "3"),
        ("$\\fbox{7}$", "7"),
        ("$\\boxed{7}$ for \\fbox{A}", "7"),
        ("\\boxedup{7}", "\\boxedup{7}"),
        ("#### The answer is $\\boxed 9$", "9"),
    ],
)
def test_truth_in(text, answer):
    assert truth_in(text) == answer


@given(
    st.recursive(st.text("ab1", max_size=3), lambda t: t.map(lambda s: "{" + s + "}"), max_leaves=5)
)
def test_truth_in_boxed_is_balanced(content):
    assert truth_in(f"so \\boxed{{{content}}} }}") == content.strip()


@pytest.mark.parametrize(
    ("value", "state"),
    [
        ('["crane"]', '["crane"]'),
        ('["crane", "slate"]', '["crane", "slate"]'),
        (' {"n": 5, "note": "#### 7"}\n', ' {"n": 5, "note": "#### 7"}\n'),
        ("Add them.\n#### 42", "42"),
        ("[first] #### 42", "42"),
        (27, "27"),
    ],
)
def test_states_of_an_environment_are_answers_but_json_as_it_is(tmp_path, value, state):
    path = write_lines(tmp_path / "rows.jsonl", [{"prompt": "p", "answer": value}])
    source = DatasetSource(path, eval_share=0.0)
    [example] = dataset_task(source, no_grade, state_text).train
    assert example.answer == state


@pytest.mark.parametrize(
    "tests",
    [
        {"inputs": ["4 4\n####\n#..#\n####\n", "1 1\n.\n"], "outputs": ["4\n", "1\n"]},
        {"inputs": ["2 2\n..\n..\n"], "outputs": ["####\n"]},
        [{"input": "\\boxed{1}", "output": "2"}],
    ],
)
def test_an_answer_that_is_json_is_taken_whole(tmp_path, tests):
    """As the tests of programs are, whose inputs may look like marks of an answer."""
    row = {"prompt": "Count.", "reward_model": {"ground_truth": json.dumps(tests)}}
    [example] = load(write_lines(tmp_path / "a.jsonl", [row]), eval_share=0.0).train
    assert json.loads(example.answer) == tests


def test_a_solution_says_its_answer_also_where_it_is_json(tmp_path):
    row = {"problem": "p", "solution": json.dumps({"text": "So $\\boxed{7}$."})}
    [example] = load(write_lines(tmp_path / "a.jsonl", [row]), eval_share=0.0).train
    assert example.answer == "7"


def test_formats_agree(tmp_path):
    datasets = pytest.importorskip("datasets")
    expected = everything(load(write_lines(tmp_path / "a.jsonl", DAPO)))
    (tmp_path / "a.json").write_text(json.dumps(DAPO, indent=1))
    datasets.Dataset.from_list(DAPO).to_parquet(tmp_path / "a.parquet")
    datasets.Dataset.from_list(DAPO).save_to_disk(tmp_path / "saved")
    datasets.DatasetDict(train=datasets.Dataset.from_list(DAPO)).save_to_disk(tmp_path / "dict")
    for name in ("a.json", "a.parquet", "saved", "dict"):
        assert everything(load(tmp_path / name)) == expected, name
    with pytest.raises(InputError, match="no split 'test'; it has: train"):
        load(tmp_path / "dict", split="test")
    with pytest.raises(InputError, match=r"saved, row 1: no layout fits .* has|saved, row 1: no"):
        load(tmp_path / "saved", answer_column="grund_truth")


def test_numbers_are_written_without_exponents(tmp_path):
    """`1e-05` would be read as e less 5 by a grader of mathematics."""
    answers = {"1e-05": "0.00001", "2.5": "2.5", "1e16": "10000000000000000", "7": "7"}
    lines = [f'{{"prompt": "{i}", "answer": {number}}}\n' for i, number in enumerate(answers)]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    task = load(tmp_path / "a.jsonl", eval_share=0.0)
    assert [example.answer for example in task.train] == list(answers.values())


def test_json_lines_need_no_extra(tmp_path, monkeypatch):
    for name in ("datasets", "pyarrow"):
        monkeypatch.setitem(sys.modules, name, None)
    assert len(everything(load(write_lines(tmp_path / "a.jsonl", GSM8K)))) == 200


def test_folder_layouts(tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    import pyarrow as pa

    (tmp_path / "data").mkdir()
    for part in (0, 1):
        table = pa.Table.from_pylist(GSM8K[part * 50 : part * 50 + 50])
        pq.write_table(table, tmp_path / "data" / f"train-0000{part}-of-00002.parquet")
    pq.write_table(pa.Table.from_pylist(GSM8K[90:120]), tmp_path / "data" / "test-0.parquet")
    (tmp_path / "README.md").write_text("trained")
    task = load(tmp_path, eval_split="test")
    assert [e.prompt for e in task.evaluation] == [row["question"] for row in GSM8K[90:120]]
    assert [e.prompt for e in task.train] == [row["question"] for row in GSM8K[:90]]
    assert task.notes == ("10 training rows left out: their prompts are held out",)
    with pytest.raises(InputError, match=r"no file for split 'valid'; found: data/test-0\.parquet"):
        load(tmp_path, eval_split="valid")
    write_lines(tmp_path / "train.jsonl", GSM8K)
    with pytest.raises(InputError, match="several types for split 'train'"):
        load(tmp_path)


def test_a_folder_of_several_subsets(tmp_path, monkeypatch):
    """As a clone of openai/gsm8k: the same problems with two kinds of solutions."""
    for folder in ("main", "socratic"):
        (tmp_path / folder).mkdir()
        for split, rows in (("train", GSM8K[:9]), ("test", GSM8K[9:12])):
            write_lines(tmp_path / folder / f"{split}-00000-of-00001.jsonl", rows)
    for path, subset in (
        (tmp_path, "main"),
        (tmp_path / "main", "main"),
        (tmp_path / "main", None),
    ):
        task = load(path, subset=subset, eval_split="test")
        assert (len(task.train), len(task.evaluation)) == (9, 3)
        assert str(tmp_path / "main") in task.train[0].where
    monkeypatch.chdir(tmp_path / "main")
    assert len(load(".", subset="main", eval_split="test").train) == 9
    with pytest.raises(InputError) as caught:
        load(tmp_path)
    assert str(caught.value) == (
        f"dataset {str(tmp_path)!r}: files for split 'train' in several folders: main, socratic;"
        " name one folder as task.subset (task.eval_subset for task.eval_path), or one file"
    )
    with pytest.raises(InputError) as caught:
        load(tmp_path, subset="default")
    assert str(caught.value) == (
        f"dataset {str(tmp_path)!r}: no folder 'default' (task.subset, task.eval_subset) has data"
        " files; folders that have some: main, socratic; name one of them, or none"
    )


def test_held_out_rows_of_another_dataset_have_a_subset_of_their_own(tmp_path):
    for place, rows in (
        ("mine/main/train", GSM8K[:9]),
        ("mine/main/test", GSM8K[9:11]),
        ("mine/hard/test", GSM8K[11:14]),
        ("other/default/test", GSM8K[14:18]),
    ):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        write_lines(tmp_path / f"{place}.jsonl", rows)
    mine, other = (str(tmp_path / name) for name in ("mine", "other"))

    def held_out(**options):
        task = load(mine, subset="main", eval_split="test", **options)
        assert len(task.train) == 9
        return len(task.evaluation)

    assert held_out(eval_path=other) == 4
    assert held_out(eval_path=other, eval_subset="default") == 4
    assert held_out(eval_path=mine) == held_out() == 2
    assert held_out(eval_subset="hard") == held_out(eval_path=mine, eval_subset="hard") == 3
    with pytest.raises(InputError, match=r"no folder 'main' \(.*task\.eval_subset\) has data"):
        held_out(eval_path=other, eval_subset="main")
    with pytest.raises(InputError, match=r"no file for split 'train'; found: hard/test\.jsonl"):
        load(mine, subset="main", eval_subset="hard")  # the split is as for training


@pytest.mark.parametrize("inside", ["", "data"])
def test_a_folder_of_one_configuration_needs_no_folder_for_it(tmp_path, inside):
    """As the shipped configurations have a subset of the hub's, for a folder of one's own."""
    (tmp_path / inside).mkdir(exist_ok=True)
    write_lines(tmp_path / inside / "train.jsonl", GSM8K[:9])
    assert len(load(tmp_path, subset="main", eval_share=0.0).train) == 9


def test_share_is_deterministic_disjoint_and_by_prompt(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", GSM8K + GSM8K[::-1])  # every prompt twice
    task = load(path, eval_share=0.3)
    trained = {example.prompt for example in task.train}
    held_out = {example.prompt for example in task.evaluation}
    assert not trained & held_out
    assert len(trained | held_out) == 200
    assert 35 <= len(held_out) <= 85
    assert load(path, eval_share=0.3) == task
    other = {e.prompt for e in load(path, eval_share=0.3, seed=1).evaluation}
    assert other != held_out
    write_lines(tmp_path / "b.jsonl", GSM8K[:100])
    fewer = {e.prompt for e in load(tmp_path / "b.jsonl", eval_share=0.3).evaluation}
    assert fewer <= held_out  # a side is a matter of the prompt, not of the rows around it


def test_evaluation_file_and_limit(tmp_path):
    train = write_lines(tmp_path / "a.jsonl", GSM8K[:100])
    test = write_lines(tmp_path / "b.jsonl", GSM8K[100:])
    task = load(train, eval_path=test, eval_limit=10)
    assert len(task.train) == 100
    assert task.notes == ()
    assert len(task.evaluation) == 10
    assert {e.prompt for e in task.evaluation} <= {row["question"] for row in GSM8K[100:]}
    assert [e.prompt for e in task.evaluation] != [row["question"] for row in GSM8K[100:110]]


def test_held_out_rows_are_distinct(tmp_path):
    """As verl's files have them: each problem many times, so that a sample of rows has few."""
    train = write_lines(tmp_path / "a.jsonl", GSM8K[:100] * 2)
    test = write_lines(tmp_path / "b.jsonl", GSM8K[100:130] * 32)
    task = load(train, eval_path=test)
    assert [e.prompt for e in task.evaluation] == [row["question"] for row in GSM8K[100:130]]
    assert task.evaluation[1].where == f"{test}, line 2"
    assert task.notes == ("930 of 960 held-out rows left out: not new",)
    assert len(task.train) == 200  # how often a row is trained on is a choice of the file
    assert len({e.prompt for e in load(train, eval_path=test, eval_limit=20).evaluation}) == 20
    shared = load(train, eval_share=0.5, eval_limit=20)
    assert len({e.prompt for e in shared.evaluation}) == len(shared.evaluation) == 20
    states = [{"prompt": "Guess my number.", "answer": str(i)} for i in range(4)]
    games = write_lines(tmp_path / "c.jsonl", states)
    assert len(load(train, eval_path=games).evaluation) == 4


def test_columns_by_name(tmp_path):
    rows = [{"q": {"text": f"ask {i}"}, "a": i, "answer": "no", "prompt": "no"} for i in range(3)]
    path = write_lines(tmp_path / "a.jsonl", rows)
    task = load(path, prompt_column="q.text", answer_column="a", eval_share=0)
    assert [(e.prompt, e.answer) for e in task.train] == [(f"ask {i}", f"{i}") for i in range(3)]
    assert load(path, prompt_column="q.text", eval_share=0).train[0].answer == "no"


def test_a_solution_that_is_named_may_be_the_answer_itself(tmp_path):
    """As those of trl-lib/DeepMath-103K are."""
    solutions = {"$0$": "$0$", "True": "True", "So $\\boxed{2}$.": "2"}
    rows = [{"prompt": chat(("user", "?", {})), "solution": solution} for solution in solutions]
    path = write_lines(tmp_path / "a.jsonl", rows)
    with pytest.raises(InputError) as caught:
        load(path, eval_share=0)
    assert str(caught.value) == (
        f"dataset {path}, line 1: column 'solution' has no \\boxed{{}} answer: '$0$'; if it is the"
        " answer itself, set task.answer_column=solution"
    )
    task = load(path, eval_share=0, answer_column="solution")
    assert [example.answer for example in task.train] == list(solutions.values())


@pytest.mark.parametrize("before", ["question", "problem"])
@pytest.mark.parametrize("answer", [{"answer": "4"}, {"solution": "So $\\boxed{4}$."}])
def test_a_prompt_goes_before_what_it_was_made_of(tmp_path, before, answer):
    """As `map` for TRL leaves it: the question stays beside the prompt."""
    prompt = chat(("system", "Be brief.", {}), ("user", "2+2?", {}))
    path = write_lines(tmp_path / "a.jsonl", [{before: "2+2?", "prompt": prompt, **answer}])
    [example] = load(path, eval_share=0).train
    assert example.prompt == (Message("system", "Be brief."), Message("user", "2+2?"))
    assert example.answer == "4"
    assert load(path, eval_share=0, prompt_column=before).train[0].prompt == "2+2?"


def test_template_and_system(tmp_path):
    plain = write_lines(tmp_path / "a.jsonl", [{"prompt": "x {y}", "answer": "1"}])
    chat = [{"role": r, "content": r[0]} for r in ("system", "user", "assistant", "user")]
    messages = write_lines(tmp_path / "b.jsonl", [{"prompt": chat, "answer": "1"}])

    def prompt(path, **options):
        return load(path, eval_share=0, **options).train[0].prompt

    assert prompt(plain, template="Q: {prompt} \\boxed{}") == "Q: x {y} \\boxed{}"
    assert prompt(plain, system="S") == (Message("system", "S"), Message("user", "x {y}"))
    assert prompt(messages, template="<{prompt}>", system="S") == (
        Message("system", "S"),
        Message("user", "u"),
        Message("assistant", "a"),
        Message("user", "<u>"),
    )


GOOD = '{"prompt": "p", "answer": "1"}\n'


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", "", "is empty"),
        ("a.json", "[]", "is empty"),
        ("a.jsonl", GOOD + "{oops\n", r"a.jsonl, line 2: not JSON: Expecting property name"),
        ("a.jsonl", GOOD + "\n\n" + "[" * 10**5, r"a.jsonl, line 4: not JSON"),
        ("a.jsonl", "[1]", r"line 1: expected an object, got list"),
        ("a.json", "[1]", r"a.json, row 1: expected an object, got int"),
        ("a.json", "[{]", r"a.json: not JSON"),
        ("a.jsonl", '{"prompt": "p", "anser": 1}', "no layout fits the columns prompt, anser"),
        ("a.jsonl", GOOD + '{"prompt": "p"}', r"line 2: no column 'answer'; has prompt"),
        (
            "a.jsonl",
            GOOD + '{"prompt": "p", "answer": null}',
            r"line 2: column 'answer' must be text",
        ),
        (
            "a.jsonl",
            GOOD + '{"prompt": "p", "answer": " "}',
            r"line 2: column 'answer' has an empty",
        ),
        ("a.jsonl", GOOD + '{"prompt": "p", "answer": true}', r"or a number, got True"),
        (
            "a.jsonl",
            GOOD + '{"prompt": " ", "answer": "1"}',
            r"line 2: column 'prompt' must be text",
        ),
        (
            "a.jsonl",
            GOOD + '{"prompt": [], "answer": "1"}',
            r"line 2: column 'prompt' must be text",
        ),
        ("a.jsonl", '{"prompt": [{"role": "user"}], "answer": "1"}', "needs a role and a content"),
        ("a.jsonl", '{"problem": "p", "solution": "so 5"}', r"no \\boxed\{\} answer: 'so 5'"),
        ("a.txt", "x", r"unknown file type; known: .jsonl, .json, .parquet"),
        ("a.jsonl", GOOD, r"eval_share=1e-09 of 1 rows holds none out"),
    ],
)
def test_bad_files(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(InputError, match=message) as caught:
        load(path, eval_share=1e-9)
    assert "\n" not in str(caught.value)


def chat(*messages):
    return [{"role": role, "content": content, **more} for role, content, more in messages]


CALL = {"function": {"name": "double", "arguments": {"x": 4}}}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"prompt": chat(("user", "2x4?", {}), ("tool", "8", {"name": "double"}))},
            r"a\.jsonl, line 2: column 'prompt': a message has 'name' beside role and content,",
        ),
        (
            {"prompt": chat(("assistant", "", {"tool_calls": [CALL]}), ("user", "2x4?", {}))},
            "a message has 'tool_calls' beside role and content, which would be lost; write it",
        ),
        (
            {"prompt": chat(("user", "2x4?", {}), ("assistant", "It is 8.", {}))},
            r"line 2: column 'prompt' ends with the assistant's turn, 'It is 8\.', so that the",
        ),
        ({"prompt": "2x4? So $\\boxed{8}$.\n"}, r"line 2: column 'prompt' ends with its answer, "),
        ({"prompt": chat(("user", "2x4?\n#### 8", {}))}, "ends with its answer, .*prompt_column"),
        ({"images": ["a.png"]}, r"line 2 has 'images', which prompts of text do not keep"),
        ({"tools": '[{"name": "double"}]'}, r"line 2 has 'tools', which prompts"),
        ({"answer": "#### Step 1\n4 + 4\n#### Step 2\nAdd."}, r"'answer' has headings \(####\), "),
        ({"answer": '["8", "9"]'}, "must have one answer, got "),
        ({"answer": ["8"]}, "must be text or a number"),
    ],
)
def test_rows_whose_meaning_would_be_lost_are_refused(tmp_path, row, message):
    rows = [{"prompt": "p", "answer": "8"}, {"prompt": "2x4?", "answer": "8"} | row]
    with pytest.raises(InputError, match=message) as caught:
        load(write_lines(tmp_path / "a.jsonl", rows), eval_share=0)
    assert "\n" not in str(caught.value)


def test_rows_that_are_like_them_are_taken(tmp_path):
    asked = [
        chat(("user", "2x4?", {"tool_calls": None, "name": ""}), ("user", "Well?", {})),
        "Of 8, 9 and \\boxed{8} which is 2x4?",
        "Write it as \\boxed{answer}.",
    ]
    rows = [{"prompt": p, "answer": '["8"]', "tools": None, "images": []} for p in asked]
    task = load(write_lines(tmp_path / "a.jsonl", rows), eval_share=0)
    assert [example.answer for example in task.train] == ["8"] * 3
    assert task.train[0].prompt == (Message("user", "2x4?"), Message("user", "Well?"))


@pytest.mark.parametrize("shows", ["Put your final answer in $\\boxed{42}$.", "End with #### 42"])
def test_an_instruction_may_show_an_answer_that_is_that_of_a_row(tmp_path, shows):
    rows = [{"prompt": f"What is {i}+2? {shows}", "answer": i + 2} for i in (40, 5, 40, 6)]
    task = load(write_lines(tmp_path / "a.jsonl", rows), eval_share=0, template="{prompt} Go.")
    assert [example.answer for example in task.train] == ["42", "7", "42", "8"]
    assert task.train[0].prompt == f"What is 40+2? {shows} Go."
    # No row says that it is one, or one of many does, which may be a wrong label.
    path = write_lines(tmp_path / "b.jsonl", [rows[0], *[rows[2]] * 8, rows[1]])
    with pytest.raises(InputError, match=r"line 1: column 'prompt' ends with its answer, "):
        load(path, eval_share=0, template="{prompt} Go.")


def test_bad_sources(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", GSM8K)
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 nonsense")
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}')
    with pytest.raises(InputError, match=r"no-such.jsonl': no such file or folder"):
        load("no-such.jsonl")
    with pytest.raises(InputError, match="no such file or folder"):
        load(tmp_path / "no" / "folder")
    with pytest.raises(InputError, match=r"latin.jsonl: cannot be read"):
        load(tmp_path / "latin.jsonl")
    with pytest.raises(
        InputError, match="no column 'quest'; has question, answer; did you mean 'question'"
    ):
        load(path, prompt_column="quest")
    with pytest.raises(InputError, match="is one file, without splits: set eval_path"):
        load(path, eval_split="test")
    with pytest.raises(InputError, match="all prompts are held out"):
        load(path, eval_path=path)
    with pytest.raises(InputError, match=r"template must contain \{prompt\}, got 'x'"):
        load(path, template="x")
    with pytest.raises(InputError, match="eval_share must be a number from 0 to 1, got 2"):
        load(path, eval_share=2)
    pytest.importorskip("pyarrow")
    with pytest.raises(InputError, match=r"bad\.parquet: not readable as Parquet"):
        load(tmp_path / "bad.parquet")


def test_hub(monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset(name, subset, *, split):
        asked.append((name, subset, split))
        if split == "valid":
            raise ValueError("Unknown split 'valid'.\nShould be one of ['train', 'test'].")
        return datasets.Dataset.from_list(GSM8K[:50] if split == "train" else GSM8K[50:60])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    task = load("openai/gsm8k", subset="main", eval_split="test")
    assert asked == [("openai/gsm8k", "main", "train"), ("openai/gsm8k", "main", "test")]
    assert (len(task.train), len(task.evaluation)) == (50, 10)
    asked.clear()
    load("openai/gsm8k", subset="main", eval_path="HuggingFaceH4/MATH-500", eval_split="test")
    load("openai/gsm8k", subset="main", eval_path="a/b", eval_split="test", eval_subset="en")
    assert asked[1::2] == [("HuggingFaceH4/MATH-500", None, "test"), ("a/b", "en", "test")]
    with pytest.raises(InputError) as caught:
        load("openai/gsm8k", split="valid")
    assert str(caught.value).endswith(": ValueError: Unknown split 'valid'.")
    assert "no split 'valid' of it" in str(caught.value)
