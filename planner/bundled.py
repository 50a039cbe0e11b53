"""The bundled models, from `planner.models` if installed, else from `models` beside `planner` in a checkout."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from planner.errors import UsageError

if TYPE_CHECKING:
    import onnx


@functools.cache
def _models() -> ModuleType:
    """The package of builders."""
    try:
        return importlib.import_module("planner.models")
    except ModuleNotFoundError as error:
        if error.name != "planner.models":
            raise
    return importlib.import_module("models")


def bundled_names() -> tuple[str, ...]:
    """Names of all bundled models, by family and size."""
    names: tuple[str, ...] = _models().names()
    return names


def bundled_info(name: str) -> Any:  # noqa: ANN401
    """The description of a bundled model, a `models.ModelInfo`; does not build it.

    Raises:
        UsageError: no bundled model has that name; the hint names the closest ones.
    """
    return _asked("info", name)


def build_bundled(name: str, *, batch: int = 1, seq: int | None = None) -> onnx.ModelProto:
    """Build a bundled model as an ONNX graph with fixed shapes and weights without data.

    Args:
        name: a name from `bundled_names`.
        batch: samples in one forward pass.
        seq: sequence length; the model's default if None.

    Raises:
        UsageError: the model is unknown, or does not support the batch or sequence length.
    """
    model: onnx.ModelProto = _asked("build", name, batch=batch, seq=seq)
    return model


def build_configured(
    config: Mapping[str, Any], *, name: str, batch: int = 1, seq: int | None = None
) -> tuple[onnx.ModelProto, tuple[str, ...]]:
    """Build the model of a Hugging Face configuration; returns it with notes on assumptions and unknown keys.

    Args:
        config: keys and values as in `config.json`.
        name: name of the graph.
        batch: samples in one forward pass.
        seq: sequence length; a default if None.

    Raises:
        UsageError: no builder for its `model_type`, missing keys, or sizes that make no sense.
    """
    built: tuple[onnx.ModelProto, tuple[str, ...]] = _asked("build_config", config, name=name, batch=batch, seq=seq)
    return built


def bundled_config(base: str, choices: Mapping[str, str]) -> dict[str, Any]:
    """The configuration of a bundled model or model type, with sizes replaced.

    Args:
        base: a name of a bundled model, of a family, or of a `model_type`.
        choices: values as text by option (`bundled_options`).

    Raises:
        UsageError: `base` is unknown, or does not have an option.
    """
    config: dict[str, Any] = _asked("changed", base, choices)
    return config


def bundled_options() -> dict[str, tuple[str, dict[str, str]]]:
    """By `model_type`: the family it is listed under, and its options with the keys of config.json that they set."""
    models = _models()
    return {name: (kind.family, dict(models.options(name))) for name, kind in models.model_types().items()}


def _asked(function: str, *arguments: object, **options: object) -> Any:  # noqa: ANN401
    """What a function of the package of builders returns.

    Raises:
        UsageError: the package refuses the arguments.
    """
    models = _models()
    try:
        return getattr(models, function)(*arguments, **options)
    except models.ModelBuildError as error:
        raise UsageError(error.message, hint=error.hint) from error
