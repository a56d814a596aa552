"""compressed-tensors names, config and bytes <-> FP4Tensor and Transform.

The only place that knows what a file calls things, and that the tensor scales a file stores are divisors.

    files.py        a folder of safetensors: what is in it, by its headers alone
    config.py       config.json: groups of layers and transforms, parsed by compressed-tensors' own classes
    stored.py       the matrices of online transforms
    read.py         all together, layer by layer, with every disagreement refused
    description.py  what a checkpoint says of itself, for people
    original.py     the unquantized model a checkpoint was made from
    write.py        what layers and transforms are called, and how the config says so
    save.py         tensors, JSON and tokenizer files into a folder
"""

from .description import describe
from .files import TensorInfo, resolve
from .original import OriginalModel
from .read import Checkpoint, LayerSpec, open_checkpoint, recognise
from .stored import StoredTransform

__all__ = [
    "Checkpoint",
    "LayerSpec",
    "OriginalModel",
    "StoredTransform",
    "TensorInfo",
    "describe",
    "open_checkpoint",
    "recognise",
    "resolve",
]
