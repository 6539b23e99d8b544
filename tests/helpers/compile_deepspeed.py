"""Compile what the tests need of DeepSpeed's operations, once; prints how long each took."""

from __future__ import annotations

import os
import sys
import time

_OPERATIONS = {"CPUAdamBuilder": "g++ and the headers of Python", "AsyncIOBuilder": "libaio-dev"}


def main() -> None:
    """Compile them into `TORCH_EXTENSIONS_DIR`, by default where the tests look for them."""
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", os.path.join(sys.prefix, "torch_extensions"))
    os.environ["PATH"] = os.pathsep.join([os.path.join(sys.prefix, "bin"), os.environ["PATH"]])  # ninja
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.accelerator import get_accelerator

    for name, needs in _OPERATIONS.items():
        start_s = time.perf_counter()
        builder = get_accelerator().create_op_builder(name)
        if not builder.is_compatible():
            print(f"{name}: not compiled, which takes {needs}; its tests are skipped")
            continue
        builder.load()
        print(f"{name}: {time.perf_counter() - start_s:.0f} s")


if __name__ == "__main__":
    main()
