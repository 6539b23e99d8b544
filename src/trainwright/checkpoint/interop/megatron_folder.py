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
from collections.abc import Callable, Collection, Iterator, Mapping
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
    ModelWeight,
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
_LAYERS = "decoder.layers."  # begins the name of a layer's weight
# Entries of a `torch_dist` checkpoint that are not weights begin with these.
_OTHER_STATE = ("optimizer.", "chained_", "rng_state", "opt_param_scheduler", "rerun_state_machine")
# Buffers in checkpoints of older versions of transformers. Newer versions compute them.
_BUFFERS = (".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq")
_WORDS = "embedding.word_embeddings.weight"
_OUTPUT = "output_layer.weight"
_MAX_NAMES = 8  # in an error
# Name of a weight in transformers → function that reads it.
_Reads = Mapping[str, Callable[[], torch.Tensor]]
# For each pipeline stage: name → tensors of the tensor-parallel ranks.
_Stages = list[dict[str, list[torch.Tensor]]]


@dataclass(frozen=True)
class MegatronLayout:
    """The layout of a checkpoint to write: parallel sizes, padded vocabulary, and the names of the layers.

    Attributes:
        tp: tensor-parallel size. Default: 1.
        pp: pipeline-parallel size. Default: 1.
        vocab: number of rows of the embedding; additional rows are zero. Default: 0, the model's own number of rows.
        impl: Megatron's `--transformer-impl`, which determines the names of norms: `"transformer_engine"` or `"local"`.
            Default: `"transformer_engine"`.
    """

    tp: int = 1
    pp: int = 1
    vocab: int = 0
    impl: str = "transformer_engine"


def megatron_folder(source: Path) -> Path | None:
    """Return the folder of one iteration in a checkpoint of Megatron, or None if `source` is not such a checkpoint.

    `source` is the folder of one iteration, or a folder of iterations, whose latest is returned. A `CheckpointError` is
    raised if the latest is missing.
    """
    if not source.is_dir():
        return None
    if (source / _LATEST).is_file():
        # The file contains "release" or the number of an iteration, as in "10" for the folder `iter_0000010`.
        text = read_bytes(source / _LATEST, max_bytes=64).decode(errors="replace").strip()
        name = f"iter_{int(text):07d}" if text.isdigit() else text
        # The name comes from a file, so that "../other" must not be followed.
        if not re.fullmatch(r"release|iter_\d{7,}", name) or not (source / name).is_dir():
            raise CheckpointError(f"{source / _LATEST} names {text!r}, but there is no folder {source / name}.")
        source /= name
    is_torch_dist = (source / "metadata.json").is_file() and (source / METADATA).is_file()
    if is_torch_dist or any(source.glob("mp_rank_*")):
        return source
    return None


def convert_megatron(source: Path, target: Path, config: Path | None) -> int:
    """Write a checkpoint of Megatron as a folder of transformers, and return its number of tensors.

    The full model is read into memory.

    Args:
        source: the folder of all iterations (the latest is read) or of one.
        target: the folder to create. It must not exist.
        config: a `config.json` of transformers or its folder. None uses `config.json` in `source` or, if that does not
            exist, the arguments in the checkpoint.

    Raises:
        CheckpointError: `source` is not a checkpoint of Megatron, is damaged or does not fit the config, the config is
            missing or describes an unsupported model, or `target` exists.
    """
    tensors, settings = _read_megatron(source, config)
    base = "transformer." if settings["model_type"] == "gpt2" else "model."
    weights = {}
    for name, tensor in tensors.items():
        # The output layer is outside the base model.
        full_name = name if name.startswith("lm_head.") else base + name
        weights[full_name] = Weight.of(tensor)
    with _new_folder(target) as folder:
        replace_weights(folder, weights, max_shard_bytes=MAX_SHARD_BYTES)
        write_file(folder / CONFIG, dump_json(settings, indent=2).encode() + b"\n")
    return len(weights)


def export_megatron(
    source: Path, target: Path, layout: MegatronLayout, *, config: Path | None = None, dtype: str | None = None
) -> list[Path]:
    """Write a model of transformers or a checkpoint of Megatron as Megatron's files per rank. Return these files.

    One pipeline stage is in memory at a time, or the full model if `source` is of Megatron.

    Args:
        source: a Trainwright checkpoint, or a folder of Hugging Face safetensors or of Megatron.
        target: the folder to create. It must not exist.
        layout: parallel sizes, padding and names to write.
        config: a `config.json` of transformers or its folder. Default: None, which uses `config.json` in `source` or,
            for a checkpoint of Megatron without this file, the arguments in the checkpoint.
        dtype: key of `EXPORT_DTYPES`, to which floating-point tensors are converted. Default: None, which keeps the
            dtypes.

    Raises:
        CheckpointError: `source` is damaged or does not fit the config, the config is missing or describes an
            unsupported model, or `target` exists.
        ConfigurationError: `layout` does not fit the sizes of the model.
    """
    reads: _Reads
    if megatron_folder(source) is not None:
        tensors, settings = _read_megatron(source, config)
        reads = {name: partial(loaded, tensor) for name, tensor in tensors.items()}
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    else:
        settings = _read_config(config or source)
        stored = {_base_name(tensor.name, settings): tensor for tensor in stored_tensors(source)[0]}
        reads = {name: tensor.read for name, tensor in stored.items()}
        shapes = {name: tuple(tensor.shape) for name, tensor in stored.items()}
    model = ModelShape.of(settings, config or source)
    model.check_parallel(layout.tp, layout.pp, layout.vocab or model.vocabulary)
    if model.tied:
        # Some files have the tied weight under both names. The model has it under that of the embedding only.
        shapes.pop("lm_head.weight", None)
    expected: dict[str, tuple[int, ...]] = {}
    for weight in model.weights():
        expected |= weight.shapes()
    _compare(expected, {name: shape for name, shape in shapes.items() if not name.endswith(_BUFFERS)}, source)
    args = argparse.Namespace(**_args(model, settings, layout))
    files = []
    with _new_folder(target) as folder:
        for stage in range(layout.pp):
            for rank, weights in enumerate(_stage(model, reads, layout, stage, dtype)):
                # Megatron's names have the pipeline stage only if there are several.
                name = f"mp_rank_{rank:02d}_{stage:03d}" if layout.pp > 1 else f"mp_rank_{rank:02d}"
                file = Path("release", name, _RANK_FILE)
                make_folder((folder / file).parent)
                state = {"model": weights, "args": args, "checkpoint_version": 3.0, "iteration": 0}
                with open(folder / file, "xb") as opened:
                    torch.save(state, opened)
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
    """Return the weights of a pipeline stage by name, for each tensor-parallel rank."""
    ranks: list[dict[str, torch.Tensor]] = [{} for _ in range(layout.tp)]
    for weight in model.weights():
        name = _name_in_stage(weight, model, stage, layout.pp)
        if name is None:
            continue
        tensor = weight.join([reads[hf_name]() for hf_name in weight.names])
        if weight.layout == "vocabulary" and layout.vocab:
            padding = tensor.new_zeros(layout.vocab - len(tensor), *tensor.shape[1:])
            tensor = torch.cat([tensor, padding])
        if dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(EXPORT_DTYPES[dtype])
        if layout.impl == "transformer_engine":
            name = joined_norms(name)
        for rank, shard in enumerate(weight.divide(tensor, layout.tp)):
            # torch.save writes the full storage of a view, so a shard needs its own.
            ranks[rank][name] = shard.clone(memory_format=torch.contiguous_format)
    return ranks


def _name_in_stage(weight: ModelWeight, model: ModelShape, stage: int, pp: int) -> str | None:
    """Return the name of a weight in a pipeline stage, or None if the stage does not have the weight.

    Each stage numbers its layers from 0. With 4 layers and pp=2, layer 3 of the model is layer 1 of stage 1.
    """
    is_last = stage == pp - 1
    layer = _LAYER.match(weight.name)
    if layer is not None:
        layers_per_stage = model.layers // pp
        layer_stage, number = divmod(int(layer[1]), layers_per_stage)
        return f"{_LAYERS}{number}.{weight.name[layer.end() :]}" if layer_stage == stage else None
    if not weight.name.startswith("embedding."):
        return weight.name if is_last else None
    if stage == 0:
        return weight.name
    # The last stage has its own copy of a tied embedding.
    return _OUTPUT if model.tied and is_last and weight.name == _WORDS else None


def _read_megatron(source: Path, config: Path | None) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the weights by name in transformers, without the prefix of the base model, and the config."""
    folder = megatron_folder(source)
    if folder is None:
        raise CheckpointError(f"{source} is not a checkpoint of megatron-core.")
    with reading(folder):
        if (folder / METADATA).is_file():
            stages, args = _read_torch_dist(folder)
        else:
            stages, args = _read_ranks(folder)
    if config is None and not (source / CONFIG).is_file():
        settings = config_from_args(args if isinstance(args, dict) else {})
        if settings is None:
            raise CheckpointError(f"{folder} does not store arguments that determine the model's config. {CONFIG_HINT}")
    else:
        settings = _read_config(config or source)
    model = ModelShape.of(settings, config or source)
    shards_by_name = _joined_stages(stages)
    # With several stages, the last stage of a tied model has a copy of the embedding as its output layer. With one
    # stage, the output layer has no tensor, so that `output_copies` is empty.
    output_copies = shards_by_name.pop(_OUTPUT, []) if model.tied else []
    for copy, words in zip(output_copies, shards_by_name.get(_WORDS, []), strict=False):
        if not torch.equal(copy, words):
            raise CheckpointError(
                f"{folder} has an output layer of its own, but the config has tie_word_embeddings=true. Pass a config "
                "with tie_word_embeddings=false."
            )
    weights = {weight.name: weight for weight in model.weights()}
    full: dict[str, torch.Tensor] = {}  # Megatron's full tensors, still with padding, by Megatron's names
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shards in shards_by_name.items():
        # `_compare` reports names that the model does not have.
        weight = weights.get(name)
        full[name] = shards[0] if weight is None else weight.undivide(shards)
        shapes[name] = tuple(full[name].shape)
        if weight is not None and weight.layout == "vocabulary" and len(full[name]) > model.vocabulary:
            # The additional rows are padding, which `separate` removes.
            shapes[name] = (model.vocabulary, *full[name].shape[1:])
    _compare({name: weight.shape for name, weight in weights.items()}, shapes, folder)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        tensors |= weight.separate(full[name])
    return tensors, settings


def _joined_stages(stages: _Stages) -> dict[str, list[torch.Tensor]]:
    """Return the weights of all stages, with layers numbered in the full model.

    A stage numbers its layers from 0. With 2 layers in each stage, layer 1 of stage 1 is layer 3 of the model.
    """
    joined: dict[str, list[torch.Tensor]] = {}
    first = 0  # number of the stage's first layer in the full model
    for stage in stages:
        numbers = set()  # of the stage's layers
        for name, shards in stage.items():
            layer = _LAYER.match(name)
            if layer is None:
                joined[name] = shards
            else:
                number = int(layer[1])
                numbers.add(number)
                joined[f"{_LAYERS}{first + number}.{name[layer.end() :]}"] = shards
        first += len(numbers)
    return joined


def _read_torch_dist(folder: Path) -> tuple[_Stages, Any]:
    """Return the weights, as of one stage and one rank, and the arguments of Megatron."""
    backend = read_json(folder / "metadata.json").get("sharded_backend")
    if backend != "torch_dist":
        raise CheckpointError(
            f"{folder} was saved with the backend {backend!r}. Save it with --ckpt-format torch_dist."
        )
    common = {}
    if (folder / "common.pt").is_file():
        common = read_torch_file(folder / "common.pt")[0]
    weights: dict[str, list[torch.Tensor]] = {}
    for saved_name, value in read_dcp(folder).items():
        if "_extra_state" in saved_name or saved_name.startswith(_OTHER_STATE):
            continue
        _check_weight(saved_name, value, folder)
        tensor = loaded(value)
        name = plain_norms(saved_name)
        if name.startswith(_LAYERS) and not _LAYER.match(name):
            # Layers of the same structure are one tensor, whose first dimension is the layer.
            for number, layer in enumerate(tensor):
                weights[f"{_LAYERS}{number}.{name.removeprefix(_LAYERS)}"] = [layer]
        else:
            weights[name] = [tensor]
    return [weights], common.get("args")


def _read_ranks(folder: Path) -> tuple[_Stages, Any]:
    """Return the weights of the stages, and the arguments of Megatron, from the files of all ranks."""
    files: dict[tuple[int, int], Any] = {}  # (pipeline stage, tensor-parallel rank) → content
    for entry in folder.glob("mp_rank_*"):
        match = _RANK.fullmatch(entry.name)
        # A third number is the rank in expert parallelism.
        if match is None or match[3]:
            raise CheckpointError(
                f"{entry} belongs to a model with experts, which cannot be converted, or is not the folder of a rank."
            )
        files[int(match[2] or 0), int(match[1])] = read_torch_file(entry / _RANK_FILE)[0]
    pp = 1 + max(stage for stage, _ in files)
    tp = 1 + max(rank for _, rank in files)
    first_file = files[min(files)]  # each file has the same arguments, as a dict instead of a Namespace
    args = first_file.get("args")
    _check_complete(folder, files.keys(), tp, pp, args or {})
    stages: _Stages = []
    for stage in range(pp):
        weights: dict[str, list[torch.Tensor]] = {}
        for rank in range(tp):
            content = files[stage, rank]
            state = content.get("model")
            if not isinstance(state, dict) or content.get("checkpoint_version", 0) < 3:
                raise CheckpointError(
                    f"{folder} has no part 'model' of checkpoint_version 3, as megatron-core writes it."
                )
            for name, value in state.items():
                if name.endswith("_extra_state"):
                    continue
                _check_weight(name, value, folder)
                weights.setdefault(plain_norms(name), []).append(value)
        stages.append(weights)
    return stages, args


def _check_complete(
    folder: Path, places: Collection[tuple[int, int]], tp: int, pp: int, args: Mapping[str, Any]
) -> None:
    """Raise a `CheckpointError` if a rank's file is missing.

    `places` has the pipeline stage and tensor-parallel rank of each file, and `tp` and `pp` are one more than the
    largest of these. If the files of the last ranks are missing, only the arguments of Megatron reveal it.
    """
    missing = []
    for stage in range(pp):
        for rank in range(tp):
            if (stage, rank) not in places:
                missing.append(f"tp {rank}, pp {stage}")
    saved_tp = args.get("tensor_model_parallel_size", tp)
    saved_pp = args.get("pipeline_model_parallel_size", pp)
    if missing:
        problem = f"without those of {'; '.join(missing[:_MAX_NAMES])}"
    elif (saved_tp, saved_pp) != (tp, pp):
        problem = f"but was saved with tp={saved_tp}, pp={saved_pp}"
    else:
        return
    raise CheckpointError(
        f"{folder} has the files of tp={tp}, pp={pp}, {problem}. Copy the files of every rank into the folder."
    )


def _check_weight(name: str, value: object, folder: Path) -> None:
    """Raise a `CheckpointError` if a value is not a tensor."""
    if not isinstance(value, torch.Tensor):
        raise CheckpointError(f"{folder} has the entry {name!r}, which is not a weight of a GPTModel.")


def _args(model: ModelShape, settings: Mapping[str, Any], layout: MegatronLayout) -> dict[str, Any]:
    """Return the arguments of Megatron that describe the model. Its option `--use-checkpoint-args` reads them."""
    is_gpt2 = model.kind == "gpt2"
    if is_gpt2:
        epsilon = settings.get("layer_norm_epsilon", 1e-5)
    else:
        epsilon = settings.get("rms_norm_eps", 1e-6)
    # transformers 5 has `rope_parameters`. Older versions have `rope_theta` and `rope_scaling` instead.
    rope = settings.get("rope_parameters") or {}
    is_scaled = rope.get("rope_type", "default") != "default" or bool(settings.get("rope_scaling"))
    window = None
    if settings.get("sliding_window") and settings.get("use_sliding_window", model.kind == "mistral"):
        # A token attends to itself and to `sliding_window - 1` tokens on its left.
        window = (settings["sliding_window"] - 1, 0)
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
        "swiglu": not is_gpt2,
        "add_bias_linear": is_gpt2,
        "normalization": "LayerNorm" if is_gpt2 else "RMSNorm",
        "position_embedding_type": "learned_absolute" if is_gpt2 else "rope",
        "add_qkv_bias": model.kind == "qwen2",
        "qk_layernorm": model.kind == "qwen3",
        "bias_gelu_fusion": settings.get("activation_function") == "gelu_new",
        "norm_epsilon": epsilon,
        "rotary_base": rope.get("rope_theta") or settings.get("rope_theta") or 10000,
        "use_rope_scaling": is_scaled,
        "window_size": window,
    }


def _read_config(path: Path) -> dict[str, Any]:
    """Return the content of a `config.json`. `path` is this file or its folder."""
    file = path / CONFIG if path.is_dir() else path
    if not file.is_file():
        raise CheckpointError(f"{file} does not exist. {CONFIG_HINT}")
    settings = read_json(file)
    if not isinstance(settings, dict):
        raise CheckpointError(f"{file} is not a transformers config: expected a JSON object.")
    return settings


def _base_name(name: str, settings: Mapping[str, Any]) -> str:
    """Return a weight's name without the prefixes of a task and of the base model.

    For example, `net.model.layers.0.mlp.up_proj.weight` becomes `layers.0.mlp.up_proj.weight`.
    """
    base = "(h|wte|wpe|ln_f)" if settings.get("model_type") == "gpt2" else "(layers|embed_tokens|norm)"
    return re.sub(rf"^([a-z_]+\.)*?(?={base}\.|lm_head\.)", "", name)


def _compare(expected: Mapping[str, tuple[int, ...]], actual: Mapping[str, tuple[int, ...]], origin: Path) -> None:
    """Raise a `CheckpointError` if names or shapes of tensors differ from those of the model."""
    unknown = sorted(actual.keys() - expected.keys())
    missing = sorted(expected.keys() - actual.keys())
    if unknown or missing:
        problem = "unknown" if unknown else "missing"
        names = unknown or missing
        more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
        raise CheckpointError(
            f"{origin} does not fit the config: {problem} tensors {', '.join(names[:_MAX_NAMES])}{more}. {CONFIG_HINT}"
        )
    for name, shape in expected.items():
        if actual[name] != shape:
            raise CheckpointError(f"{origin}: {name} has the shape {actual[name]}, and the config expects {shape}.")


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
