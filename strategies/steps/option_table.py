"""The options of fp8 and of `torch.compile` with Accelerate's names."""

from __future__ import annotations

from trainwright.core.names.kwargs_handler import as_flag
from trainwright.strategies.option_table import EngineOption, OptionTable

MSAMP = "MS-AMP needs a patched build of an old torch; use --fp8_backend ao or te"

FP8 = OptionTable(
    title="fp8",
    section="fp8_config",
    flag="fp8_{}",
    variable="ACCELERATE_FP8_{}",
    rows=(
        EngineOption("backend", "AO for torchao, or TE.", read=str.upper, choices=("AO", "TE"), other=f" {MSAMP}."),
        EngineOption("enable_fsdp_float8_all_gather", "AO: FSDP gathers weights in float8.", read=as_flag),
        EngineOption("pad_inner_dim", "AO: pad micro-batches to a multiple of 16 rows.", read=as_flag),
        EngineOption(
            "fp8_format",
            "TE: HYBRID, E4M3 or E5M2.",
            read=str.upper,
            flag="fp8_format",
            variable="ACCELERATE_FP8_FORMAT",
            choices=("HYBRID", "E4M3", "E5M2"),
        ),
        EngineOption("margin", "TE: margin of the scale.", read=int),
        EngineOption("interval", "TE: steps between updates of the scale.", read=int),
        EngineOption("amax_history_len", "TE: steps whose largest values set the scale.", read=int),
        EngineOption("amax_compute_algo", "TE: max or most_recent.", choices=("max", "most_recent")),
        EngineOption(
            "override_linear_precision", "TE: forward and both products of backward in bf16: true,false,true."
        ),
        EngineOption("use_autocast_during_eval", "TE: compute evaluations in fp8, too.", read=as_flag),
        EngineOption("opt_level", variable=None, not_launched=MSAMP, harmless=("O2",)),
    ),
)

DYNAMO = OptionTable(
    title="compilation",
    section="dynamo_config",
    flag="dynamo_{}",
    variable="ACCELERATE_DYNAMO_{}",
    rows=(
        EngineOption("backend", "Compile models by this backend of torch.compile."),
        EngineOption("mode", "Mode of torch.compile."),
        EngineOption("use_fullgraph", "Compile a model as one graph.", read=as_flag),
        EngineOption("use_dynamic", "Compile for dynamic shapes.", read=as_flag),
        EngineOption("use_regional_compilation", "Compile repeated blocks.", read=as_flag),
    ),
)
