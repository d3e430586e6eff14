"""The doctor: finds silent bugs in anyone's Transformer. `diagnose(model)` measures; it reads no source.

The names are imported when they are first used: the plugin for pytest lies in this folder and waits for no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from brickformer.doctor.examination import diagnose
    from brickformer.doctor.probes import PROBES
    from brickformer.doctor.report import Finding, Report, Verdict
    from brickformer.doctor.subject import Subject

_HOME = {
    "PROBES": "probes",
    "Finding": "report",
    "Report": "report",
    "Subject": "subject",
    "Verdict": "report",
    "diagnose": "examination",
}

__all__ = ["PROBES", "Finding", "Report", "Subject", "Verdict", "diagnose"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"brickformer.doctor.{_HOME[name]}"), name)
    globals()[name] = value
    return value
