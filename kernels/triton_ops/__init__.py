"""The ops in Triton, for CUDA devices: tensors in, tensors out. Not yet run on a GPU.

What an op means is defined by `kernels.reference` and `kernels.reference_quantised`. Until a GPU was at hand the
kernels were checked in two halves: what they compute, on CPU under Triton's interpreter (TRITON_INTERPRET=1 before
triton is imported), and that they compile to machine code for sm_80, sm_90 and sm_100 within the chip's shared memory.
Tile sizes are reasoned, not tuned.

The KV cache is [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], any strides but the last, which is 1.
"""

import os

# Multiply-adds are fused, as Triton has always done; said aloud, since Triton 3.9 warns where it is not.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
