"""What torch.compile puts around a module, paths of modules without it, and modules of torch.export."""

from __future__ import annotations

import sys
from typing import Any

import torch.fx

_INNER = "_orig_mod"


def is_compiled(module: Any) -> bool:
    """Whether a module is what torch.compile put around one."""
    compiling = sys.modules.get("torch._dynamo.eval_frame")  # which takes seconds to import
    return compiling is not None and isinstance(module, compiling.OptimizedModule)


def is_exported(module: Any) -> bool:
    """Whether a module is what `torch.export.ExportedProgram.module` gives: a graph in one mode for good."""
    return isinstance(module, torch.fx.GraphModule) and "eval" in vars(module)


def path_without(path: str) -> str:
    """The path of a module in the network as it was before torch.compile."""
    return ".".join(part for part in path.split(".") if part != _INNER)
