"""`trainwright estimate-memory` takes what Accelerate's command of that name takes, and says what it lacks."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from trainwright.cli.main import main

_BERT = {
    "architectures": ["BertForMaskedLM"], "model_type": "bert", "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100, "max_position_embeddings": 32,
}  # fmt: skip
_MODELS = ("bert-base-cased", "HuggingFaceM4/idefics-80b-instruct")

_FAKE_TIMM = """
from torch import nn

def create_model(name, pretrained=True):
    if name != "resnet50.a1_in1k" or pretrained:
        raise RuntimeError(f"Unknown model ({name})")
    return nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8))

def list_models():
    return ["resnet50"]
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders by the names of the guide's models, in the present one."""
    for name in _MODELS:
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text(json.dumps(_BERT))
    monkeypatch.chdir(tmp_path)


def _dtypes(out: str) -> list[str]:
    return [line.split("|")[1].strip() for line in out.splitlines() if line.startswith("| ")][2:]


@pytest.mark.slow
@pytest.mark.requires("transformers", reason="models by their configuration")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("models")
def test_the_guide_s_commands_print_their_tables(capsys: pytest.CaptureFixture[str]) -> None:
    everything = ["float32", "bfloat16", "float16", "float8", "int8", "int4"]
    for options, dtypes in (
        (["bert-base-cased"], everything),
        (["HuggingFaceM4/idefics-80b-instruct", "--library_name", "transformers"], everything),
        (["bert-base-cased", "--dtypes", "float32", "float16"], ["float32", "float16"]),
        (["bert-base-cased", "--dtypes", "int8", "--library-name", "transformers", "--trust_remote_code"], ["int8"]),
        (["bert-base-cased", "--dtypes", "int4", "--trust-remote-code", "--batch_size", "1"], ["int4"]),
    ):
        assert main(["estimate-memory", *options]) == 0
        out = capsys.readouterr().out
        assert out.startswith(f"{options[0]}: ")
        assert "Largest Layer" in out
        assert "Training using Adam" in out
        assert _dtypes(out) == dtypes


@pytest.mark.slow
@pytest.mark.requires("transformers", reason="models by their configuration")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("models")
def test_a_sequence_that_is_too_long_is_one_readable_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "bert-base-cased", "--batch-size", "1", "--sequence-length", "33"]) == 2
    assert "pass --sequence-length 32 or less" in capsys.readouterr().err


def test_another_library_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate-memory", "bert-base-cased", "--library_name", "keras"]) == 2
    assert "transformers" in capsys.readouterr().err


_CODE = {
    "configuration_mine.py": """
from transformers import PretrainedConfig

class MineConfig(PretrainedConfig):
    model_type = "mine"
    width = 7
""",
    "modeling_mine.py": """
from torch import nn
from transformers import PreTrainedModel
from .configuration_mine import MineConfig

class MineForCausalLM(PreTrainedModel):
    config_class = MineConfig

    def __init__(self, config):
        super().__init__(config)
        self.layer = nn.Linear(config.width, config.width, bias=False)
        self.post_init()
""",
    "config.json": json.dumps({
        "model_type": "mine", "architectures": ["MineForCausalLM"], "auto_map": {
            "AutoConfig": "configuration_mine.MineConfig", "AutoModelForCausalLM": "modeling_mine.MineForCausalLM",
        },
    }),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.requires("transformers", reason="models by their configuration")
@pytest.mark.filterwarnings("ignore")
def test_code_of_a_model_runs_only_if_it_is_trusted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file, text in _CODE.items():
        (tmp_path / file).write_text(text)
    assert main(["estimate-memory", str(tmp_path), "--dtypes", "float32"]) == 2
    assert "trust_remote_code" in capsys.readouterr().err
    assert main(["estimate-memory", str(tmp_path), "--dtypes", "float32", "--trust_remote_code", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["elements"] == 49


@pytest.mark.slow
@pytest.mark.requires("transformers", reason="models by their names")
@pytest.mark.filterwarnings("ignore")
def test_a_name_that_cannot_be_found_is_one_readable_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert main(["estimate-memory", "no-such/model"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "'no-such/model' is not a local file or folder, and Hugging Face's hub cannot be reached" in error
    assert "Pass a local folder, or set HF_HOME" in error


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


@pytest.mark.slow
@pytest.mark.requires("timm", "its own models, which need a torchvision that was built for the torch that is installed")
@pytest.mark.parametrize("name", ["resnet18", "vit_tiny_patch16_224"])
def test_an_estimate_counts_every_floating_element_of_a_model_of_timm(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["estimate-memory", f"timm/{name}", "--dtypes", "float32", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["elements"]
    import timm

    built = timm.create_model(name, pretrained=False)
    assert found == sum(value.numel() for value in built.state_dict().values() if value.is_floating_point())


def test_a_timm_that_cannot_be_imported_is_said_with_what_to_do(timm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    timm.write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    assert main(["estimate-memory", "timm/resnet50.a1_in1k", "--library_name", "timm"]) == 2
    error = capsys.readouterr().err
    assert "torchvision::nms does not exist" in error
    assert "pip install --upgrade torchvision timm" in error


def test_a_missing_timm_is_asked_for(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["estimate-memory", "timm/resnet50.a1_in1k"]) == 2
    assert "pip install timm" in capsys.readouterr().err
