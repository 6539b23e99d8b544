"""States of user-written loops in remote folders: uploaded, deleted, interrupted, and continued on another machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.checkpoint.test_remote_runs import folders, names
from tests.contracts.test_own_loop import Net, data, make_optimizer
from trainwright.accelerator import project
from trainwright.accelerator.accelerator import Accelerator
from trainwright.accelerator.project import ProjectConfiguration
from trainwright.core.errors import TrainwrightWarning

pytestmark = pytest.mark.usefixtures("fresh_state")


class Loop:
    """A script on a machine whose disk is `root`."""

    def __init__(self, root: Path, project: str | None, **options: Any) -> None:
        root.mkdir(exist_ok=True)
        os.chdir(root)
        configuration = ProjectConfiguration(project, automatic_checkpoint_naming=project is not None, **options)
        self.accelerator = Accelerator(cpu=True, seed=0, project_config=configuration)
        torch.manual_seed(1)
        net = Net()
        loader = DataLoader(data(16), batch_size=2, shuffle=True)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(net, make_optimizer(net), loader)

    def run(self, num_steps: int, *places: str, saves: bool = True) -> dict[str, torch.Tensor]:
        for count, (x, y, _) in enumerate(self.loader, 1):
            self.accelerator.backward(torch.nn.functional.mse_loss(self.model(x), y))
            self.optimizer.step()
            self.optimizer.zero_grad()
            if saves:
                self.accelerator.save_state(*places)
            if count == num_steps:
                break
        return {name: value.clone() for name, value in self.accelerator.get_state_dict(self.model).items()}


def uninterrupted(root: Path) -> dict[str, torch.Tensor]:
    return Loop(root, None).run(6, saves=False)


@pytest.mark.slow
@pytest.mark.parametrize("async_save", [False, True])
def test_states_are_uploaded_limited_and_continued_exactly_on_another_machine(
    memory: str, tmp_path: Path, async_save: bool
) -> None:
    url = f"{memory}/run"
    options = {"total_limit": 2, "async_save": async_save}
    first = Loop(tmp_path / "a", url, **options)
    first.run(3)
    first.accelerator.end_training()
    assert folders(f"{url}/checkpoints") == names(f"{url}/checkpoints") == ["checkpoint_1", "checkpoint_2"]
    second = Loop(tmp_path / "b", url, **options)
    second.accelerator.load_state()
    weights = second.run(3)
    second.accelerator.end_training()
    torch.testing.assert_close(weights, uninterrupted(tmp_path / "c"), rtol=0, atol=0)
    assert folders(f"{url}/checkpoints") == ["checkpoint_4", "checkpoint_5"]
    # The first machine has older states than the remote folder.
    third = Loop(tmp_path / "a", url, **options)
    third.accelerator.load_state()
    assert third.accelerator.save_iteration == 6
    # The second one needs no download.
    downloaded = list((tmp_path / "b" / "downloaded").iterdir())
    Loop(tmp_path / "b", url).accelerator.load_state()
    assert list((tmp_path / "b" / "downloaded").iterdir()) == downloaded


def test_a_missing_state_is_an_error_and_a_taken_number_is_skipped(memory: str, tmp_path: Path) -> None:
    loop = Loop(tmp_path / "a", f"{memory}/run")
    with pytest.raises(FileNotFoundError, match=f"no valid state in {memory}/run/checkpoints"):
        loop.accelerator.load_state()
    with pytest.raises(FileNotFoundError, match="no valid state in memory://"):
        loop.accelerator.load_state(f"{memory}/nothing")
    loop.run(1)
    with pytest.warns(TrainwrightWarning, match="holds states up to checkpoint_0"):
        Loop(tmp_path / "b", f"{memory}/run").run(1)
    assert names(f"{memory}/run/checkpoints") == ["checkpoint_0", "checkpoint_1"]


def test_a_loop_asks_the_service_once_before_its_saves(
    memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def remote_names(url: str) -> list[str]:
        asked.append(url)
        return []

    monkeypatch.setattr(project, "remote_names", remote_names)
    loop = Loop(tmp_path, None)
    for place in (f"{memory}/run/a", f"{memory}/run/b", f"{memory}/other/a"):
        loop.accelerator.save_state(place)
    assert asked == [f"{memory}/run", f"{memory}/other"]
    assert folders(f"{memory}/run") == ["a", "b"]
