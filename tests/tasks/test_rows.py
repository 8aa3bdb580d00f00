import json

import pytest

from tim_jax.common.errors import InputError
from tim_jax.tasks.rows import read_rows

ONE = [{"question": "What is 1 + 1000?", "answer": "#### 1,001"}]


def write_lines(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return str(path)


@pytest.mark.parametrize(
    ("names", "read"),
    [
        (["train", "train_socratic"], ["train"]),
        (["train", "train_1000"], ["train"]),
        (["train-0-of-2", "train-1-of-2", "train_hard-0-of-1"], ["train-0-of-2", "train-1-of-2"]),
        (["train-0-of-2-a0b1", "train-1-of-2-ffc0"], ["train-0-of-2-a0b1", "train-1-of-2-ffc0"]),
        (["train-1-of-2", "train-2-of-2"], ["train-1-of-2", "train-2-of-2"]),
        (["train_0", "train_1"], ["train_0", "train_1"]),
        (["train.part0", "train.part1"], ["train.part0", "train.part1"]),
        (["train-v1.1"], ["train-v1.1"]),
    ],
)
def test_the_files_of_a_split(tmp_path, names, read):
    for name in names:
        write_lines(tmp_path / f"{name}.jsonl", ONE)
    rows = read_rows(str(tmp_path))
    assert [row.where for row in rows] == [f"{tmp_path / name}.jsonl, line 1" for name in read]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["train-0-of-3", "train-2-of-3"], "lacks the parts 1 of 3; found: train-0-of-3.jsonl, "),
        (["train-00001-of-00002"], "lacks the parts 0 of 2; found: train-00001-of-00002.jsonl; "),
        (["train-3-of-3"], "lacks the parts 1, 2 of 3; found: "),
        (["train-0-of-99999999999999999999"], "lacks the parts 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 of "),
        (["train_sft-0-of-2"], "lacks the parts 1 of 2; found: train_sft-0-of-2.jsonl; "),
        (
            ["train-0-of-1", "train-0-of-2", "train-1-of-2"],
            "has files of several sets of parts: train-0-of-1.jsonl, train-0-of-2.jsonl, ",
        ),
        (["train-0-of-1-aa", "train-0-of-1-bb"], "has files of several sets of parts: "),
        (["train-0-of-2", "train-1-of-2", "train-2-of-2"], "has files of several sets of parts: "),
        (["train-0-of-1", "train-1"], "has files of several sets of parts: "),
    ],
)
def test_parts_that_are_not_all_of_one_set_are_refused(tmp_path, names, message):
    """As a download leaves them that was interrupted, or that came over an older one."""
    for name in names:
        write_lines(tmp_path / f"{name}.jsonl", ONE)
    with pytest.raises(InputError) as caught:
        read_rows(str(tmp_path))
    assert str(caught.value).startswith(f"dataset {str(tmp_path)!r}: split 'train' {message}")
    assert "\n" not in str(caught.value)


def test_names_that_could_all_be_the_split_are_refused(tmp_path):
    for name in ("train_sft-0-of-1", "train_gen-0-of-1"):
        write_lines(tmp_path / f"{name}.jsonl", ONE)
    names = (
        r"several sets for split 'train': train_gen-0-of-1\.jsonl, train_sft-0-of-1\.jsonl; name"
    )
    with pytest.raises(InputError, match=names):
        read_rows(str(tmp_path))
    assert len(read_rows(str(tmp_path), split="train_sft")) == 1


def test_unicode_line_separators_are_no_line_ends(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"prompt": "a\u2028b", "answer": "1"}\n\n{"prompt": "c", "answer": "2"}', "utf-8"
    )
    assert [row.where[-6:] for row in read_rows(str(path))] == ["line 1", "line 3"]


def test_missing_extras_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr("tim_jax.tasks.rows.find_spec", lambda name: None)
    (tmp_path / "a.parquet").write_bytes(b"")
    for path in (tmp_path / "a.parquet", "openai/gsm8k"):
        with pytest.raises(InputError, match=r"pip install 'tim-jax\[math\]'"):
            read_rows(str(path))
