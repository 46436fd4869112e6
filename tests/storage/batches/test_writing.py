"""What can be written as a column, what comes back, and what is refused."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tensordict import NonTensorStack, TensorDict

from storage.batches.columns import COLUMNS, SampleStatus
from storage.batches.writing import Jagged, write_batch
from storage.objects.store import Store


def jagged(
    lengths: list[int], dtype: torch.dtype = torch.float32, tail: tuple[int, ...] = ()
) -> torch.Tensor:
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    values = (
        torch.arange(int(offsets[-1]) * int(np.prod(tail or (1,)))).reshape(-1, *tail).to(dtype)
    )
    return torch.nested.nested_tensor_from_jagged(values, offsets)


DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(store: Store, dtype: torch.dtype) -> None:
    dense = torch.arange(12).reshape(3, 4).to(dtype)
    ref = write_batch(store, "a", {"dense": dense, "jagged": jagged([2, 0, 1], dtype)})
    found = ref.fetch(store)
    assert found["dense"].dtype == dtype
    assert torch.equal(found["dense"], dense)
    assert torch.equal(found["jagged"].values(), jagged([2, 0, 1], dtype).values())
    shuffled = ref.take([2, 1, 0, 2]).fetch(store)
    assert torch.equal(shuffled["dense"], dense[[2, 1, 0, 2]])
    assert [len(row) for row in shuffled["jagged"].unbind()] == [1, 0, 2, 1]
    values, offsets = ref.fetch_numpy(store, "jagged")
    assert values.tolist() == jagged([2, 0, 1], dtype).values().tolist()
    assert offsets is not None
    assert offsets.tolist() == [0, 2, 2, 3]


def test_rows_of_more_dimensions(store: Store) -> None:
    ref = write_batch(store, "a", {"x": jagged([2, 1], tail=(3, 2))})
    found = ref.take([1, 0]).fetch(store)["x"]
    assert found.values().shape == (3, 3, 2)
    assert found.unbind()[0].flatten().tolist() == list(range(12, 18))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_that_are_views(store: Store) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    data = {
        "columns": base[:, ::2][:2],
        "transposed": base.T[:2],
        "graph": (base[:2].requires_grad_() * 2),
        "strided": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "rows": [torch.ones(2), torch.zeros(1)],
    }
    found = write_batch(store, "a", data).fetch(store)
    assert torch.equal(found["columns"], base[:, ::2][:2])
    assert torch.equal(found["transposed"], base.T[:2])
    assert [len(row) for row in found["strided"].unbind()] == [2, 3]
    assert [row.tolist() for row in found["rows"].unbind()] == [[1, 1], [0]]


def test_a_narrowed_nested_tensor(store: Store) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    narrowed = torch.nested.narrow(
        base, 1, torch.tensor([0, 2, 1]), torch.tensor([2, 1, 3]), layout=torch.jagged
    )
    found = write_batch(store, "a", {"x": narrowed}).fetch(store)["x"]
    assert [row.tolist() for row in found.unbind()] == [[0, 1], [6], [9, 10, 11]]


def test_lists_take_their_declared_type(store: Store) -> None:
    data = {
        "prompt_ids": [[1, 2], [], [3]],
        "rollout_logprobs": [[-1, -2], [], [-0.5]],
        "response_mask": [[1, 0], [], [1]],
        "reward": [1, 0, 0.5],
        "status": [SampleStatus.OK, SampleStatus.FAILED, SampleStatus.TRUNCATED],
        "row": [["any", None], 3, {"a": "é"}],
        "finish_reason": ["stop", "", "lёngth"],
    }
    ref = write_batch(store, "a", data)
    for name in data:
        assert (ref.columns[name].kind, ref.columns[name].dtype) == (
            COLUMNS[name].kind,
            COLUMNS[name].dtype,
        )
    assert ref.fetch_list(store, "row") == data["row"]
    found = ref.fetch(store)
    assert list(found["finish_reason"]) == data["finish_reason"]
    assert found["status"].tolist() == [0, 2, 1]


def test_lists_without_a_declaration(store: Store) -> None:
    data = {
        "numbers": [1, 2], "floats": [0.5, 2], "words": ["a", "b"], "lists": [[1], [2, 3]],
        "mixed_lists": [[], [0.5]], "records": [{"a": 1}, {}], "arrays": [np.ones(2, np.int32), np.ones(0, np.int32)],
    }  # fmt: skip
    ref = write_batch(store, "a", data)
    assert {name: (c.kind, c.dtype) for name, c in ref.columns.items()} == {
        "numbers": ("dense", "I64"), "floats": ("dense", "F32"), "words": ("str", "U8"),
        "lists": ("jagged", "I64"), "mixed_lists": ("jagged", "F32"), "records": ("json", "U8"),
        "arrays": ("jagged", "I32"),
    }  # fmt: skip


def test_no_rows_at_all(store: Store) -> None:
    data = {
        "prompt_ids": [], "worker": [], "reward": torch.empty(0),
        "x": Jagged(np.empty(0, np.float32), np.zeros(1, np.int64)),
    }  # fmt: skip
    ref = write_batch(store, "a", data)
    assert len(ref) == 0
    found = ref.fetch(store)
    assert found.batch_size == (0,)
    assert found["prompt_ids"].dtype == torch.int32
    assert ref.fetch_list(store, "worker") == []


def test_columns_of_equal_lengths_calculate_together(store: Store) -> None:
    data = {
        "response_ids": [[1, 2], [3]],
        "advantages": [[0.5, 1], [2]],
        "prompt_ids": [[1], [2, 3]],
    }
    ref = write_batch(store, "a", {"response_ids": data["response_ids"]})
    ref = ref.with_columns(
        write_batch(store, "b", {n: data[n] for n in ("advantages", "prompt_ids")})
    )
    found = ref.fetch(store)
    product = found["response_ids"] * found["advantages"]
    assert product.values().tolist() == [0.5, 2, 6]
    assert found["response_ids"].offsets() is found["advantages"].offsets()


def test_plain_safetensors_reads_the_object(store: Store) -> None:
    ref = write_batch(store, "a.safetensors", {"prompt_ids": [[1, 2], [3]], "reward": [0.5, 1.0]})
    (key,) = ref.objects
    found = load_file(store.url(key).removeprefix("file://"))
    assert found["prompt_ids"].tolist() == [1, 2, 3]
    assert found["reward"].tolist() == [0.5, 1.0]
    assert found["_row_offsets.0"].tolist() == [0, 2, 3]


def test_a_tensordict_is_not_changed(store: Store) -> None:
    data = TensorDict(
        {
            "reward": torch.ones(2),
            "response_ids": jagged([1, 2], torch.int64),
            "worker": NonTensorStack("a", "b"),
        },
        batch_size=[2],
    )
    before = data.clone()
    ref = write_batch(store, "a", data)
    assert torch.equal(data["reward"], before["reward"])
    again = write_batch(store, "b", ref.fetch(store))
    assert again.fetch_list(store, "worker") == ["a", "b"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "at least one column"),
        ({"reward": torch.ones(2), "status": torch.zeros(3, dtype=torch.int64)}, "'status' has 3 rows, column 'reward' has 2"),
        ({"reward": torch.ones(2, dtype=torch.float64)}, r"'reward' is dense F32 \(.*\), not dense F64"),
        ({"advantages": torch.ones(2, 3)}, "'advantages' is jagged F32"),
        ({"x": torch.ones(2, dtype=torch.complex64)}, "'x' cannot be stored: .*complex64"),
        ({"x": "text"}, "a str is no tensor, array or list"),
        ({"worker": ["a", 3]}, "row 1 is 3, no string"),
        ({"x": [object()]}, "not JSON serializable"),
        ({"x": Jagged(np.ones(3), np.array([0, 2]))}, "do not run from 0 to the 3 values"),
        ({"x": Jagged(np.ones(3), np.array([0, 4, 3]))}, "go down"),
        ({"_x": torch.ones(1)}, "begin with _"),
        ({"x": []}, "an empty list shows no type"),
        ({"x": torch.tensor(1.0)}, "no rows"),
        ({"x": torch.ones(3, 0)}, "no number of rows"),
    ],
)  # fmt: skip
def test_what_fits_no_column_is_refused(
    store: Store, data: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        write_batch(store, "a", data)
    assert store.list() == []
