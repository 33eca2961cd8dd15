"""Compiles the CPU kernels while the package is built, also for an editable install.

A machine without a compiler still gets the package: the build says so loudly, and the workers run plain torch.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_MARK = "*" * 78


class CustomBuildHook(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """`version` is "standard" or "editable"; the library lands beside its loader either way."""
        # By path: the package's own dependencies need not be there yet.
        module = runpy.run_path(str(Path(self.root, "kernels", "cpu", "build.py")))
        try:
            module["build"]()
        except module["BuildError"] as error:
            self.app.display_warning(
                f"\n{_MARK}\nbiphase: the CPU kernels were NOT compiled; workers on CPU will run plain torch, "
                f"several times slower.\n{error}\n"
                f"Install a C++17 compiler and run `python -m kernels.cpu.build`.\n{_MARK}"
            )
            print(f"biphase: CPU kernels not compiled: {error}", file=sys.stderr)
            return
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
