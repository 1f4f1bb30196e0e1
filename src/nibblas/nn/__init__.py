"""Modules with FP4 weights, and the conversion of a model's layers to them."""

from nibblas.nn.conversion import DEFAULT_EXCLUDE, LayerReport, conversion_report, convert
from nibblas.nn.experts import FP4Experts, TransformersExperts
from nibblas.nn.linear import FP4Linear

__all__ = [
    "DEFAULT_EXCLUDE",
    "FP4Experts",
    "FP4Linear",
    "LayerReport",
    "TransformersExperts",
    "conversion_report",
    "convert",
]
