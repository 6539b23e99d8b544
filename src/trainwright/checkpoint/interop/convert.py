"""Conversion of other programs' checkpoints to checkpoints of Trainwright.

Sources are Lightning's `.ckpt` files, state dicts, and folders of Accelerate, DeepSpeed and
torch.distributed.checkpoint.

Pickles are parsed and never executed (see `torch_file`), unless `ConvertOptions.trust_pickle` is True.
"""

from __future__ import annotations

import pickle
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from trainwright.checkpoint.disk.untrusted import reading, shortened
from trainwright.checkpoint.format.codec import encode
from trainwright.checkpoint.format.layout import MANIFEST, Kind, Snapshot
from trainwright.checkpoint.format.model import MODEL_INDEX, SINGLE_FILE, read_model
from trainwright.checkpoint.format.safetensors_io import read_safetensors
from trainwright.checkpoint.format.staging import clean_stale
from trainwright.checkpoint.format.writer import write_checkpoint
from trainwright.checkpoint.interop.dcp_folder import METADATA, Sharded
from trainwright.checkpoint.interop.deepspeed_folder import LATEST
from trainwright.checkpoint.interop.foreign_optimizer import NamesUnknown, named_from_positions, steps_of
from trainwright.checkpoint.interop.pickle_parser import Placeholder
from trainwright.checkpoint.interop.sharded_folder import FSDP_MODEL, accelerate_rng, read_sharded
from trainwright.checkpoint.interop.torch_file import read_torch_file
from trainwright.core.errors import CheckpointError
from trainwright.core.names.hidden_names import plain_name
from trainwright.core.state import TrainState

Source = Literal["lightning", "accelerate", "state dict", "torch.distributed", "deepspeed"]

_LIGHTNING_VERSION = "pytorch-lightning_version"
# The entries that Lightning writes; all others come from the user's hooks.
_LIGHTNING_KEYS = frozenset(
    {
        _LIGHTNING_VERSION,
        "epoch",
        "global_step",
        "state_dict",
        "loops",
        "callbacks",
        "optimizer_states",
        "lr_schedulers",
        "hparams_name",
        "hparams_type",
        "hyper_parameters",
        "MixedPrecision",
        "native_amp_scaling_state",
        "datamodule_hparams_name",
        "datamodule_hparams_type",
        "datamodule_hyper_parameters",
    }
)
# The files that only Accelerate's `save_state` writes.
_ACCELERATE_ONLY = re.compile(r"(optimizer|scheduler)(_\d+)?\.bin|random_states_\d+\.pkl")
# The files of Accelerate's folder that are read besides the weights. The states of samplers and loaders are not read,
# because these files contain pickled objects.
_ACCELERATE = re.compile(
    r"(optimizer|scheduler)(_\d+)?\.bin|scaler\.pt|random_states_\d+\.pkl|custom_checkpoint_\d+\.pkl"
)
_NESTED_KEYS = (
    "state_dict",
    "model_state_dict",
    "model",
)  # keys of the weights in files of user-written loops, most common first


@dataclass(frozen=True)
class ConvertOptions:
    """Options for reading a foreign checkpoint.

    Attributes:
        trust_pickle: unpickle with `torch.load(weights_only=False)`, which runs any code that the file names. It has no
            effect on folders of torch.distributed.checkpoint and DeepSpeed. Default: False.
        drop_unknown: skip values that are neither tensors nor plain data, with a note. It has no effect on folders of
            torch.distributed.checkpoint and DeepSpeed. Default: False, which raises an error for such values.
        param_names: for each optimizer, the parameter names in the optimizer's order. Default: no names. They are
            needed only if they cannot be inferred from the file.
        optimizer_classes: for each optimizer, the name of its class. Default: no names. They are needed only if the
            classes cannot be inferred from the hyper-parameters in the file.
        step: number of completed optimizer steps. Default: None, the number in the file or, if the file has none, in
            the optimizers' states.
        epoch: number of finished epochs. Default: None, the number in the file, or 0.
    """

    trust_pickle: bool = False
    drop_unknown: bool = False
    param_names: Sequence[Sequence[str]] = ()
    optimizer_classes: Sequence[str] = ()
    step: int | None = None
    epoch: int | None = None


@dataclass
class Converted:
    """The result of a conversion.

    Attributes:
        path: the new checkpoint.
        source: kind of the checkpoint that was read.
        kind: kind of the new checkpoint. `"full"` checkpoints can be resumed. From `"weights"` checkpoints, only the
            weights can be loaded.
        step, epoch: completed optimizer steps and finished epochs of the new checkpoint.
        num_tensors: number of tensors in the model's state dict. A tied tensor counts once for each of its names.
        notes: sentences about what was skipped or assumed, and why.
    """

    path: Path
    source: Source
    kind: Kind
    step: int
    epoch: int
    num_tensors: int
    notes: list[str] = field(default_factory=list)


def convert_checkpoint(source: Path | str, target: Path | str, options: ConvertOptions | None = None) -> Converted:
    """Write the checkpoint `target` from the checkpoint of another program.

    Optimizer states are converted if the parameter names and the class of every optimizer are in `options` or can be
    inferred from the file. Otherwise the result has weights only, and `Converted.notes` has the reason. Tensors are
    mapped from the source and written one at a time, except that shards of several ranks, and files that are read with
    `trust_pickle`, are loaded into memory. Call this function on one process. Blocks on the disk. Temporary folders of
    killed writes in the parent folder of `target` are deleted before the write.

    Args:
        source: a file or folder. Files: Lightning's `.ckpt`, and `.pt`, `.pth`, `.bin` or `.safetensors` with a state
            dict, which may be under the key `state_dict`, `model_state_dict` or `model`. Folders: Accelerate's
            `save_state`, Hugging Face safetensors, torch.distributed.checkpoint, and DeepSpeed's `save_checkpoint`.
        target: the checkpoint folder to create. It must not exist.
        options: see `ConvertOptions`.

    Raises:
        FileNotFoundError: `source` does not exist.
        CheckpointError: `source` has another format, is damaged, or contains objects that need `trust_pickle` or
            `drop_unknown` (the message lists the objects), the names or classes in `options` do not fit the optimizers,
            or `target` exists or cannot be written.
    """
    source = Path(source)
    target = Path(target)
    options = options or ConvertOptions()
    if not source.exists():
        raise FileNotFoundError(f"{source} does not exist.")
    if target.exists():
        raise CheckpointError(f"{target} exists; it is not replaced. Choose another name.")
    notes: list[str] = []
    with reading(source):
        if source.is_dir():
            source_kind, snapshot = _from_folder(source, options, notes)
        else:
            source_kind, snapshot = _from_file(source, options, notes)
        state = TrainState()
        state.load_dict(snapshot.state)
        if options.step is not None:
            state.step = options.step
        if options.epoch is not None:
            state.epoch = options.epoch
        snapshot.state = state.to_dict()
        snapshot.trainer = {key: _savable(value, key, notes) for key, value in snapshot.trainer.items()}
        snapshot.trainer["converted_from"] = source_kind
    try:
        if target.parent.is_dir():
            clean_stale(target.parent)
        write_checkpoint(target, snapshot)
    except (OSError, MemoryError, RuntimeError) as error:  # torch raises RuntimeError without memory
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{target} cannot be written: {shortened(error)}.") from error
    return Converted(
        path=target,
        source=source_kind,
        kind=snapshot.kind,
        step=state.step,
        epoch=state.epoch,
        num_tensors=sum(isinstance(value, torch.Tensor) for value in (snapshot.model or {}).values()),
        notes=notes,
    )


def _from_file(path: Path, options: ConvertOptions, notes: list[str]) -> tuple[Source, Snapshot]:
    if path.suffix == ".safetensors":
        return "state dict", _weights_only(read_safetensors(path, copy=False), notes)
    tree = _read_pickled(path, options, notes)
    if isinstance(tree, Mapping) and _is_lightning(tree):
        return "lightning", _from_lightning(tree, options, notes)
    return "state dict", _weights_only(_find_state_dict(tree, path, notes), notes)


def _is_lightning(tree: Mapping[str, Any]) -> bool:
    if _LIGHTNING_VERSION in tree:
        return True
    return "state_dict" in tree and ("loops" in tree or "lr_schedulers" in tree)


def _from_folder(path: Path, options: ConvertOptions, notes: list[str]) -> tuple[Source, Snapshot]:
    names = {entry.name for entry in path.iterdir()}
    if MANIFEST in names:
        raise CheckpointError(f"{path} is a Trainwright checkpoint already. It needs no conversion.")
    # Accelerate comes first, because its folder may contain the sharded weights of FSDP or DeepSpeed, or safetensors.
    if any(_ACCELERATE_ONLY.fullmatch(name) for name in names):
        return "accelerate", _from_accelerate(path, names, options, notes)
    sharded = read_sharded(path)
    if sharded is not None:
        return sharded.source, _from_sharded(sharded.load(), options, notes)
    if names & {MODEL_INDEX, SINGLE_FILE}:
        return "state dict", _weights_only(read_model(path, copy=False), notes)
    raise CheckpointError(
        f"{path} cannot be converted. Pass a folder of Accelerate's save_state, of torch.distributed.checkpoint (with "
        f"{METADATA}) or of DeepSpeed (with {LATEST}), or a folder with {SINGLE_FILE} or {MODEL_INDEX}. "
        f"This one has: {', '.join(sorted(names)[:10]) or 'nothing'}."
    )


def _from_lightning(tree: Mapping[str, Any], options: ConvertOptions, notes: list[str]) -> Snapshot:
    weights = _state_dict(tree["state_dict"])
    state = _lightning_progress(tree, notes)
    callbacks = tree.get("callbacks") or {}
    if callbacks:
        # A key has the callback's name and arguments, as in "ModelCheckpoint{'monitor': 'loss'}".
        names = [str(key).partition("{")[0] for key in callbacks]
        notes.append(f"The states of Lightning's callbacks are skipped: {', '.join(names)}.")
    if tree.get("datamodule_hyper_parameters"):
        notes.append("The data module's hyper-parameters are skipped.")
    trainer: dict[str, Any] = {
        "hyper_parameters": tree.get("hyper_parameters") or {},
        "task": {key: value for key, value in tree.items() if key not in _LIGHTNING_KEYS},
    }
    # Lightning stores the name of the constructor's argument that received all hyper-parameters as one object. The name
    # is "kwargs" if each hyper-parameter was an argument of its own.
    if tree.get("hparams_name") not in (None, "kwargs"):
        trainer["hyper_parameters_name"] = str(tree["hparams_name"])
    return _with_optimizers(
        Snapshot(state=state.to_dict(), model=weights, trainer=trainer),
        optimizer_states=list(tree.get("optimizer_states") or []),
        schedulers=list(tree.get("lr_schedulers") or []),
        # The second name is that of older versions of Lightning.
        scaler=tree.get("MixedPrecision") or tree.get("native_amp_scaling_state"),
        ordered=True,
        options=options,
        notes=notes,
    )


def _lightning_progress(tree: Mapping[str, Any], notes: list[str]) -> TrainState:
    """Return the counts of steps and batches, and the number of the epoch that a resume starts.

    A file that was saved within an epoch restarts the epoch, because Lightning's data order cannot be resumed. An empty
    `tree` results in zeros.
    """
    state = TrainState(step=int(tree.get("global_step", 0)), epoch=int(tree.get("epoch", 0)))
    fit = (tree.get("loops") or {}).get("fit_loop", {})
    # For example, {"total": {"completed": 250, ...}, "current": {"completed": 50, ...}, "is_last_batch": False}.
    # "total" counts since the first epoch, and "current" since the start of the epoch.
    batches = fit.get("epoch_loop.batch_progress", {})
    state.batches = int(batches.get("total", {}).get("completed", 0))
    epochs = (fit.get("epoch_progress") or {}).get("current", {})
    # Lightning counts an epoch as ready before its first batch, as processed after its last batch and validation, and
    # as completed after the hooks for its end, in which it saves. An epoch is therefore finished if it is processed.
    # Files of the validation after the last batch count it only as ready.
    state.epoch = max(state.epoch, int(epochs.get("processed", 0)))
    batches_in_epoch = int(batches.get("current", {}).get("completed", 0))
    if batches.get("is_last_batch", False):
        state.epoch = max(state.epoch, int(epochs.get("ready", 0)))
    elif batches_in_epoch:
        notes.append(
            f"The file was saved {batches_in_epoch} batches into epoch {state.epoch}. A resume restarts that epoch, "
            "since Trainwright's data order differs from Lightning's."
        )
    if len(tree.get("optimizer_states") or []) > 1:
        notes.append(
            "Lightning counts the steps of every optimizer separately, and Trainwright counts one step for all. Set "
            "the step with --step if that matters."
        )
    return state


def _from_accelerate(path: Path, names: set[str], options: ConvertOptions, notes: list[str]) -> Snapshot:
    if names & {"model_1.safetensors", "pytorch_model_1.bin", "pytorch_model_1", f"{FSDP_MODEL}1"}:
        raise CheckpointError(
            f"{path} holds several models, and a checkpoint holds one task. Convert each model's file separately, "
            "and load their weights by name in the task."
        )
    sharded = read_sharded(path)
    weights: Mapping[str, Any]
    ordered = True  # safetensors files do not preserve the order of the model's modules; see `named_from_positions`
    if sharded is not None:
        weights = sharded.load().weights
        notes.extend(sharded.notes)
    elif names & {MODEL_INDEX, SINGLE_FILE}:
        weights = read_model(path, copy=False)
        ordered = False
    elif "pytorch_model.bin" in names:
        weights = _read_pickled(path / "pytorch_model.bin", options, notes)
    elif "pytorch_model_fsdp.bin" in names:
        weights = _read_pickled(path / "pytorch_model_fsdp.bin", options, notes)
    else:
        raise CheckpointError(
            f"{path} has no {SINGLE_FILE}, {MODEL_INDEX} or pytorch_model.bin; its weights are missing."
        )
    contents: dict[str, Any] = {}  # by file name
    # `scheduler_2.bin` is before `scheduler_10.bin`: the order in which the objects were prepared.
    for name in sorted(names, key=lambda name: (_number(name), name)):
        if _ACCELERATE.fullmatch(name):
            contents[name] = _read_pickled(path / name, options, notes)
    optimizer_states = _numbered(contents, "optimizer") if sharded is None else sharded.optimizers
    state = TrainState(step=_most_steps(optimizer_states))
    if sharded is not None and sharded.step is not None:
        state.step = sharded.step
    origin = "the optimizer's step count" if state.step else "unknown"
    if options.step is None:
        notes.append(f"Accelerate does not save the step; it is {state.step} ({origin}). Change it with --step.")
    notes.append("Accelerate does not save the epoch; a resume starts a new one. Set the finished epochs with --epoch.")
    schedulers = _numbered(contents, "scheduler")
    rng = []  # one dict for each process, which is empty if one of its states is missing
    custom = {}
    for name, content in contents.items():
        if name.startswith("random_states_"):
            rng.append(accelerate_rng(content))
        elif name.startswith("custom_checkpoint_"):
            custom[Path(name).stem] = content
    if len(rng) > 1 and schedulers:
        notes.append(
            f"Accelerate by default steps schedulers once per process ({len(rng)}), and Trainwright once per step. "
            "Check the learning rate of the resumed run."
        )
    return _with_optimizers(
        Snapshot(state=state.to_dict(), model=_state_dict(weights), trainer={"hyper_parameters": {}, "task": custom}),
        optimizer_states=optimizer_states,
        schedulers=schedulers,
        scaler=contents.get("scaler.pt"),
        ordered=ordered,
        options=options,
        notes=notes,
        # A checkpoint has the states of all processes or of none.
        rng=rng if all(rng) else [],
    )


def _number(name: str) -> int:
    """Return 3 for `scheduler_3.bin`, and 0 for `scheduler.bin`."""
    match = re.search(r"_(\d+)\.", name)
    return int(match[1]) if match else 0


def _numbered(contents: Mapping[str, Any], stem: str) -> list[Any]:
    """Return the contents of `{stem}.bin`, `{stem}_1.bin`, and so on, in the order of `contents`."""
    return [content for name, content in contents.items() if re.fullmatch(rf"{stem}(_\d+)?\.bin", name)]


def _most_steps(optimizer_states: list[Any]) -> int:
    return max(map(steps_of, optimizer_states), default=0)


def _from_sharded(sharded: Sharded, options: ConvertOptions, notes: list[str]) -> Snapshot:
    notes.extend(sharded.notes)
    # `progress` is empty, and all counts are 0, unless Lightning wrote the folder.
    state = _lightning_progress(sharded.progress, notes)
    if not state.step:
        state.step = _most_steps(sharded.optimizers)
    if sharded.step is not None:
        state.step = sharded.step
    elif not sharded.progress and options.step is None:
        notes.append(f"The source does not store the step; the optimizer counts {state.step}. Change it with --step.")
    if not sharded.progress:
        notes.append(
            "The source does not store the epoch; a resume starts a new one. Set the finished epochs with --epoch."
        )
    trainer = {"hyper_parameters": sharded.progress.get("hyper_parameters") or {}, "task": {}}
    return _with_optimizers(
        Snapshot(state.to_dict(), _state_dict(sharded.weights), trainer=trainer),
        optimizer_states=sharded.optimizers,
        schedulers=sharded.schedulers,
        scaler=None,
        ordered=True,
        options=options,
        notes=notes,
    )


def _with_optimizers(
    snapshot: Snapshot,
    *,
    optimizer_states: list[Any],
    schedulers: list[Any],
    scaler: object,
    ordered: bool,
    options: ConvertOptions,
    notes: list[str],
    rng: Sequence[Any] = (),
) -> Snapshot:
    """Add what a resume needs to `snapshot`, and return it.

    Its kind becomes `"full"`. If the source has no optimizers, or the parameter names or the class of an optimizer are
    unknown, its kind becomes `"weights"` and nothing is added.

    Args:
        snapshot: the progress, the model, and a dict `trainer`, to which entries are added.
        optimizer_states: a torch state dict for each optimizer, with positions or names.
        schedulers: the states of learning-rate schedules.
        scaler: the state of the gradient scaler, or None.
        ordered: see `named_from_positions`.
        options: the user's options.
        notes: list to which sentences are added.
        rng: RNG states of each process. Default: none.
    """
    snapshot.kind = "weights"
    if not optimizer_states:
        notes.append("The source has no optimizer, so that the result holds weights only.")
        return snapshot
    for option in ("param_names", "optimizer_classes"):
        num_entries = len(getattr(options, option))
        if num_entries not in (0, len(optimizer_states)):
            raise CheckpointError(
                f"{option} has {num_entries} entries, expected one for each of {len(optimizer_states)} optimizers."
            )
    optimizers = []
    for number, state in enumerate(optimizer_states):
        try:
            tree = named_from_positions(
                state,
                snapshot.model or {},
                ordered=ordered,
                names=options.param_names[number] if options.param_names else None,
                class_name=options.optimizer_classes[number] if options.optimizer_classes else None,
            )
        except NamesUnknown as error:
            notes.append(
                f"Weights only: the state of optimizer {number} cannot be keyed by name: {error} {error.advice}"
            )
            return snapshot
        optimizers.append(_savable(tree, f"optimizer {number}", notes))
    snapshot.kind = "full"
    snapshot.optimizers = optimizers
    snapshot.trainer |= {
        "callbacks": {},
        "schedulers": schedulers,
        "strategy": {} if scaler is None else {"scaler": scaler},
        "data": {},  # a resume restarts the epoch
        "loggers": [],
        "datamodule": {},
        "seed": 0,  # of the data order; every resume needs the same one
        "run_id": secrets.token_hex(8),
    }
    snapshot.rng = list(rng)
    snapshot.world_size = len(rng)
    if not rng:
        notes.append("The source has no states of random number generators; a resume seeds them again.")
    return snapshot


def _weights_only(weights: object, notes: list[str]) -> Snapshot:
    notes.append("The source has weights only.")
    return Snapshot(model=_state_dict(weights), trainer={"hyper_parameters": {}}, kind="weights")


def _state_dict(values: object) -> dict[str, Any]:
    """Return a state dict without the name prefixes of DDP and `torch.compile`."""
    if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
        raise CheckpointError(f"the weights are a {type(values).__name__}, expected a dict of tensors by name.")
    # DDP adds the prefix to all names. If only some names have it, the model has a child `module`.
    if all(name.startswith("module.") for name in values):
        values = {name.removeprefix("module."): value for name, value in values.items()}
    return {plain_name(name): value for name, value in values.items()}


def _find_state_dict(tree: object, path: Path, notes: list[str]) -> Mapping[str, Any]:
    """Return the state dict in the content of the file `path`: the content itself, or the value of a usual key."""
    if isinstance(tree, torch.nn.Module):  # with `trust_pickle`
        return tree.state_dict()
    if not isinstance(tree, Mapping):
        raise CheckpointError(f"{path} has no state dict: it is a {type(tree).__name__}.")
    if tree and all(isinstance(value, torch.Tensor) for value in tree.values()):
        return tree
    for key in _NESTED_KEYS:
        nested = tree.get(key)
        if isinstance(nested, Mapping) and _has_tensors(nested):
            skipped = [str(other) for other in tree if other != key]
            if skipped:
                notes.append(f"The weights are those under {key!r}; skipped: {', '.join(skipped)}.")
            return nested
    if _has_tensors(tree):
        return tree
    keys = ", ".join(map(str, list(tree)[:10]))
    raise CheckpointError(f"{path} has no state dict: it is a {type(tree).__name__} with the keys {keys}.")


def _has_tensors(values: Mapping[str, Any]) -> bool:
    return any(isinstance(value, torch.Tensor) for value in values.values())


def _read_pickled(path: Path, options: ConvertOptions, notes: list[str]) -> Any:
    """Return the content of a file of `torch.save`, without unknown objects if `options` permit to skip them."""
    if options.trust_pickle:
        try:
            # The caller trusts the file: this may run code from it.
            return torch.load(path, map_location="cpu", weights_only=False)
        except (pickle.UnpicklingError, EOFError, ImportError, AttributeError, RuntimeError, OSError) as error:
            raise CheckpointError(f"{path} cannot be unpickled: {error}") from error
    tree, unknown = read_torch_file(path)
    if not unknown:
        return tree
    if not options.drop_unknown:
        more = ", ..." if len(unknown) > 8 else ""
        raise CheckpointError(
            f"{path} names {', '.join(unknown[:8])}{more}, which is neither a tensor "
            "nor plain data. No code from the file was run. Pass --drop-unknown to skip such values without running "
            "code, or --trust-pickle to unpickle the file, which runs its code, if you trust its author."
        )
    dropped: list[str] = []
    tree = _without_unknown(tree, "", dropped)
    more = ", ..." if len(dropped) > 20 else ""
    notes.append(f"{path.name}: skipped: {', '.join(dropped[:20])}{more}.")
    return tree


def _without_unknown(tree: object, path: str, dropped: list[str]) -> Any:
    """Return `tree` without the dict entries that contain placeholders, and add their paths to `dropped`.

    An entry is dropped if its key or value is a placeholder, or if its value is a list, tuple or set with a
    placeholder. Dicts and lists of dicts keep their other entries.
    """
    if isinstance(tree, dict):
        known = {}
        for key, value in tree.items():
            entry_path = f"{path}.{key}" if path else str(key)
            if isinstance(key, Placeholder) or _is_unknown(value):
                dropped.append(entry_path)
            else:
                known[key] = _without_unknown(value, entry_path, dropped)
        return known
    # A torch.Size is a tuple of numbers, which cannot be created from other objects.
    if isinstance(tree, (list, tuple)) and not isinstance(tree, torch.Size):
        items = [_without_unknown(value, f"{path}[{number}]", dropped) for number, value in enumerate(tree)]
        return type(tree)(items)
    if isinstance(tree, Placeholder):
        raise CheckpointError(
            f"the file is a {tree.name}, which cannot be read without running code of the file. Save its state dict."
        )
    return tree


def _is_unknown(value: object) -> bool:
    """Return whether a value is a placeholder or a container with one. Entries of dicts are not considered."""
    if isinstance(value, (list, tuple, set, frozenset)):
        return any(_is_unknown(item) for item in value)
    return isinstance(value, Placeholder)


def _savable(value: object, path: str, notes: list[str]) -> Any:
    """Return `value` without dict entries that a checkpoint cannot contain. Add a note for each such entry.

    A `CheckpointError` is raised if `value` itself, or an item of a list, cannot be stored. The caller, which is this
    function for nested values, then drops the closest dict entry around it. A tuple with dropped entries becomes a
    list.
    """
    try:
        encode(value)
        return value
    except CheckpointError:
        if not isinstance(value, (Mapping, list, tuple)):
            raise
    # A part of `value` cannot be stored.
    if not isinstance(value, Mapping):
        return [_savable(item, f"{path}[{number}]", notes) for number, item in enumerate(value)]
    savable = {}
    for key, item in value.items():
        try:
            encode({key: None})  # raises for a key that cannot be stored
            savable[key] = _savable(item, f"{path}.{key}", notes)
        except CheckpointError as error:
            notes.append(f"Skipped: {path}.{key}: {error}")
    return savable


def read_names(lines: Iterable[str]) -> list[str]:
    """Return the parameter names in the lines of a text file with one name per line. Blank lines are skipped."""
    return [line.strip() for line in lines if line.strip()]
