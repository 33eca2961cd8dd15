"""Output that follows a grammar: what may be asked, whether it compiles, and which tokens it allows at each place.

The gateway checks what clients ask (`spec`, `checker`) and loads no grammar engine: that runs in processes of its own
that can be killed. Workers compile it again (`library`) and ask before each token which ones are allowed (`matcher`).
"""
