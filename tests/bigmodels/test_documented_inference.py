"""The guide to inference on several processes, block by block, with small models in the place of large ones."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.helpers.distributed import run_distributed
from trainwright import PartialState, gather_object, prepare_pippy


class Image:
    """A picture of a prompt."""

    def __init__(self, pixels: torch.Tensor) -> None:
        self.pixels = pixels

    def save(self, file: str) -> None:
        Path(file).write_text(" ".join(f"{pixel:.6f}" for pixel in self.pixels.tolist()))


class Result:
    """What a pipeline returns."""

    def __init__(self, images: list[Image]) -> None:
        self.images = images


class DiffusionPipeline:
    """As diffusers has it: made by name, moved to a device, called with one prompt or several."""

    def __init__(self, net: nn.Module) -> None:
        self.net = net

    @classmethod
    def from_pretrained(cls, name: str, torch_dtype: torch.dtype) -> DiffusionPipeline:
        with torch.random.fork_rng():
            torch.manual_seed(len(name))
            return cls(nn.EmbeddingBag(256, 4, dtype=torch_dtype))

    def to(self, device: torch.device | str) -> DiffusionPipeline:
        self.net.to(device)
        return self

    @torch.no_grad()
    def __call__(self, prompt: str | list[str]) -> Result:
        prompts = [prompt] if isinstance(prompt, str) else prompt
        letters = [torch.tensor([list(each.encode())], device=next(self.net.parameters()).device) for each in prompts]
        return Result([Image(self.net(each)[0]) for each in letters])


def _pipe() -> DiffusionPipeline:
    return DiffusionPipeline.from_pretrained("runwayml/stable-diffusion-v1-5", torch_dtype=torch.float32)


def _saved(folder: str, prompt: str) -> str:
    file = Path(folder, "one.png")
    _pipe()(prompt).images[0].save(str(file))
    return file.read_text()


# Chunks of a batch for each process's model


def _by_rank(rank: int, world_size: int) -> None:
    pipe = _pipe()
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    pipe.to("cpu")

    if torch.distributed.get_rank() == 0:
        prompt = "a dog"
    elif torch.distributed.get_rank() == 1:
        prompt = "a cat"

    result = pipe(prompt).images[0]
    result.save(f"result_{rank}.png")
    dist.destroy_process_group()


def _by_split() -> None:
    pipe = _pipe()
    distributed_state = PartialState()
    pipe.to(distributed_state.device)

    # Assume two processes
    with distributed_state.split_between_processes(["a dog", "a cat"]) as prompt:
        result = pipe(prompt).images[0]
        result.save(f"split_{distributed_state.process_index}.png")


def _padded() -> tuple[list[str], list[float]]:
    pipe = _pipe()
    distributed_state = PartialState()
    pipe.to(distributed_state.device)

    # Assume two processes
    with distributed_state.split_between_processes(["a dog", "a cat", "a chicken"], apply_padding=True) as prompt:
        result = pipe(prompt).images

    gathered = gather_object([image.pixels.cpu() for image in result])
    return prompt, [float(pixels.sum()) for pixels in gathered[:-1]]  # the last one is a duplicate


def _run_guide(folder: str) -> tuple[list[str], list[float]]:
    os.chdir(folder)
    _by_split()
    found = _padded()
    # A script of its own in the guide. It comes last, since rank 0's store ends with the group that torch makes here.
    PartialState().destroy_process_group()
    _by_rank(int(os.environ["RANK"]), 2)
    return found


@pytest.fixture(scope="module")
def guide(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    folder = tmp_path_factory.mktemp("guide")
    return folder, run_distributed(_run_guide, 2, str(folder), init=False, timeout=120)


@pytest.mark.distributed
@pytest.mark.exhaustive
def test_each_process_makes_the_picture_of_its_prompt(guide: tuple[Path, list[Any]], tmp_path: Path) -> None:
    for rank, prompt in enumerate(["a dog", "a cat"]):
        picture = _saved(str(tmp_path), prompt)
        assert Path(guide[0], f"result_{rank}.png").read_text() == picture
        assert Path(guide[0], f"split_{rank}.png").read_text() == picture


@pytest.mark.distributed
@pytest.mark.exhaustive
def test_an_odd_number_of_prompts_is_padded_and_gathered(guide: tuple[Path, list[Any]]) -> None:
    assert [prompts for prompts, _ in guide[1]] == [["a dog", "a cat"], ["a chicken", "a chicken"]]
    wanted = [float(image.pixels.sum()) for image in _pipe()(["a dog", "a cat", "a chicken"]).images]
    for _, sums in guide[1]:
        assert sums == pytest.approx(wanted)


# A pipeline over processes


def _run_pipeline_guide() -> dict[str, Any]:
    from transformers import GPT2Config, GPT2ForSequenceClassification

    with torch.random.fork_rng():
        torch.manual_seed(1)
        config = GPT2Config(n_embd=32, n_layer=4, n_head=4, vocab_size=64, n_positions=32)
        model = GPT2ForSequenceClassification(config)
        model.eval()
        input = torch.randint(
            low=0,
            high=config.vocab_size,
            size=(2, 32),  # bs x seq_len
            device="cpu",
            dtype=torch.int64,
            requires_grad=False,
        )
    some_more_arguments = (input.flip(0),)
    with torch.no_grad():  # one by one: without a padding token the model takes no more
        wanted = torch.cat([model(row[None]).logits for row in some_more_arguments[0]])

    example_inputs = {"input_ids": input}
    model = prepare_pippy(model, example_args=(input,))

    args = some_more_arguments
    with torch.no_grad():
        output = model(*args)

    found: dict[str, Any] = {"is None": output is None, "use_cache": config.use_cache, "names": list(example_inputs)}
    if PartialState().is_last_process:
        found["error"] = float((output.logits - wanted).abs().max())
    return found


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.requires("transformers", reason="models by their configuration")
@pytest.mark.exhaustive
def test_a_pipeline_over_processes_has_its_output_on_the_last_one() -> None:
    first, last = run_distributed(_run_pipeline_guide, 2, init=False, timeout=200)
    assert (first["is None"], last["is None"]) == (True, False)
    assert "error" not in first
    assert last["error"] < 1e-5
    assert first["use_cache"] is last["use_cache"] is True  # as it was
