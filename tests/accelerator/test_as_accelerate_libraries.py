"""transformers and peft on Trainwright in the place of accelerate."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

from tests.accelerator.tiny_llama import (
    GROUP,
    STEPS,
    WORDS,
    Sentences,
    arguments_of,
    in_order,
    language_model,
    losses_of,
    train_by_hand,
)
from tests.helpers.distributed import run_distributed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore"),  # of the libraries
]

_TOKENS = torch.arange(24).view(2, 12) % WORDS


# transformers: from_pretrained(device_map=…)

_LAYERS = {"model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "cpu", "model.rotary_emb": "cpu"}
_ENDS = {"model.embed_tokens": "cpu", "lm_head": "cpu"}
_MAPS: dict[str, dict[str, Any]] = {
    "a layer on the disk": {"device_map": _LAYERS | _ENDS},
    "max_memory, with buffers": {"device_map": "sequential", "max_memory": {"cpu": "45KB"}, "offload_buffers": True},
    "a parameter without a place": {"device_map": _LAYERS | {"lm_head": "cpu"}},
}


def _from_pretrained(folder: Path, kind: str) -> tuple[set[str], list[bool]]:
    """Load a saved model with a device map; returns the places and whether the results equal those without a map."""
    import trainwright

    trainwright.as_accelerate()
    from transformers import LlamaForCausalLM

    language_model(tie_word_embeddings=False).save_pretrained(folder / "model")
    plain = LlamaForCausalLM.from_pretrained(folder / "model").eval()
    kind_of_model: Any = LlamaForCausalLM
    if kind == "a parameter without a place":

        class WithoutPlace(LlamaForCausalLM):  # type: ignore[misc]  # it has no types
            _no_placement_params = ("model.embed_tokens.weight",)

        kind_of_model = WithoutPlace
    options = {"offload_folder": str(folder / "offloaded"), **_MAPS[kind]}
    model = kind_of_model.from_pretrained(folder / "model", **options).eval()
    with torch.no_grad():
        same = [torch.equal(model(_TOKENS).logits, plain(_TOKENS).logits)]
        settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
        same.append(torch.equal(model.generate(_TOKENS, **settings), plain.generate(_TOKENS, **settings)))
    model.save_pretrained(folder / "again")
    again = LlamaForCausalLM.from_pretrained(folder / "again").state_dict()
    same.append(all(torch.equal(value, again[name]) for name, value in plain.state_dict().items()))
    return {str(place) for place in getattr(model, "hf_device_map", {}).values()}, same


@pytest.mark.parametrize("kind", _MAPS)
def test_transformers_loads_with_a_device_map(kind: str, tmp_path: Path) -> None:
    (places, same), *_ = run_distributed(_from_pretrained, 1, tmp_path, kind, timeout=60)
    assert same == [True, True, True]
    assert "disk" in places


# peft: adapters that transformers' Trainer trains


# transformers' Trainer: options that use other parts of accelerate


class _Stream(IterableDataset[dict[str, torch.Tensor]]):
    """The sentences, without a length."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return (Sentences()[index] for index in range(48))


_EXTRAS: dict[str, dict[str, Any]] = {
    "auto_find_batch_size": {"auto_find_batch_size": True},
    "dispatch_batches": {"accelerator_config": {"dispatch_batches": True, "split_batches": False}},
    "stream": {"max_steps": STEPS},
    "best model": {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2},
}


def _train_with_extras(folder: Path, kind: str) -> dict[str, Any]:
    """Train with options of transformers' Trainer, and predict."""
    import trainwright

    trainwright.as_accelerate()
    from transformers import Trainer, TrainingArguments

    class Watched(Trainer if kind == "stream" else in_order(Trainer)):  # type: ignore[misc]  # it has no types
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            if kind == "auto_find_batch_size" and self._train_batch_size > GROUP:
                raise RuntimeError("CUDA out of memory.")
            return super().training_step(*args, **kwargs)

    # A smaller batch is 0.9 of it, then 0.9 of that.
    size = 23 if kind == "auto_find_batch_size" else GROUP // dist.get_world_size()
    options = {"save_strategy": "no", "num_train_epochs": 2, **_EXTRAS[kind]}
    if kind == "best model":
        options["save_strategy"] = "steps"
    sizes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 1}
    arguments = TrainingArguments(**arguments_of(folder, **sizes, **options))
    data: Any = _Stream() if kind == "stream" else Sentences()
    trainer = Watched(model=language_model(), args=arguments, train_dataset=data, eval_dataset=Sentences())
    trainer.train()
    if kind == "best model":
        assert trainer.state.best_model_checkpoint == str(folder / f"checkpoint-{trainer.state.best_global_step}")
    found = trainer.predict(Sentences())
    return {
        "losses": losses_of(trainer),
        "predictions": torch.from_numpy(found.predictions),
        "size": trainer._train_batch_size,
    }


@pytest.mark.parametrize("kind", _EXTRAS)
def test_options_of_transformers_trainer(kind: str, tmp_path: Path) -> None:
    found, *_ = run_distributed(
        _train_with_extras, 1 if kind == "auto_find_batch_size" else 2, tmp_path, kind, timeout=60
    )
    model = language_model()
    losses = train_by_hand(model)
    if kind == "auto_find_batch_size":
        assert found["size"] <= GROUP
        assert len(found["losses"]) == 2 * -(-48 // found["size"])
        return
    torch.testing.assert_close(torch.tensor(found["losses"]), torch.tensor(losses), rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        wanted = model(torch.stack([Sentences()[index]["input_ids"] for index in range(48)])).logits
    torch.testing.assert_close(found["predictions"], wanted, rtol=1e-5, atol=1e-5)


# diffusers: models that move to the device one after another
