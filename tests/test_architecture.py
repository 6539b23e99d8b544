"""The laws of the house, read from the source: each holds on the whole tree and catches a small offender."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.helpers import code_rules, import_rules
from tests.helpers.sources import PARTS, ROOT, Breach, Source, outside_sources, package_sources, stub_sources

SOURCES = package_sources()
OUTSIDE = outside_sources()

# Backend names that trainer/ or callbacks/ may spell out, as `(module, what the rule says)`, each with its reason.
NAMED_BACKENDS: dict[tuple[str, str], str] = {
    (
        "trainer.configuration.settings",
        "the string names the backend 'tpu'",
    ): "says where another trainer's tpu_cores= has gone",
}


def _show(breaches: list[Breach]) -> str:
    return "\n".join(map(str, breaches))


def _expect_none(breaches: list[Breach]) -> None:
    if breaches:
        pytest.fail(_show(breaches), pytrace=False)


def _breaches(rule: Callable[[Source], list[Breach]], module: str, text: str) -> str:
    return _show(rule(Source(f"trainwright.{module}", text)))


def test_the_tree_is_found() -> None:
    parts = {source.part for source in SOURCES}
    assert parts == {"", *PARTS}
    assert any(source.module == "trainwright.core.task" for source in SOURCES)


def test_every_part_is_a_folder_or_a_link_in_the_import_package() -> None:
    shown = {path.name for path in (ROOT / "src/trainwright").iterdir() if path.is_dir()} - {"__pycache__"}
    assert shown == set(PARTS)


# Law 1: layers


def test_imports_point_only_downward() -> None:
    _expect_none([breach for source in [*SOURCES, *stub_sources()] for breach in import_rules.layer_breaches(source)])


@pytest.mark.parametrize(
    ("module", "text", "complaint"),
    [
        ("core.x", "from trainwright.trainer.trainer import Trainer", "core must not import trainer"),
        ("core.x", "import trainwright.data.order", "core must not import data"),
        ("callbacks.x", "from trainwright.strategies import Strategy", "callbacks must not import strategies"),
        ("callbacks.x", "from trainwright.loggers import Logger", "callbacks must not import loggers"),
        ("data.x", "from trainwright import checkpoint", "data must not import checkpoint"),
        ("loggers.x", "def f():\n    from trainwright.trainer import trainer", "loggers must not import trainer"),
        (
            "checkpoint.x",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from trainwright.strategies import Strategy",
            "checkpoint must not import strategies",
        ),
        ("strategies.x", "from trainwright.trainer.trainer import Trainer", "strategies must not import trainer"),
        ("trainer.x", "from trainwright.cli.main import main", "trainer must not import cli"),
        ("cli.x", "import trainwright.templates", "cli must not import templates"),
        ("trainer.x", "from trainwright import Trainer", "public face"),
        ("trainer.x", "import trainwright", "public face"),
        ("strategies.x", "from trainwright import __version__", "public face"),
        ("trainer.x", "from callbacks.callback import Callback", "bare import of 'callbacks'"),
        ("core.x", "import trainer", "bare import of 'trainer'"),
        ("core.x", "from .state import TrainState", "relative import"),
        ("core.x", "from . import state", "relative import"),
    ],
)
def test_an_import_that_points_upward_or_astray_is_caught(module: str, text: str, complaint: str) -> None:
    assert complaint in _breaches(import_rules.layer_breaches, module, text)


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("trainer.x", "from trainwright.callbacks.callback import Callback\nfrom trainwright.data import DataModule"),
        ("strategies.x", "from trainwright.checkpoint.format.writer import write_checkpoint"),
        ("core.x", "import os\nimport torch\nfrom trainwright.core.state import TrainState"),
        ("cli.x", "from trainwright import Trainer, __version__"),
        ("core.x", '"""from trainwright.trainer import Trainer"""'),
    ],
)
def test_a_downward_import_is_let_through(module: str, text: str) -> None:
    assert _breaches(import_rules.layer_breaches, module, text) == ""


def test_tests_and_benchmarks_import_the_package_by_its_name() -> None:
    _expect_none([breach for source in OUTSIDE for breach in import_rules.bare_import_breaches(source)])


@pytest.mark.parametrize("text", ["import callbacks", "from trainer.trainer import Trainer", "import src.trainwright"])
def test_a_bare_import_in_a_test_is_caught(text: str) -> None:
    assert import_rules.bare_import_breaches(Source("tests.test_x", text))


def test_no_import_cycles() -> None:
    assert import_rules.import_cycles(SOURCES) == []


def test_an_import_cycle_is_caught() -> None:
    sources = [
        Source("trainwright.core.a", "from trainwright.core.b import B"),
        Source("trainwright.core.b", "from trainwright.core import c"),
        Source("trainwright.core.c", "if TYPE_CHECKING:\n    from trainwright.core.a import A"),
        Source("trainwright.core.d", "def f():\n    import trainwright.core.a"),
    ]
    cycle = "trainwright.core.a -> trainwright.core.b -> trainwright.core.c -> trainwright.core.a"
    assert import_rules.import_cycles(sources) == [cycle]


def test_an_import_inside_a_function_closes_no_cycle() -> None:
    sources = [
        Source("trainwright.core.a", "from trainwright.core.b import B"),
        Source("trainwright.core.b", "def f():\n    from trainwright.core.a import A"),
    ]
    assert import_rules.import_cycles(sources) == []


# Law 3: the loop is blind


def _blind_loop_breaches(source: Source) -> list[Breach]:
    found = code_rules.blind_loop_breaches(source)
    return [breach for breach in found if (source.short, breach.what) not in NAMED_BACKENDS]


def test_the_loop_knows_no_engine_and_no_device() -> None:
    _expect_none([breach for source in SOURCES for breach in _blind_loop_breaches(source)])


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("isinstance(strategy, DDPStrategy)", "asks for the type DDPStrategy"),
        ("isinstance(strategy, (int, strategies.Strategy))", "asks for the type Strategy"),
        ("issubclass(kind, SingleDeviceStrategy)", "asks for the type SingleDeviceStrategy"),
        ("if device.type == 'cuda': pass", "'cuda'"),
        ("device = 'cuda:0'", "'cuda'"),
        ("torch.cuda.synchronize()", "'cuda'"),
        ("if tensor.is_cuda: pass", "'is_cuda'"),
        ("use_ddp = True", "'use_ddp'"),
        ("def f(deepspeed_config): pass", "'deepspeed_config'"),
        ("f(nccl=1)", "'nccl'"),
        ("message = f'{x} on gloo'", "'gloo'"),
        ("class FSDPCallback: pass", "'FSDPCallback'"),
        ("from torch.distributed import fsdp", "'fsdp'"),
    ],
)
def test_a_loop_that_looks_is_caught(text: str, complaint: str) -> None:
    for module in ("trainer.x", "callbacks.x"):
        assert complaint in _breaches(_blind_loop_breaches, module, text)


@pytest.mark.parametrize("text", ['"""Runs on cuda and under DDP."""', "# cuda\nx = 1", "isinstance(x, Callback)"])
def test_words_in_documentation_are_no_breach(text: str) -> None:
    assert _breaches(_blind_loop_breaches, "trainer.x", text) == ""


def test_strategies_may_name_backends() -> None:
    assert _breaches(_blind_loop_breaches, "strategies.x", "backend = 'gloo'") == ""


def test_no_backend_is_excused_without_need() -> None:
    found = {(s.short, breach.what) for s in SOURCES for breach in code_rules.blind_loop_breaches(s)}
    assert set(NAMED_BACKENDS) - found == set()


# Law 11: one reader of the environment, one writer


def test_one_file_reads_the_environment_and_one_writes_it() -> None:
    _expect_none([breach for source in SOURCES for breach in import_rules.environment_breaches(source)])


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("core.x", "os.environ['RANK']"),
        ("core.x", "rank = os.environ.get('RANK')"),
        ("trainer.x", "os.getenv('RANK')"),
        ("strategies.x", "os.environ['RANK'] = '0'"),
        ("strategies.x", "os.putenv('RANK', '0')"),
        ("cli.x", "from os import environ"),
        ("cli.x", "from os import getenv as g"),
        ("core.process", "os.environ['RANK'] = '0'"),
        ("core.process", "del os.environ['RANK']"),
        ("core.process", "os.environ.update(RANK='0')"),
        ("core.process", "os.environ |= {'RANK': '0'}"),
        ("core.process", "os.unsetenv('RANK')"),
        ("processes.launcher", "os.environ.get('RANK')"),
        ("processes.launcher", "rank = os.environ['RANK']"),
        ("processes.launcher", "'RANK' in os.environ"),
        ("processes.launcher", "dict(os.environ)"),
        ("processes.launcher", "os.getenv('RANK')"),
    ],
)
def test_a_second_reader_or_writer_of_the_environment_is_caught(module: str, text: str) -> None:
    assert _breaches(import_rules.environment_breaches, module, text)


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("core.process", "os.environ.get('RANK')\n'RANK' in os.environ\nenviron = os.environ if x is None else x"),
        (
            "processes.launcher",
            "os.environ.update(values)\nos.environ['RANK'] = '0'\ndel os.environ['RANK']",
        ),
        ("core.x", "import os\nos.path.join('a', 'b')"),
    ],
)
def test_the_reader_may_read_and_the_writer_may_write(module: str, text: str) -> None:
    assert _breaches(import_rules.environment_breaches, module, text) == ""


# Law 12: packages are imported when they are needed


def test_modules_load_only_torch_and_light_packages() -> None:
    _expect_none([breach for source in SOURCES for breach in import_rules.eager_import_breaches(source)])


@pytest.mark.parametrize(
    "package",
    [
        *("wandb", "deepspeed", "torch_xla", "lightning", "accelerate", "matplotlib.pyplot", "psutil", "rich.console"),
        *("tqdm", "tensorboard", "torch.utils.tensorboard", "torchmetrics", "jsonargparse", "jinja2", "pandas"),
    ],
)
def test_an_eager_import_of_a_heavy_package_is_caught(package: str) -> None:
    root, _, rest = package.rpartition(".")
    statements = [
        f"import {package}",
        f"from {package} import x",
        f"try:\n    import {package}\nexcept ImportError: pass",
    ]
    if root:
        statements.append(f"from {root} import {rest}")
    for statement in statements:
        assert _breaches(import_rules.eager_import_breaches, "loggers.x", statement), statement


@pytest.mark.parametrize(
    "text",
    [
        "def f():\n    import wandb",
        "if TYPE_CHECKING:\n    import wandb",
        "import json\nimport torch\nfrom torch import nn\nimport numpy as np\nfrom trainwright.core.tree import move",
    ],
)
def test_a_lazy_or_light_import_is_let_through(text: str) -> None:
    assert _breaches(import_rules.eager_import_breaches, "loggers.x", text) == ""


def test_the_ground_floor_loads_torch_and_numpy_only() -> None:
    assert _breaches(import_rules.eager_import_breaches, "core.x", "import safetensors")
    assert not _breaches(import_rules.eager_import_breaches, "data.x", "import safetensors")


def test_an_optional_package_has_one_file_of_its_own() -> None:
    assert import_rules.scattered_packages(SOURCES) == []


@pytest.mark.parametrize(
    "second",
    [
        "def f():\n    import wandb.sdk",
        "def f():\n    require_package('wandb', purpose='x')",
        "def f():\n    errors.require_package('wandb.sdk', purpose='x')",
        "def f():\n    importlib.import_module('wandb')",
        "if TYPE_CHECKING:\n    from wandb import Run",
    ],
)
def test_an_optional_package_in_two_files_is_caught(second: str) -> None:
    first = Source("trainwright.loggers.wandb", "def f():\n    import wandb")
    found = import_rules.scattered_packages([first, Source("trainwright.callbacks.x", second)])
    assert found == ["wandb: trainwright.callbacks.x, trainwright.loggers.wandb"]


# Documentation, honesty


def test_every_public_name_is_documented() -> None:
    _expect_none(code_rules.undocumented_names(SOURCES))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("x = 1", "the module has no docstring"),
        ('"""M."""\ndef f(): pass', "f has no docstring"),
        ('"""M."""\nclass A: pass', "A has no docstring"),
        ('"""M."""\nclass A:\n    """A."""\n    def f(self): pass', "A.f has no docstring"),
        ('"""M."""\nclass A(ABC):\n    """A."""\n    @property\n    def f(self): pass', "A.f has no docstring"),
        (
            '"""M."""\nclass A:\n    """A."""\nclass B(A):\n    """B."""\n    def f(self): pass',
            "B.f has no docstring",
        ),
    ],
)
def test_a_public_name_without_docstring_is_caught(text: str, complaint: str) -> None:
    assert complaint in _show(code_rules.undocumented_names([Source("trainwright.core.x", text)]))


@pytest.mark.parametrize(
    "text",
    [
        '"""M."""\ndef _f(): pass\nclass _A: pass',
        '"""M."""\nclass A:\n    """A."""\n    def f(self):\n        """F."""\n'
        'class B(A):\n    """B."""\n    def f(self): pass',
        '"""M."""\nclass A(nn.Module):\n    """A."""\n    def forward(self, x): return x',
        '"""M."""\nclass A:\n    """A."""\n    def __init__(self): self.x = 1',
    ],
)
def test_private_and_inherited_names_need_no_docstring(text: str) -> None:
    assert _show(code_rules.undocumented_names([Source("trainwright.core.x", text)])) == ""


def test_nothing_swallows_every_exception() -> None:
    _expect_none([breach for source in SOURCES for breach in code_rules.swallowing_breaches(source)])


@pytest.mark.parametrize("caught", ["", " Exception", " BaseException as e", " (OSError, Exception)"])
def test_an_exception_swallowed_whole_is_caught(caught: str) -> None:
    text = f"try:\n    f()\nexcept{caught}:\n    pass"
    assert _breaches(code_rules.swallowing_breaches, "core.x", text)


@pytest.mark.parametrize("handler", ["except OSError:\n    pass", "except Exception as e:\n    report(e)"])
def test_an_expected_or_reported_exception_is_let_through(handler: str) -> None:
    assert _breaches(code_rules.swallowing_breaches, "core.x", f"try:\n    f()\n{handler}") == ""
