"""docs/results/parity.md is what the library does: every row within 1e-6 of verl's formulas."""

from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(scope="module")
def table():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        import parity_table

        yield parity_table


def test_losses_estimators_and_aggregations_are_verls(table):
    batch = table.draw(1)
    parts = (table.losses, table.estimates, table.estimators, table.aggregations)
    found = [row for part in parts for row in part(batch)]
    assert len(found) == 27
    for row in found:
        assert row.difference <= table.CLOSE, row


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 2])
def test_every_row_of_the_page_is_close(table, seed):
    found = table.rows(seed)
    for row in found:
        assert row.difference <= table.CLOSE, row
    text = table.PAGE.read_text()
    for row in found:
        assert f"| `{row.theirs}` | `{row.ours}` | " in text
    assert f"{len(found)} rows, all at most 1e-06" in text
