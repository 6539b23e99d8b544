"""The names of precisions."""

from __future__ import annotations

import torch

from trainwright.core.errors import ConfigurationError, nearest
from trainwright.strategies.precision import Precision

_FULL = Precision("32-true")
_DOUBLE = Precision("64-true", param_dtype=torch.float64)
_HALF = Precision("16-true", param_dtype=torch.float16)
_BFLOAT = Precision("bf16-true", param_dtype=torch.bfloat16)
_HALF_MIXED = Precision("16-mixed", autocast_dtype=torch.float16, scaled=True)
_BFLOAT_MIXED = Precision("bf16-mixed", autocast_dtype=torch.bfloat16)
_KNOWN: dict[str, Precision] = {
    "32-true": _FULL, "32": _FULL, "fp32": _FULL, "no": _FULL,
    "64-true": _DOUBLE, "64": _DOUBLE,
    "16-true": _HALF,
    "bf16-true": _BFLOAT,
    "16-mixed": _HALF_MIXED, "16": _HALF_MIXED, "fp16": _HALF_MIXED,
    "bf16-mixed": _BFLOAT_MIXED, "bf16": _BFLOAT_MIXED,
}  # fmt: skip
_OF_LAYERS = ("fp8", "transformer-engine")


def parse_precision(spec: str | int | Precision) -> Precision:
    """Return a precision by name. A precision is returned unchanged.

    Raises:
        ConfigurationError: The name is unknown. The message suggests the most similar name.
    """
    if isinstance(spec, Precision):
        return spec
    if spec == "fp8":
        from trainwright.strategies.steps.fp8 import Fp8  # few runs use it

        return Fp8()
    if spec == "transformer-engine":
        from trainwright.strategies.steps.te_layers import TransformerEnginePrecision  # few runs use it

        return TransformerEnginePrecision()
    found = _KNOWN.get(str(spec))
    if found is None:
        names = ", ".join([*dict.fromkeys(p.name for p in _KNOWN.values()), *_OF_LAYERS])
        near = nearest(str(spec), [*_KNOWN, *_OF_LAYERS])
        raise ConfigurationError(f"precision={spec!r} is unknown.{near} Known: {names}.")
    return found
