"""Record the arguments of the estimators of SageMaker's SDK: `python -m tests.launch.sagemaker_signatures`."""

from __future__ import annotations

import importlib
import inspect
import json
from pathlib import Path

RECORDED = Path(__file__).with_name("sagemaker_signatures.json")
_CLASSES = ("sagemaker.pytorch.PyTorch", "sagemaker.huggingface.HuggingFace")


def signatures() -> dict[str, dict[str, list[str]]]:
    found = {}
    for path in _CLASSES:
        module, _, name = path.rpartition(".")
        estimator = getattr(importlib.import_module(module), name)
        arguments = {one for base in estimator.__mro__ for one in inspect.signature(base.__init__).parameters}
        fit = list(inspect.signature(estimator.fit).parameters)
        found[path] = {"arguments": sorted(arguments - {"self", "args", "kwargs"}), "fit": fit[1:]}
    return found


if __name__ == "__main__":
    RECORDED.write_text(json.dumps(signatures(), indent=1) + "\n")
