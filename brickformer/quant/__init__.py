"""Quantization: weights in 8 and 4 bits, rounded to nearest or by data, fast where the machine has a kernel."""

from brickformer.quant.codes import Coded, encode
from brickformer.quant.files import entry, restore
from brickformer.quant.grid import NF4, Int4, Int8, Scheme
from brickformer.quant.linear import QuantEmbedding, QuantLinear
from brickformer.quant.quantize import Calibration, Heads, Matrix, Method, linears, quantize
from brickformer.quant.receipt import Receipt

__all__ = [
    "NF4",
    "Calibration",
    "Coded",
    "Heads",
    "Int4",
    "Int8",
    "Matrix",
    "Method",
    "QuantEmbedding",
    "QuantLinear",
    "Receipt",
    "Scheme",
    "encode",
    "entry",
    "linears",
    "quantize",
    "restore",
]
