"""What a rank needs at most is what real steps have in memory, for three models of transformers."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.distributed import run_distributed
from tests.helpers.runs import quiet_trainer
from trainwright import TaskModule
from trainwright.callbacks.callback import Callback
from trainwright.cli.main import main
from trainwright.strategies.offload.estimates import count_activation_bytes
from trainwright.strategies.offload.rank_peaks import (
    TrainingShape,
    rank_peaks,
    ranks_that_fit,
    shape_of,
    training_shape,
)

_SMALL, _LARGE = (1, 16), (4, 64)  # (batch, sequence): the step's end or the backward's begin is the peak


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """Adds up the storages that are alive; `peak` is the most there were."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # likewise
        self.live = self.peak = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.see(tensor)
        return result

    def see(self, tensor: torch.Tensor) -> None:
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            weakref.finalize(storage, self._forget, key)
        self.live += size - self._known.get(key, 0)  # sharding frees and fills the same storage
        self._known[key] = size
        self.peak = max(self.peak, self.live)

    def _forget(self, key: int) -> None:
        self.live -= self._known.pop(key)


def _model(name: str) -> Any:
    import transformers as kit

    with torch.random.fork_rng():
        torch.manual_seed(0)
        if name == "llama":
            return kit.LlamaForCausalLM(
                kit.LlamaConfig(
                    hidden_size=128, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
                    vocab_size=1000, use_cache=False,
                )
            )  # fmt: skip
        if name == "gpt2":
            return kit.GPT2LMHeadModel(
                kit.GPT2Config(
                    n_embd=128, n_layer=4, n_head=4, vocab_size=1000, n_positions=64, use_cache=False,
                    bos_token_id=1, eos_token_id=2,
                )
            )  # fmt: skip
        return kit.T5ForConditionalGeneration(
            kit.T5Config(
                d_model=128, d_kv=32, d_ff=512, num_layers=3, num_heads=4, vocab_size=1000, decoder_start_token_id=0
            )
        )


class Task(TaskModule):
    """Trains one of the models with Adam."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.model = _model(name)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def shard_units(self) -> Any:
        return [m for m in self.model.modules() if type(m).__name__ in ("LlamaDecoderLayer", "GPT2Block", "T5Block")]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


class Measure(Callback):
    """Counts from the second step on, when Adam has its states."""

    def __init__(self) -> None:
        self.bytes = LiveBytes()

    def on_train_step_end(self, trainer: Any, task: Any, result: Any) -> None:
        if trainer.global_step == 1:
            for state in trainer.optimizers[0].state.values():
                for value in state.values():
                    self.bytes.see(value)
            for parameter in task.parameters():
                self.bytes.see(parameter)
            self.bytes.__enter__()  # type: ignore[no-untyped-call]  # likewise

    def on_train_end(self, trainer: Any, task: Any) -> None:
        self.bytes.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # likewise


def _tokens(shape: tuple[int, int]) -> torch.Tensor:
    return torch.randint(0, 1000, shape, generator=torch.Generator().manual_seed(1))


def _measured(name: str, strategy: Any, shape: tuple[int, int]) -> int:
    measure = Measure()
    trainer = quiet_trainer(strategy=strategy, devices="auto", max_steps=3, callbacks=[measure])
    trainer.fit(Task(name), [_tokens(shape)] * 8)
    return measure.bytes.peak


def _estimated(name: str, strategy: str, shape: tuple[int, int], world_size: int) -> int:
    model, tokens = _model(name), _tokens(shape)
    kept = count_activation_bytes(lambda: model(input_ids=tokens, labels=tokens).loss, model)
    peaks = rank_peaks(training_shape(model), world_size=world_size, activation_bytes=kept)
    return peaks[strategy]


@pytest.mark.slow
@pytest.mark.requires("transformers", reason="models by their configuration")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("shape", [_SMALL, _LARGE])
@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_one_process_needs_what_was_estimated(name: str, shape: tuple[int, int]) -> None:
    assert _estimated(name, "single", shape, 1) == pytest.approx(_measured(name, "single", shape), rel=0.1)


def _measured_on_ranks(strategy: str, names: list[str]) -> list[int]:
    return [_measured(name, strategy, shape) for name in names for shape in (_SMALL, _LARGE)]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.requires("transformers", reason="models by their configuration")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_each_of_two_ranks_needs_what_was_estimated(strategy: str) -> None:
    names = ["llama", "gpt2", "t5"]
    found = run_distributed(_measured_on_ranks, 2, strategy, names, init=False, timeout=240)[0]
    wanted = [_estimated(name, strategy, shape, 2) for name in names for shape in (_SMALL, _LARGE)]
    assert wanted == pytest.approx(found, rel=0.1)


def test_a_shape_knows_blocks_from_what_is_around_them() -> None:
    sizes = {"embed.weight": 100, "layers.0.a.weight": 30, "layers.0.b": 5, "layers.1.a.weight": 40, "norm": 2}
    assert shape_of(sizes) == TrainingShape(elements=177, unit=40, outside=102, tensor=100)


def test_more_ranks_need_less_each_and_fit_sooner() -> None:
    shape = TrainingShape(elements=7_000_000_000, unit=200_000_000, outside=260_000_000, tensor=131_000_000)
    peaks = [rank_peaks(shape, world_size=ranks, activation_bytes=10**9)["fsdp"] for ranks in (1, 2, 8, 64)]
    assert peaks == sorted(peaks, reverse=True)
    needed = ranks_that_fit(shape, 80 * 10**9, activation_bytes=10**9)
    assert needed["single"] is None
    assert needed["fsdp"] in (2, 4)
    assert needed["offload"] == 1


@pytest.mark.slow
@pytest.mark.requires("transformers", reason="models by their configuration")
@pytest.mark.filterwarnings("ignore")
def test_the_command_says_what_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _model("llama").config.save_pretrained(tmp_path)
    arguments = ["estimate", str(tmp_path), "--batch-size", "1", "--sequence-length", "16", "--devices", "2"]
    assert main([*arguments, "--device-memory", "16MB", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert set(facts["peaks_float32_adam"]) == set(facts["devices_needed"])
    assert facts["devices_needed"]["single"] is None
    assert facts["devices_needed"]["fsdp"] is not None
    assert main([*arguments, "--device-memory", "16MB"]) == 0
    assert "does not fit" in capsys.readouterr().out
    assert main(["estimate", str(tmp_path), "--devices", "0"]) == 2
    assert "at least 1" in capsys.readouterr().err


def test_stored_weights_do_not_say_what_is_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    assert main(["estimate", str(tmp_path), "--devices", "2"]) == 2
    assert "need a model" in capsys.readouterr().err
