import pytest
from study_files import make_file


@pytest.fixture
def file(tmp_path):
    return make_file(tmp_path)
