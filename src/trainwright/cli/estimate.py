"""`trainwright estimate`: memory estimates of a model, without allocating it."""

from __future__ import annotations

import argparse
import copy
import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.cli.import_path import add_project_to_import_path
from trainwright.core.errors import ConfigurationError, MissingPackageError, nearest, require_package
from trainwright.core.host.byte_sizes import convert_file_size_to_int, format_bytes
from trainwright.core.host.hub import local_files_only
from trainwright.core.names.packages import load_transformers
from trainwright.core.registry import import_object

if TYPE_CHECKING:
    from torch import nn

    from trainwright.bigmodels.maps.estimates import WeightCount

DTYPES = ("float32", "bfloat16", "float16", "float8", "int8", "int4")
LIBRARIES = ("transformers", "timm")
_TOKENS = 1024
_OF_TOKENS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")  # models whose labels are tokens
_PURPOSE = "trainwright estimate for this model"
_TIMM = "timm/"  # prefix of timm's models on the hub


@dataclass(frozen=True, slots=True)
class _FoundModel:
    """Model to estimate.

    Attributes:
        count: numbers of elements.
        module: the model on the meta device. None for stored weights without a model.
        config: configuration of a transformers model. None for other models.
    """

    count: WeightCount
    module: nn.Module | None = None
    config: dict[str, Any] | None = None


def estimate(argv: Sequence[str]) -> int:
    """Print the memory of a model for each dtype.

    With a batch size, also print activations and KV cache. With a number of devices or their memory, also print the
    training memory of a rank, or the number of devices that training needs.

    Returns:
        The exit code 0.

    Raises:
        ConfigurationError: the model is unknown or cannot be built, or an option is not valid for it.
        MissingPackageError: transformers or timm is not installed.
    """
    from trainwright.bigmodels.maps.sizes import dtype_byte_size

    wanted = _parser().parse_args(argv)
    for dtype in wanted.dtypes:
        _read("--dtypes", dtype, dtype_byte_size)
    if wanted.device_memory is not None:
        wanted.device_memory = int(_read("--device-memory", wanted.device_memory, convert_file_size_to_int))
    model = _find(wanted.model, wanted.library_name, trust_remote_code=wanted.trust_remote_code)
    if wanted.sequence_length is None:
        wanted.sequence_length = min(_TOKENS, _num_positions(model.config) or _TOKENS)
    facts = _facts(model, wanted)
    if wanted.json:
        print(json.dumps(facts, indent=2))
    else:
        _show(wanted.model, facts)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trainwright estimate",
        description="Estimate the memory of a model. Only a configuration is downloaded, and no memory is allocated.",
    )
    parser.add_argument(
        "model",
        help="a transformers config.json, its folder or its name; a folder of safetensors or one such file; "
        "a model of timm as timm/NAME; or a task's class as package.module:Class, created without arguments",
    )
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), metavar="DTYPE", help=f"of {', '.join(DTYPES)}")
    number: dict[str, Any] = {"type": int, "metavar": "N"}
    _option(parser, "library-name", choices=LIBRARIES, help="the library of a name, if it is ambiguous")
    _option(parser, "batch-size", **number, help="add activations and KV cache of N sequences")
    _option(parser, "sequence-length", **number, help=f"tokens of each (default: {_TOKENS}, or the model's maximum)")
    _option(parser, "devices", **number, help="add the training memory of each of N ranks, by strategy")
    _option(parser, "num-micro-batches", **number, help="those of a pipeline's step (default: as many as devices)")
    _option(parser, "device-memory", metavar="SIZE", help='add the number of devices of a size ("80GB") it needs')
    _option(parser, "reduce-bucket-size", **number, help="elements of DeepSpeed's bucket (default: 200,000,000)")
    _option(parser, "trust-remote-code", action="store_true", help="run code that comes with the model")
    parser.add_argument("--json", action="store_true", help="print bytes as JSON")
    return parser


def _option(parser: argparse.ArgumentParser, name: str, **settings: Any) -> None:
    """Add an option whose name may be written with dashes, or with underscores as in Accelerate."""
    parser.add_argument(*dict.fromkeys((f"--{name}", f"--{name.replace('-', '_')}")), **settings)


def _read(option: str, text: str, convert: Callable[[str], float]) -> float:
    """Convert the value of an option. Errors name the option."""
    try:
        return convert(text)
    except ConfigurationError as error:
        raise ConfigurationError(f"{option} {text}: {error}") from None


def _facts(model: _FoundModel, wanted: argparse.Namespace) -> dict[str, Any]:
    """Return the numbers to print, with the names that `--json` prints."""
    from trainwright.bigmodels.maps.estimates import kv_cache_bytes

    count = model.count
    rows: dict[str, dict[str, int]] = {}
    cached_config: dict[str, Any] | None = None  # the configuration of a model with a KV cache, if it is requested
    if wanted.batch_size is not None and _keeps_keys_and_values(model):
        cached_config = model.config
    for dtype in wanted.dtypes:
        rows[dtype] = {
            "largest_layer_bytes": count.largest_bytes(dtype),
            "total_bytes": count.total_bytes(dtype),
            "training_adam_bytes": count.training_bytes(dtype),
        }
        if cached_config is not None:
            shape = {"batch_size": wanted.batch_size, "sequence_length": wanted.sequence_length}
            cache_bytes = kv_cache_bytes(cached_config, dtype=dtype, **shape)
            if cache_bytes is not None:
                rows[dtype]["kv_cache_bytes"] = cache_bytes
    facts: dict[str, Any] = {"elements": count.elements, "largest_layer": count.largest_layer, "dtypes": rows}
    if wanted.batch_size is not None:
        facts["activation_bytes_float32"] = _activation_bytes(model, wanted.batch_size, wanted.sequence_length)
    if wanted.devices is not None or wanted.device_memory is not None:
        facts.update(_peaks(model, wanted))
    return facts


def _peaks(model: _FoundModel, wanted: argparse.Namespace) -> dict[str, Any]:
    """Return the peak memory of a rank for each strategy, and the number of devices that each strategy needs."""
    from trainwright.bigmodels.maps.rank_peaks import ZeroBuckets, rank_peaks, ranks_that_fit, training_shape

    for name in ("devices", "reduce_bucket_size", "num_micro_batches"):
        number = getattr(wanted, name)
        if number is not None and number < 1:
            raise ConfigurationError(f"--{name.replace('_', '-')} {number}: write a number of at least 1.")
    if model.module is None:
        raise ConfigurationError(
            "--devices and --device-memory need a model, but stored weights do not contain its layers. Pass its "
            "config.json, its name, or package.module:Class."
        )
    shape = training_shape(model.module)
    buckets = ZeroBuckets() if wanted.reduce_bucket_size is None else ZeroBuckets(reduce=wanted.reduce_bucket_size)
    activation_bytes = 0
    if wanted.batch_size is not None:
        activation_bytes = _activation_bytes(model, wanted.batch_size, wanted.sequence_length, loss=True)
    load: dict[str, Any] = {"activation_bytes": activation_bytes, "buckets": buckets, "foreach": True}
    facts: dict[str, Any] = {}
    if wanted.devices is not None:
        peaks = dict(rank_peaks(shape, world_size=wanted.devices, **load))
        reasons: dict[str, str] = {}  # strategy → why it has no estimate
        if wanted.devices > 1:
            for name, estimate_peak in (("tp", _split_peak), ("pp", _pipeline_peak), ("cp", _context_peak)):
                peak = estimate_peak(model, wanted)
                if isinstance(peak, str):
                    reasons[name] = peak
                else:
                    peaks[name] = peak
        facts["no_estimate"] = reasons
        facts["peaks_float32_adam"] = peaks
    if wanted.device_memory is not None:
        facts["devices_needed"] = ranks_that_fit(shape, wanted.device_memory, **load)
    return facts


def _split_peak(model: _FoundModel, wanted: argparse.Namespace) -> int | str:
    """Return the peak memory of a rank with tensor parallelism, or the reason why it cannot be estimated."""
    from trainwright.bigmodels.maps.rank_peaks import model_of_one_rank, split_peak, training_shape

    assert model.module is not None
    share = model_of_one_rank(model.module, wanted.devices)
    if share is None:
        return f"no built-in plan splits this model over {wanted.devices} ranks"
    activation_bytes = 0
    logits_bytes = 0
    if wanted.batch_size is not None:
        # The shards in `share` cannot be called: its embedding and output layer have the shapes of one rank.
        callable_share = replace(model, module=model_of_one_rank(model.module, wanted.devices, ends=False))
        activation_bytes = _activation_bytes(callable_share, wanted.batch_size, wanted.sequence_length, loss=True)
        num_tokens = wanted.batch_size * wanted.sequence_length
        logits_bytes = 4 * num_tokens * (model.config or {}).get("vocab_size", 0)  # float32
    return split_peak(
        training_shape(share),
        world_size=wanted.devices,
        activation_bytes=activation_bytes,
        logits_bytes=logits_bytes,
    )


def _pipeline_peak(model: _FoundModel, wanted: argparse.Namespace) -> int | str:
    """Return the peak memory of a rank with one pipeline stage, or the reason why it cannot be estimated."""
    from trainwright.bigmodels.maps.rank_peaks import pipeline_peak, stage_shapes

    assert model.module is not None
    stages = stage_shapes(model.module, wanted.devices)
    pp = wanted.devices
    if stages is None:
        return f"the model has no stack of {pp} layers or more"
    activation_bytes = [0] * pp
    sent_bytes = [0] * (pp - 1)
    if wanted.batch_size is not None:
        activation_bytes, sent_bytes = _stage_bytes(model, wanted.batch_size, wanted.sequence_length, loss=True, pp=pp)
    load: dict[str, Any] = {"activation_bytes": activation_bytes, "sent_bytes": sent_bytes, "foreach": True}
    return pipeline_peak(stages, num_micro_batches=wanted.num_micro_batches or pp, **load)


def _context_peak(model: _FoundModel, wanted: argparse.Namespace) -> int | str:
    """Return the peak memory of a rank with context parallelism, or the reason why it cannot be estimated."""
    from trainwright.bigmodels.maps.rank_peaks import rank_peaks, training_shape

    assert model.module is not None
    length = wanted.sequence_length
    cp = wanted.devices
    takes_tokens = "input_ids" in inspect.signature(model.module.forward).parameters
    is_decoder = takes_tokens and not (model.config or {}).get("is_encoder_decoder")
    if wanted.batch_size is None:
        return "pass --batch-size"
    if not is_decoder:
        return "the model is not a decoder of tokens"
    if length % (2 * cp):  # two chunks of a sequence on each rank
        return f"--sequence-length {length} is not divisible by 2 x {cp}"
    activation_bytes = _activation_bytes(model, wanted.batch_size, length // cp, loss=True)
    # The parameters are sharded over the ranks as with FSDP.
    peaks = rank_peaks(training_shape(model.module), world_size=cp, activation_bytes=activation_bytes, foreach=True)
    return peaks["fsdp"]


def _activation_bytes(model: _FoundModel, batch_size: int, sequence_length: int, *, loss: bool = False) -> int:
    """Return the bytes that autograd saves in a forward. With `loss`, include the model's own loss on tokens."""
    return sum(_stage_bytes(model, batch_size, sequence_length, loss=loss, pp=1)[0])


def _stage_bytes(
    model: _FoundModel, batch_size: int, sequence_length: int, *, loss: bool, pp: int
) -> tuple[list[int], list[int]]:
    """Return the bytes that autograd saves in each pipeline stage, and the bytes that each stage sends to the next.

    Raises:
        ConfigurationError: a size is below 1, the model is not one of transformers, or its forward fails.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from trainwright.bigmodels.maps.estimates import FakeGroupedProducts, count_stage_bytes
    from trainwright.strategies.megatron.stages import find_stages

    if batch_size < 1 or sequence_length < 1:
        raise ConfigurationError(f"--batch-size {batch_size} --sequence-length {sequence_length}: write at least 1.")
    if model.module is None or model.config is None:
        raise ConfigurationError("--batch-size needs a transformers model: inputs of other models are unknown.")
    module: Any = copy.deepcopy(model.module)
    # Tensors on the CPU without memory: on the meta device torch would use other kernels, and models could not read
    # values.
    with FakeTensorMode():
        module = module.float().train()
        module._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu"))
        inputs = _inputs(module, model.config, batch_size, sequence_length)
        if loss and type(module).__name__.endswith(_OF_TOKENS):
            inputs["labels"] = inputs["input_ids"]
        try:
            with FakeGroupedProducts():
                stages = find_stages(module, pp, None) if pp > 1 else []
                return count_stage_bytes(lambda: module(**inputs), module, stages)
        except (RuntimeError, LookupError, ValueError, TypeError, AttributeError) as error:
            positions = _num_positions(model.config)
            hint = ""
            if positions is not None and sequence_length > positions:
                hint = f" It has {positions} positions: pass --sequence-length {positions} or less."
            shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in inputs.items() if isinstance(x, torch.Tensor))
            raise ConfigurationError(
                f"{type(module).__name__} does not take {shapes}: {error}.{hint} Without --batch-size only its weights "
                "are estimated."
            ) from error


def _inputs(module: Any, config: dict[str, Any], batch_size: int, sequence_length: int) -> dict[str, Any]:
    """Return the inputs of a transformers model: tokens, or images if it has no tokens."""
    import torch

    takes = inspect.signature(module.forward).parameters
    if "input_ids" not in takes:
        height, width = _image_size(module, config)
        images = torch.zeros(batch_size, config.get("num_channels") or 3, height, width)
        return {"pixel_values": images}
    tokens = torch.zeros(batch_size, sequence_length, dtype=torch.long)
    inputs: dict[str, Any] = {"input_ids": tokens, "use_cache": False}
    if config.get("is_encoder_decoder"):
        inputs["decoder_input_ids"] = tokens
    elif "past_key_values" in takes:
        # An empty one: without it, models search for several sequences in one row, in missing values.
        caches = load_transformers(_PURPOSE)
        inputs["past_key_values"] = caches.DynamicCache(config=module.config)
    return inputs


def _image_size(module: object, config: dict[str, Any]) -> tuple[int, int]:
    """Return the height and width of a model's input images, in pixels."""
    main = getattr(module, "main_input_name", None)
    size = config.get("image_size")
    if main != "pixel_values" or not size:
        lack = f"takes {main}" if main != "pixel_values" else "takes images, and its configuration has no image_size"
        raise ConfigurationError(
            f"--batch-size: {type(module).__name__} {lack}. Inputs are only known for tokens, and for images with "
            "image_size. Remove --batch-size to estimate the weights alone."
        )
    height, width = (size, size) if isinstance(size, int) else size
    return height, width


def _keeps_keys_and_values(model: _FoundModel) -> bool:
    """Return whether a model is one of transformers with a KV cache. Encoders and image models have none."""
    module: Any = model.module
    if model.config is None or "past_key_values" not in inspect.signature(module.forward).parameters:
        return False
    return bool(module.can_generate() or getattr(module.config, "is_decoder", True))


def _num_positions(config: dict[str, Any] | None) -> int | None:
    """Return the maximum number of tokens of a transformers model. None if its configuration does not contain it."""
    config = config or {}
    positions = config.get("max_position_embeddings") or config.get("n_positions")
    return positions if isinstance(positions, int) else None


def _show(name: str, facts: dict[str, Any]) -> None:
    print(f"{name}: {facts['elements']:,} elements; the largest layer is {facts['largest_layer'] or 'the model'}\n")
    head = ["dtype", "Largest Layer", "Total Size", "Training using Adam"]
    if any("kv_cache_bytes" in row for row in facts["dtypes"].values()):
        head.append("KV cache")
    rows = [[dtype, *(format_bytes(size) for size in row.values())] for dtype, row in facts["dtypes"].items()]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for line in [head, ["-" * width for width in widths], *rows]:
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |")
    if "activation_bytes_float32" in facts:
        print(f"\nactivations kept for the backward, float32: {format_bytes(facts['activation_bytes_float32'])}")
    if "peaks_float32_adam" in facts:
        print("\npeak memory of one rank's device in a step (float32, Adam), by strategy:")
        for strategy, peak in facts["peaks_float32_adam"].items():
            print(f"  {strategy:18} {format_bytes(peak)}")
        for strategy, reason in facts["no_estimate"].items():
            print(f"  {strategy:18} -  ({reason})")
    if "devices_needed" in facts:
        print("\nnumber of devices for training:")
        for strategy, number in facts["devices_needed"].items():
            print(f"  {strategy:18} {'does not fit' if number is None else number}")


def _find(name: str, library: str | None, *, trust_remote_code: bool) -> _FoundModel:
    """Return the model of `name`: weights on disk, a configuration, a class, or a name in a library."""
    from trainwright.bigmodels.maps.estimates import count_stored_weights, count_weights, read_config

    path = Path(name)
    if path.suffix in (".json", ".safetensors") and not path.exists():
        raise ConfigurationError(
            f"{name} does not exist. Pass a model's config.json, its folder or its name, a folder of safetensors or "
            "one such file, timm/NAME, or package.module:Class."
        )
    names_timm = library is None and name.startswith(_TIMM) and not path.exists()
    if library == "timm" or names_timm:
        module = _from_timm(name.removeprefix(_TIMM))
        return _FoundModel(count_weights(module), module)
    if path.name.endswith(".safetensors.index.json"):
        path = path.parent
    file = path if path.suffix == ".json" else path / "config.json"
    is_config = path.suffix == ".json" or (file.is_file() and not _is_of_other_library(file, path))
    if is_config:
        # transformers reads a folder, or a file with another name than config.json.
        source = str(file.parent if file.name == "config.json" else file)
        module, config = _from_config(source, read_config(file), trust_remote_code=trust_remote_code)
        return _FoundModel(count_weights(module), module, config)
    if path.exists():  # weights without a configuration of transformers
        return _FoundModel(count_stored_weights(path))
    if ":" in name and library is None:
        module = _make_task(name)
        return _FoundModel(count_weights(module), module)
    module, config = _from_config(name, None, trust_remote_code=trust_remote_code)
    return _FoundModel(count_weights(module), module, config)


def _is_of_other_library(file: Path, path: Path) -> bool:
    """Return whether a folder with weights has the configuration of another library (timm, diffusers)."""
    if not path.is_dir() or not any(path.glob("*.safetensors")):
        return False  # without weights, `_from_config` reports what is wrong with the configuration
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return True
    return not isinstance(config, dict) or "model_type" not in config


def _from_config(
    source: str, raw: dict[str, Any] | None, *, trust_remote_code: bool = False
) -> tuple[nn.Module, dict[str, Any]]:
    """Build the model of a configuration, without memory for its weights. Return it with its configuration.

    Args:
        source: a file, a folder, or a name of the hub.
        raw: the configuration in a file. None for a name.
        trust_remote_code: run code that comes with the model. Default: False.
    """
    from trainwright.bigmodels.weights.empty import init_empty_weights

    transformers: Any = load_transformers(_PURPOSE)
    options = {"trust_remote_code": trust_remote_code, "local_files_only": local_files_only(source)}
    try:
        config = transformers.AutoConfig.from_pretrained(source, **options)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigurationError(
            f"{source!r} is not a known model: {reason} If the hub cannot be reached, pass a folder with the model's "
            "config.json. A model of timm is timm/NAME."
        ) from error
    facts = raw or config.to_dict()
    # {"architectures": ["LlamaForCausalLM"]} names a class of transformers.
    model_class: Any = None
    for name in facts.get("architectures") or ():
        model_class = getattr(transformers, name, None)
        if model_class is not None:
            break
    # {"auto_map": {"AutoModelForCausalLM": "modeling_x.XForCausalLM"}}: the model has its own code.
    auto_class = "AutoModel"
    for name in facts.get("auto_map") or ():
        if name.startswith("AutoModelFor"):
            auto_class = name
            break
    with init_empty_weights():
        if model_class is not None and "auto_map" not in facts:
            model: nn.Module = model_class(config)
        else:
            model = getattr(transformers, auto_class).from_config(config, trust_remote_code=trust_remote_code)
    return model, config.to_dict()


def _from_timm(name: str) -> nn.Module:
    """Build a model of timm, without memory for its weights."""
    import torch

    from trainwright.bigmodels.weights.empty import init_empty_weights

    try:
        timm: Any = require_package("timm", purpose="trainwright estimate for a model of timm")
    except MissingPackageError:  # an ImportError, whose text already says what to install
        raise
    except (ImportError, RuntimeError, AttributeError, OSError) as error:
        raise ConfigurationError(
            f"timm is installed and cannot be imported: {type(error).__name__}: {str(error).strip()}. Most often its "
            f"torchvision was built for another torch than {torch.__version__}. Run: pip install --upgrade torchvision "
            "timm. Or name a folder of the model's safetensors, which needs no timm."
        ) from error
    try:
        with init_empty_weights():
            model: nn.Module = timm.create_model(name, pretrained=False)
    except RuntimeError as error:
        known = timm.list_models()
        raise ConfigurationError(
            f"timm has no model {name!r}: {error}.{nearest(name.partition('.')[0], known)}"
        ) from error
    return model


def _make_task(name: str) -> nn.Module:
    """Create a task without memory for its weights, including `configure_model`."""
    from torch import nn

    from trainwright.bigmodels.weights.empty import init_empty_weights
    from trainwright.core.task import TaskModule

    add_project_to_import_path()
    try:
        task_class = import_object(name)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(f"{name!r} cannot be imported: {error}. Write package.module:Class.") from error
    try:
        inspect.signature(task_class).bind()
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{name!r} cannot be created without arguments: {error}. Write a sub-class that needs none."
        ) from error
    with init_empty_weights():
        task = task_class()
        if not isinstance(task, nn.Module):
            raise ConfigurationError(f"{name!r} creates a {type(task).__name__}, expected a task or another nn.Module.")
        if isinstance(task, TaskModule):
            task.configure_model()
    return task
