"""Where the bundled profiles lie, and what they are called."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from planner.errors import HardwareError

_SOURCES = "sources.yaml"
_TABLES = (_SOURCES, "errors.yaml")
"""Files beside the profiles that describe no cluster."""


@cache
def profile_folder() -> Path:
    """The folder of the bundled profiles: inside the installed package, else beside it in a checkout.

    Raises:
        HardwareError: neither is there.
    """
    return _folder_of(Path(__file__).resolve().parents[1])


def _folder_of(package: Path) -> Path:
    for folder in (package / "hardware_profiles", package.parent / "hardware_profiles"):
        if (folder / _SOURCES).is_file():
            return folder
    raise HardwareError("the bundled hardware profiles are missing", where=str(package), hint="install shardplan again")


def cluster_names() -> tuple[str, ...]:
    """Names of the bundled clusters, sorted."""
    return tuple(sorted(p.stem for p in profile_folder().glob("*.yaml") if p.name not in _TABLES))


def device_names() -> tuple[str, ...]:
    """Names of the bundled devices, sorted."""
    return tuple(sorted(p.stem for p in (profile_folder() / "devices").glob("*.yaml")))


def stack_names() -> tuple[str, ...]:
    """Names of the bundled stacks, sorted."""
    return tuple(sorted(p.stem for p in (profile_folder() / "stacks").glob("*.yaml")))


def bundled_path(name: str) -> Path | None:
    """The file of a bundled cluster, device or stack, None when there is none of that name."""
    folders = {"": cluster_names(), "devices": device_names(), "stacks": stack_names()}
    return next(
        (profile_folder() / folder / f"{name}.yaml" for folder, names in folders.items() if name in names), None
    )


@cache
def citations() -> dict[str, str]:
    """The citations that every profile may use, by short name."""
    from planner.hardware.document import read_document

    data = read_document(profile_folder() / _SOURCES).data
    return {str(key): str(text) for key, text in data.items()}


def looks_like_path(text: str) -> bool:
    """Whether a name on the command line means a file."""
    return text.endswith((".yaml", ".yml")) or "/" in text or "\\" in text
