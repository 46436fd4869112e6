"""Which names of flow runs are a person's."""

from __future__ import annotations

import pytest
from prefect.utilities.names import generate_slug

from tasks.run.flow_run_names import NOT_BEGUN, made_up


def test_names_that_prefect_made_up_are_known() -> None:
    """Those of its server, of its form (as 3.7.7 fills them in), and ours for the time before."""
    for _ in range(500):
        name = generate_slug(2)
        assert made_up(name), name
    for name in ("beta3-lyrae", "omega417-uxmal-reach", "pi62-canis-majoris-b", f"tiny{NOT_BEGUN}"):
        assert made_up(name), name


@pytest.mark.parametrize(
    "name",
    [
        *(
            "lr sweep 3",
            "tiny",
            "my-run",
            "fast-run",
            "alpha-test",
            "beta-sweep-b",
            "beta3",
            "Brave-Cat",
        ),
        *("tiny-20261129-034545-ab12", "qwen2-lora", "run-7", "brave-cat-2", "", "alpha3_lyrae"),
    ],
)
def test_other_names_are_a_persons(name: str) -> None:
    assert not made_up(name)
