from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.checkpoint import megatron_run
from trainwright.checkpoint.interop.megatron_names import config_from_args
from trainwright.cli.checkpoint import checkpoint
from trainwright.core.errors import CheckpointError, ConfigurationError

needs_megatron = pytest.mark.requires("megatron.core", "runs its GPTModel")


def _config(kind: str) -> Any:
    if kind == "gpt2":
        sizes: dict[str, Any] = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_inner": 64, "n_positions": 16}
        drops: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        return transformers.GPT2Config(vocab_size=64, **sizes, **drops)
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"intermediate_size": 64, "head_dim": 8, "max_position_embeddings": 16, "rms_norm_eps": 1e-5}
    return transformers.AutoConfig.for_model(kind, vocab_size=64, tie_word_embeddings=False, **sizes)


@pytest.fixture
def saved(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A folder of a tiny model of transformers with random weights, norms and biases included."""
    torch.manual_seed(0)
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_config(_config(request.param))
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    model.save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


def _logits(folder: Path) -> torch.Tensor:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        logits = model.eval()(megatron_run.tokens()).logits
    assert isinstance(logits, torch.Tensor)
    return logits


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()


def _megatron(kind: str, action: str, folder: Path) -> None:
    given = [kind, action, str(folder)]
    store = folder.parent / f"{folder.name}.store"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.checkpoint.megatron_run", *given, str(rank), str(store)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert not any(rank.returncode for rank in ranks), "\n".join(outputs)


def _run(*argv: object) -> None:
    assert checkpoint([str(part) for part in argv]) == 0


@pytest.mark.engines
@needs_megatron
@pytest.mark.parametrize("saved", ["gpt2"], indirect=True)
def test_megatron_computes_the_logits_of_transformers(saved: Path) -> None:
    target = saved.with_name("megatron")
    _run("export", saved, target, "--megatron", "tp=2,impl=local")
    _megatron("gpt2", "load", target)
    torch.testing.assert_close(torch.load(saved.with_name("megatron.logits")), _logits(saved), atol=1e-5, rtol=1e-5)


@pytest.mark.engines
@needs_megatron
def test_transformers_computes_the_logits_of_megatron(tmp_path: Path) -> None:
    folder = tmp_path / "iter_0000010"
    folder.mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10")
    _megatron("qwen3", "save", folder)
    _config("qwen3").save_pretrained(tmp_path / "config")
    _run("convert", tmp_path, tmp_path / "hf", "--config", tmp_path / "config")
    expected = torch.load(tmp_path / "iter_0000010.logits")
    torch.testing.assert_close(_logits(tmp_path / "hf"), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "saved",
    ["llama", "gpt2", *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in ("qwen2", "qwen3", "mistral"))],
    indirect=True,
)
def test_a_model_passes_through_other_layouts_unchanged(saved: Path) -> None:
    first, second, back = (saved.with_name(name) for name in ("first", "second", "back"))
    _run("export", saved, first, "--megatron", "tp=2,pp=2,vocab=256")
    assert sorted(entry.name for entry in (first / "release").iterdir()) == [
        f"mp_rank_0{tp}_00{pp}" for tp in (0, 1) for pp in (0, 1)
    ]
    _run("export", first, second, "--megatron", "tp=1,impl=local")
    _run("convert", second, back)
    expected, found = _weights(saved), _weights(back)
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("saved", ["qwen3", "gpt2"], indirect=True)
def test_the_config_comes_from_the_arguments_in_the_checkpoint(saved: Path) -> None:
    first, back = saved.with_name("first"), saved.with_name("back")
    _run("export", saved, first, "--megatron", "tp=2,vocab=128")
    (first / "config.json").unlink()
    _run("convert", first, back)
    torch.testing.assert_close(_logits(back), _logits(saved), atol=0, rtol=0)


@pytest.mark.parametrize("saved", ["llama"], indirect=True)
@pytest.mark.parametrize(
    ("layout", "error"),
    [
        ("tp=3", "tp=3 does not divide the model's heads \\(4\\)"),
        ("pp=3", "pp=3 does not divide the model's layers \\(4\\)"),
        ("tp=2,vocab=65", "does not divide the vocabulary \\(65\\). Pad it: vocab=256"),
        ("vocab=8", "vocab=8 is smaller than the model's vocabulary"),
        ("ep=2", "'ep=2' is not known"),
    ],
)
def test_a_layout_that_does_not_fit_is_an_error(saved: Path, layout: str, error: str) -> None:
    with pytest.raises(ConfigurationError, match=error):
        _run("export", saved, saved.with_name("first"), "--megatron", layout)
    assert [entry.name for entry in saved.parent.iterdir()] == ["hf"]


@pytest.mark.parametrize("saved", ["qwen2"], indirect=True)
@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"model_type": "llama"}, "unknown tensors .*self_attention.linear_qkv.bias"),
        ({"intermediate_size": 48}, r"has the shape \(128, 32\), and the config expects \(96, 32\)"),
        ({"tie_word_embeddings": True}, "has an output layer of its own"),
    ],
)
def test_a_config_of_another_model_is_an_error(saved: Path, changed: dict[str, Any], error: str) -> None:
    first = saved.with_name("first")
    _run("export", saved, first, "--megatron", "tp=2")
    other = saved.with_name("config.json")
    other.write_text(json.dumps(json.loads((first / "config.json").read_text()) | changed))
    with pytest.raises(CheckpointError, match=error):
        _run("convert", first, saved.with_name("back"), "--config", other)
    assert sorted(entry.name for entry in saved.parent.iterdir()) == ["config.json", "first", "hf"]


@pytest.mark.parametrize("saved", ["llama"], indirect=True)
@pytest.mark.parametrize(
    "changed",
    [
        {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "rope_theta": 500000.0}},
        {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"model_type": "mistral", "sliding_window": 8},
    ],
)
def test_arguments_that_do_not_describe_the_config_are_an_error(saved: Path, changed: dict[str, Any]) -> None:
    config = saved / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changed))
    first = saved.with_name("first")
    _run("export", saved, first, "--megatron", "tp=2")
    (first / "config.json").unlink()
    with pytest.raises(CheckpointError, match="does not store arguments that determine the model's config"):
        _run("convert", first, saved.with_name("back"))


@pytest.mark.parametrize(
    "changed",
    [
        {"num_experts": 4},
        {"window_size": (7, 0)},
        {"qk_layernorm": True},
        {"kv_channels": 16},
        {"group_query_attention": True, "num_query_groups": 2},
    ],
)
def test_arguments_of_a_changed_gpt2_do_not_determine_a_config(changed: dict[str, Any]) -> None:
    args: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 64}
    args |= {"max_position_embeddings": 16, "vocab_size": 64, "position_embedding_type": "learned_absolute"}
    args |= {"normalization": "LayerNorm", "swiglu": False, "add_bias_linear": True, "kv_channels": 8}
    assert config_from_args(args) is not None
    assert config_from_args(args | changed) is None


@pytest.mark.parametrize("saved", ["llama"], indirect=True)
def test_a_missing_rank_is_an_error(saved: Path) -> None:
    first = saved.with_name("first")
    _run("export", saved, first, "--megatron", "tp=2,pp=2")
    rank = first / "release" / "mp_rank_01_000"
    rank.rename(saved.with_name("elsewhere"))
    with pytest.raises(CheckpointError, match="without those of tp 1, pp 0"):
        _run("convert", first, saved.with_name("back"))


@pytest.mark.parametrize("saved", ["llama"], indirect=True)
def test_a_failed_export_leaves_nothing(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(CheckpointError, match="no space"):
        _run("export", saved, saved.with_name("first"), "--megatron", "tp=1")
    assert [entry.name for entry in saved.parent.iterdir()] == ["hf"]
