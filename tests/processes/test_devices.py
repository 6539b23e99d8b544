"""Types of accelerators: names, errors, backends, and training on one that a package adds to torch."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.helpers.runs import assert_equal_weights
from tests.helpers.sources import ROOT
from trainwright.core.errors import ConfigurationError
from trainwright.core.host.device_types import NAMED, properties
from trainwright.launch import launch
from trainwright.processes.devices import DistributedType, check_backend, default_backend, device_type
from trainwright.strategies import DDPStrategy
from trainwright.trainer.trainer import Trainer


def _sees(monkeypatch: pytest.MonkeyPatch, kind: str | None) -> None:
    found = None if kind is None else SimpleNamespace(type=kind)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: found)


@pytest.mark.parametrize("kind", [*NAMED, "new"])
def test_a_device_is_found_by_its_name_by_auto_and_by_gpu(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _sees(monkeypatch, kind)
    assert {device_type(name) for name in (kind, "auto", "gpu")} == {kind}
    assert DistributedType(properties(kind).distributed_type).value.startswith("MULTI_")
    with pytest.raises(ConfigurationError, match=f"sees {kind} on this machine"):
        device_type("npu" if kind != "npu" else "xpu")


@pytest.mark.parametrize(
    ("kind", "variable"),
    [("cuda", "CUDA_VISIBLE_DEVICES"), ("xpu", "ZE_AFFINITY_MASK"), ("npu", "ASCEND_RT_VISIBLE_DEVICES")],
)
def test_the_launcher_limits_devices_by_the_variable_of_their_type(
    kind: str, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _sees(monkeypatch, kind)
    assert launch._visible_devices("0,2") == {variable: "0,2"}


def test_a_backend_of_another_device_is_refused_before_processes_start() -> None:
    for backend, kind in (("nccl", "cpu"), ("hccl", "cuda"), ("ccl", "cuda")):
        with pytest.raises(ConfigurationError, match=f"'{backend}' needs .* on {kind}"):
            check_backend(backend, kind)
    for backend, kind in (("nccl", "cuda"), ("hccl", "npu"), ("hccl", "hpu"), ("gloo", "cuda"), (None, "cpu")):
        check_backend(backend, kind)
    with pytest.raises(ConfigurationError, match="process_group_backend='nccl' needs CUDA devices"):
        Trainer(accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend="nccl"))


def test_the_default_backend_is_that_of_torch_or_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_backend(torch.device("cpu")) == "gloo"
    assert default_backend(torch.device("cuda")) == "nccl"

    def none_registered(device: torch.device) -> str:
        raise ValueError(device)

    monkeypatch.setattr(dist, "get_default_backend_for_device", none_registered)
    assert default_backend(torch.device("hpu")) == "hccl"


def _run(*arguments: str, path: Path = ROOT) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{path}"}
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.engines
@pytest.mark.distributed
def test_ccl_is_imported_and_used(tmp_path: Path) -> None:
    """With a package of that name whose backend is gloo: oneCCL itself is not installed here."""
    (tmp_path / "oneccl_bindings_for_pytorch.py").write_text(
        textwrap.dedent("""
        import torch.distributed as dist

        def create(store, rank, size, timeout):
            return dist.ProcessGroupGloo(store, rank, size, timeout)

        dist.Backend.register_backend("ccl", create, devices=["cpu"])
        """)
    )
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(f"""
        import torch.distributed as dist
        from tests.helpers.tasks import RegressionTask, regression_loader
        from trainwright import Trainer
        from trainwright.strategies import DDPStrategy

        class Task(RegressionTask):
            def on_train_start(self):
                assert dist.get_backend() == "ccl", dist.get_backend()
                if self.global_rank == 0:
                    open({str(tmp_path / "ran")!r}, "w").close()

        if __name__ == "__main__":
            Trainer(max_epochs=1, accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend="ccl"),
                    logger=False, enable_checkpointing=False).fit(Task(), regression_loader(16, 4))
        """)
    )
    _run(str(script), path=tmp_path)
    assert (tmp_path / "ran").exists()


@pytest.mark.engines
def test_training_on_an_added_device_equals_the_cpu_to_the_last_bit(tmp_path: Path) -> None:
    found: dict[str, Any] = {}
    for kind in ("cpu", "open"):
        folder = tmp_path / kind
        folder.mkdir()
        (tmp_path / "build").mkdir(exist_ok=True)
        _run(str(Path(__file__).with_name("open_device_run.py")), str(folder), kind, str(tmp_path / "build"))
        found[kind] = torch.load(folder / "found.pt")
    cpu, added = found["cpu"], found["open"]
    assert added["facts"] == {"accelerator": "open", "names": ["Open device 0"]}
    for precision, run in added["runs"].items():
        assert run["devices"] == ["open", "open"]
        assert run["metrics"] == cpu["runs"][precision]["metrics"]
        assert_equal_weights(run["weights"], cpu["runs"][precision]["weights"])
