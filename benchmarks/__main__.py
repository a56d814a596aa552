"""`python -m benchmarks`: the benchmark of the machine at hand, the GPU's where there is one."""

import torch

from benchmarks import cpu_model, gpu_rotate_quantize

(gpu_rotate_quantize if torch.cuda.is_available() else cpu_model).main()
