"""All cases of remedies, and the remedies that no case follows, each with the reason."""

from __future__ import annotations

from collections.abc import Mapping

from tests.remedies.inputs import INPUTS, INSTANCES
from tests.remedies.limits import LIMITS, MISSPELT
from tests.remedies.plans import PLANS

CASES = (*LIMITS, *INPUTS, *INSTANCES, *PLANS, *MISSPELT)

_PACKAGE = "installs a package, which a test must not"
_TORCH = "is said by processes with torch that run; tests/runtime provokes them"
_GPU = "needs a GPU"
_PLAN_OF_FRAMEWORK = (
    "needs a plan that only a model of some size and a framework's limits give; tests/export provokes it"
)
_CHECK = "names the command that lists what is wrong: a damaged plan stays damaged"
EXCEPTIONS: Mapping[tuple[str, str], str] = {
    ("planner/hardware/loader.py", "give its file as --stack FILE"): "of the stack in a changed profile, from Python",
    (
        "planner/documents.py",
        "name a file that `shardplan plan` wrote",
    ): "from Python; each case writes a plan and reads it",
    ("planner/ask/sweeps.py", "--on needs dask"): _PACKAGE,
    ("planner/ask/sweeps.py", "pip install distributed (shardplan[sweep])"): _PACKAGE,
    ("planner/costs/measured.py", "pip install onnxruntime (shardplan[measure])"): _PACKAGE,
    ("planner/importers/onnx.py", "pip install torch onnxscript (shardplan[torch])"): _PACKAGE,
    ("planner/runtime/device.py", "use --device cpu, or torch with CUDA"): _GPU,
    ("planner/runtime/device.py", "use --backend gloo"): _GPU,
    ("cli/hardware.py", "--ranks needs --measure"): "measures the machine that it runs on",
    (
        "planner/ask/choices.py",
        "plan the job with `shardplan plan`",
    ): "answers a question on a plan that no search made, which the command line does not write",
    (
        "planner/costs/imported.py",
        "price it with --device or --measure",
    ): "from Python alone: the command line asks first",
    ("planner/costs/measured.py", "price it with --device; the first: {}"): "needs a model of which nothing runs",
    (
        "planner/costs/roofline.py",
        "it has {}: choose another --precision, or add the figure to the hardware profile",
    ): "from Python alone: the command line refuses the precision first (`use --precision`)",
    (
        "planner/importers/onnx_graph/resolve.py",
        "{} is taken for the batch and as 1: plans search the size that they run (--dim {}=N)",
    ): "a note on every plan of a symbolic batch: each case with --dim batch=4 follows it",
    ("planner/operators/batching.py", "name the batch axis at import, --dim batch=N"): "needs a graph without a batch, "
    "from Python",
    ("planner/planning.py", "plan with --for {}, or limit the job further"): "needs frameworks that none serves a job",
    (
        "planner/systems/compare.py",
        "`shardplan compare` says which systems can train the model",
    ): "names the command that lists who can",
    ("planner/plans/explain_shardings.py", "`shardplan check` with model and hardware tells all"): _CHECK,
    ("planner/plans/validate.py", "`shardplan check` tells all"): _CHECK,
    ("planner/runtime/requirements.py", "`shardplan check` tells all"): _CHECK,
}
"""Remedies that no case follows, each with the reason."""

EXCEPTED_FILES: Mapping[str, str] = {
    "planner/export/deepspeed.py": _PLAN_OF_FRAMEWORK,
    "planner/export/galvatron.py": _PLAN_OF_FRAMEWORK,
    "planner/export/jax.py": _PLAN_OF_FRAMEWORK,
    "planner/export/megatron.py": _PLAN_OF_FRAMEWORK,
    "planner/export/torchtitan.py": _PLAN_OF_FRAMEWORK,
    "planner/export/transformers.py": _PLAN_OF_FRAMEWORK,
    "planner/export/torch.py": _PLAN_OF_FRAMEWORK,
    "planner/export/__init__.py": _PLAN_OF_FRAMEWORK,
    "planner/export/reading": "is about lines of a framework's file; tests/export/test_framework_files.py follows them",
    "planner/runtime": _TORCH,
    "cli/run.py": _TORCH,
}
"""Files and folders whose other remedies no case follows."""
