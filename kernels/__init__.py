"""Compute kernels: tensors in, tensors out. `reference` defines what is correct; `cpu` and `triton_ops` are fast.

transformers probes the import name `kernels` for Hugging Face's package of that name. The version "0" keeps
`transformers.utils.is_kernels_available()` False; a test holds that.
"""

__version__ = "0"
