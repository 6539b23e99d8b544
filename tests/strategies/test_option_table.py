"""Tests of the tables that declare the options of engines."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from typing import Any

import pytest

from trainwright.launch.launch_config import LaunchConfig
from trainwright.strategies.engine_choice import PLUGINS
from trainwright.strategies.engine_tables import ENGINE_TABLES
from trainwright.strategies.fsdp.option_table import FSDP
from trainwright.strategies.launcher_variables import TorchDynamoPlugin
from trainwright.strategies.option_table import EngineOption, OptionTable
from trainwright.strategies.steps.fp8 import AORecipeKwargs
from trainwright.strategies.steps.option_table import DYNAMO, FP8
from trainwright.strategies.steps.te_layers import FP8RecipeKwargs

TABLES = [*ENGINE_TABLES, FP8, DYNAMO]


def _plugins(table: OptionTable) -> list[Any]:
    others = {DYNAMO.section: [TorchDynamoPlugin], FP8.section: [AORecipeKwargs, FP8RecipeKwargs]}
    return others.get(table.section) or [PLUGINS.get(table.argument)]


def test_names_of_flags_and_variables_follow_the_table_or_the_row() -> None:
    assert FSDP.options["min_num_params"].flag == "fsdp_min_num_params"
    assert FSDP.options["min_num_params"].variable == "FSDP_MIN_NUM_PARAMS"
    assert FSDP.options["cpu_offload"].flag == "fsdp_offload_params"
    assert FSDP.options["cpu_offload"].variable == "FSDP_OFFLOAD_PARAMS"
    assert FSDP.switch_variable == "ACCELERATE_USE_FSDP"


def test_prefixes_cover_variables_with_another_beginning() -> None:
    table = OptionTable("title", "section", "{}", "A_{}", (EngineOption("x"), EngineOption("y", variable="B_Y")))
    assert table.prefixes == ("A_", "B_Y")


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.section)
def test_a_plugin_reads_the_variable_of_each_option(table: OptionTable) -> None:
    read = {one.metadata.get("variable") for plugin in _plugins(table) for one in fields(plugin)}
    assert read - {None} == set(table.variables)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.section)
def test_each_supported_flag_is_a_field_of_the_launchers_options(table: OptionTable) -> None:
    flags = {option.flag for option in table.options.values() if option.not_launched is None and option.flag}
    assert flags <= {one.name for one in fields(LaunchConfig)}


def test_the_tables_do_not_import_torch() -> None:
    program = "import sys, trainwright.launch.launch_config; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
