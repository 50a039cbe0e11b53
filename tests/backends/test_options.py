"""The tables of options against the frameworks' own parsers, where these are at hand.

DeepSpeed is looked at as it is installed. Megatron-LM and torchtitan are no packages with their parsers: set
`MEGATRON_LM` and `TORCHTITAN` to checkouts of them.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from planner import export

TABLES = {
    "zero_optimization": ("runtime/zero/config.py", "DeepSpeedZeroConfig"),
    "zero_optimization.offload_param": ("runtime/zero/offload_config.py", "DeepSpeedZeroOffloadParamConfig"),
    "zero_optimization.offload_optimizer": ("runtime/zero/offload_config.py", "DeepSpeedZeroOffloadOptimizerConfig"),
    "bf16": ("runtime/precision_config.py", "DeepSpeedBF16Config"),
    "fp16": ("runtime/precision_config.py", "DeepSpeedFP16Config"),
    "comms_logger": ("comm/config.py", "CommsLoggerConfig"),
    "tensorboard": ("monitor/config.py", "TensorBoardConfig"),
    "wandb": ("monitor/config.py", "WandbConfig"),
    "csv_monitor": ("monitor/config.py", "CSVConfig"),
    "comet": ("monitor/config.py", "CometConfig"),
    "compile": ("compile/config.py", "CompileConfig"),
    "tensor_parallel": ("runtime/tensor_parallel/config.py", "TPTrainingConfig"),
    "hybrid_engine": ("runtime/config.py", "HybridEngineConfig"),
}
"""Files and classes of DeepSpeed's tables."""


def fields(source: str, name: str) -> Iterator[str]:
    """Fields of a class, by the names that files write: an alias where there is one."""
    for item in ast.walk(ast.parse(source)):
        for entry in item.body if isinstance(item, ast.ClassDef) and item.name == name else ():
            if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name):
                keywords = entry.value.keywords if isinstance(entry.value, ast.Call) else ()
                aliases = [k.value.value for k in keywords if k.arg == "alias" and isinstance(k.value, ast.Constant)]
                yield str(aliases[0]) if aliases else entry.target.id


def known(framework: str, name: str) -> bool:
    """Whether a table has an option, or a table of that name."""
    table = export.options_of(framework)
    return table.find(name) is not None or any(row.name.startswith(f"{name}.") for row in table.rows)


def test_tables_of_deepspeed_have_all_its_keys() -> None:
    deepspeed = pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    root = Path(deepspeed.__file__).parent
    missing = [
        f"{table}.{field}"
        for table, (path, name) in TABLES.items()
        if (root / path).exists()
        for field in fields((root / path).read_text(encoding="utf-8"), name)
        if not known("deepspeed", f"{table}.{field}")
    ]
    assert missing == []
    constants = ast.parse((root / "runtime" / "constants.py").read_text(encoding="utf-8"))
    assert constants.body  # the keys outside of tables are named there


def checkout(variable: str) -> Path:
    path = os.environ.get(variable, "")
    if not path:
        pytest.skip(f"{variable} names no checkout")
    return Path(path)


def test_the_table_of_megatron_has_all_arguments_of_its_parser() -> None:
    root = checkout("MEGATRON_LM")
    paths = (root / "megatron" / "training" / "arguments.py", root / "megatron" / "arguments.py")
    source = next(path for path in paths if path.exists()).read_text(encoding="utf-8")
    names = {
        argument.value
        for call in ast.walk(ast.parse(source))
        if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "add_argument"
        for argument in call.args
        if isinstance(argument, ast.Constant) and str(argument.value).startswith("--")
    }
    assert len(names) > 100
    assert sorted(name for name in names if not known("megatron", name)) == []


def test_the_table_of_torchtitan_has_all_keys_of_its_configuration() -> None:
    path = checkout("TORCHTITAN") / "torchtitan" / "config" / "job_config.py"
    source = path.read_text(encoding="utf-8")
    types = {
        entry.target.id: ast.unparse(entry.annotation)
        for item in ast.walk(ast.parse(source))
        if isinstance(item, ast.ClassDef) and item.name == "JobConfig"
        for entry in item.body
        if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name)
    }
    missing = [
        f"{table}.{field}"
        for table, name in types.items()
        for field in fields(source, name)
        if not known("torchtitan", f"{table}.{field}")
    ]
    assert len(types) > 10
    assert missing == []
