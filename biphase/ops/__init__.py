"""The only importer of `kernels`: what executors call. `eager` is plain torch, `cpu_program` the compiled CPU step."""
