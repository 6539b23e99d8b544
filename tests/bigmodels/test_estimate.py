"""`trainwright estimate`, also by Accelerate's name: the bytes that it counts are those that are taken."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.bigmodels.nets import of_transformers
from trainwright import TaskModule
from trainwright.bigmodels.maps.estimates import (
    count_stage_bytes,
    count_stored_weights,
    count_weights,
    kv_cache_bytes,
)
from trainwright.cli.main import main

_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300,
    "tie_word_embeddings": False,
}  # fmt: skip
_LAYER = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128 + 2 * 64  # q and o, k and v, the three of the MLP, two norms
_TOTAL = 3 * _LAYER + 2 * 300 * 64 + 64


class LargeTask(TaskModule):
    """A task whose weights no machine could hold."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.ModuleList(nn.Embedding(10**6, 10**3) for _ in range(10**2))  # 4 GB each


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(_LLAMA))
    return path


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["estimate", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@of_transformers
def test_a_configuration_is_weighed_in_every_dtype(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for source in (llama, llama.parent):
        facts = _run(capsys, str(source))
        rope = facts["elements"] - _TOTAL  # a buffer of frequencies, or two
        assert 0 <= rope <= 16
        rows = facts["dtypes"]
        assert rows["float32"]["total_bytes"] == 4 * facts["elements"]
        assert rows["bfloat16"]["total_bytes"] == 2 * facts["elements"]
        assert rows["int4"]["largest_layer_bytes"] == _LAYER / 2
        assert rows["float32"]["training_adam_bytes"] == 16 * facts["elements"]
        assert facts["largest_layer"] == "model.layers.0"


def test_integer_buffers_have_neither_gradients_nor_averages() -> None:
    model = nn.BatchNorm1d(3)  # 12 floating-point elements, and a counter of 8 bytes
    count = count_weights(model)
    assert count.training_bytes(torch.float32) == 4 * count.elements * 4 + 8


_SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


_TEXT = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 50}
_WIDE = {**_TEXT, "intermediate_size": 64, "num_key_value_heads": 2}
_EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
_LATENT = {
    "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6, "v_head_dim": 5, **_EXPERTS,
}  # fmt: skip
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _WIDE,
    "mistral": {**_WIDE, "sliding_window": 5},
    "deepseek_v3": {**_WIDE, **_LATENT, "num_key_value_heads": 4},
    "falcon": {**_TEXT, "multi_query": True, "new_decoder_architecture": False},
    "mpt": {"d_model": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 50},
    "t5": {"d_model": 32, "d_ff": 64, "d_kv": 16, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4},
}


@of_transformers
@pytest.mark.parametrize("family", _FAMILIES)
def test_a_cache_is_as_large_as_that_of_a_real_forward(family: str) -> None:
    transformers: Any = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(family, **_FAMILIES[family], pad_token_id=0, decoder_start_token_id=0)
    kind = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    tokens = torch.ones(2, 12, dtype=torch.long)
    inputs = {"input_ids": tokens} | ({"decoder_input_ids": tokens} if config.is_encoder_decoder else {})
    with torch.no_grad():
        cache = kind.from_config(config).eval()(**inputs, use_cache=True).past_key_values
    parts = [cache.self_attention_cache, cache.cross_attention_cache] if config.is_encoder_decoder else [cache]
    real = sum(layer.keys.nbytes + layer.values.nbytes for part in parts for layer in part.layers)
    found = kv_cache_bytes(config.to_dict(), batch_size=2, sequence_length=12, dtype="float32")
    assert found == real
    within = {"text_config": config.to_dict(), "vision_config": {"hidden_size": 7}}
    assert kv_cache_bytes(within, batch_size=2, sequence_length=12, dtype="float32") == real


_IMAGES = {**_SMALL, "model_type": "vit", "image_size": 32, "patch_size": 8}
_WITH_EXPERTS = {**_WIDE, **_LATENT, "num_key_value_heads": 4, "model_type": "deepseek_v3"}


@of_transformers
@pytest.mark.parametrize(
    ("kind", "config", "length", "rel"),
    [
        ("LlamaForCausalLM", _LLAMA, 32, 0.1),
        ("ViTForImageClassification", _IMAGES, None, 0.1),
        ("DeepseekV3ForCausalLM", _WITH_EXPERTS, 8, 0.01),
    ],
)
def test_activations_counted_on_the_meta_device_are_those_of_a_real_forward(
    kind: str, config: dict[str, Any], length: int | None, rel: float, tmp_path: Path, capsys: Any
) -> None:
    transformers: Any = pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": [kind]}))
    options = ["--sequence-length", str(length)] if length else []
    facts = _run(capsys, str(tmp_path), "--batch-size", "2", *options)
    inputs = {"input_ids": torch.zeros(2, length, dtype=torch.long), "use_cache": False} if length else {}
    model = getattr(transformers, kind)(transformers.AutoConfig.from_pretrained(str(tmp_path))).train()
    real = count_stage_bytes(lambda: model(**(inputs or {"pixel_values": torch.zeros(2, 3, 32, 32)})), model, [])[0]
    assert facts["activation_bytes_float32"] == pytest.approx(sum(real), rel=rel)
    row = facts["dtypes"]["float16"]
    assert ("kv_cache_bytes" in row) is bool(length)
    if kind == "LlamaForCausalLM":
        assert row["kv_cache_bytes"] == 2 * 3 * 2 * 16 * 2 * 32 * 2


def test_a_stage_keeps_what_its_backward_needs_and_sends_its_output() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    inputs, hidden = 3 * 4 * 4, 3 * 8 * 4  # bytes
    whole = count_stage_bytes(lambda: net(torch.ones(3, 4)), net, [])
    two = count_stage_bytes(lambda: net(torch.ones(3, 4)), net, [[net[0], net[1]], [net[2]]])
    assert (whole, two) == (([inputs + hidden], []), ([inputs + hidden, hidden], [hidden]))


_INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("config.json", '{"architecture": "resnet50"}'), ("config.json", "{")),
        (_INDEX, '{"weight_map": {"a.weight": "model.safetensors"}}'),
    ],
)
def test_weights_beside_an_index_or_a_configuration_of_others_are_weighed(
    name: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file({"a.weight": torch.zeros(8, 4)}, tmp_path / "model.safetensors")
    (tmp_path / name).write_text(text)
    assert _run(capsys, str(tmp_path / name if name == _INDEX else tmp_path))["elements"] == 32


@pytest.mark.slow
def test_a_task_is_weighed_without_memory(capsys: pytest.CaptureFixture[str]) -> None:
    facts = _run(capsys, f"{__name__}:LargeTask", "--dtypes", "float32", "--devices", "2")
    assert facts["peaks_float32_adam"]["fsdp"] > 0
    assert facts["dtypes"]["float32"]["total_bytes"] == 4 * 10**11
    assert facts["largest_layer"] == "net.0"


def test_stored_weights_are_weighed_from_their_headers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = {"layers.0.a.weight": torch.zeros(10, dtype=torch.bfloat16), "layers.0.b": torch.zeros(5)}
    save_file(first, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"head.weight": torch.zeros(12), "step": torch.zeros(1, dtype=torch.int64)}, tmp_path / "x.safetensors")
    count = count_stored_weights(tmp_path)
    assert (count.elements, count.fixed_bytes) == (27, 8)
    assert (count.largest_layer, count.largest_elements) == ("layers.0", 15)
    assert _run(capsys, str(tmp_path), "--dtypes", "float16")["dtypes"]["float16"]["total_bytes"] == 54 + 8


def test_the_table_is_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"a.weight": torch.zeros(1024, 1024)}, tmp_path / "model.safetensors")
    assert main(["estimate", str(tmp_path), "--dtypes", "float32", "int4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("1,048,576 elements; the largest layer is a")
    assert lines[2].split(" | ")[2:] == ["Total Size", "Training using Adam |"]
    assert [cell.strip(" |") for cell in lines[4].split(" | ")] == ["float32", "4.00 MiB", "4.00 MiB", "16.0 MiB"]
    assert lines[5].split(" | ")[2].strip() == "512.0 KiB"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["no.such.module:Task"], "cannot be imported"),
        (["{folder}"], "contains no safetensors file"),
        (["{folder}/config.json"], "config.json does not exist. Pass a model's config.json, its folder"),
        ([f"{__name__}:LargeTask", "--dtypes", "flaot32"], "--dtypes flaot32: dtype 'flaot32' is unknown. Did you"),
        ([f"{__name__}:LargeTask", "--device-memory", "lots"], "--device-memory lots: `size` 'lots' is not"),
        (["torch.nn:Linear"], "cannot be created without arguments: missing a required argument: 'in_features'"),
        (["torch.nn:functional"], "is not a callable object"),
        ([f"{__name__}:LargeTask", "--batch-size", "0"], "--batch-size 0"),
    ],
)
def test_what_cannot_be_estimated_is_one_readable_line(
    arguments: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["estimate", *(argument.format(folder=tmp_path) for argument in arguments)]) == 2
    assert complaint in capsys.readouterr().err


_FAKE_TIMM = """
from torch import nn

def create_model(name, pretrained=True):
    if name != "resnet50.a1_in1k" or pretrained:
        raise RuntimeError(f"Unknown model ({name})")
    return nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8))

def list_models():
    return ["resnet50"]
"""


@of_transformers
def test_code_of_a_model_does_not_run_unless_it_is_trusted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = {"AutoConfig": "mine.MineConfig", "AutoModelForCausalLM": "mine.MineForCausalLM"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mine", "auto_map": code}))
    (tmp_path / "mine.py").write_text("raise SystemExit('it ran')")
    assert main(["estimate-memory", str(tmp_path)]) == 2
    assert "trust_remote_code" in capsys.readouterr().err


@pytest.fixture
def timm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where timm is found first, for a test to write."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    yield tmp_path / "timm.py"
    sys.modules.pop("timm", None)


def test_a_model_of_timm_is_built_by_timm(timm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    timm.write_text(_FAKE_TIMM)
    for options in (["timm/resnet50.a1_in1k", "--library_name", "timm"], ["timm/resnet50.a1_in1k"]):
        assert main(["estimate-memory", *options, "--dtypes", "float32", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["elements"] == 3 * 8 * 9 + 4 * 8
    assert main(["estimate-memory", "timm/resnet05"]) == 2
    assert "Did you mean 'resnet50'" in capsys.readouterr().err
