"""miofind in PyTorch: `enable()` has its kernels run the convolutions of any model, forward and backward.

`fuse` makes a network for inference of one, whose convolutions compute what follows them; `convolution` is such a call.
What records and tunes is imported when it is first asked for: a program whose convolutions run needs none of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from miofind.errors import MissingLibraryError
from miofind.process.garbage import without_garbage_collection as _without_garbage_collection
from miofind.process.late_names import LateNames as _LateNames

try:
    import torch as _torch  # noqa: F401, what all below imports
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise MissingLibraryError(
        "miofind.torch needs PyTorch 2.9 or newer, which is not installed: install miofind's extra torch, as in "
        "`pip install -e '.[torch]'` in its clone, `pip install 'FILE.whl[torch]'` for its wheel; for a GPU "
        "[cuda13,torch] or [cuda12,torch], by the version of CUDA that PyTorch is built for"
    ) from error

with _without_garbage_collection():
    from miofind.runtime.background import wait_until_compiled
    from miofind.torch.direct import build
    from miofind.torch.fused.differentiable import convolution
    from miofind.torch.fused.fuse import FusedLayer, FusionReport, fuse
    from miofind.torch.fused.module import FusedConvolution
    from miofind.torch.inductor import inductor_options
    from miofind.torch.override.dispatcher import Override, disable, enable, use

if TYPE_CHECKING:
    from miofind.torch.recording.export import exported_problems
    from miofind.torch.recording.network import problems
    from miofind.torch.recording.recorder import record
    from miofind.torch.recording.recording import RecordedCall, Recording
    from miofind.torch.tuning.explanation import Explanation, LayerRun, explain, report
    from miofind.torch.tuning.report import TunedProblem, TuningReport
    from miofind.torch.tuning.tuning import tune

__all__ = [
    "Explanation",
    "FusedConvolution",
    "FusedLayer",
    "FusionReport",
    "LayerRun",
    "Override",
    "RecordedCall",
    "Recording",
    "TunedProblem",
    "TuningReport",
    "build",
    "convolution",
    "disable",
    "enable",
    "explain",
    "exported_problems",
    "fuse",
    "inductor_options",
    "problems",
    "record",
    "report",
    "tune",
    "use",
    "wait_until_compiled",
]

_late = _LateNames(
    __name__,
    {
        "miofind.torch.recording.export": ("exported_problems",),
        "miofind.torch.recording.network": ("problems",),
        "miofind.torch.recording.recorder": ("record",),
        "miofind.torch.recording.recording": ("RecordedCall", "Recording"),
        "miofind.torch.tuning.explanation": ("Explanation", "LayerRun", "explain", "report"),
        "miofind.torch.tuning.report": ("TunedProblem", "TuningReport"),
        "miofind.torch.tuning.tuning": ("tune",),
    },
)

__dir__ = _late.listed
if not TYPE_CHECKING:  # type checkers know what there is, and tell of anything else
    __getattr__ = _late
