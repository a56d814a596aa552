"""Quarterturn: language models with 4-bit float weights behind online block-diagonal transforms."""

from . import ops
from .errors import BackendRefusal, CheckpointRefusal, Refusal
from .formats import MXFP4, NVFP4, FP4Format
from .linear import FP4Linear
from .tensor import FP4Tensor
from .transforms import Transform, hadamard, matrix, random_hadamard

__version__ = "0.1.0"
