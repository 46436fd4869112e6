"""The commands that a run names can be pasted: they find the run's store again."""

import shlex

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.flows import command, fork_command, resume_command
from configs.overrides import change
from configs.storage import StoreConfig

TEXT = st.text(st.characters(blacklist_categories=["Cs", "Cc"]))
VALUES = st.one_of(TEXT, st.integers(), st.booleans(), st.floats(allow_nan=False))


def test_a_run_in_the_default_store_needs_no_more_than_its_name() -> None:
    store = StoreConfig()
    again = resume_command("flows.grpo:grpo", store, "tiny-1")
    assert again == "refrain grpo --resume tiny-1"
    again = resume_command("lab.my_flows:my_flow", store, "mine-1")
    assert again == "python -m lab.my_flows --resume mine-1"
    fork = fork_command("flows.ppo:ppo", store, "tiny-1@3")
    assert fork == "refrain ppo --fork tiny-1@3"


@pytest.mark.parametrize(
    ("module", "start"), [("flows.grpo", "refrain grpo"), ("my_flows", "python -m my_flows")]
)
def test_another_store_is_named(module: str, start: str) -> None:
    store = StoreConfig(uri="s3://bucket/a b", options={"endpoint_url": "http://127.0.0.1:9000"})
    assert command(module, store, "--resume", "x") == (
        f"{start} --resume x 'store.uri=s3://bucket/a b' "
        "store.options.endpoint_url=http://127.0.0.1:9000"
    )


@settings(max_examples=300, derandomize=True)
@given(name=TEXT, options=st.dictionaries(st.sampled_from(["a", "b", "c"]), VALUES))
def test_the_words_read_as_the_store_that_they_were_made_of(
    name: str, options: dict[str, str | int | float | bool]
) -> None:
    store = StoreConfig(uri=f"s3://bucket/{name}", options=options)
    words = shlex.split(command("flows.grpo", store))[2:]
    given = [word.removeprefix("store.") for word in words]
    read = change(StoreConfig, {}, given)
    assert read == store
    assert {key: type(one) for key, one in read.options.items()} == {
        key: type(one) for key, one in options.items()
    }
