"""Conversion of checkpoints of megatron-core to models of transformers and back.

Two formats can be read: `torch_dist`, whose tensors do not depend on the parallelism, and one file per rank,
`mp_rank_TT[_PPP]/model_optim_rng.pt` (tensor-parallel rank, pipeline stage). Only the second format is written. Pickles
are parsed, never executed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainwright.checkpoint.disk.durable import hidden, make_folder, rename, sync_folder, write_file
from trainwright.checkpoint.disk.planned_file import Weight
from trainwright.checkpoint.disk.untrusted import dump_json, read_bytes, read_json, reading
from trainwright.checkpoint.format.model import MAX_SHARD_BYTES
from trainwright.checkpoint.format.shard_files import loaded
from trainwright.checkpoint.interop.dcp_folder import METADATA, read_dcp
from trainwright.checkpoint.interop.export import EXPORT_DTYPES, stored_tensors
from trainwright.checkpoint.interop.megatron_names import (
    CONFIG_HINT,
    ModelShape,
    config_from_args,
    joined_norms,
    plain_norms,
)
from trainwright.checkpoint.interop.torch_file import read_torch_file
from trainwright.checkpoint.interop.weights_folder import replace_weights
from trainwright.core.errors import CheckpointError

CONFIG = "config.json"
_LATEST = "latest_checkpointed_iteration.txt"
_RANK_FILE = "model_optim_rng.pt"
_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(_\d{3,})?")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_STACKED = "decoder.layers."
_OTHER_STATE = ("optimizer.", "chained_", "rng_state", "opt_param_scheduler", "rerun_state_machine")  # of torch_dist
_BUFFERS = (".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq")  # in old checkpoints of transformers
_Reads = Mapping[str, Callable[[], torch.Tensor]]  # weight → function that reads it
_SHOWN = 8  # maximal number of names in an error


@dataclass(frozen=True)
class MegatronLayout:
    """The layout of a checkpoint to write: parallel sizes, padded vocabulary, and the names of the layers.

    Attributes:
        tp: tensor-parallel size. Default: 1.
        pp: pipeline-parallel size. Default: 1.
        vocab: number of rows of the embedding; additional rows are zero. Default: 0, the model's own number of rows.
        impl: Megatron's `--transformer-impl`, which determines the names of norms: `"transformer_engine"` or `"local"`.
    """

    tp: int = 1
    pp: int = 1
    vocab: int = 0
    impl: str = "transformer_engine"


def megatron_folder(source: Path) -> Path | None:
    """Return the folder of one iteration in a checkpoint folder of Megatron, or None for another kind of folder."""
    if not source.is_dir():
        return None
    if (source / _LATEST).is_file():
        text = read_bytes(source / _LATEST, max_bytes=64).decode(errors="replace").strip()
        source /= text if text == "release" or not text.isdigit() else f"iter_{int(text):07d}"
        if not re.fullmatch(r"release|iter_\d{7,}", source.name) or not source.is_dir():
            raise CheckpointError(f"{source.parent / _LATEST} names {text!r}, but there is no folder {source}.")
    sharded = (source / "metadata.json").is_file() and (source / METADATA).is_file()
    return source if sharded or any(source.glob("mp_rank_*")) else None


def convert_megatron(source: Path, target: Path, config: Path | None) -> int:
    """Write a checkpoint of Megatron as a folder of transformers, and return its number of tensors.

    `source` is the folder of all iterations (the latest is read) or of one. `config` is a `config.json` or its folder.
    None uses `config.json` in `source` or else the arguments in the checkpoint. `target` must not exist.
    """
    tensors, settings = _read_megatron(source, config)
    base = "transformer." if settings["model_type"] == "gpt2" else "model."
    named = {name if name.startswith("lm_head.") else base + name: Weight.of(one) for name, one in tensors.items()}
    with _new_folder(target) as folder:
        replace_weights(folder, named, max_shard_bytes=MAX_SHARD_BYTES)
        write_file(folder / CONFIG, dump_json(settings, indent=2).encode() + b"\n")
    return len(named)


def export_megatron(
    source: Path, target: Path, layout: MegatronLayout, *, config: Path | None = None, dtype: str | None = None
) -> list[Path]:
    """Write a model of transformers or a checkpoint of Megatron as Megatron's files per rank. Return the files.

    `source` is a Trainwright checkpoint, or a folder of Hugging Face safetensors or of Megatron. One pipeline stage is
    in memory at a time, or the full model if `source` is of Megatron.
    """
    if megatron_folder(source) is not None:
        tensors, settings = _read_megatron(source, config)
        reads: _Reads = {name: partial(loaded, one) for name, one in tensors.items()}
        shapes = {name: tuple(one.shape) for name, one in tensors.items()}
    else:
        settings = _settings(config or source)
        stored = {_base_name(one.name, settings): one for one in stored_tensors(source)[0]}
        reads = {name: one.read for name, one in stored.items()}
        shapes = {name: tuple(one.shape) for name, one in stored.items()}
    model = ModelShape.of(settings, config or source)
    model.check_parallel(layout.tp, layout.pp, layout.vocab or model.vocabulary)
    if model.tied:
        shapes.pop("lm_head.weight", None)
    expected = {name: shape for weight in model.weights() for name, shape in weight.shapes().items()}
    _compare(expected, {name: shape for name, shape in shapes.items() if not name.endswith(_BUFFERS)}, source)
    files = []
    with _new_folder(target) as folder:
        for stage in range(layout.pp):
            ranks = _stage(model, reads, layout, stage, dtype)
            for rank, weights in enumerate(ranks):
                name = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if layout.pp > 1 else "")
                file = Path("release", name, _RANK_FILE)
                make_folder((folder / file).parent)
                args = argparse.Namespace(**_args(model, settings, layout))
                with open(folder / file, "xb") as opened:
                    torch.save({"model": weights, "args": args, "checkpoint_version": 3.0, "iteration": 0}, opened)
                    opened.flush()
                    os.fsync(opened.fileno())
                files.append(target / file)
        write_file(folder / CONFIG, dump_json(settings, indent=2).encode() + b"\n")
        write_file(folder / _LATEST, b"release")
    return files


def _stage(
    model: ModelShape,
    reads: _Reads,
    layout: MegatronLayout,
    stage: int,
    dtype: str | None,
) -> list[dict[str, torch.Tensor]]:
    """Return the weights of a pipeline stage for each tensor-parallel rank."""
    per_stage, last = model.layers // layout.pp, stage == layout.pp - 1
    ranks: list[dict[str, torch.Tensor]] = [{} for _ in range(layout.tp)]
    for weight in model.weights():
        name = weight.name
        number = _LAYER.match(name)
        if number is not None:
            if int(number[1]) // per_stage != stage:
                continue
            name = f"{_STACKED}{int(number[1]) % per_stage}.{name[number.end() :]}"
        elif name.startswith("embedding.") and stage > 0:
            if not (model.tied and last and weight.layout == "vocabulary"):
                continue
            name = "output_layer.weight"  # the last stage's copy of a tied embedding
        elif not name.startswith("embedding.") and not last:
            continue
        tensor = weight.join([reads[one]() for one in weight.names])
        if weight.layout == "vocabulary" and layout.vocab:
            tensor = torch.cat([tensor, tensor.new_zeros(layout.vocab - len(tensor), *tensor.shape[1:])])
        if dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(EXPORT_DTYPES[dtype])
        name = joined_norms(name) if layout.impl == "transformer_engine" else name
        for rank, shard in enumerate(weight.divide(tensor, layout.tp)):
            ranks[rank][name] = shard.clone(memory_format=torch.contiguous_format)  # torch.save stores whole storages
    return ranks


def _read_megatron(source: Path, config: Path | None) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the weights by name in transformers, and the config."""
    folder = megatron_folder(source)
    if folder is None:
        raise CheckpointError(f"{source} is not a checkpoint of megatron-core.")
    with reading(folder):
        stages, args = _read_torch_dist(folder) if (folder / METADATA).is_file() else _read_ranks(folder)
    if config is None and not (source / CONFIG).is_file():
        settings = config_from_args(args if isinstance(args, dict) else {})
        if settings is None:
            raise CheckpointError(f"{folder} does not store arguments that determine the model's config. {CONFIG_HINT}")
    else:
        settings = _settings(config or source)
    model = ModelShape.of(settings, config or source)
    found: dict[str, list[torch.Tensor]] = {}
    first = 0
    for stage in stages:
        numbers = {int(number[1]) for name in stage if (number := _LAYER.match(name))}
        for name, shards in stage.items():
            number = _LAYER.match(name)
            found[name if number is None else f"{_STACKED}{first + int(number[1])}.{name[number.end() :]}"] = shards
        first += len(numbers)
    copies = found.pop("output_layer.weight", []) if model.tied else []
    if any(
        not torch.equal(*pair) for pair in zip(copies, found.get("embedding.word_embeddings.weight", []), strict=False)
    ):
        raise CheckpointError(
            f"{folder} has an output layer of its own, but the config has tie_word_embeddings=true. Pass a config with "
            "tie_word_embeddings=false."
        )
    weights = {weight.name: weight for weight in model.weights()}
    full = {name: weights[name].undivide(shards) if name in weights else shards[0] for name, shards in found.items()}
    shapes = {}
    for name, tensor in full.items():
        vocabulary = name in weights and weights[name].layout == "vocabulary" and len(tensor) > model.vocabulary
        shapes[name] = (model.vocabulary, *tensor.shape[1:]) if vocabulary else tuple(tensor.shape)
    _compare({name: weight.shape for name, weight in weights.items()}, shapes, folder)
    return {
        name: one for ours, weight in weights.items() for name, one in weight.separate(full[ours]).items()
    }, settings


_Stages = list[dict[str, list[torch.Tensor]]]  # for each pipeline stage: name → tensors of the tensor-parallel ranks


def _read_torch_dist(folder: Path) -> tuple[_Stages, Any]:
    backend = read_json(folder / "metadata.json").get("sharded_backend")
    if backend != "torch_dist":
        raise CheckpointError(
            f"{folder} was saved with the backend {backend!r}. Save it with --ckpt-format torch_dist."
        )
    common = read_torch_file(folder / "common.pt")[0] if (folder / "common.pt").is_file() else {}
    found: dict[str, list[torch.Tensor]] = {}
    for name, value in read_dcp(folder).items():
        if "_extra_state" in name or name.startswith(_OTHER_STATE):
            continue
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(f"{folder} has the entry {name!r}, which is not a weight of a GPTModel.")
        tensor, name = loaded(value), plain_norms(name)
        if name.startswith(_STACKED) and not _LAYER.match(name):
            found |= {f"{_STACKED}{i}.{name.removeprefix(_STACKED)}": [layer] for i, layer in enumerate(tensor)}
        else:
            found[name] = [tensor]
    return [found], common.get("args")


def _read_ranks(folder: Path) -> tuple[_Stages, Any]:
    grid: dict[tuple[int, int], Any] = {}
    for entry in folder.glob("mp_rank_*"):
        match = _RANK.fullmatch(entry.name)
        if match is None or match[3]:
            raise CheckpointError(
                f"{entry} belongs to a model with experts, which cannot be converted, or is not the folder of a rank."
            )
        grid[int(match[2] or 0), int(match[1])] = read_torch_file(entry / _RANK_FILE)[0]
    pp, tp = (1 + max(place[axis] for place in grid) for axis in (0, 1))
    absent = [f"tp {t}, pp {p}" for p in range(pp) for t in range(tp) if (p, t) not in grid]
    args = grid[min(grid)].get("args")
    told = (args or {}).get("tensor_model_parallel_size", tp), (args or {}).get("pipeline_model_parallel_size", pp)
    if absent or told != (tp, pp):
        raise CheckpointError(
            f"{folder} has the files of tp={tp}, pp={pp}"
            + (
                f", without those of {'; '.join(absent[:_SHOWN])}"
                if absent
                else f", but was saved with tp={told[0]}, pp={told[1]}"
            )
            + ". Copy the files of every rank into the folder."
        )
    stages: _Stages = []
    for p in range(pp):
        stages.append({})
        for t in range(tp):
            state = grid[p, t].get("model")
            if not isinstance(state, dict) or grid[p, t].get("checkpoint_version", 0) < 3:
                raise CheckpointError(
                    f"{folder} has no part 'model' of checkpoint_version 3, as megatron-core writes it."
                )
            for name, value in state.items():
                if name.endswith("_extra_state"):
                    continue
                if not isinstance(value, torch.Tensor):
                    raise CheckpointError(f"{folder} has the entry {name!r}, which is not a weight of a GPTModel.")
                stages[p].setdefault(plain_norms(name), []).append(value)
    return stages, args


def _args(model: ModelShape, settings: Mapping[str, Any], layout: MegatronLayout) -> dict[str, Any]:
    """Return the arguments of Megatron that describe the model. Its option `--use-checkpoint-args` reads them."""
    gpt2 = model.kind == "gpt2"
    rope = settings.get("rope_parameters") or {}
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "num_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "ffn_hidden_size": model.mlp,
        "kv_channels": model.head,
        "max_position_embeddings": model.positions,
        "seq_length": model.positions,
        "padded_vocab_size": layout.vocab or model.vocabulary,
        "vocab_size": model.vocabulary,
        "untie_embeddings_and_output_weights": not model.tied,
        "group_query_attention": model.groups != model.heads,
        "num_query_groups": model.groups,
        "swiglu": not gpt2,
        "add_bias_linear": gpt2,
        "normalization": "LayerNorm" if gpt2 else "RMSNorm",
        "position_embedding_type": "learned_absolute" if gpt2 else "rope",
        "add_qkv_bias": model.kind == "qwen2",
        "qk_layernorm": model.kind == "qwen3",
        "bias_gelu_fusion": settings.get("activation_function") == "gelu_new",
        "norm_epsilon": settings.get("layer_norm_epsilon" if gpt2 else "rms_norm_eps", 1e-5 if gpt2 else 1e-6),
        "rotary_base": rope.get("rope_theta") or settings.get("rope_theta") or 10000,
    }


def _settings(path: Path) -> dict[str, Any]:
    file = path / CONFIG if path.is_dir() else path
    if not file.is_file():
        raise CheckpointError(f"{file} does not exist. {CONFIG_HINT}")
    settings = read_json(file)
    if not isinstance(settings, dict):
        raise CheckpointError(f"{file} is not a transformers config: expected a JSON object.")
    return settings


def _base_name(name: str, settings: Mapping[str, Any]) -> str:
    """Return a weight's name without the prefixes of a task and of the base model."""
    base = "(h|wte|wpe|ln_f)" if settings.get("model_type") == "gpt2" else "(layers|embed_tokens|norm)"
    return re.sub(rf"^([a-z_]+\.)*?(?={base}\.|lm_head\.)", "", name)


def _compare(expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]], origin: Path) -> None:
    for names, what in (
        (sorted(found.keys() - expected.keys()), "unknown"),
        (sorted(expected.keys() - found.keys()), "missing"),
    ):
        if names:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            raise CheckpointError(
                f"{origin} does not fit the config: {what} tensors {', '.join(names[:_SHOWN])}{more}. {CONFIG_HINT}"
            )
    for name, shape in expected.items():
        if found[name] != shape:
            raise CheckpointError(f"{origin}: {name} has the shape {found[name]}, and the config expects {shape}.")


@contextmanager
def _new_folder(target: Path) -> Iterator[Path]:
    """Return a context with a new hidden folder. At the end it is renamed to `target` or, after an error, deleted."""
    if os.path.lexists(target):
        raise CheckpointError(f"{target} exists; it is not replaced. Choose another name.")
    make_folder(target.parent)
    folder = hidden(target, "tmp")
    try:
        make_folder(folder)
        yield folder
        sync_folder(folder)
        rename(folder, target)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
