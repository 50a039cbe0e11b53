"""Number formats and optimizers in Megatron's arguments, and back."""

from __future__ import annotations

import re
from collections.abc import Mapping

FORMATS = {
    "fp32": (),
    "bf16": ("--bf16",),
    "bf16-fp32grad": ("--bf16",),
    "fp16": ("--fp16",),
    "fp8": ("--bf16", "--fp8-format hybrid", "--fp8-recipe delayed"),
    "fp8-cs": ("--bf16", "--fp8-format hybrid", "--fp8-recipe tensorwise"),
    "fp8-blockwise": ("--bf16", "--fp8-format e4m3", "--fp8-recipe blockwise"),
    "mxfp8": ("--bf16", "--fp8-format e4m3", "--fp8-recipe mxfp8"),
    "nvfp4": ("--bf16", "--fp4-format e2m1", "--fp4-recipe nvfp4"),
}
"""Arguments by precision, without those about gradients and about weights that are kept in the narrow format alone."""

NARROW_WEIGHTS = {
    "fp8": ("--fp8-param-gather",),
    "fp8-cs": ("--fp8-param-gather",),
    "mxfp8": ("--fp8-param-gather", "--reuse-grad-buf-for-mxfp8-param-ag"),
}
"""Arguments that keep no weights in bf16, of precisions that do without."""

MOMENTUM = {"sgd": 0, "momentum": 0.9}
"""`--sgd-momentum` by optimizer."""

BF16_GRADIENTS = "--grad-reduce-in-bf16"
WIDE_SUMS = "--ddp-param-name-patterns-for-fp32-local-accumulation all"

FLAGS = re.compile(r"--(bf16|fp16|fp8-(format|recipe|param-gather)|fp4-(format|recipe)|reuse-grad-buf)")
"""Arguments about the formats of products and weights."""


def format_of(words: Mapping[str, str]) -> tuple[str, tuple[str, ...]]:
    """The precision that explains most of the arguments about number formats, and notes on those that it does not.

    Args:
        words: arguments and their values, "" of flags.
    """
    recipe = {"--fp8-recipe": "delayed"} if "--fp8-format" in words else {}
    said = {**recipe, **words}
    if "--fp8-format" not in words:
        said.pop("--fp8-recipe", None)
    if "--fp4-format" in words:
        said.setdefault("--fp4-recipe", "nvfp4")
    else:
        said.pop("--fp4-recipe", None)
    given = {f"{name} {value}".strip() for name, value in said.items() if FLAGS.match(name)}
    name = max((name for name, own in FORMATS.items() if given.issuperset(own)), key=lambda name: len(FORMATS[name]))
    narrow = given.intersection(NARROW_WEIGHTS.get(name, ()))
    left = sorted(given - narrow - set(FORMATS[name]))
    options = ["weights=bf16"] if name in NARROW_WEIGHTS and not narrow else []
    if "--bf16" in FORMATS[name] and BF16_GRADIENTS in said:
        options += ["grads=fp32", "reduce=bf16"] if WIDE_SUMS.partition(" ")[0] in said else []
    elif name == "bf16":
        name = "bf16-fp32grad"
    elif "--bf16" in FORMATS[name] or "--accumulate-allreduce-grads-in-fp32" in said:
        options += ["grads=fp32"] if FORMATS[name] else []
    ends = {"first": "start", "last": "end"} if "--first-last-layers-bf16" in said else {}
    counts = {option: int(words.get(f"--num-layers-at-{end}-in-bf16", "1")) for option, end in ends.items()}
    options += [f"{option}={count}" for option, count in counts.items() if count]
    notes = tuple(f"{argument}: other time and memory; no precision has it beside {name}" for argument in left)
    return f"{name}:{','.join(options)}" if options else name, notes


def optimizer_of(words: Mapping[str, str]) -> str:
    """The optimizer, with the type of its moments."""
    name, moments = words.get("--optimizer", "adam"), words.get("--exp-avg-dtype", "")
    if name == "sgd":
        return "momentum" if words.get("--sgd-momentum", "0.9").strip("0.") else "sgd"
    return f"{name}:moments={moments}" if moments and "--use-precision-aware-optimizer" in words else name
