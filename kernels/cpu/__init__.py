"""The forward pass on CPU in C++: a tape of ops over raw pointers, run by a small thread pool.

`src/` holds the C++, `build` compiles it (the package's own build does, and `python -m kernels.cpu.build` for a quick
rebuild), `library` loads it. What the ops compute is defined by `kernels.reference`. `draw` chooses tokens, as
`kernels.reference_draw` defines; `checksum` sums blocks up.
"""
