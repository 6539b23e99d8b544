"""What a rank needs at most: pinned numbers that agreed with real steps, and what the command says of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.bigmodels.nets import of_transformers
from trainwright.bigmodels.maps.rank_peaks import (
    TrainingShape,
    ZeroBuckets,
    pipeline_peak,
    rank_peaks,
    shape_of,
    split_peak,
    stage_shapes,
)
from trainwright.cli.main import main


def _save_config(name: str, folder: Path) -> None:
    import transformers as kit

    if name == "llama":
        sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
        config = kit.LlamaConfig(**sizes, vocab_size=1000, use_cache=False, architectures=["LlamaForCausalLM"])
    else:
        sizes = {"d_model": 128, "d_kv": 32, "d_ff": 512, "num_layers": 3, "num_heads": 4, "vocab_size": 1000}
        config = kit.T5Config(**sizes, decoder_start_token_id=0, architectures=["T5ForConditionalGeneration"])
    config.save_pretrained(folder)


_SHAPE = TrainingShape(sizes=(3000, *[500, 900, 40] * 3, 90), largest_block=1440, outside_blocks=3090, num_uses=2)
_BUCKETS = ZeroBuckets(reduce=800, persistent=50, prefetch=600, max_reuse_distance=900, max_live=1000)


@pytest.mark.parametrize(
    ("activation_bytes", "options", "peaks"),
    [
        (1000, {}, (142_560, 142_560, 149_160, 42_306, 141_320, 134_120, 129_980)),
        (1000, {"foreach": True}, (148_200, 148_200, 149_160, 42_306, 141_320, 134_120, 129_980)),
        (60_000, {}, (160_920, 190_560, 194_340, 84_360, 171_227, 171_227, 169_047)),
    ],
)
def test_peaks_are_those_that_agreed_with_measured_ones(
    activation_bytes: int, options: dict[str, Any], peaks: tuple[int, ...]
) -> None:
    found = rank_peaks(_SHAPE, world_size=2, activation_bytes=activation_bytes, buckets=_BUCKETS, **options)
    assert tuple(found.values()) == peaks


def test_peaks_of_a_split_model_are_those_that_agreed_with_measured_ones() -> None:
    split = [split_peak(_SHAPE, world_size=2, activation_bytes=10, logits_bytes=logits) for logits in (100, 20_000)]
    assert split == [142_560, 158_930]
    stages = [_SHAPE, TrainingShape(sizes=(500, 700), largest_block=700, outside_blocks=500)]
    piped = [
        pipeline_peak(stages, num_micro_batches=num, activation_bytes=kept, sent_bytes=[100], foreach=foreach)
        for num, kept, foreach in ((1, [50_000, 9], False), (4, [50_000, 9], False), (4, [9, 9], True))
    ]
    assert piped == [151_020, 230_960, 148_600]


def test_a_shape_knows_blocks_from_what_is_around_them() -> None:
    sizes = {"embed.weight": 100, "layers.0.a.weight": 30, "layers.0.b": 5, "layers.1.a.weight": 40, "norm": 2}
    assert shape_of(sizes) == TrainingShape(sizes=(100, 30, 5, 40, 2), largest_block=40, outside_blocks=102)


@of_transformers
def test_the_command_says_what_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _save_config("llama", tmp_path)
    arguments = ["estimate", str(tmp_path), "--batch-size", "1", "--sequence-length", "16", "--devices", "2"]
    assert main([*arguments, "--device-memory", "16MB", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert set(facts["peaks_float32_adam"]) == {*facts["devices_needed"], "tp", "pp", "cp"}
    assert facts["devices_needed"]["single"] is None
    assert facts["devices_needed"]["fsdp"] is not None
    assert main([*arguments, "--device-memory", "16MB"]) == 0
    assert "does not fit" in capsys.readouterr().out
    assert main([*arguments, "--num-micro-batches", "0"]) == 2
    assert "at least 1" in capsys.readouterr().err
    assert main(["estimate", str(tmp_path), "--devices", "0"]) == 2
    assert "at least 1" in capsys.readouterr().err


@of_transformers
def test_the_command_leaves_out_what_a_model_does_not_allow(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("llama", "t5"):
        _save_config(name, tmp_path / name)

    def rows(name: str, *arguments: str) -> set[str]:
        capsys.readouterr()
        assert main(["estimate", str(tmp_path / name), "--json", *arguments]) == 0
        facts = json.loads(capsys.readouterr().out)
        found = {"tp", "pp", "cp"} & set(facts["peaks_float32_adam"])
        assert {name for name, reason in facts["no_estimate"].items() if reason} == {"tp", "pp", "cp"} - found
        return found - {"tp"}

    sizes = ["--batch-size", "1", "--sequence-length"]
    assert rows("llama", *sizes, "16", "--devices", "2") == {"pp", "cp"}
    assert rows("llama", *sizes, "18", "--devices", "2") == {"pp"}  # 18 positions are not four chunks
    assert rows("llama", *sizes, "16", "--devices", "8") == {"cp"}  # it has four layers
    assert rows("llama", "--devices", "2") == {"pp"}
    assert rows("t5", *sizes, "16", "--devices", "2") == set()


def test_stages_hold_a_shared_weight_each_and_more_micro_batches_need_more() -> None:
    layers = torch.nn.ModuleList(torch.nn.Linear(4, 4, bias=False) for _ in range(4))
    head = torch.nn.Linear(4, 9, bias=False)
    embed = torch.nn.Embedding(9, 4)
    embed.weight = head.weight
    model = torch.nn.ModuleDict({"embed": embed, "layers": layers, "head": head})
    stages = stage_shapes(model, 2)
    assert sum(stage.elements for stage in stages) == 4 * 16 + 2 * 36
    assert stage_shapes(model, 5) is None
    peaks = [
        pipeline_peak(stages, num_micro_batches=num, activation_bytes=[1000, 1000], sent_bytes=[100])
        for num in (1, 2, 3, 4)
    ]
    assert peaks == sorted(set(peaks))
    assert peaks[3] - peaks[2] == 100


def test_stored_weights_do_not_say_what_is_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    assert main(["estimate", str(tmp_path), "--devices", "2"]) == 2
    assert "need a model" in capsys.readouterr().err
