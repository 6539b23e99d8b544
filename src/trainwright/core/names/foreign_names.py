"""Counterparts of Lightning's and Accelerate's names, and advice for names without a counterpart.

The tables are used for errors of `trainwright.<name>`, for objects of those libraries that are passed to a Trainer, for
class paths in configuration files, and for `trainwright migrate`. Names that are the same in Trainwright are not
listed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TypeVar

from trainwright.core.errors import ConfigurationError, nearest

LIBRARIES = {
    "lightning": "Lightning",
    "pytorch_lightning": "Lightning",
    "lightning_fabric": "Lightning",
    "lightning_utilities": "Lightning",
    "accelerate": "Accelerate",
}
"""Top-level package → the library's name."""

# Older or separate top-level package → the module of the package `lightning` with the same names.
_CANONICAL = {
    "pytorch_lightning": "lightning.pytorch",
    "lightning_fabric": "lightning.fabric",
    "lightning_utilities": "lightning.pytorch.utilities",
}

# Modules of accelerate for which Trainwright has a module of the same name.
_EQUAL_MODULES = (
    "accelerator big_modeling commands.launch data_loader hooks inference launchers local_sgd logging optimizer "
    "parallelism_config scheduler state tracking utils"
)

MODULES: Mapping[str, str | None] = {
    "accelerate": "trainwright",
    **{f"accelerate.{name}": f"trainwright.{name}" for name in _EQUAL_MODULES.split()},
    "lightning": "trainwright",
    "lightning.fabric": None,
    **{f"lightning.fabric.{name}": f"trainwright.{name}" for name in ("loggers", "strategies", "utilities")},
    "lightning.pytorch": "trainwright",
    **dict.fromkeys((f"lightning.pytorch.{name}" for name in ("accelerators", "demos", "loops", "plugins")), None),
    **{
        f"lightning.pytorch.{name}": f"trainwright.{name}"
        for name in (
            "callbacks",
            "cli",
            "loggers",
            "profilers",
            "strategies",
            "tuner",
            "utilities",
            "utilities.model_summary",
            "utilities.types",
        )
    },
}
"""Module → Trainwright's module with the same names. An entry also applies to sub-modules without an entry.

None means that Trainwright has no such module: names of this module that Trainwright has elsewhere are other things.
"""

_T = TypeVar("_T")
_FUNCTIONS = "trainwright.utilities.lightning_functions"
_SUMMARY = "model_summary.model_summary"


def _each(names: str, answer: str) -> dict[str, str]:
    """Return a dict from each of the names, separated by spaces, to the same answer."""
    return dict.fromkeys(names.split(), answer)


def _in(module: str, names: str) -> dict[str, str]:
    """Return a dict from each of the names, separated by spaces, to its full name in `module`."""
    return {name: f"{module}.{name}" for name in names.split()}


RENAMED: Mapping[str, Mapping[str, str]] = {
    "Lightning": {
        "CombinedLoader": "trainwright.CombinedLoader",
        "LightningArgumentParser": "trainwright.cli.CLIParser",
        "LightningCLI": "trainwright.CLI",
        "LightningDataModule": "trainwright.DataModule",
        "LightningModule": "trainwright.TaskModule",
        "MisconfigurationException": "trainwright.ConfigurationError",
        "RichModelSummary": "trainwright.callbacks.ModelSummary",
        "SpikeDetection": "trainwright.callbacks.LossSpikeDetector",
        "seed_everything": "trainwright.seed_everything",
        "ThroughputMonitor": "trainwright.callbacks.Throughput",
        **_each(
            "STEP_OUTPUT EVAL_DATALOADERS TRAIN_DATALOADERS OptimizerLRScheduler OptimizerConfig "
            "OptimizerLRSchedulerConfig LRSchedulerConfigType Optimizable "
            "_DEVICE _MAP_LOCATION_TYPE _METRICS _OUT_DICT _PARAMETERS _PATH _PBAR_DICT "
            "_EVALUATE_OUTPUT _PREDICT_OUTPUT _VALUE",
            "typing.Any",
        ),
        **_in("trainwright.trainer.run_state", "RunningStage TrainerFn TrainerStatus"),
        "TrainerState": "trainwright.trainer.run_state.RunState",
        "LightningOptimizer": "trainwright.trainer.optimization.ManualOptimizer",
        "LRSchedulerConfig": "trainwright.core.run.SchedulerConfig",
        # The callback of the same name is another class.
        **dict.fromkeys(
            (f"lightning.pytorch.utilities.{module}.ModelSummary" for module in ("model_summary", _SUMMARY)),
            "trainwright.callbacks.model_summary.summarize",
        ),
        "_LRFinder": "trainwright.callbacks.lr_finder.LRFinder",
        "EarlyStoppingReason": "trainwright.callbacks.early_stopping.EarlyStoppingReason",
        "WriteInterval": "trainwright.callbacks.prediction_writer.WriteInterval",
        "Tqdm": "tqdm.tqdm",
        **_in("trainwright.loggers.logger", "DummyExperiment DummyLogger"),
        # The logger is its own `experiment`.
        "ExperimentWriter": "trainwright.loggers.CSVLogger",
        "HyperparametersMixin": "trainwright.core.hyperparameters.HyperparametersMixin",
        "DataHooks": "trainwright.core.hooks.DataHooks",
        **_each("CheckpointHooks ModelHooks", "trainwright.core.hooks.TaskHooks"),
        "PossibleUserWarning": "trainwright.TrainwrightWarning",
        "LightningDeprecationWarning": "builtins.DeprecationWarning",
        "SIGTERMException": "trainwright.Preempted",
        "is_oom_error": "trainwright.core.host.memory.is_out_of_memory",
        "extract_batch_size": "trainwright.core.tree.batch_size",
        **_in(
            _FUNCTIONS,
            "garbage_collection_cuda get_filesystem get_init_args get_model_size_mb is_overridden isolate_rng "
            "lightning_getattr lightning_hasattr lightning_setattr load_hparams_from_yaml pl_worker_init_function "
            "LRSchedulerTypeTuple rank_zero_debug rank_zero_experiment recursive_detach save_hparams_to_yaml",
        ),
        **_in("trainwright.strategies.lightning_registries", "AcceleratorRegistry StrategyRegistry"),
        **_in(
            "trainwright.utilities.boring_classes",
            "BoringDataModule BoringModel DemoModel ManualOptimBoringModel RandomDataset RandomDictDataset "
            "RandomIterableDataset RandomIterableDatasetWithLen",
        ),
        **_in("lightning_utilities.core.imports", "RequirementCache module_available package_available"),
        "WarningCache": "lightning_utilities.core.rank_zero.WarningCache",
        "Namespace": "jsonargparse.Namespace",
        "ArgsType": "typing.Any",
        "ReduceOp": "torch.distributed.ReduceOp",
        **_each("LRScheduler _TORCH_LRSCHEDULER", "torch.optim.lr_scheduler.LRScheduler"),
        # trainwright.cli has a sub-class, which takes the monitored metric.
        **_each(
            "lightning.fabric.utilities.types.ReduceLROnPlateau lightning.pytorch.utilities.types.ReduceLROnPlateau",
            "torch.optim.lr_scheduler.ReduceLROnPlateau",
        ),
    },
    "Accelerate": {
        "__version__": "trainwright.utils.constants.ACCELERATE_VERSION",
        "set_seed": "trainwright.utils.set_seed",
    },
}
"""Library → its name → the full name of the counterpart, if it differs or is in another module than `MODULES` has.

A name that has different meanings in two modules is listed with its module.
"""


_LIGHTNING = {
    "Checkpoint": "sub-class trainwright.callbacks.ModelCheckpoint, or Callback.",
    **_each(
        "LitLogger NeptuneLogger",
        "sub-class trainwright.loggers.Logger (docs/logging.md, Writing a logger).",
    ),
    "XLAProfiler": "use trainwright.profilers.PyTorchProfiler.",
    "SingleDeviceXLAStrategy": "use trainwright.XLAStrategy().",
    "XLAFSDPStrategy": "use trainwright.XLAStrategy(spmd='fsdp').",
    "ParallelStrategy": "sub-class trainwright.Strategy (docs/extending.md).",
    **_each(
        "BitsandbytesPrecision DeepSpeedPrecision DoublePrecision HalfPrecision MixedPrecision FSDPPrecision "
        "XLAPrecision",
        "pass Trainer(precision=…), for example 'bf16-mixed'; for 8 and 4 bits load_and_quantize_model.",
    ),
    "TransformerEnginePrecision": "pass Trainer(precision='transformer-engine'), or TERecipeKwargs(…).precision().",
    **_each(
        "AsyncCheckpointIO CheckpointIO TorchCheckpointIO XLACheckpointIO",
        "a checkpoint is a folder of safetensors and JSON, written while training continues: Trainer(async_save=…).",
    ),
    **_each(
        "ClusterEnvironment KubeflowEnvironment LSFEnvironment LightningEnvironment MPIEnvironment SLURMEnvironment "
        "TorchElasticEnvironment XLAEnvironment",
        "launchers are found by their environment variables; Trainer(launcher='torchrun' | 'slurm' | 'mpi') names one.",
    ),
    **_each("LayerSync TorchSyncBatchNorm", "pass Trainer(sync_batchnorm=True)."),
    **_each(
        "CPUAccelerator CUDAAccelerator MPSAccelerator XLAAccelerator find_usable_cuda_devices",
        "pass Trainer(accelerator='cpu'), 'gpu' or 'auto', and devices=….",
    ),
    **_each(
        "_MultiProcessingLauncher _SubprocessScriptLauncher _Launcher",
        "the Trainer starts processes itself; Trainer(launcher='torchrun' | 'slurm' | 'mpi') names another launcher.",
    ),
    **_each(
        "RichProgressBarTheme CustomProgress",
        "override open, draw and close of trainwright.callbacks.ProgressBar.",
    ),
    "UnrepeatedDistributedSampler": "evaluations read each sample once; delete the use.",
    "UnrepeatedDistributedSamplerWrapper": "evaluations read each sample once; delete the use.",
    "convert_zero_checkpoint_to_fp32_state_dict": "run trainwright checkpoint convert.",
    "plugins": "strategies, precision and launchers are arguments of Trainer.",
    "accelerators": "pass Trainer(accelerator='cpu'), 'gpu' or 'auto'.",
    "loops": "override hooks of TaskModule, or keep your own loop with trainwright.Accelerator.",
    "demos": "import the models and data sets from trainwright.utilities.boring_classes.",
    "Fabric": "use trainwright.Accelerator: prepare() for setup() and setup_dataloaders(), accelerator.backward(loss).",
    **_each("find_shared_parameters set_shared_parameters", "use find_tied_parameters and retie_parameters."),
    **_each(
        "disable_possible_user_warnings is_picklable is_shared_filesystem suggested_max_num_workers LightningEnum "
        "GradClipAlgorithmType",
        "it has no replacement; delete the use.",
    ),
}

_ACCELERATE = {
    "initialize": "Accelerator(megatron_lm_plugin=…) joins the processes; delete the call.",
    "MSAMPRecipeKwargs": (
        "MS-AMP needs a patched build of an old torch; install torchao and pass AORecipeKwargs with "
        "mixed_precision='fp8'."
    ),
    "AimTracker": "Aim's own reader does not find what was written; sub-class GeneralTracker to use it.",
    **_each(
        "DeepSpeedEngineWrapper DeepSpeedOptimizerWrapper",
        "prepare() returns the model and the optimizer; call accelerator.backward(loss) and optimizer.step().",
    ),
    "install_xla": "install torch_xla with pip; delete the use.",
}

ANSWERS: Mapping[str, Mapping[str, str]] = {"Lightning": _LIGHTNING, "Accelerate": _ACCELERATE}
"""Library → its name without a counterpart in Trainwright → advice on what to use instead.

The advice for a package of Lightning, such as `loops`, is also that for its names.
"""


def canonical(path: str) -> str:
    """Return a dotted path with the library's current package: `pytorch_lightning.x` → `lightning.pytorch.x`."""
    root, dot, rest = path.partition(".")
    return _CANONICAL.get(root, root) + dot + rest


def own_module(module: str) -> str | None:
    """Return Trainwright's module with the names of another library's module. None if it has no counterpart."""
    path = canonical(module)
    while path and path not in MODULES:
        path = path.rpartition(".")[0]
    return MODULES.get(path)


def own_name(path: str) -> str | None:
    """Return the full name of the counterpart of a `path` of Lightning or Accelerate. None if it has no counterpart."""
    path = canonical(path)
    module, _, name = path.rpartition(".")
    renamed = RENAMED[LIBRARIES[path.partition(".")[0]]]
    counterpart = renamed.get(path) or renamed.get(name)
    if counterpart is not None:
        return counterpart
    own = own_module(module)
    if own is None or name not in public_names(own):
        return None
    return f"{own}.{name}"


def public_names(module: str) -> Iterable[str]:
    """Return the public names of a package of Trainwright, or nothing if the package does not exist."""
    try:
        names: Iterable[str] = getattr(import_module(module), "__all__", ())
    except ImportError:
        return ()
    return names


def answer(name: str, library: str | None = None) -> str | None:
    """Return a sentence with the replacement of another library's name. None for an unknown name.

    `library` is a key of `ANSWERS`. Default: None, which searches all libraries.
    """
    for known in [library] if library else ANSWERS:
        if name in RENAMED[known]:
            return f"{name} of {known} is {RENAMED[known][name]} here."
        if name in ANSWERS[known]:
            return f"{name} of {known} is not here: {ANSWERS[known][name]}"
    return None


def answer_for(path: str) -> str:
    """Return a sentence with advice for a `path` of Lightning that has no counterpart."""
    module, _, name = path.rpartition(".")
    # From the most specific entry to the packages that contain the name: `loops` for `lightning.pytorch.loops.FitLoop`.
    for key in (path, name, *reversed(module.split("."))):
        if key in _LIGHTNING:
            return f"{name} of Lightning is not here: {_LIGHTNING[key]}"
    return f"{path} has no counterpart in Trainwright."


def missing(module: str, name: str, public: Iterable[str]) -> Exception:
    """Return the error for a module's `__getattr__` to raise for a missing name.

    It is an AttributeError, whose text Python would replace in `from module import name`; there it is an ImportError.
    """
    text = f"module {module!r} has no attribute {name!r}"
    advice = None if name.startswith("_") else answer(name)
    hint = nearest(name, public)  # " Did you mean …", or an empty text
    if advice:
        text = f"{text}. {advice}"
    elif hint:
        text = f"{text}.{hint}"
    return ImportError(text, name=module) if _importing() else AttributeError(text, name=name)


def _importing() -> bool:
    """Return whether the code three calls above runs `from … import …`: its current instruction is IMPORT_FROM."""
    # Only the instruction distinguishes `from module import name` from `module.name` and `hasattr`. These need an
    # AttributeError, whose text the import statement drops, and no class can be both errors, because their layouts
    # conflict.
    import dis

    # Frames: 0 is this function, 1 is `missing`, 2 is the module's `__getattr__`, 3 is the code that reads the name.
    frame = sys._getframe(3)
    return frame.f_lasti >= 0 and frame.f_code.co_code[frame.f_lasti] == dis.opmap["IMPORT_FROM"]


def check_owner(value: object) -> None:
    """Raise a ConfigurationError for an object of Lightning or Accelerate. The error contains the line to change."""
    for cls in type(value).__mro__:
        library = LIBRARIES.get(cls.__module__.partition(".")[0])
        if library is not None:
            raise ConfigurationError(_foreign_text(type(value), cls, library))


def check_class(argument: str, value: object, kind: type[_T]) -> _T:
    """Return `value` if it is a `kind`, a class of Trainwright. Otherwise raise a ConfigurationError."""
    if not isinstance(value, kind):
        raise ConfigurationError(
            f"{argument} is a {type(value).__module__}.{type(value).__name__}. Pass one trainwright.{kind.__name__}, "
            "which takes the same arguments."
        )
    return value


def _foreign_text(value_class: type, cls: type, library: str) -> str:
    """Return the message for an object of another library.

    Args:
        value_class: the object's class, which may be the user's sub-class of `cls`.
        cls: the class of the library.
        library: the library's name.
    """
    name = cls.__name__
    listed_module = canonical(cls.__module__)  # then the nearest parent module that `MODULES` lists
    while listed_module not in MODULES:
        listed_module = listed_module.rpartition(".")[0]
    own = RENAMED[library].get(name)
    own_module_name = MODULES[listed_module]
    if own is None and own_module_name is not None and name not in ANSWERS[library]:
        own = f"{own_module_name}.{name}"
    text = f"{value_class.__name__} is a {name} of {library}, not of Trainwright"
    if own is None:
        return f"{text}. {answer(name, library) or 'Trainwright cannot use it.'}"
    # The file with the import to change: that of a sub-class. None if the object's class is the library's own.
    file = None
    if value_class is not cls:
        file = getattr(sys.modules.get(value_class.__module__), "__file__", None)
    new_module, _, new_name = own.rpartition(".")
    if file is not None and "site-packages" in Path(file).parts:
        package = value_class.__module__.partition(".")[0]
        return (
            f"{text}. It belongs to the installed package {package}, which Trainwright does not change. Call "
            f"trainwright.as_{library.lower()}() before {package} is imported, or define a {new_name} in your program "
            f"that has a {value_class.__name__} as an attribute and calls its methods."
        )
    return (
        f"{text}. Change `from {listed_module} import {name}` to `from {new_module} import {new_name}`"
        f"{f' in {file}' if file else ''}, or run: trainwright migrate {file or 'FILE'}"
    )
