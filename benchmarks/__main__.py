"""`python -m benchmarks`: the benchmarks of the machine at hand, the GPU's where there is one."""

import torch

from benchmarks import cpu_model, gpu_matmul, gpu_rotate_quantize

for module in (gpu_rotate_quantize, gpu_matmul) if torch.cuda.is_available() else (cpu_model,):
    module.main()
