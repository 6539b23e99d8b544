"""MegatronLMPlugin: pipelines and split layers in the names of Hugging Face Accelerate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from trainwright.core.errors import ConfigurationError
from trainwright.core.names.kwargs_handler import VariableFields, as_flag, from_variable
from trainwright.strategies.fsdp.options import one_of
from trainwright.strategies.megatron.stages import layers_of
from trainwright.strategies.megatron.strategy import MegatronStrategy

_SIZES = "sequences and experts are not split; use tp_degree or pp_degree, and remove it"
_DROPOUT = "the model's own configuration sets it, such as GPT2Config(attn_pdrop=…, resid_pdrop=…); remove it"
_STAGES = "write Accelerator(strategy=MegatronStrategy(split_points=…)), which names the first layer of each stage"
_SAMPLES = "schedules count optimizer steps; use train_iters, lr_decay_iters or lr_warmup_iters"
_GROUPS = "pass the optimizer parameter groups with lr and weight_decay of their own, and remove it"
_MODEL = "prepare() trains the model that it receives; build it in the script, and remove it"
_DATA = "indexed data sets of Megatron-LM are not supported; prepare a DataLoader, and remove it"
_TRACKERS = "pass Accelerator(log_with='tensorboard', project_dir=…), and remove it"
_LATER = "save_state and load_state always include the optimizer; remove it"
_HOST = "the optimizer stays on the device; write Accelerator(fsdp_plugin=…) with cpu_offload=True for one on the host"
# Fields that only request something with other values than these, and what to write instead.
_REFUSED: dict[str, tuple[str, tuple[object, ...]]] = {
    "use_custom_fsdp": ("use_distributed_optimizer=True shards parameters by FSDP; remove it", (False,)),
    "overlap_cpu_optimizer_d2h_h2d": (_HOST, (False,)),
    "optimizer_cpu_offload": (_HOST, (False,)),
    "use_precision_aware_optimizer": ("choose an optimizer that stores narrow states, and remove it", (False,)),
    "no_load_optim": (_LATER, (False,)),
    "no_save_optim": (_LATER, (False,)),
    "eod_mask_loss": ("set labels to -100 where the loss does not count, and remove it", (False,)),
    "decoder_last_pipeline_num_layers": (_STAGES, ()),
    "pipeline_model_parallel_split_rank": ("a pipeline has one stack of layers; use tp_degree for an encoder and a "
                                           "decoder", ()),
    "recompute_method": ("all layers are computed again; use 'uniform'", ("uniform",)),
    "recompute_num_layers": ("each layer is computed again by itself; use 1", (1,)),
    "expert_model_parallel_size": (_SIZES, (1,)),
    "expert_tensor_parallel_size": (_SIZES, (1,)),
    "context_parallel_size": (_SIZES, (1,)),
    "attention_dropout": (_DROPOUT, (0.0,)),
    "hidden_dropout": (_DROPOUT, (0.0,)),
    "calculate_per_token_loss": ("each micro-batch counts by its rows; accelerator.backward(loss, num_items=…) under "
                                 "another strategy counts tokens", (False,)),
    "use_rotary_position_embeddings": ("the model determines its position embeddings, as Llama's do; remove it",
                                       (False,)),
    "train_samples": (_SAMPLES, ()),
    "lr_decay_samples": (_SAMPLES, ()),
    "lr_warmup_samples": (_SAMPLES, (0,)),
    "consumed_samples": ("load_state restores the position in the data; remove it", ([0], [0, 0], [0, 0, 0])),
    "no_wd_decay_cond": (_GROUPS, ()),
    "scale_lr_cond": (_GROUPS, ()),
    "lr_mult": (_GROUPS, (1.0,)),
    "megatron_dataset_flag": (_DATA, (False,)),
    "tensorboard_dir": (_TRACKERS, ()),
    "set_all_logging_options": (_TRACKERS, (False,)),
    "custom_model_provider_function": (_MODEL, ()),
    "custom_prepare_model_function": (_MODEL, ()),
    "custom_megatron_datasets_provider_function": (_DATA, ()),
    "other_megatron_args": ("Megatron-LM itself does not run; choose position embeddings and kinds of attention by the "
                            "model, and remove it", ({},)),
}  # fmt: skip
_DEFAULTS = {"tp_degree": 1, "pp_degree": 1, "num_micro_batches": 1, "gradient_clipping": 1.0}


def _variable(name: str, read: Callable[[str], Any] = str) -> Any:
    return from_variable(f"MEGATRON_LM_{name}", read)


@dataclass
class MegatronLMPlugin(VariableFields):
    """Options of `MegatronStrategy`, with the names of Hugging Face Accelerate.

    A field that is None takes the value of its environment variable (`MEGATRON_LM_TP_DEGREE`, …), and otherwise the
    default. A call of the prepared model in training runs forward and backward of all micro-batches.

    Attributes:
        tp_degree, pp_degree: Ranks that split layers, and stages of the pipeline. Default: 1.
        num_micro_batches: Micro-batches of one optimizer step. A batch of a prepared DataLoader has `batch_size` rows
            for each of them. Default: 1.
        gradient_clipping: Largest norm of the gradients at a step; 0: they are not clipped. Default: 1.0.
        sequence_parallelism: Accepted; makes no difference. Plans that split layers shard sequences where they can.
        recompute_activations: Recompute all but matrix products in backward.
        recompute_granularity: `"full"` or `"selective"`; takes precedence over `recompute_activations`.
        use_distributed_optimizer: Shard parameters, gradients and the optimizer's state over data-parallel ranks.
        num_layers_per_virtual_pipeline_stage: Layers of each of several stages on a rank, which are interleaved.
        train_iters, lr_decay_iters, lr_warmup_iters, lr_warmup_fraction: Steps of the schedule; they take precedence
            over those of `MegatronLMDummyScheduler`. The fraction is that of the decay's steps.
        lr_decay_style, min_lr: `"linear"`, `"cosine"` or `"constant"`, and the learning rate at the end.
        weight_decay_incr_style, start_weight_decay, end_weight_decay: `"constant"`, or how the weight decay changes.
        return_logits: Outputs in evaluation have the logits beside the loss.
        custom_train_step_class, custom_train_step_kwargs: A subclass of `AbstractTrainStep`, and its arguments.
        custom_get_batch_function, custom_loss_function: Replace those of `GPTTrainStep` and others.
        is_train_batch_min, attention_backend, attention_softmax_in_fp32, seq_length, encoder_seq_length,
            decoder_seq_length, eval_iters, eval_interval: Accepted; make no difference.

    Other fields are options of Megatron-LM. A value that requests something is an error, which says what to write.
    """

    tp_degree: int | None = _variable("TP_DEGREE", int)
    pp_degree: int | None = _variable("PP_DEGREE", int)
    use_custom_fsdp: bool | None = _variable("USE_CUSTOM_FSDP", as_flag)
    overlap_cpu_optimizer_d2h_h2d: bool | None = _variable("OVERLAP_CPU_OPTIMIZER_D2H_H2D", as_flag)
    no_load_optim: bool | None = _variable("NO_LOAD_OPTIM", as_flag)
    eod_mask_loss: bool | None = _variable("EOD_MASK_LOSS", as_flag)
    no_save_optim: bool | None = _variable("NO_SAVE_OPTIM", as_flag)
    optimizer_cpu_offload: bool | None = _variable("OPTIMIZER_CPU_OFFLOAD", as_flag)
    use_precision_aware_optimizer: bool | None = _variable("USE_PRECISION_AWARE_OPTIMIZER", as_flag)
    decoder_last_pipeline_num_layers: int | None = _variable("DECODER_LAST_PIPELINE_NUM_LAYERS", int)
    recompute_granularity: str | None = _variable("RECOMPUTE_GRANULARITY")
    recompute_method: str | None = _variable("RECOMPUTE_METHOD")
    recompute_num_layers: int | None = _variable("RECOMPUTE_NUM_LAYERS", int)
    attention_backend: bool | str | None = _variable("ATTENTION_BACKEND")
    expert_model_parallel_size: int | None = _variable("EXPERT_MODEL_PARALLEL_SIZE", int)
    context_parallel_size: int | None = _variable("CONTEXT_PARALLEL_SIZE", int)
    attention_dropout: float | None = _variable("ATTENTION_DROPOUT", float)
    hidden_dropout: float | None = _variable("HIDDEN_DROPOUT", float)
    attention_softmax_in_fp32: bool | None = _variable("ATTENTION_SOFTMAX_IN_FP32", as_flag)
    expert_tensor_parallel_size: int | None = _variable("EXPERT_TENSOR_PARALLEL_SIZE", int)
    calculate_per_token_loss: bool | None = _variable("CALCULATE_PER_TOKEN_LOSS", as_flag)
    use_rotary_position_embeddings: bool | None = _variable("USE_ROTARY_POSITION_EMBEDDINGS", as_flag)
    num_micro_batches: int | None = _variable("NUM_MICRO_BATCHES", int)
    gradient_clipping: float | None = _variable("GRADIENT_CLIPPING", float)
    sequence_parallelism: bool | None = _variable("SEQUENCE_PARALLELISM", as_flag)
    recompute_activations: bool | None = _variable("RECOMPUTE_ACTIVATIONS", as_flag)
    use_distributed_optimizer: bool | None = _variable("USE_DISTRIBUTED_OPTIMIZER", as_flag)
    pipeline_model_parallel_split_rank: int | None = None
    num_layers_per_virtual_pipeline_stage: int | None = None
    is_train_batch_min: bool | str = True
    train_iters: int | None = None
    train_samples: int | None = None
    weight_decay_incr_style: str = "constant"
    start_weight_decay: float | None = None
    end_weight_decay: float | None = None
    lr_decay_style: str = "linear"
    lr_decay_iters: int | None = None
    lr_decay_samples: int | None = None
    lr_warmup_iters: int | None = None
    lr_warmup_samples: int | None = None
    lr_warmup_fraction: float | None = None
    min_lr: float = 0
    consumed_samples: list[int] | None = None
    no_wd_decay_cond: Callable[..., Any] | None = None
    scale_lr_cond: Callable[..., Any] | None = None
    lr_mult: float = 1.0
    megatron_dataset_flag: bool = False
    seq_length: int | None = None
    encoder_seq_length: int | None = None
    decoder_seq_length: int | None = None
    tensorboard_dir: str | None = None
    set_all_logging_options: bool = False
    eval_iters: int = 100
    eval_interval: int = 1000
    return_logits: bool = False
    custom_train_step_class: Any = None
    custom_train_step_kwargs: dict[str, Any] | None = None
    custom_model_provider_function: Callable[..., Any] | None = None
    custom_prepare_model_function: Callable[..., Any] | None = None
    custom_megatron_datasets_provider_function: Callable[..., Any] | None = None
    custom_get_batch_function: Callable[..., Any] | None = None
    custom_loss_function: Callable[..., Any] | None = None
    other_megatron_args: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, default in _DEFAULTS.items():
            if getattr(self, name) is None:
                setattr(self, name, default)
        for name in ("sequence_parallelism", "recompute_activations", "use_distributed_optimizer"):
            setattr(self, name, bool(getattr(self, name)))

    def set_training_args(self, micro_batch_size: int, dp_degree: int) -> None:
        """Set the attributes `micro_batch_size`, `data_parallel_size` and `global_batch_size`.

        `prepare` calls it with the first DataLoader's batch size.
        """
        self.micro_batch_size, self.data_parallel_size = micro_batch_size, dp_degree
        self.global_batch_size = dp_degree * micro_batch_size * (self.num_micro_batches or 1)

    def strategy(self, num_processes: int, model: nn.Module | None = None) -> MegatronStrategy:
        """Return the strategy with the same options.

        Args:
            num_processes: Of the run.
            model: That is trained; its layers determine the number of virtual stages. Default: None, which takes two.

        Raises:
            ConfigurationError: An option is unknown, or the strategy does not support it.
        """
        for name, (reason, harmless) in _REFUSED.items():
            value = getattr(self, name)
            if value is not None and value not in harmless:
                raise ConfigurationError(f"{name}={value!r} of MegatronLMPlugin is not supported: {reason}.")
        if self.recompute_granularity is not None:
            one_of("recompute_granularity", self.recompute_granularity, ("full", "selective"))
        one_of("lr_decay_style", self.lr_decay_style, ("linear", "cosine", "constant"))
        one_of("weight_decay_incr_style", self.weight_decay_incr_style, ("constant", "linear", "cosine"))
        options: dict[str, Any] = {"tp": self.tp_degree, "pp": self.pp_degree}
        if self.pp_degree != 1:
            options["num_micro_batches"] = self.num_micro_batches
            virtual = self._virtual_stages(model)
            options |= {} if virtual == 1 else {"virtual_stages": virtual, "schedule": "interleaved1f1b"}
        return MegatronStrategy(
            **options,
            recompute=self.recompute_granularity or ("selective" if self.recompute_activations else None),
            distributed_optimizer=bool(self.use_distributed_optimizer),
        )

    def _virtual_stages(self, model: nn.Module | None) -> int:
        each, pp = self.num_layers_per_virtual_pipeline_stage, self.pp_degree or 1
        if each is None or model is None:
            return 1 if each is None else 2
        num_layers = len(layers_of(model, pp))
        if each < 1 or num_layers % (pp * each):
            raise ConfigurationError(
                f"num_layers_per_virtual_pipeline_stage={each}: {num_layers} layers cannot be divided by pp_degree={pp}"
                f" × {each}. Use a divisor of {num_layers // pp}."
            )
        return num_layers // (pp * each)
