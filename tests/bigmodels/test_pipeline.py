"""A model in stages on several processes computes what it computes on one, for batches of any size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.distributed import run_distributed
from trainwright import ConfigurationError, prepare_pippy


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(32, 3)

    def forward(self, inputs: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.first(inputs) * scale
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return {"scores": self.head(hidden), "hidden": hidden}


class Odd(nn.Module):
    """A number among its arguments; results that are flattened, none, or no tensors."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.first = nn.Linear(6, 32)
            self.second = nn.Linear(32, 32)
            self.head = nn.Linear(32, 3)

    def forward(self, inputs: torch.Tensor, options: dict[str, int]) -> Any:
        hidden = self.second(self.first(inputs) ** options["power"])
        return {"flat": self.head(hidden).flatten(0, 1), "hidden": hidden, "loss": None, "steps": 5}


class MeanLoss(Odd):
    def forward(self, inputs: torch.Tensor, options: dict[str, int]) -> Any:
        return {**super().forward(inputs, options), "loss": self.second(self.first(inputs)).mean()}


def sequence(size: int, length: int = 7) -> torch.Tensor:
    return torch.randn(size, length, 6, generator=torch.Generator().manual_seed(size))


UNLIKE_THE_EXAMPLE: dict[str, tuple[tuple[Any, ...], str]] = {
    "a number": ((sequence(4), {"power": 3}), "called with 3 where the example had 2"),
    "a length": ((sequence(4, 5), {"power": 2}), r"\(batch, 5, 6\) where the example had torch.float32 \(batch, 7, 6"),
    "a dtype": ((sequence(4).double(), {"power": 2}), r"torch.float64 .* where the example had torch.float32"),
    "a structure": ((sequence(4), {"base": 2}), "another structure"),
    "too few": ((sequence(4),), "1 positional arguments .* The example had 2"),
}


def make_net() -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return Net().eval()


def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(size)
    return torch.randn(size, 6, generator=generator), torch.rand(size, 1, generator=generator)


SIZES = (4, 8, 5, 1, 11)


def _run() -> dict[str, Any]:
    import torch.distributed as dist

    rank = dist.get_rank()
    last = prepare_pippy(make_net(), example_args=batch(4))
    everywhere = prepare_pippy(
        make_net(), split_points=["blocks.1"], example_kwargs=dict(zip(("inputs", "scale"), batch(4), strict=True)),
        num_chunks=1, gather_output=True,
    )  # fmt: skip
    found: dict[str, Any] = {"points": last.hf_split_points, "last": [], "everywhere": []}
    for size in SIZES:
        found["last"].append(last(*batch(size)) if rank == 0 else last())
        named = dict(zip(("inputs", "scale"), batch(size), strict=True))
        found["everywhere"].append(everywhere(**named))
    elsewhere = "the first process of the pipeline are invalid"
    with pytest.raises(ConfigurationError, match=r"batches of \[2, 3\]" if rank == 0 else elsewhere):
        last(batch(2)[0], batch(3)[1])
    found["after an error"] = last(*batch(4))

    odd = prepare_pippy(Odd().eval(), example_args=(sequence(4), {"power": 2}), gather_output=True)
    found["odd"] = [odd(sequence(size), {"power": 2}) for size in SIZES]
    for arguments, text in UNLIKE_THE_EXAMPLE.values():
        with pytest.raises(ConfigurationError, match=text if rank == 0 else elsewhere):
            odd(*arguments)
    with pytest.raises(ConfigurationError, match=r"shape \(\) for 2 samples"):
        prepare_pippy(MeanLoss(), example_args=(sequence(4), {"power": 2}))
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_distributed(_run, 2, timeout=120)


def _assert_equal(result: Any, size: int) -> None:
    wanted = make_net()(*batch(size))
    assert list(result) == list(wanted)
    for name, tensor in wanted.items():
        torch.testing.assert_close(result[name], tensor, rtol=0, atol=1e-6)


@pytest.mark.distributed
@pytest.mark.slow
def test_the_last_process_has_the_result_for_every_batch_size_and_all_have_it_on_request(
    found: list[dict[str, Any]],
) -> None:
    assert found[0]["last"] == [None] * len(SIZES)
    for results in (found[1]["last"], found[0]["everywhere"], found[1]["everywhere"]):
        for size, result in zip(SIZES, results, strict=True):
            _assert_equal(result, size)
    assert found[0]["points"] == found[1]["points"]
    assert found[0]["points"][0].startswith("blocks.2")  # stages are even by default
    _assert_equal(found[1]["after an error"], 4)


@pytest.mark.distributed
@pytest.mark.slow
def test_results_are_joined_whatever_they_are(found: list[dict[str, Any]]) -> None:
    for rank in found:
        for size, result in zip(SIZES, rank["odd"], strict=True):
            wanted = Odd().eval()(sequence(size), {"power": 2})
            assert list(result) == list(wanted)
            assert (result["loss"], result["steps"]) == (None, 5)
            for name in ("flat", "hidden"):
                torch.testing.assert_close(result[name], wanted[name], rtol=0, atol=1e-6)


def test_what_a_pipeline_cannot_be_made_of_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="example_args or example_kwargs"):
        prepare_pippy(make_net())
    with pytest.raises(ConfigurationError, match="needs several processes"):
        prepare_pippy(make_net(), example_args=batch(4))
