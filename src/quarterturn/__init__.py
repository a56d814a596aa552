"""Quarterturn: language models with 4-bit float weights behind online block-diagonal transforms."""

from . import ops
from .compiled import compile_options
from .errors import BackendRefusal, CheckpointRefusal, Refusal
from .formats import MXFP4, NVFP4, FP4Format
from .integrations.transformers import explain, load
from .linear import FP4Linear
from .quantize import quantize
from .tensor import FP4Tensor
from .transforms import Transform, hadamard, matrix, random_hadamard

__version__ = "0.1.0"

__all__ = [
    "MXFP4",
    "NVFP4",
    "BackendRefusal",
    "CheckpointRefusal",
    "FP4Format",
    "FP4Linear",
    "FP4Tensor",
    "Refusal",
    "Transform",
    "compile_options",
    "explain",
    "hadamard",
    "load",
    "matrix",
    "ops",
    "quantize",
    "random_hadamard",
]
