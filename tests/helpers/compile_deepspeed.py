"""Compile DeepSpeed's operations for the tests, once; prints how long each took. The arguments name their builders."""

from __future__ import annotations

import os
import sys
import time

_NEEDED = {"CPUAdamBuilder": "g++ and the headers of Python", "AsyncIOBuilder": "libaio-dev"}


def compile_operations(builders: list[str]) -> None:
    """Compile operations into `TORCH_EXTENSIONS_DIR`. Default: the folder in which the tests look for them."""
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", os.path.join(sys.prefix, "torch_extensions"))
    os.environ["PATH"] = os.pathsep.join([os.path.join(sys.prefix, "bin"), os.environ["PATH"]])  # ninja
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.accelerator import get_accelerator

    for name in builders:
        start_s = time.perf_counter()
        builder = get_accelerator().create_op_builder(name)
        if not builder.is_compatible():
            print(f"{name}: not compiled, because it needs {_NEEDED[name]}. Its tests are skipped.")
            continue
        builder.load()
        print(f"{name}: {time.perf_counter() - start_s:.0f} s")


if __name__ == "__main__":
    compile_operations(sys.argv[1:])
