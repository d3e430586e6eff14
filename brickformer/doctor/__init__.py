"""The doctor: finds silent bugs in anyone's Transformer. `diagnose(model)` measures; it reads no source."""

from brickformer.doctor.diagnose import diagnose
from brickformer.doctor.probes import PROBES
from brickformer.doctor.report import Finding, Report, Verdict
from brickformer.doctor.subject import Subject

__all__ = ["PROBES", "Finding", "Report", "Subject", "Verdict", "diagnose"]
