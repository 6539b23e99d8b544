"""Names that programs import from the modules of Lightning.

`NAMES` follows Lightning `constants.LIGHTNING_VERSION`. It contains the modules and names that programs and libraries
are known to import, not all of Lightning's, and some names of earlier versions (`PrecisionPlugin`). Under
`as_lightning()`, `lightning_stand_in` provides these modules only: an import of another module or name fails.

To support a further name, append it to the text of its module here. If the name differs in Trainwright or has no
counterpart, add the counterpart or the advice to `foreign_names`. A name that `foreign_names.own_name` does not find
becomes a class that raises an error with the advice when it is used.

The constants above `NAMES` are names that several modules contain, because Lightning's packages re-export those of
their sub-modules.
"""

from __future__ import annotations

from collections.abc import Mapping

_TOP_LEVEL = "Callback LightningDataModule LightningModule Trainer seed_everything"
_CALLBACKS = (
    "BackboneFinetuning BaseFinetuning BasePredictionWriter BatchSizeFinder Callback Checkpoint DeviceStatsMonitor "
    "EMAWeightAveraging EarlyStopping GradientAccumulationScheduler LambdaCallback LearningRateFinder "
    "LearningRateMonitor ModelCheckpoint ModelPruning ModelSummary OnExceptionCheckpoint ProgressBar RichModelSummary "
    "RichProgressBar SpikeDetection StochasticWeightAveraging TQDMProgressBar ThroughputMonitor Timer WeightAveraging"
)
CLUSTER_ENVIRONMENTS = (
    "ClusterEnvironment KubeflowEnvironment LSFEnvironment LightningEnvironment MPIEnvironment SLURMEnvironment "
    "TorchElasticEnvironment XLAEnvironment"
)
_IO = "AsyncCheckpointIO CheckpointIO TorchCheckpointIO XLACheckpointIO"
_PRECISION = (
    "BitsandbytesPrecision DeepSpeedPrecision DoublePrecision FSDPPrecision HalfPrecision MixedPrecision Precision "
    "TransformerEnginePrecision XLAPrecision"
)
_ACCELERATORS = (
    "Accelerator AcceleratorRegistry CPUAccelerator CUDAAccelerator MPSAccelerator XLAAccelerator "
    "find_usable_cuda_devices"
)
_STRATEGIES = (
    "DDPStrategy DeepSpeedStrategy FSDPStrategy ModelParallelStrategy ParallelStrategy SingleDeviceStrategy "
    "SingleDeviceXLAStrategy Strategy StrategyRegistry XLAFSDPStrategy XLAStrategy"
)
_LOGGERS = "CSVLogger CometLogger LitLogger Logger MLFlowLogger NeptuneLogger TensorBoardLogger WandbLogger"
_RANK_ZERO = (
    "rank_prefixed_message rank_zero_debug rank_zero_deprecation rank_zero_info rank_zero_only rank_zero_warn "
    "WarningCache LightningDeprecationWarning"
)
_SEED = "isolate_rng pl_worker_init_function reset_seed seed_everything"
_FABRIC_TYPES = (
    "LRScheduler Optimizable ReduceLROnPlateau ReduceOp _DEVICE _MAP_LOCATION_TYPE _PARAMETERS _PATH _TORCH_LRSCHEDULER"
)
_CLOUD_IO = "get_filesystem _atomic_save _is_dir _load"
_MISCONFIGURATION = "MisconfigurationException"

NAMES: Mapping[str, str] = {
    "lightning": f"{_TOP_LEVEL} Fabric",
    # Lightning's Trainer
    "lightning.pytorch": _TOP_LEVEL,
    "lightning.pytorch.accelerators": _ACCELERATORS,
    "lightning.pytorch.accelerators.accelerator": "Accelerator",
    "lightning.pytorch.accelerators.cpu": "CPUAccelerator",
    "lightning.pytorch.accelerators.cuda": "CUDAAccelerator",
    "lightning.pytorch.accelerators.mps": "MPSAccelerator",
    "lightning.pytorch.accelerators.xla": "XLAAccelerator",
    "lightning.pytorch.callbacks": _CALLBACKS,
    "lightning.pytorch.callbacks.batch_size_finder": "BatchSizeFinder",
    "lightning.pytorch.callbacks.callback": "Callback",
    "lightning.pytorch.callbacks.checkpoint": "Checkpoint",
    "lightning.pytorch.callbacks.device_stats_monitor": "DeviceStatsMonitor",
    "lightning.pytorch.callbacks.early_stopping": "EarlyStopping EarlyStoppingReason",
    "lightning.pytorch.callbacks.finetuning": "BackboneFinetuning BaseFinetuning",
    "lightning.pytorch.callbacks.gradient_accumulation_scheduler": "GradientAccumulationScheduler",
    "lightning.pytorch.callbacks.lambda_function": "LambdaCallback",
    "lightning.pytorch.callbacks.lr_finder": "LearningRateFinder",
    "lightning.pytorch.callbacks.lr_monitor": "LearningRateMonitor",
    "lightning.pytorch.callbacks.model_checkpoint": "ModelCheckpoint",
    "lightning.pytorch.callbacks.model_summary": "ModelSummary",
    "lightning.pytorch.callbacks.on_exception_checkpoint": "OnExceptionCheckpoint",
    "lightning.pytorch.callbacks.prediction_writer": "BasePredictionWriter WriteInterval",
    "lightning.pytorch.callbacks.progress": "ProgressBar RichProgressBar TQDMProgressBar",
    "lightning.pytorch.callbacks.progress.progress_bar": "ProgressBar",
    "lightning.pytorch.callbacks.progress.rich_progress": "CustomProgress RichProgressBar RichProgressBarTheme",
    "lightning.pytorch.callbacks.progress.tqdm_progress": "TQDMProgressBar Tqdm",
    "lightning.pytorch.callbacks.pruning": "ModelPruning",
    "lightning.pytorch.callbacks.rich_model_summary": "RichModelSummary",
    "lightning.pytorch.callbacks.spike": "SpikeDetection",
    "lightning.pytorch.callbacks.stochastic_weight_avg": "StochasticWeightAveraging",
    "lightning.pytorch.callbacks.throughput_monitor": "ThroughputMonitor",
    "lightning.pytorch.callbacks.timer": "Timer",
    "lightning.pytorch.callbacks.weight_averaging": "EMAWeightAveraging WeightAveraging",
    "lightning.pytorch.cli": (
        "ArgsType LRSchedulerCallable LRSchedulerTypeTuple LRSchedulerTypeUnion LightningArgumentParser LightningCLI "
        "Namespace OptimizerCallable ReduceLROnPlateau SaveConfigCallback instantiate_class"
    ),
    "lightning.pytorch.core": "LightningDataModule LightningModule",
    "lightning.pytorch.core.datamodule": "LightningDataModule",
    "lightning.pytorch.core.hooks": "CheckpointHooks DataHooks ModelHooks",
    "lightning.pytorch.core.mixins": "HyperparametersMixin",
    "lightning.pytorch.core.mixins.hparams_mixin": "HyperparametersMixin",
    "lightning.pytorch.core.module": "LightningModule",
    "lightning.pytorch.core.optimizer": "LightningOptimizer",
    "lightning.pytorch.core.saving": "get_filesystem load_hparams_from_yaml save_hparams_to_yaml",
    "lightning.pytorch.demos": "",
    "lightning.pytorch.demos.boring_classes": (
        "BoringDataModule BoringModel DemoModel ManualOptimBoringModel RandomDataset RandomDictDataset "
        "RandomIterableDataset RandomIterableDatasetWithLen"
    ),
    "lightning.pytorch.loggers": _LOGGERS,
    "lightning.pytorch.loggers.comet": "CometLogger",
    "lightning.pytorch.loggers.csv_logs": "CSVLogger ExperimentWriter",
    "lightning.pytorch.loggers.litlogger": "LitLogger",
    "lightning.pytorch.loggers.logger": "DummyExperiment DummyLogger Logger merge_dicts rank_zero_experiment",
    "lightning.pytorch.loggers.mlflow": "MLFlowLogger",
    "lightning.pytorch.loggers.neptune": "NeptuneLogger",
    "lightning.pytorch.loggers.tensorboard": "TensorBoardLogger",
    "lightning.pytorch.loggers.utilities": "_scan_checkpoints",
    "lightning.pytorch.loggers.wandb": "WandbLogger",
    "lightning.pytorch.loops": "_EvaluationLoop _FitLoop _Loop _PredictionLoop _TrainingEpochLoop",
    "lightning.pytorch.loops.evaluation_loop": "_EvaluationLoop",
    "lightning.pytorch.loops.fetchers": "_DataFetcher _DataLoaderIterDataFetcher _PrefetchDataFetcher",
    "lightning.pytorch.loops.fit_loop": "_FitLoop",
    "lightning.pytorch.loops.loop": "_Loop",
    "lightning.pytorch.loops.optimization": "_AutomaticOptimization _ManualOptimization",
    "lightning.pytorch.loops.optimization.closure": "AbstractClosure OutputResult",
    "lightning.pytorch.loops.prediction_loop": "_PredictionLoop",
    "lightning.pytorch.loops.progress": "_BatchProgress _Progress _ProgressTracker",
    "lightning.pytorch.loops.training_epoch_loop": "_TrainingEpochLoop",
    "lightning.pytorch.loops.utilities": "_verify_dataloader_idx_requirement",
    "lightning.pytorch.overrides": "",
    "lightning.pytorch.overrides.distributed": "UnrepeatedDistributedSampler UnrepeatedDistributedSamplerWrapper",
    "lightning.pytorch.plugins": (
        f"{_IO} {_PRECISION} {CLUSTER_ENVIRONMENTS} LayerSync PrecisionPlugin TorchSyncBatchNorm"
    ),
    "lightning.pytorch.plugins.environments": CLUSTER_ENVIRONMENTS,
    "lightning.pytorch.plugins.io": _IO,
    "lightning.pytorch.plugins.io.async_plugin": "AsyncCheckpointIO",
    "lightning.pytorch.plugins.io.checkpoint_plugin": "CheckpointIO",
    "lightning.pytorch.plugins.io.torch_plugin": "TorchCheckpointIO",
    "lightning.pytorch.plugins.io.wrapper": "_WrappingCheckpointIO",
    "lightning.pytorch.plugins.layer_sync": "LayerSync TorchSyncBatchNorm",
    "lightning.pytorch.plugins.precision": _PRECISION,
    "lightning.pytorch.plugins.precision.amp": "MixedPrecision",
    "lightning.pytorch.plugins.precision.bitsandbytes": "BitsandbytesPrecision",
    "lightning.pytorch.plugins.precision.deepspeed": "DeepSpeedPrecision",
    "lightning.pytorch.plugins.precision.double": "DoublePrecision",
    "lightning.pytorch.plugins.precision.fsdp": "FSDPPrecision",
    "lightning.pytorch.plugins.precision.half": "HalfPrecision",
    "lightning.pytorch.plugins.precision.precision": "Precision",
    "lightning.pytorch.plugins.precision.transformer_engine": "TransformerEnginePrecision",
    "lightning.pytorch.profilers": (
        "AdvancedProfiler PassThroughProfiler Profiler PyTorchProfiler SimpleProfiler XLAProfiler"
    ),
    "lightning.pytorch.profilers.advanced": "AdvancedProfiler",
    "lightning.pytorch.profilers.base": "PassThroughProfiler",
    "lightning.pytorch.profilers.profiler": "Profiler",
    "lightning.pytorch.profilers.pytorch": "PyTorchProfiler",
    "lightning.pytorch.profilers.simple": "SimpleProfiler",
    "lightning.pytorch.profilers.xla": "XLAProfiler",
    "lightning.pytorch.strategies": _STRATEGIES,
    "lightning.pytorch.strategies.ddp": "DDPStrategy",
    "lightning.pytorch.strategies.deepspeed": "DeepSpeedStrategy",
    "lightning.pytorch.strategies.fsdp": "FSDPStrategy",
    "lightning.pytorch.strategies.launchers": "_Launcher _MultiProcessingLauncher _SubprocessScriptLauncher",
    "lightning.pytorch.strategies.launchers.launcher": "_Launcher",
    "lightning.pytorch.strategies.launchers.multiprocessing": "_MultiProcessingLauncher",
    "lightning.pytorch.strategies.launchers.subprocess_script": "_SubprocessScriptLauncher",
    "lightning.pytorch.strategies.model_parallel": "ModelParallelStrategy",
    "lightning.pytorch.strategies.parallel": "ParallelStrategy",
    "lightning.pytorch.strategies.single_device": "SingleDeviceStrategy",
    "lightning.pytorch.strategies.strategy": "Strategy",
    "lightning.pytorch.strategies.xla": "XLAStrategy",
    "lightning.pytorch.trainer": f"Trainer seed_everything {_MISCONFIGURATION}",
    "lightning.pytorch.trainer.connectors": "",
    "lightning.pytorch.trainer.connectors.accelerator_connector": "_AcceleratorConnector",
    "lightning.pytorch.trainer.connectors.callback_connector": "_CallbackConnector",
    "lightning.pytorch.trainer.connectors.checkpoint_connector": "_CheckpointConnector",
    "lightning.pytorch.trainer.connectors.data_connector": "_DataConnector _DataHookSelector",
    "lightning.pytorch.trainer.connectors.logger_connector": "_LoggerConnector",
    "lightning.pytorch.trainer.connectors.logger_connector.result": (
        "_METRICS _OUT_DICT _PBAR_DICT _ResultCollection _ResultMetric _VALUE"
    ),
    "lightning.pytorch.trainer.connectors.signal_connector": "_SignalConnector",
    "lightning.pytorch.trainer.states": "RunningStage TrainerFn TrainerState TrainerStatus",
    "lightning.pytorch.trainer.trainer": "Trainer",
    "lightning.pytorch.tuner": "Tuner",
    "lightning.pytorch.tuner.lr_finder": "_LRFinder",
    "lightning.pytorch.tuner.tuning": "Tuner",
    "lightning.pytorch.utilities": (
        f"{_RANK_ZERO} AttributeDict CombinedLoader GradClipAlgorithmType {_MISCONFIGURATION} "
        "disable_possible_user_warnings find_shared_parameters grad_norm is_picklable is_shared_filesystem "
        "measure_flops move_data_to_device set_shared_parameters suggested_max_num_workers"
    ),
    "lightning.pytorch.utilities.argparse": "from_argparse_args",
    "lightning.pytorch.utilities.combined_loader": "CombinedLoader",
    "lightning.pytorch.utilities.compile": "from_compiled to_uncompiled",
    "lightning.pytorch.utilities.data": "extract_batch_size has_len_all_ranks",
    "lightning.pytorch.utilities.deepspeed": "convert_zero_checkpoint_to_fp32_state_dict",
    "lightning.pytorch.utilities.enums": "GradClipAlgorithmType LightningEnum",
    "lightning.pytorch.utilities.exceptions": f"{_MISCONFIGURATION} SIGTERMException _TunerExitException",
    "lightning.pytorch.utilities.grads": "grad_norm",
    "lightning.pytorch.utilities.imports": "RequirementCache module_available package_available",
    "lightning.pytorch.utilities.memory": (
        "garbage_collection_cuda get_model_size_mb is_cuda_out_of_memory is_oom_error is_out_of_cpu_memory "
        "recursive_detach"
    ),
    "lightning.pytorch.utilities.model_helpers": "is_overridden",
    "lightning.pytorch.utilities.model_summary": "LayerSummary ModelSummary summarize",
    "lightning.pytorch.utilities.model_summary.model_summary": "LayerSummary ModelSummary summarize",
    "lightning.pytorch.utilities.parameter_tying": "find_shared_parameters set_shared_parameters",
    "lightning.pytorch.utilities.parsing": (
        "AttributeDict get_init_args is_picklable lightning_getattr lightning_hasattr lightning_setattr str_to_bool"
    ),
    "lightning.pytorch.utilities.rank_zero": _RANK_ZERO,
    "lightning.pytorch.utilities.seed": _SEED,
    "lightning.pytorch.utilities.signature_utils": "is_param_in_hook_signature",
    "lightning.pytorch.utilities.types": (
        f"{_FABRIC_TYPES} EVAL_DATALOADERS LRSchedulerConfig LRSchedulerConfigType LRSchedulerTypeUnion "
        "OptimizerConfig OptimizerLRScheduler OptimizerLRSchedulerConfig STEP_OUTPUT TRAIN_DATALOADERS "
        "_EVALUATE_OUTPUT _PREDICT_OUTPUT"
    ),
    "lightning.pytorch.utilities.warnings": "PossibleUserWarning",
    # Fabric
    "lightning.fabric": "Fabric seed_everything",
    "lightning.fabric.accelerators": _ACCELERATORS,
    "lightning.fabric.fabric": "Fabric",
    "lightning.fabric.loggers": "CSVLogger Logger TensorBoardLogger WandbLogger",
    "lightning.fabric.loggers.csv_logs": "CSVLogger",
    "lightning.fabric.loggers.logger": "Logger rank_zero_experiment",
    "lightning.fabric.loggers.tensorboard": "TensorBoardLogger",
    "lightning.fabric.plugins": f"{_IO} {_PRECISION} {CLUSTER_ENVIRONMENTS}",
    "lightning.fabric.plugins.environments": CLUSTER_ENVIRONMENTS,
    "lightning.fabric.plugins.io": _IO,
    "lightning.fabric.plugins.io.checkpoint_io": "CheckpointIO",
    "lightning.fabric.plugins.io.torch_io": "TorchCheckpointIO",
    "lightning.fabric.plugins.precision": _PRECISION,
    "lightning.fabric.strategies": _STRATEGIES,
    "lightning.fabric.utilities": (
        "AttributeDict LightningEnum disable_possible_user_warnings is_shared_filesystem measure_flops "
        f"move_data_to_device suggested_max_num_workers {_RANK_ZERO}"
    ),
    "lightning.fabric.utilities.apply_func": "move_data_to_device",
    "lightning.fabric.utilities.cloud_io": _CLOUD_IO,
    "lightning.fabric.utilities.data": "AttributeDict",
    "lightning.fabric.utilities.device_dtype_mixin": "_DeviceDtypeModuleMixin",
    "lightning.fabric.utilities.enums": "LightningEnum",
    "lightning.fabric.utilities.exceptions": _MISCONFIGURATION,
    "lightning.fabric.utilities.imports": "RequirementCache",
    "lightning.fabric.utilities.logger": "_add_prefix _convert_params _flatten_dict _sanitize_callable_params",
    "lightning.fabric.utilities.rank_zero": _RANK_ZERO,
    "lightning.fabric.utilities.seed": _SEED,
    "lightning.fabric.utilities.throughput": "measure_flops",
    "lightning.fabric.utilities.types": _FABRIC_TYPES,
    "lightning.fabric.utilities.warnings": "PossibleUserWarning",
    "lightning.fabric.wrappers": "_FabricDataLoader _FabricModule _FabricOptimizer is_wrapped",
}
"""Module of the package `lightning` → the names to import from it, separated by spaces.

`foreign_names.canonical` maps the packages `pytorch_lightning` and `lightning_fabric` to these modules. Sub-modules are
not among the names: they are keys of their own. A package with `""` has nothing but sub-modules.
"""
