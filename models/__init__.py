"""Builders of well-known models as ONNX graphs: shapes, no weights.

    import models

    model = models.build("llama3-70b", batch=1, seq=4096)

The graph has real operators, names, module paths and shapes, but its weights are initializers whose data file does not
exist, so that a model of a trillion parameters is a small file. Graphs end at logits, without loss and softmax.

A model is a configuration in the keys of Hugging Face's `config.json`. Those of the bundled models are rows of
`bundled.toml`; `build_config` builds a user's own.
"""

from __future__ import annotations

import functools
import importlib
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ._config import ModelBuildError as ModelBuildError
from ._config import ModelConfiguration, close_names, option_names, understand, with_options
from ._config import ModelInfo as ModelInfo
from ._config import ModelType as ModelType
from ._graph import GraphBuilder

if TYPE_CHECKING:
    import onnx

BUILDERS = (
    "gpt", "decoders", "bert", "t5", "vit", "resnet", "vgg", "gnmt", "dlrm",
)  # fmt: skip
"""Modules of builders; `MODEL_TYPES` of each has the model types that it builds."""

USUAL_SEQ = 4096
"""Default sequence length of a user's configuration, unless its position table is shorter."""


_Entry = tuple[ModelInfo, Mapping[str, Any]]
"""A bundled model and its configuration."""


@functools.cache
def model_types() -> Mapping[str, ModelType]:
    """All model types by name."""
    modules = [importlib.import_module(f"{__name__}.{builder}") for builder in BUILDERS]
    return {name: kind for module in modules for name, kind in module.MODEL_TYPES.items()}


@functools.cache
def _data() -> Mapping[str, Any]:
    return tomllib.loads((Path(__file__).parent / "bundled.toml").read_text(encoding="utf-8"))


@functools.cache
def _entries() -> Mapping[str, _Entry]:
    """All bundled models by name, in the order of the data."""
    entries = (_entry(group, row) for group in _data()["group"] for row in group["rows"])
    return {info.name: (info, config) for info, config in entries}


_INFO_FIELDS = {field.name for field in fields(ModelInfo)}


def _entry(group: Mapping[str, Any], row: list[Any]) -> _Entry:
    """The model of one row of a group of `bundled.toml`."""
    kind = model_types()[group["model_type"]]
    given = dict(zip(group["columns"], row, strict=True))
    config = {"model_type": group["model_type"], **group.get("config", {})}
    config |= {key: value for key, value in given.items() if key not in _INFO_FIELDS}
    about: dict[str, Any] = {"family": kind.family, "seq": None, "active": None}
    about |= {key: value for key, value in {**group, **given}.items() if key in _INFO_FIELDS}
    about.setdefault("layers", config.get(option_names(kind).get("layers", "")))
    about["max_seq"] = config.get(kind.positions, kind.keys[kind.positions].default) if kind.positions else None
    return ModelInfo(**about), config


def _named(name: str) -> _Entry:
    entries = _entries()
    if name not in entries:
        hint = close_names(name, entries).strip() or f"known: {', '.join(entries)}"
        raise ModelBuildError(f"no bundled model is called {name!r}", hint)
    return entries[name]


def names() -> tuple[str, ...]:
    """Names of all bundled models, by family and size."""
    return tuple(_entries())


def families() -> tuple[str, ...]:
    """Names of the families that bundled models are listed under."""
    return tuple(dict.fromkeys(info.family for info, _ in _entries().values()))


def info(name: str) -> ModelInfo:
    """The description of a bundled model; does not build it.

    Raises:
        ModelBuildError: no bundled model has that name; the hint names the closest ones.
    """
    return _named(name)[0]


def options(model_type: str) -> Mapping[str, str]:
    """By option of a model type: the key of its configuration that the option sets."""
    return option_names(model_types()[model_type])


def changed(base: str, choices: Mapping[str, str]) -> dict[str, Any]:
    """The configuration of a bundled model, a model type or a family's first type, with sizes replaced.

    Args:
        base: a name from `names`, `model_types` or `families`.
        choices: values as text by option (see `options`): `{"layers": "40", "hidden": "5120"}`.

    Raises:
        ModelBuildError: `base` names nothing.
        ModelBuildError: the type does not have an option, or a value cannot be read.
    """
    types = model_types()
    if base in _entries():
        config = _entries()[base][1]
    else:
        of_family = {kind.family: name for name, kind in reversed(list(types.items()))}
        name = base if base in types else of_family.get(base, base)
        config = {"model_type": name}
    return with_options(config, choices, types)


def build(name: str, *, batch: int = 1, seq: int | None = None) -> onnx.ModelProto:
    """Build a bundled model: fixed shapes, float32 weights without data.

    Args:
        name: a name from `names`.
        batch: samples in one forward pass, the leading dimension of every input.
        seq: sequence length; the model's default if None. An encoder-decoder reads a quarter of it as target.

    Raises:
        ModelBuildError: no bundled model has that name.
        ModelBuildError: the model does not support the batch or sequence length.
    """
    about, config = _named(name)
    configuration = understand(config, model_types(), ())
    return _built(name, configuration, batch, seq, about.seq, about.source)


def build_config(
    document: Mapping[str, Any], *, name: str = "custom", batch: int = 1, seq: int | None = None
) -> tuple[onnx.ModelProto, tuple[str, ...]]:
    """Build the model of a configuration in the keys of Hugging Face's `config.json`.

    Args:
        document: keys and values, `model_type` among them.
        name: name of the graph.
        batch: samples in one forward pass.
        seq: sequence length; if None 4096, or the size of a shorter position table.

    Returns:
        The model, and notes on what was assumed, left out or not understood.

    Raises:
        ModelBuildError: no or an unknown `model_type`.
        ModelBuildError: required keys are missing, or sizes make no sense.
    """
    configuration = understand(document, model_types(), _data()["irrelevant"])
    kind, notes = configuration.model_type, list(configuration.notes)
    max_seq = configuration.values.get(kind.positions or "max_position_embeddings")
    usual = min(USUAL_SEQ, max_seq or USUAL_SEQ) if kind.reads_sequence else None
    if seq is None and usual is not None:
        notes.append(f"a sequence of {usual} is assumed; another one is given by --dim seq=N")
    if configuration.values.get("num_nextn_predict_layers"):
        notes.append("predictors of further tokens are built; num_nextn_predict_layers 0 leaves them out")
    return _built(name, configuration, batch, seq, usual, ""), tuple(notes)


def size_of(**config: Any) -> ModelConfiguration:  # noqa: ANN401
    """A configuration as `build_custom` takes it: `size_of(model_type="llama", hidden_size=64, ...)`.

    Raises:
        ModelBuildError: no or an unknown `model_type`.
        ModelBuildError: required keys are missing, or have values of the wrong type.
    """
    return understand(config, model_types(), ())


def _built(
    name: str, configuration: ModelConfiguration, batch: int, seq: int | None, usual: int | None, source: str
) -> onnx.ModelProto:
    if batch < 1:
        raise ModelBuildError(f"batch {batch} is not positive", "give a batch of 1 or more")
    kind = configuration.model_type
    max_seq = configuration.values[kind.positions] if kind.positions else None
    length = _sequence(name, usual, max_seq, seq)
    return build_custom(configuration, batch=batch, seq=length, name=name, source=source)


def build_custom(
    configuration: ModelConfiguration,
    *,
    batch: int = 1,
    seq: int = 0,
    name: str = "custom",
    seed: int | None = None,
    source: str = "",
) -> onnx.ModelProto:
    """Build a model of any size.

    Args:
        configuration: as `size_of` makes it.
        batch: samples in one forward pass.
        seq: sequence length, for families that read one.
        name: name of the graph.
        seed: when given, weights hold reproducible random values, for models small enough to run.
        source: where the sizes come from, written into the file.

    Raises:
        ModelBuildError: sizes make no sense together.
    """
    kind = configuration.model_type
    g = GraphBuilder(name, opset=kind.opset, source=source, seed=seed)
    kind.build(configuration.values, g, batch, seq)
    return g.finish()


def _sequence(name: str, usual: int | None, max_seq: int | None, seq: int | None) -> int:
    """The checked sequence length; 0 for a model that reads no sequence."""
    if usual is None:
        if seq is not None:
            raise ModelBuildError(f"{name} reads no sequence", "leave the sequence length out")
        return 0
    length = usual if seq is None else seq
    if length < 1:
        raise ModelBuildError(f"sequence length {length} is not positive", f"{name} is usually run at {usual}")
    if max_seq is not None and length > max_seq:
        raise ModelBuildError(
            f"sequence length {length} is more than the {max_seq} positions of {name}", f"ask for {max_seq} or less"
        )
    return length
