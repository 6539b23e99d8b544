"""Communication hooks: what crosses ranks in which form, and what training makes of it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from tests.helpers.distributed import run_distributed
from tests.helpers.runs import quiet_trainer, weights_of
from tests.helpers.tasks import RegressionTask, regression_data, regression_loader
from trainwright.callbacks.callback import Callback
from trainwright.core.errors import ConfigurationError
from trainwright.processes.process_group import _wait_for_gloo_threads
from trainwright.strategies import DDPCommunicationHookType, DDPStrategy, DistributedDataParallelKwargs
from trainwright.strategies.ddp.comm_hooks import batched_power_sgd

_FULL_RANK = {"matrix_approximation_rank": 8, "start_powerSGD_iter": 2, "min_compression_rate": 0.0}
_RANK_ONE = {"matrix_approximation_rank": 1, "start_powerSGD_iter": 2, "min_compression_rate": 0.0}


class Gradients(Callback):
    """Keeps the first step's gradients, and the dtypes of what is summed over ranks from then on."""

    def __init__(self) -> None:
        self.first: dict[str, torch.Tensor] = {}
        self.dtypes: set[torch.dtype] = set()

    def on_train_start(self, trainer: Any, task: Any) -> None:
        self._exchange = exchange = dist.all_reduce

        def noted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if tensor.numel() > 1:
                self.dtypes.add(tensor.dtype)
            return exchange(tensor, *args, **kwargs)

        dist.all_reduce = noted

    def on_before_optimizer_step(self, trainer: Any, task: Any, optimizer: Any) -> None:
        if not self.first:
            self.first = {n: p.grad.clone() for n, p in task.named_parameters() if p.grad is not None}

    def on_train_end(self, trainer: Any, task: Any) -> None:
        dist.all_reduce = self._exchange
        del self._exchange


def train(strategy: DDPStrategy, **arguments: Any) -> dict[str, Any]:
    task, gradients = RegressionTask(), Gradients()
    callbacks = [gradients, *arguments.pop("callbacks", [])]
    settings = {"max_epochs": 1, "callbacks": callbacks, "num_sanity_val_steps": 0, **arguments}
    trainer = quiet_trainer(devices="auto", strategy=strategy, **settings)
    trainer.fit(task, regression_loader(16))
    return {"weights": weights_of(task), "first": gradients.first, "dtypes": gradients.dtypes, "trainer": trainer}


def annotated(state: dict[str, int], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    state["calls"] += 1
    return default_hooks.allreduce_hook(None, bucket)  # type: ignore[arg-type]  # None: all ranks


def doubled(hook: Any) -> Any:
    def run(state: Any, bucket: Any) -> Any:
        return hook(state, bucket).then(lambda done: done.value().mul_(2))

    return run


def by_hand(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Average the first step's gradients of both ranks, cast before they are added up. Collective."""
    task, batch = RegressionTask(), regression_data(16)[dist.get_rank()]
    task.loss([part.unsqueeze(0) for part in batch]).backward()  # type: ignore[no-untyped-call]
    found = {}
    for name, parameter in task.named_parameters():
        cast = parameter.grad.to(dtype) / 2
        dist.all_reduce(cast)
        found[name] = cast.to(torch.float32)
    return found


_STRATEGIES: dict[str, Any] = {
    "plain": DDPStrategy,
    "fp16": lambda: DDPStrategy(ddp_comm_hook="fp16"),
    "bf16": lambda: DDPStrategy(ddp_comm_hook=DDPCommunicationHookType.BF16),
    "full rank": lambda: DDPStrategy(ddp_comm_hook="power_sgd", ddp_comm_state=_FULL_RANK),
    "rank one": lambda: DDPStrategy(ddp_comm_hook="power_sgd", ddp_comm_state=_RANK_ONE),
    "batched": lambda: DDPStrategy(ddp_comm_hook="batched_power_sgd", ddp_comm_state=_FULL_RANK),
    "cast rank one": lambda: DDPStrategy(
        ddp_comm_hook="power_sgd", ddp_comm_wrapper=DDPCommunicationHookType.BF16, ddp_comm_state=_RANK_ONE
    ),
    "doubled": lambda: DDPStrategy(ddp_comm_wrapper=doubled),
}


def _train_with_all() -> dict[str, Any]:
    found: dict[str, Any] = {name: train(make()) for name, make in _STRATEGIES.items()}
    found["by hand"] = {dtype: by_hand(dtype) for dtype in (torch.float16, torch.bfloat16)}
    state = {"calls": 0}
    found["own"] = train(DDPStrategy(ddp_comm_hook=annotated, ddp_comm_state=state), accumulate_grad_batches=2)
    found["calls"] = state["calls"]
    given = powerSGD_hook.PowerSGDState(None, **_RANK_ONE)  # type: ignore[arg-type]
    strategy = DDPStrategy(ddp_comm_hook=powerSGD_hook.powerSGD_hook, ddp_comm_state=given)
    strategy = cloudpickle.loads(cloudpickle.dumps(strategy))
    found["given"], found["again"] = train(strategy), train(strategy)
    for each in found.values():
        if isinstance(each, dict):
            each.pop("trainer", None)
    return found


@pytest.fixture(scope="module")
def runs() -> list[dict[str, Any]]:
    return run_distributed(_train_with_all, 2, timeout=240)


@pytest.mark.distributed
@pytest.mark.parametrize(("name", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_gradients_are_cast_before_they_are_averaged(name: str, dtype: torch.dtype, runs: list[dict[str, Any]]) -> None:
    for of_rank in runs:
        torch.testing.assert_close(of_rank[name]["first"], of_rank["by hand"][dtype], rtol=0, atol=0)
        assert of_rank[name]["dtypes"] == {dtype}
        assert not torch.equal(of_rank[name]["first"]["net.0.weight"], of_rank["plain"]["first"]["net.0.weight"])


@pytest.mark.distributed
def test_replicas_stay_equal_under_every_hook(runs: list[dict[str, Any]]) -> None:
    for name in (*_STRATEGIES, "own", "given"):
        torch.testing.assert_close(runs[0][name]["weights"], runs[1][name]["weights"], rtol=0, atol=0)


@pytest.mark.distributed
def test_power_sgd_of_full_rank_is_an_average_and_of_rank_one_is_not(runs: list[Any]) -> None:
    plain = runs[0]["plain"]["weights"]
    for name in ("full rank", "batched"):
        torch.testing.assert_close(runs[0][name]["weights"], plain, rtol=0, atol=1e-5)
    assert (runs[0]["rank one"]["weights"]["net.0.weight"] - plain["net.0.weight"]).abs().max() > 1e-4


class _Bucket:
    def __init__(self, values: torch.Tensor) -> None:
        self.values = values.clone()

    def buffer(self) -> torch.Tensor:
        return self.values

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


def _compressed(gradient: torch.Tensor, steps: int, **options: Any) -> list[torch.Tensor]:
    """Return what each of several steps with the same gradient makes of it in one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        state = powerSGD_hook.PowerSGDState(None, 1, 2, **options)  # type: ignore[arg-type]  # None: all ranks
        return [batched_power_sgd(state, _Bucket(gradient)).wait() for _ in range(steps)]
    finally:
        _wait_for_gloo_threads()  # one of them may hold the group, which cannot end in a thread of its own
        dist.destroy_process_group()


def test_batched_power_sgd_begins_after_its_first_steps_and_finds_the_best_matrix_of_its_rank() -> None:
    gradient = torch.randn(14, generator=torch.Generator().manual_seed(0), dtype=torch.float64)  # of 4 × 4 numbers
    left, sizes, right = torch.linalg.svd(torch.cat([gradient, torch.zeros(2)]).view(4, 4))
    best = (sizes[0] * left[:, :1] @ right[:1]).view(-1)[:14]
    warm = _compressed(gradient, 60, use_error_feedback=False)
    assert torch.equal(warm[0], gradient)
    assert torch.equal(warm[1], gradient)
    assert (warm[2] - best).norm() > 1e-3
    torch.testing.assert_close(warm[-1], best)
    cold = _compressed(gradient, 4, use_error_feedback=False, warm_start=False)
    assert not torch.equal(cold[2], cold[3])  # begins with other random numbers


def test_batched_power_sgd_makes_up_for_its_errors() -> None:
    gradient = torch.randn(14, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    total = torch.stack(_compressed(gradient, 202)[2:]).mean(0)
    torch.testing.assert_close(total, gradient, rtol=0, atol=0.1)


@pytest.mark.distributed
def test_a_wrapper_casts_what_a_hook_exchanges(runs: list[dict[str, Any]]) -> None:
    assert runs[0]["cast rank one"]["dtypes"] == {torch.bfloat16}
    assert runs[0]["plain"]["dtypes"] == set()  # in C++


@pytest.mark.distributed
def test_hooks_and_wrappers_of_the_users_own_are_called_once_a_step(runs: list[dict[str, Any]]) -> None:
    for of_rank in runs:
        assert of_rank["calls"] == 4  # eight micro-batches, one bucket
        for name, gradient in of_rank["doubled"]["first"].items():
            torch.testing.assert_close(gradient, 2 * of_rank["plain"]["first"][name])


@pytest.mark.distributed
def test_a_state_object_says_the_options_and_every_fit_begins_with_them(runs: list[dict[str, Any]]) -> None:
    for name in ("given", "again"):
        torch.testing.assert_close(runs[0][name]["weights"], runs[0]["rank one"]["weights"], rtol=0, atol=0)


def _resume(folder: Path) -> list[str]:
    trainer = train(DDPStrategy(ddp_comm_hook="power_sgd", ddp_comm_state=_RANK_ONE), max_steps=4)["trainer"]
    path = trainer.save_checkpoint(folder / "half")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = quiet_trainer(devices="auto", strategy=DDPStrategy(ddp_comm_hook="power_sgd"), max_steps=5)
        trainer.fit(RegressionTask(), regression_loader(16), ckpt_path=path)
    return [str(warning.message) for warning in caught]


@pytest.mark.distributed
def test_a_resume_says_that_power_sgd_begins_anew(tmp_path: Path) -> None:
    first, second = run_distributed(_resume, 2, tmp_path)
    assert any("PowerSGD is reset" in text for text in first)
    assert not any("PowerSGD" in text for text in second)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"start_method": "auto"}, "in one way, which works in scripts"),
        ({"ddp_comm_hook": "pf16"}, "Did you mean 'fp16'"),
        ({"ddp_comm_wrapper": "power_sgd"}, "Known: no, fp16, bf16"),
        ({"ddp_comm_state": {"a": 1}}, "has no state"),
        ({"ddp_comm_hook": "power_sgd", "ddp_comm_state": {"rank": 4}}, "no option 'rank'"),
        ({"ddp_comm_hook": "power_sgd", "ddp_comm_state": {"start_powerSGD_iter": 1}}, "start_powerSGD_iter"),
    ],
)
def test_an_option_that_cannot_be_served_is_an_error_at_construction(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        DDPStrategy(**options)


def test_the_options_of_an_accelerate_script_are_understood() -> None:
    kwargs = DistributedDataParallelKwargs(
        comm_hook=DDPCommunicationHookType.POWER_SGD,
        comm_wrapper=DDPCommunicationHookType.FP16,
        comm_state_option={"matrix_approximation_rank": 2},
        find_unused_parameters=True,
        broadcast_buffers=False,
    )
    strategy = DDPStrategy.from_kwargs(kwargs, timeout=60)
    assert (strategy.comm_hook.hook, strategy.comm_hook.wrapper) == ("power_sgd", "fp16")
    assert strategy.comm_hook.power_sgd == {"matrix_approximation_rank": 2, "process_group": None}
    ours = {"find_unused_parameters": True, "gradient_as_bucket_view": False, "broadcast_buffers": False}
    assert strategy.ddp_options == DDPStrategy(**ours).ddp_options
    with pytest.raises(ConfigurationError, match="check_reduction"):
        DDPStrategy.from_kwargs(DistributedDataParallelKwargs(check_reduction=True))
