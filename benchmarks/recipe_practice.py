"""What a source's own scripts set where its table of results is silent: data with its place, read from public code.

No figure here was chosen by a measured time: each entry is what the named script passes to the framework for the rows
that the table lists. A row's own words go before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

_BRIDGE = "Megatron-Bridge performance summary"
_SCRIPTS = "Megatron-Bridge v0.1.0rc4, scripts/performance"


@dataclass(frozen=True, slots=True)
class Practice:
    """What the scripts behind a source's rows set.

    Attributes:
        source: of the rows, as they name it.
        sets: fields of a row; of those that hold fields themselves, the ones that the row leaves open.
        place: the public file that says so.
        release, model, device, row: patterns of the rows' names that it applies to.
        alone: applies to rows that say nothing of what they overlap, alone: those that come without their script.
    """

    source: str
    sets: Mapping[str, Any]
    place: str
    release: str = "*"
    model: str = "*"
    device: str = "*"
    row: str = "*"
    alone: bool = False

    def applies(self, row: Mapping[str, Any]) -> bool:
        """True if the row is one of those that the scripts ran."""
        names = (
            (row["release"], self.release),
            (row["model"], self.model),
            (row["system"]["device"], self.device),
            (row["id"], self.row),
        )
        silent = not self.alone or row.get("overlap") is None
        return row["source"] == self.source and silent and all(fnmatch(name, pattern) for name, pattern in names)


_BF16_SUMS = {"distributed": True, "main_grads": "bf16"}
_IRONWOOD = "Google tpu-recipes Ironwood"
_BF16_GRADIENTS = {"optimizer": {"main_grads": "bf16"}}
PRACTICES = (
    Practice(
        _BRIDGE,
        {
            "optimizer": {**_BF16_SUMS, "moments": "bf16"},
            "overlap": ["dp_param_gather", "moe_a2a", "delay_wgrad"],
            "recompute": {"granularity": "selective", "modules": ["mla_up_proj", "mlp"]},
            "moe": {"dispatcher": "flex", "backend": "deepep"},
            "pipeline_layout": "Et|(tt|)*30mL",
        },
        f"{_SCRIPTS}/run_script.py and src/megatron/bridge/recipes/deepseek/deepseek_v3.py",
        release="NeMo 25.09",
        model="deepseek-v3",
        device="H100*",
        alone=True,
    ),
    Practice(
        _BRIDGE,
        {
            "optimizer": {**_BF16_SUMS, "moments": "bf16"},
            "overlap": ["dp_grad_reduce", "dp_param_gather", "moe_shared_expert"],
            "recompute": {"granularity": "selective", "modules": ["mla_up_proj"]},
            "moe": {"dispatcher": "alltoall"},
        },
        f"{_SCRIPTS}/run_script.py and src/megatron/bridge/recipes/deepseek/deepseek_v3.py",
        release="NeMo 25.09",
        model="deepseek-v3",
        alone=True,
    ),
    Practice(
        _BRIDGE,
        {
            "optimizer": _BF16_SUMS,
            "overlap": ["dp_grad_reduce", "dp_param_gather", "tp_comm"],
            "recompute": {"modules": []},
        },
        f"{_SCRIPTS}/run_script.py and configs (grad_reduce_in_fp32: false; no recomputation for these rows)",
        release="NeMo 25.*",
        alone=True,
    ),
    Practice(
        "Megatron-LM examples/llama",
        {"optimizer": _BF16_SUMS, "overlap": ["dp_grad_reduce", "dp_param_gather", "tp_comm"]},
        "examples/llama/README.md (the configuration of NeMo's performance scripts, which overlap tensor-parallel "
        "communication) and train_llama3_8b_h100_fp8.sh (--grad-reduce-in-bf16)",
    ),
    *(
        Practice(
            _IRONWOOD,
            _BF16_GRADIENTS,
            f"AI-Hypercomputer/tpu-recipes@c8cfe2f68 training/ironwood/deepseek3-671b/{folder} (grad_dtype=bfloat16)",
            row=f"ironwood-deepseek-v3-{rows}",
        )
        for rows, folder in (("bf16-*", "4k-bf16-tpu7x-4x*x8"), ("fp8-128-*", "4k-fp8-tpu7x-4x4x8"))
    ),
)


def with_practice(row: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """A row with what the first practice that applies sets, and what was taken from it, in words."""
    practice = next((each for each in PRACTICES if each.applies(row)), None)
    if practice is None:
        return dict(row), ()
    filled, taken = dict(row), []
    for name, value in practice.sets.items():
        own = row.get(name)
        if isinstance(value, Mapping):
            said = {key: inner for key, inner in (own or {}).items() if inner is not None}
            taken += [key for key in value if key not in said]
            filled[name] = {**value, **said}
        elif own is None:
            taken.append(name)
            filled[name] = value
    return filled, (f"{', '.join(taken)} as in {practice.place}",) if taken else ()
