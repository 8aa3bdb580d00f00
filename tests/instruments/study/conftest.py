import pytest
import tiny
from study_files import FILE


@pytest.fixture
def file(tmp_path):
    """A study's file, beside its run's."""
    (tmp_path / "run.toml").write_text(tiny.RUN)
    path = tmp_path / "one.toml"
    path.write_text(FILE)
    return path
