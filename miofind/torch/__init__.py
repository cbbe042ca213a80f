"""miofind in PyTorch: `enable()` has its kernels run the convolutions of any model, forward and backward."""

from miofind.torch.export import exported_problems
from miofind.torch.network import problems
from miofind.torch.override import Override, disable, enable, report, use
from miofind.torch.recorder import record
from miofind.torch.recording import RecordedCall, Recording

__all__ = [
    "Override",
    "RecordedCall",
    "Recording",
    "disable",
    "enable",
    "exported_problems",
    "problems",
    "record",
    "report",
    "use",
]
