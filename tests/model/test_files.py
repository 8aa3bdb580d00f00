"""Files are written whole or not at all."""

import os
import re
import resource
import stat
import threading
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tim_jax.common.errors import InputError
from tim_jax.model.files import read_json, write_arrays, write_bytes, write_json, write_text


@contextmanager
def full():
    """A disk that takes four more bytes of a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_file_that_cannot_be_written_leaves_the_one_before(tmp_path):
    path = tmp_path / "page.html"
    path.write_text("good")
    with full(), pytest.raises(OSError, match="too large") as raised:
        write_text(path, "longer than the disk")
    assert raised.value.filename == str(path)
    assert [one.name for one in tmp_path.iterdir()] == [path.name]
    assert path.read_text() == "good"


def test_what_a_file_holds_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """Else the power may end between the two, and the name is that of an empty file."""
    done, sync, rename = [], os.fsync, Path.replace

    def fsync(file):
        done.append(("synced", os.fstat(file).st_size))
        sync(file)

    def replace(path, target):
        done.append(("named", path.stat().st_size))
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", replace)
    write_json(tmp_path / "a.json", {"a": 1})
    size = (tmp_path / "a.json").stat().st_size
    assert done == [("synced", size), ("named", size)]


def test_a_link_and_the_rights_of_a_file_stay(tmp_path):
    (tmp_path / "there").mkdir()
    true, link = tmp_path / "there" / "a.txt", tmp_path / "link"
    true.write_text("before")
    true.chmod(0o600)
    link.symlink_to(true)
    write_text(link, "\ud800", errors="backslashreplace")
    assert link.is_symlink()
    assert true.read_text() == r"\ud800"
    assert stat.S_IMODE(true.stat().st_mode) == 0o600


def test_a_pipe_is_written_to(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    read = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_bytes()))
    reader.start()
    write_bytes(tmp_path / "pipe", b"words")
    reader.join(10)
    assert read == [b"words"]


def test_a_key_with_two_values_is_refused(tmp_path):
    """JSON itself takes the last. The same value twice is no matter."""
    path = tmp_path / "config.json"
    path.write_text('{"a": {"size": 1, "size": 1}, "b": 2}')
    assert read_json(path) == {"a": {"size": 1}, "b": 2}
    path.write_text('{"a": {"size": 1, "size": 1.0}}')
    line = f"{path}: 'size' stands there twice, with 1 and 1.0; leave one out"
    with pytest.raises(InputError, match=f"^{re.escape(line)}$"):
        read_json(path)


def test_arrays_come_back(tmp_path):
    write_arrays(tmp_path / "a.npz", {"one two": np.arange(3)})
    with np.load(tmp_path / "a.npz") as read:
        assert read["one two"].tolist() == [0, 1, 2]
