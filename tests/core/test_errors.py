from __future__ import annotations

import pytest

from trainwright.core import errors
from trainwright.core.errors import MissingPackageError


@pytest.mark.requires("torchao", reason="the error names its version")
def test_a_torchao_that_needs_a_newer_torch_is_an_error_with_the_version_that_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(name: str) -> None:
        raise ImportError("cannot import name 'ScalingType' from 'torch.nn.functional'")

    monkeypatch.setattr(errors.importlib, "import_module", fail)
    with pytest.raises(MissingPackageError, match=r"needs a torchao for torch 2\..*pip install torchao==0\.17\.0"):
        errors.load_torchao("precision='fp8'")
