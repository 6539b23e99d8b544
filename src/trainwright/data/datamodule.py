"""DataModule: the data of a run, independent of the task."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from trainwright.core.hooks import DataHooks
from trainwright.core.host.device_types import properties
from trainwright.core.hyperparameters import DATAMODULE_HYPER_PARAMETERS, HyperparametersMixin
from trainwright.core.registry import import_object
from trainwright.data.combined import is_tree, leaves_of, map_leaves

# The reader of checkpoints is in another layer. It is looked up when a checkpoint is loaded, not imported here.
_LOAD_DATA = "trainwright.checkpoint.load_task:load_data_from_checkpoint"


class DataModule(HyperparametersMixin, DataHooks):
    """Base class for data modules, which download, split and load the data of a run.

    Pass a sub-class to `Trainer.fit(task, datamodule=...)`. The loaders are plain `DataLoader`s, which are divided over
    ranks automatically. Every hook is optional. `prepare_data` runs on one process of each node (see
    `prepare_data_per_node`), other hooks on every rank. `save_hyperparameters()` and `hparams` work as on a task.

    Attributes:
        trainer: the Trainer of the current or last stage; None before the first stage.
        prepare_data_per_node: call `prepare_data` once on each node. False calls it once in total, for a shared file
            system.
    """

    CHECKPOINT_HYPER_PARAMS_KEY = DATAMODULE_HYPER_PARAMETERS

    prepare_data_per_node: bool = True
    trainer: Any = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state for checkpoints: JSON-compatible values and tensors. Default: an empty dict."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the result of `state_dict`."""

    def on_exception(self, exception: BaseException) -> None:
        """Called on each rank whose run ends with `exception`. This hook must not communicate."""

    @property
    def name(self) -> str:
        """The name of the class."""
        return type(self).__name__

    @classmethod
    def load_from_checkpoint(
        cls,
        checkpoint_path: str | Path,
        map_location: object = None,
        hparams_file: str | Path | None = None,
        weights_only: bool | None = None,
        **overrides: object,
    ) -> Self:
        """Build the data module from the hyper-parameters and the state in a checkpoint.

        Args:
            checkpoint_path: the checkpoint's folder, or its URL.
            map_location, weights_only: Accepted without effect: the state is on the host, and checkpoints contain no
                pickles. Default: None.
            hparams_file: a YAML or JSON file of hyper-parameters, instead of the checkpoint's. Default: None.
            overrides: arguments of `__init__` that replace, or add to, the saved hyper-parameters.

        Raises:
            FileNotFoundError: the checkpoint does not exist.
            CheckpointError: the checkpoint is damaged, or lacks arguments of `__init__`.
        """
        load = import_object(_LOAD_DATA)
        return load(  # type: ignore[no-any-return]  # looked up by name; see _LOAD_DATA
            cls, checkpoint_path, hparams_file=hparams_file, hparams_overrides=overrides
        )

    @classmethod
    def from_datasets(
        cls,
        train_dataset: object = None,
        val_dataset: object = None,
        test_dataset: object = None,
        predict_dataset: object = None,
        batch_size: int = 1,
        num_workers: int = 0,
        **datamodule_kwargs: object,
    ) -> Self:
        """Return a data module whose loaders read these data sets. A map-style training set is shuffled.

        Args:
            train_dataset, val_dataset, test_dataset, predict_dataset: a data set, or a list, tuple or dict of data
                sets, for which the hook returns loaders in the same structure. None uses the hook of the class.
                Default: None.
            batch_size: samples in a batch of each loader. Default: 1.
            num_workers: worker processes of each loader. Default: 0.
            **datamodule_kwargs: arguments of the class's `__init__`. `batch_size` and `num_workers` are also passed to
                it if it accepts them.
        """
        loader_arguments = {"batch_size": batch_size, "num_workers": num_workers}
        module = cls(**_accepted(cls, loader_arguments), **datamodule_kwargs)
        datasets_of = {"train": train_dataset, "val": val_dataset, "test": test_dataset, "predict": predict_dataset}
        for stage, datasets in datasets_of.items():
            if datasets is None:
                continue
            # Partial functions and not closures, so that the module can be pickled for spawned processes.
            make_loader = partial(_loader_of, batch_size=batch_size, num_workers=num_workers, shuffle=stage == "train")
            if _holds_data_sets(datasets):
                hook = partial(map_leaves, make_loader, datasets)
            else:
                hook = partial(make_loader, datasets)
            setattr(module, f"{stage}_dataloader", hook)
        return module


def _loader_of(dataset: Dataset[Any], *, batch_size: int, num_workers: int, shuffle: bool) -> DataLoader[Any]:
    return DataLoader(
        dataset,
        batch_size=batch_size,
        shuffle=shuffle and not isinstance(dataset, IterableDataset),
        num_workers=num_workers,
        pin_memory=_has_pinned_memory(),
    )


def _has_pinned_memory() -> bool:
    """Return whether loaders can pin batches for this machine's accelerator. False for MPS (torch 2.13)."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator is not None and properties(accelerator.type).copies_beside


def _holds_data_sets(tree: object) -> bool:
    """Return whether a sequence or mapping contains data sets. A list of samples is itself a data set."""
    return is_tree(tree) and any(isinstance(leaf, Dataset) for leaf in leaves_of(tree))


def _accepted(cls: Callable[..., Any], candidates: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `candidates` that the constructor accepts."""
    parameters = inspect.signature(cls).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(candidates)
    return {name: value for name, value in candidates.items() if name in parameters}
