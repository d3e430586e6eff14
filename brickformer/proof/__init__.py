"""Proof: `check` builds a tiny twin of a model from the same bricks and tries every property it owes."""

from brickformer.proof.kernels import Used, kernels_of
from brickformer.proof.limits import limits_of
from brickformer.proof.properties import PROPERTIES, Property
from brickformer.proof.prove import check
from brickformer.proof.report import Report, Row
from brickformer.proof.twin import Twin, twin_of

__all__ = ["PROPERTIES", "Property", "Report", "Row", "Twin", "Used", "check", "kernels_of", "limits_of", "twin_of"]
