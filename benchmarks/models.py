"""What each family of models computes, in training, in versions and in each engine, on a CPU.

    python -m benchmarks.models [FAMILY or FOLDER ...] [--without-vllm] [--to docs/models.md]

A family is a small random checkpoint (benchmarks/families.py), a folder any checkpoint that is small
enough. All numbers are the largest difference in nats, float32, from transformers' own forward pass
of one sequence at a time with eager attention, but for the gradient (a share of the largest one):

- packed: the train engine's log-probs of four samples in one row; gradient: of those samples.
- export: after an update with all weights, the train engine beside transformers' model of the
  version's own folder.
- sampled and scored, by the transformers engine and by vLLM after a second sync: log-probs of the
  tokens that it drew, and of given ones, under the version's folder.
- LoRA: as export, of an adapter that is merged into its base.
- plan: the weights that the memory plan counts, as a share of those that there are, and what it says
  that a micro-batch keeps, as a share of what autograd keeps of it (float32, samples as
  long as they may be).

A family is refused where the self-test before a run refuses it. Each runs in a process of its own.
What is printed has a column for each; a page (`--to`) has of each family the largest difference.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from engines.rollout.engine import RolloutEngine
    from engines.train.batching.packed_batch import PackedBatch
    from storage.objects.store import Store
    from storage.runs.weights import WeightsRef

COLUMNS = {
    "packed": "packed",
    "gradient": "gradient",
    "export": "export",
    "transformers": "transformers engine: sampled, scored",
    "vllm": "vLLM: sampled, scored",
    "lora": "LoRA",
    "plan": "plan: weights, kept",
}
# Of a page: the largest difference of training, versions, transformers' engine and LoRA; vLLM's; the
# plan's share of what is kept.
SUMMARY = ("family", "largest difference", "vLLM", "plan")
LIMIT = 900.0  # seconds for a family
LONGEST = 48  # tokens of a sample
NEW = 12  # tokens that an engine draws
PROMPTS = (33, 36)  # tokens of its prompts
BEGIN, END = "<!-- families: python -m benchmarks.models -->", "<!-- end of families -->"


class Family:
    """A checkpoint, its first two policy versions, and the engines that take them."""

    def __init__(self, directory: Path, folder: Path) -> None:
        from storage.objects.store import Store

        self.directory, self.folder = directory, folder
        self.store: Store = Store(f"file://{folder}/store")

    def packed(self) -> dict[str, str]:
        from engines.train.self_test.comparison import differences
        from engines.train.self_test.twin import samples

        found = differences(plain(self.directory), samples())
        return {"packed": number(found.largest), "gradient": number(found.gradients)}

    def trained(self, run: str, lora: bool) -> tuple[list[WeightsRef], Path, float]:
        """Two versions with an update between, the second one's folder, and what scores differ by."""
        from configs.lora import LoraConfig
        from configs.model import PretrainedModel
        from configs.train import TrainConfig
        from engines.models.adapters import stream_whole
        from engines.train.contract import TrainSpec, UpdateRequest
        from engines.train.fsdp_engine import FSDPEngine
        from storage.objects.store import Store
        from storage.runs.weights_writing import copy_whole

        engine = FSDPEngine(
            TrainSpec(
                model=PretrainedModel(path=str(self.directory)),
                model_cache=str(self.folder / "models"),
                train=TrainConfig(learning_rate=1e-2, compute_dtype="float32"),
                lora=LoraConfig(rank=4) if lora else None,
                role="actor",
                store_uri=self.store.uri,
                run=run,
                total_steps=2,
            )
        )
        engine.join(rank=0, world=1, host="127.0.0.1", port=0, generation=1, timeout=60.0)
        try:
            versions = [engine.export_weights(0, "float32")]
            engine.update(UpdateRequest(step=1, **self._batch(run)))
            versions.append(engine.export_weights(1, "float32"))
            engine.settle_weights(1, "float32")
            ours = engine.score(*rows())
        finally:
            engine.close()
        tensors = stream_whole(self.store, versions[1])
        copy_whole(self.store, versions[1], Store(f"file://{self.folder}"), run, tensors)
        target = self.folder / run
        theirs, before = (scores(plain(folder), *rows()) for folder in (target, self.directory))
        if largest(theirs, before) < 1e-3:
            raise ValueError("the update changed nothing")
        return versions, target, largest(ours, theirs)

    def _batch(self, run: str) -> dict[str, Any]:
        """Of an update: eight samples of the twin's lengths, by GRPO's loss."""
        import numpy as np

        from configs.algorithm.algorithm import AlgorithmConfig
        from engines.train.self_test.twin import samples
        from storage.batches.writing import write_batch

        drawn = [*samples(0), *samples(1)]
        ref = write_batch(
            self.store,
            f"{run}/batch.safetensors",
            {
                "prompt_ids": [prompt.numpy() for prompt, _ in drawn],
                "response_ids": [response.numpy() for _, response in drawn],
                "response_mask": [np.ones(len(each), dtype=np.uint8) for _, each in drawn],
                "advantages": [
                    np.full(len(each), (-1.0) ** n, dtype=np.float32)
                    for n, (_, each) in enumerate(drawn)
                ],
                "group_id": np.arange(len(drawn)),
            },
        )
        return {
            "batch": ref,
            "algorithm": AlgorithmConfig(),
            "temperature": 1.0,
            "max_new_tokens": LONGEST,
        }

    def sampled(self, kind: str, versions: list[WeightsRef], exported: Path) -> str:
        """What an engine's own log-probs are off by, of tokens that it draws and of given ones."""
        import numpy as np
        import torch

        from engines.rollout.contract import RolloutRequest, Sampling
        from storage.batches.writing import write_batch

        prompts = [np.arange(40, 40 + length) for length in PROMPTS]
        model = plain(exported)
        with self.engine(kind) as engine:
            for version in versions:
                engine.sync(version)
            given = largest(engine.score(*rows()), scores(model, *rows()))
            batch = write_batch(
                self.store,
                f"{kind}/prompts.safetensors",
                {
                    "prompt_ids": prompts,
                    "group_id": np.arange(len(prompts)),
                    "prompt_row": np.arange(len(prompts)),
                },
            )
            sampling = Sampling(n=2, max_new_tokens=NEW, seed=1, ignore_eos=True)
            request = RolloutRequest(
                prompts=batch, sampling=sampling, out_key=f"{kind}/s.safetensors", step=1, shard=0
            )
            ref = engine.generate(request).ref
        drawn = [
            torch.as_tensor(row).tolist() for row in ref.fetch_list(self.store, "response_ids")
        ]
        logprobs = ref.fetch_list(self.store, "rollout_logprobs")
        whole = [[*prompts[n // 2].tolist(), *row] for n, row in enumerate(drawn)]
        own = scores(model, whole, [PROMPTS[n // 2] for n in range(len(drawn))])
        of_drawn = largest([torch.as_tensor(row).tolist() for row in logprobs], own)
        return f"{number(of_drawn)}, {number(given)}"

    @contextmanager
    def engine(self, kind: str) -> Iterator[RolloutEngine]:
        from configs.imports import imported_class
        from configs.model import PretrainedModel
        from configs.rollout import RolloutConfig
        from engines.models.facts import model_facts
        from engines.rollout.contract import RolloutSpec, engine_class
        from tasks.run.preflight import check_vllm, check_vllm_on_cpu

        model = PretrainedModel(path=str(self.directory))
        arguments = {"max_num_batched_tokens": 2048} if kind == "vllm" else {}
        rollout = RolloutConfig(
            engine=kind, dtype="float32", kv_cache_gib=0.1, engine_args=arguments
        )
        facts = model_facts(model)
        assert facts is not None
        if kind == "vllm":
            check_vllm(facts, 4 * LONGEST, "rollout")
            check_vllm_on_cpu(rollout, facts, 4 * LONGEST, "rollout")
        engine = imported_class(engine_class(rollout))(
            RolloutSpec(
                model=model,
                rollout=rollout,
                store_uri=self.store.uri,
                max_model_len=4 * LONGEST,
            )
        )
        try:
            yield engine
        finally:
            engine.close()

    def plan(self) -> str:
        from configs.model import PretrainedModel
        from configs.train import TrainConfig
        from engines.train.memory_plan import Batch, activation_bytes
        from tasks.memory.holders import sizes_of

        shape = sizes_of(PretrainedModel(path=str(self.directory)), LONGEST + 1, "float32")
        if shape is None:
            return "none"
        model = plain(self.directory, attention=None)
        weights = sum(weight.numel() for weight in model.parameters())
        kept, packed = kept_by(model)
        batch = Batch(
            tokens=packed.tokens.numel(),
            slots=packed.layout.expand.numel(),
            responses=packed.labels.numel(),
            longest=LONGEST,
            several=False,
        )
        train = TrainConfig(compute_dtype="float32")
        planned = activation_bytes(shape, train, batch, 4, on_gpu=False)
        return f"{shape.parameters / weights:.3f}, {planned / kept:.3f}"


def kept_by(model: PreTrainedModel) -> tuple[int, PackedBatch]:
    """Bytes that autograd keeps of a micro-batch: two prompts, four samples of LONGEST of each."""
    import numpy as np

    from benchmarks.memory import counted
    from engines.train.batching.packed_batch import pack
    from engines.train.model.sequence_parallel import ALONE
    from engines.train.policy import decoder_states, use_packed_attention

    model, needs = use_packed_attention(model)
    prompts = [np.full(LONGEST // 2, 40 + row // 4) for row in range(8)]
    responses = [np.full(LONGEST + 1 - len(prompt), 50 + n) for n, prompt in enumerate(prompts)]
    packed, kept = pack(prompts, responses, needs=needs), dict[int, int]()
    with counted(kept):
        # Its result lives until all is counted, so that no other storage gets an address again.
        states = decoder_states(model.get_decoder(), packed, packed.predictors, ALONE, needs.whole)
    del states
    return sum(kept.values()), packed


def plain(directory: Path, attention: str | None = "eager") -> PreTrainedModel:
    """Transformers' own model of a folder, in float32; attention: None: as transformers takes it."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation=attention
    ).eval()


def rows() -> tuple[list[list[int]], list[int]]:
    """Token ids of the twin's samples, and the lengths of their prompts."""
    from engines.train.self_test.twin import samples

    drawn = samples()
    return [[*p.tolist(), *r.tolist()] for p, r in drawn], [len(p) for p, _ in drawn]


def scores(model: PreTrainedModel, token_ids: list[list[int]], prompts: list[int]) -> list[Tensor]:
    """Log-probs of what follows each prompt, in nats."""
    import torch

    from engines.train.self_test.comparison import own_logprobs

    cut = [
        (torch.tensor(ids[:length]), torch.tensor(ids[length:]))
        for ids, length in zip(token_ids, prompts, strict=True)
    ]
    with torch.no_grad():
        return own_logprobs(model, cut)


def largest(ours: Any, theirs: Any) -> float:
    import torch

    pairs = zip(ours, theirs, strict=True)
    return max(float((torch.as_tensor(a) - torch.as_tensor(b)).abs().max()) for a, b in pairs)


def number(value: float) -> str:
    return f"{value:.1e}"


def looked_at(directory: Path, with_vllm: bool) -> dict[str, str]:
    """The cells of one family, by the columns' names; `refused` alone where it is."""
    from configs.lora import LoraConfig
    from engines.train.self_test.child import verdict

    with tempfile.TemporaryDirectory() as folder:
        said = verdict(directory, LONGEST)
        if said.refused:
            return {"refused": said.refused}
        cells = {"untested": said.untested} if said.untested else {}
        family = Family(directory, Path(folder))
        versions: list[WeightsRef] = []
        exported = Path()

        def export() -> str:
            nonlocal exported
            found, exported, off = family.trained("whole", lora=False)
            versions.extend(found)
            return number(off)

        def by(kind: str) -> str:
            return family.sampled(kind, versions, exported) if versions else "no version"

        cells |= attempt("packed", family.packed)
        cells |= attempt("export", export)
        cells |= attempt("transformers", lambda: by("transformers"))
        if with_vllm:
            cells |= attempt("vllm", lambda: by("vllm"))
        if unfit := LoraConfig().unfit(said.linear, said.stacked):
            cells["lora"] = f"refused: {unfit.split('. ')[0]}"
        else:
            cells |= attempt("lora", lambda: number(family.trained("adapter", lora=True)[2]))
        cells |= attempt("plan", family.plan)
    return cells


def attempt(name: str, work: Callable[[], str | dict[str, str]]) -> dict[str, str]:
    """A cell or several; what fails is told in its place."""
    from tasks.run.features import PreflightError

    try:
        found = work()
    except PreflightError as error:
        return {name: f"refused: {' '.join(str(error).split()).split('. ')[0]}"}
    except Exception as error:  # whatever a model's code or vLLM raises is what is to be told
        line = " ".join(str(error).split()).split(". ")[0].split("; its log is ")[0]
        return {name: f"{type(error).__name__}: {line[:160]}"}
    return found if isinstance(found, dict) else {name: found}


def child(name: str, with_vllm: bool) -> dict[str, str]:
    """The cells of a family or a folder, by a process of its own."""
    command = [sys.executable, "-m", "benchmarks.models", "--alone", name]
    threads = {"OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command + ([] if with_vllm else ["--without-vllm"]),
            env={**os.environ, **threads},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"refused": f"not done within {LIMIT:.0f} s"}
    try:
        return dict(json.loads(done.stdout.splitlines()[-1]))
    except (ValueError, IndexError):
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return {"refused": f"broke off: {last[:160]}"}


def line(name: str, cells: dict[str, str]) -> str:
    if "refused" in cells:
        return f"| {name} | refused: {cells['refused']} |" + " |" * (len(COLUMNS) - 1)
    return f"| {name} | " + " | ".join(cells.get(column, "") for column in COLUMNS) + " |"


def summary(name: str, cells: dict[str, str]) -> str:
    """A family's line of a page; what was refused or failed is told by its first word."""

    def told(*columns: str) -> str:
        said = ", ".join(cells[column] for column in columns if column in cells)
        numbers = re.findall(r"\d\.\d+e[+-]\d+", said)
        return max(numbers, key=float) if numbers else said.partition(":")[0]

    if "refused" in cells:
        return f"| {name} | refused | | |"
    ours = told("packed", "gradient", "export", "transformers", "lora")
    if cells.get("lora", "").startswith("refused"):
        ours += ", no LoRA"
    kept = cells.get("plan", "").rpartition(", ")[2].partition(":")[0]
    return f"| {name} | {ours} | {told('vllm')} | {kept} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", help="families or folders [all families]")
    parser.add_argument("--without-vllm", action="store_true")
    parser.add_argument("--to", type=Path, help="a file whose table is replaced")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    from benchmarks.families import FAMILIES, make

    if given.alone:
        warnings.filterwarnings("ignore")
        (name,) = given.names
        with tempfile.TemporaryDirectory() as folder:
            directory = make(name, Path(folder)) if name in FAMILIES else Path(name)
            print(json.dumps(looked_at(directory, not given.without_vllm)))
        return
    print("| family | " + " | ".join(COLUMNS.values()) + " |", flush=True)
    print("|---" * (len(COLUMNS) + 1) + "|", flush=True)
    table = [f"| {' | '.join(SUMMARY)} |", "|---" * len(SUMMARY) + "|"]
    for name in given.names or FAMILIES:
        cells = child(name, not given.without_vllm)
        print(line(Path(name).name, cells), flush=True)
        table.append(summary(Path(name).name, cells))
    if given.to:
        text = given.to.read_text()
        before, rest = text.split(BEGIN)
        after = rest.split(END)[1]
        given.to.write_text(f"{before}{BEGIN}\n{chr(10).join(table)}\n{END}{after}")


if __name__ == "__main__":
    main()
