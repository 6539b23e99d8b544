"""transformers, peft, trl and diffusers on Trainwright in the place of accelerate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from tests.accelerator.tiny_llama import (
    GROUP,
    STEPS,
    WORDS,
    Sentences,
    arguments_of,
    in_order,
    language_model,
    loss_of,
    losses_of,
    train_by_hand,
)
from tests.helpers.distributed import run_distributed

pytestmark = [
    pytest.mark.engines,
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore"),  # of the libraries
]

_TOKENS = torch.arange(24).view(2, 12) % WORDS


_MAPS: dict[str, dict[str, Any]] = {
    "auto": {"device_map": "auto"},
    "everything on the disk": {"device_map": {"": "disk"}},
    "max_memory, with buffers": {"device_map": "sequential", "max_memory": {"cpu": "45KB"}, "offload_buffers": True},
}


def _from_pretrained(folder: Path, kind: str) -> tuple[set[str], list[bool]]:
    """Load a saved model with a device map; returns the places and whether the results equal those without a map."""
    import trainwright

    trainwright.as_accelerate()
    from transformers import LlamaForCausalLM

    language_model(tie_word_embeddings=False).save_pretrained(folder / "model")
    plain = LlamaForCausalLM.from_pretrained(folder / "model").eval()
    options = {"offload_folder": str(folder / "offloaded"), **_MAPS[kind]}
    model = LlamaForCausalLM.from_pretrained(folder / "model", **options).eval()
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
    on_disk = "disk" in kind or kind.startswith("max_memory")
    assert ("disk" in places) == on_disk


def _adapted(folder: Path, bits: int | None = None) -> Any:
    """Return a model with seeded LoRA adapters; its saved weights are quantized with `bits`."""
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from transformers import BitsAndBytesConfig, LlamaForCausalLM

    base = language_model(hidden_size=64)  # bitsandbytes packs 64 numbers of 4 bits at a time
    if bits is not None:
        base = LlamaForCausalLM.from_pretrained(
            folder / "base",
            quantization_config=BitsAndBytesConfig(
                **{f"load_in_{bits}bit": True}, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
            ),
            device_map={"": "cpu"},
            dtype=torch.float32,
        )
        base = prepare_model_for_kbit_training(base, use_gradient_checkpointing=False)
    torch.manual_seed(1)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM")
    return get_peft_model(base, config)


def _train_adapters(folder: Path, bits: int | None, resume: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """Train adapters with transformers' Trainer; returns the losses of all steps, and those of the saved adapters."""
    import trainwright

    trainwright.as_accelerate()
    from peft import PeftModel
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(**arguments_of(folder / "run", num_train_epochs=2, **options))
    trainer = in_order(Trainer)(model=_adapted(folder, bits), args=arguments, train_dataset=Sentences())
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(str(folder / "adapters"))
    dist.barrier()
    value = None
    if (folder / "adapters/adapter_config.json").exists():
        loaded = PeftModel.from_pretrained(_adapted(folder, bits).unload(), str(folder / "adapters"))
        with torch.no_grad():
            value = float(loss_of(loaded, [Sentences()[index] for index in range(8)]))
    return {
        "losses": losses_of(trainer),
        "loaded": value,
        "units": sum(isinstance(module, FSDPModule) for module in trainer.model.modules()),
    }


_SHARDED = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
_ADAPTERS: dict[str, tuple[int, int | None, dict[str, Any]]] = {
    "1 process": (1, None, {}),
    "ddp": (2, None, {}),
    "fsdp": (2, None, {"fsdp": True, "fsdp_config": _SHARDED}),
    "fsdp, sharded files": (
        2, None, {"fsdp": True, "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT", **_SHARDED}},
    ),
    "8 bits": (1, 8, {}),
    "4 bits, ddp": (2, 4, {}),
}  # fmt: skip


@pytest.mark.parametrize("kind", _ADAPTERS)
def test_peft_trains_saves_and_resumes_adapters(kind: str, tmp_path: Path) -> None:
    num_ranks, bits, options = _ADAPTERS[kind]
    language_model(hidden_size=64).save_pretrained(tmp_path / "base")
    model = _adapted(tmp_path, bits)
    losses = train_by_hand(model)
    with torch.no_grad():
        last = float(loss_of(model, [Sentences()[index] for index in range(8)]))
    found, *_ = run_distributed(_train_adapters, num_ranks, tmp_path, bits, None, options, timeout=120)
    assert found["units"] == (3 if "fsdp" in kind else 0)  # the whole model and its two layers
    tolerance = 1e-5 if bits != 8 else 1e-4  # activations are rounded to 8 bits
    torch.testing.assert_close(torch.tensor(found["losses"]), torch.tensor(losses), rtol=tolerance, atol=1e-5)
    if kind != "fsdp, sharded files":  # of which transformers writes no adapters
        assert found["loaded"] == pytest.approx(last, abs=10 * tolerance)
    resume = str(tmp_path / "run/checkpoint-4")
    again, *_ = run_distributed(_train_adapters, num_ranks, tmp_path, bits, resume, options, timeout=120)
    assert again == found


def _ragged() -> list[list[int]]:
    """Return 48 sentences of 512 tokens: both fill their optimizer steps, so that no rank repeats samples."""
    return [Sentences()[index]["input_ids"].tolist()[: (9, 10, 13)[index % 3]] for index in range(48)]


def _loss_of_blocks(model: Any, blocks: list[list[int]]) -> torch.Tensor:
    rows = [torch.tensor(block) for block in blocks]
    tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    labels = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)
    mask = (labels != -100).long()
    scores = model(input_ids=tokens, attention_mask=mask).logits[:, :-1]
    return nn.functional.cross_entropy(scores.flatten(0, 1).float(), labels[:, 1:].flatten())


def _fine_tune(folder: Path, resume: str | None, adapters: bool) -> list[dict[str, float]]:
    """Train with trl's SFTTrainer; returns what it has logged in each step."""
    import trainwright

    trainwright.as_accelerate()
    from datasets import Dataset, disable_caching
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    disable_caching()
    words = Tokenizer(models.WordLevel({str(word): word for word in range(WORDS)}, unk_token="0"))
    arguments = SFTConfig(**arguments_of(folder, max_steps=STEPS, bf16=False, max_length=16))
    trainer = in_order(SFTTrainer)(
        model=_adapted(folder) if adapters else language_model(),
        args=arguments,
        train_dataset=Dataset.from_list([{"input_ids": sentence} for sentence in _ragged()]),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1", unk_token="0"),
    )
    assert type(trainer.accelerator).__module__.startswith("trainwright.")
    trainer.train(resume_from_checkpoint=resume)
    names = ("loss", "grad_norm", "num_tokens", "mean_token_accuracy")
    return [{name: entry[name] for name in names} for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize(("kind", "num_ranks"), [("sentences", 1), ("sentences", 2), ("adapters", 2)])
def test_trl_fine_tunes_and_resumes(kind: str, num_ranks: int, tmp_path: Path) -> None:
    adapters = kind == "adapters"
    model, blocks = _adapted(tmp_path) if adapters else language_model(), _ragged()
    groups = [blocks[start : start + GROUP] for start in range(0, len(blocks), GROUP)]
    steps = [groups[step % len(groups)] for step in range(STEPS)]
    losses = train_by_hand(model, lambda step: _loss_of_blocks(model, steps[step]))
    found, *_ = run_distributed(_fine_tune, num_ranks, tmp_path, None, adapters, timeout=90)
    measured = torch.tensor([entry["loss"] for entry in found])
    torch.testing.assert_close(measured, torch.tensor(losses), rtol=1e-5, atol=1e-5)
    assert found[-1]["num_tokens"] == sum(len(block) for step in steps for block in step)
    resume = str(tmp_path / "checkpoint-4")
    again, *_ = run_distributed(_fine_tune, num_ranks, tmp_path, resume, adapters, timeout=90)
    assert again[:4] == found[:4]
    for name in ("loss", "grad_norm"):
        assert [entry[name] for entry in again[4:]] == [entry[name] for entry in found[4:]]


def _generate_images(kind: str) -> list[bool]:
    """Run a pipeline with offloaded models; returns whether each result is that of the plain pipeline."""
    import trainwright

    trainwright.as_accelerate()
    from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
    from diffusers.utils import logging

    logging.disable_progress_bar()

    def pipeline() -> Any:
        torch.manual_seed(0)
        unet = UNet2DModel(
            sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, norm_num_groups=4,
            block_out_channels=(8, 16), down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        )  # fmt: skip
        return DDPMPipeline(unet, DDPMScheduler(num_train_timesteps=10))

    def images(run: Any) -> torch.Tensor:
        options = {"num_inference_steps": 3, "output_type": "np", "generator": torch.Generator().manual_seed(1)}
        return torch.from_numpy(run(**options).images)

    plain, offloaded = pipeline(), pipeline()
    getattr(offloaded, f"enable_{kind}_cpu_offload")(device="cpu")
    wanted = images(plain)
    same = [torch.equal(images(offloaded), wanted), torch.equal(images(offloaded), wanted)]
    offloaded.remove_all_hooks()
    return [*same, torch.equal(images(offloaded), wanted)]


@pytest.mark.parametrize("kind", ["model", "sequential"])
def test_diffusers_offloads_models(kind: str) -> None:
    found, *_ = run_distributed(_generate_images, 1, kind, timeout=60)
    assert found == [True, True, True]
