"""Kernels: Triton and Gluon sources for GPUs, C for CPUs. Importing this imports neither."""

CODES, VALUES, ROTATED = OUTPUTS = 0, 1, 2
"""What a rotate + quantize kernel writes: codes and block scales; e2m1 * block_scale; rotated values."""
