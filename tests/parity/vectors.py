"""Reference vectors: reading a folder of them, and the cases in it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engines.algorithms.aggregation import Rows
from tests.parity import distillation, embodied

Json = Any  # a value read from JSON


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One recorded call of a reference function."""

    name: str
    function: str
    dtype: torch.dtype
    params: dict[str, Json]
    inputs: dict[str, Json]
    outputs: dict[str, Json] | None  # None: refused, or NaN
    nan_in: tuple[str, ...]  # outputs in which the reference has NaN
    rtol: float
    atol: float
    compare: str  # "all", "mask" or "bound"
    rounding: float  # distance of the reference's own float32 and float64 results

    def tensor(self, name: str) -> Tensor:
        """An input as it is: numbers in the case's dtype, "NaN" as NaN."""
        return as_tensor(self.inputs[name], self.dtype)

    def optional(self, name: str) -> Tensor | None:
        """An input that a case may lack, flattened."""
        return self.flat(name) if name in self.inputs else None

    def flat(self, name: str) -> Tensor:
        """A [rows, width] input as [rows * width] values."""
        return self.tensor(name).reshape(-1)

    def mask(self, name: str = "response_mask") -> Tensor:
        """A [rows, width] mask as bool [rows * width]."""
        return torch.tensor(self.inputs[name]).reshape(-1) > 0

    def padding_mask(self) -> Tensor | None:
        """The case's mask [rows, width], from whichever input gives it."""
        if "completion_length" in self.inputs and "sampling_per_token_logps" in self.inputs:
            width = len(self.inputs["sampling_per_token_logps"][0])
            return torch.arange(width) < torch.tensor(self.inputs["completion_length"])[:, None]
        for name in ("response_mask", "mask", "loss_mask", "completion_mask"):
            if name in self.inputs:
                return torch.tensor(self.inputs[name]) > 0
        return None

    def rows(self, name: str = "response_mask") -> Rows:
        """The padded matrix as rows of equal length."""
        count, width = torch.tensor(self.inputs[name]).shape
        return Rows.padded(count, width)


def as_tensor(value: Json, dtype: torch.dtype) -> Tensor:
    """Numbers (nested lists, "NaN" for NaN) as a tensor of dtype."""
    return torch.tensor(_numbers(value), dtype=torch.float64).to(dtype)


def _numbers(value: Json) -> Json:
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    return float(value) if isinstance(value, str | bool) else value


def vector_files(folder: Path) -> dict[Path, bool]:
    """Every JSON file of a folder, in the order of the names, and whether its form is known."""
    return {
        path: _records(json.loads(path.read_text())) is not None
        for path in sorted(folder.glob("*.json"))
    }


def _records(content: dict[str, Json]) -> list[dict[str, Json]] | None:
    """The cases in this format, if they are or can be brought into it; others lie beside ours."""
    if distillation.is_distillation(content):
        return distillation.records(content)
    if embodied.is_embodied(content):
        return embodied.records(content)
    cases = content.get("cases")
    if not isinstance(cases, list):
        return None
    if all("fn" in case for case in cases):
        return [tree_record(case) for case in cases]
    return cases if all("function" in case for case in cases) else None


def read_folder(folder: Path) -> Iterator[Case]:
    """The cases of the files of a known form, in the order of the files' names."""
    for path in (path for path, ours in vector_files(folder).items() if ours):
        content = json.loads(path.read_text())
        default = content.get("default_tolerance", {"rtol": 1e-5, "atol": 1e-6})
        for record in _records(content) or ():
            yield read_case(record, default)


TREE_OUTPUTS = ("pre_whiten", "modified_reward", "segment_advantage", "advantages")


def tree_record(record: dict[str, Json]) -> dict[str, Json]:
    """A case of tree_advantages.json, whose fields stand side by side, as the others have theirs.

    Outputs by completion become lists in the order of `index`, those of several numbers flat ones.
    """
    index, outputs = record["index"], {}
    for name in TREE_OUTPUTS:
        if name in record:
            given = record[name]
            rows = [given[key] for key in index] if isinstance(given, dict) else given
            outputs[name] = [
                one for row in rows for one in (row if isinstance(row, list) else [row])
            ]
    inputs = {name: record[name] for name in ("index", "rewards", "lengths")}
    known = {"fn", "name", *inputs, *TREE_OUTPUTS}
    params = {name: value for name, value in record.items() if name not in known}
    return {
        "name": "/".join([record["fn"], record["name"], *(str(v) for v in params.values())]),
        "function": record["fn"],
        "dtype": "float64",
        "params": params,
        "inputs": inputs,
        "outputs": outputs,
        "tolerance": {"rtol": 0.0, "atol": 1e-6},
    }


def read_case(record: dict[str, Json], default: dict[str, float]) -> Case:
    """A case; one whose name ends in /float64 allows 1e-7 relative, as the format says."""
    exact = record["name"].endswith("/float64")
    tolerance = record.get("tolerance") or ({"rtol": 1e-7, "atol": 1e-9} if exact else default)
    return Case(
        name=record["name"],
        function=record["function"],
        dtype=torch.float64 if record["dtype"] == "float64" else torch.float32,
        params=record["params"],
        inputs=record["inputs"],
        outputs=record["outputs"],
        nan_in=tuple(record.get("nan_in", ())),
        rtol=tolerance["rtol"],
        atol=tolerance["atol"],
        compare=record.get("compare", "all"),
        rounding=_rounding(record.get("float32_minus_float64")),
    )


def _rounding(value: Json) -> float:
    if isinstance(value, dict):
        return max((_rounding(item) for item in value.values()), default=0.0)
    return float(value or 0.0)
