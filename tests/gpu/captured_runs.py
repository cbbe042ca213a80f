"""Run by test_captured_runs_gpu: replays CUDA graphs after all that ran in them was let go of; ends with 0 if right.

Arguments: "thread", for runs captured in threads that have ended, or "handle", for those of a handle that is closed.
"""

from __future__ import annotations

import gc
import sys
import threading
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import cupy
import numpy as np

import miofind
from miofind.core.problem import DataType, Direction, ProblemDescription
from miofind.solver.registry import Registry
from miofind.solver.steps import Config

PROBLEMS = (
    ProblemDescription.convolution(x=(8, 64, 28, 28), w=(64, 64, 3, 3), padding=1, dtype="float16", layout="NHWC"),
    ProblemDescription.convolution(
        x=(8, 64, 28, 28),
        w=(64, 64, 3, 3),
        padding=1,
        dtype="bfloat16",
        layout="NHWC",
        direction=Direction.BACKWARD_DATA,
    ),
)


class Captured:
    """One configuration of cuDNN's, captured; it keeps buffers and the graph, nothing of what ran."""

    def __init__(self, handle: miofind.Handle, problem: ProblemDescription, config: Config) -> None:
        invoker = handle.invoker(problem, "ConvCudnn", config)
        self.is_repeatable = invoker.deterministic
        random = np.random.default_rng(0)
        tensors = [operand.tensor for operand in problem.operands]
        self.buffers = [_filled(tensor.size, tensor.dtype, random) for tensor in tensors]
        self.workspace = cupy.zeros(max(16, invoker.workspace_bytes), cupy.uint8)
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.output = self.buffers[[operand.is_input for operand in problem.operands].index(False)]
        bases = (*(buffer.data.ptr for buffer in self.buffers), self.workspace.data.ptr)
        cupy.cuda.Device().synchronize()
        invoker.run(bases, self.stream.ptr)
        self.stream.synchronize()
        self.wanted = self.output.copy()
        cupy.cuda.Device().synchronize()
        self.stream.begin_capture()
        invoker.run(bases, self.stream.ptr)
        self.graph = self.stream.end_capture()

    def is_right(self) -> bool:
        """Whether a replay writes what the run wrote."""
        self.output.fill(0)
        cupy.cuda.Device().synchronize()
        self.graph.launch(self.stream)
        self.stream.synchronize()
        return not self.is_repeatable or bool((self.output == self.wanted).all())


def _filled(size: int, dtype: DataType, random: np.random.Generator) -> Any:
    """Small numbers of a 16-bit type as its bits."""
    numbers = random.standard_normal(size, np.float32)
    if dtype is DataType.BFLOAT16:
        return cupy.asarray((numbers.view(np.uint32) >> 16).astype(np.uint16))
    return cupy.asarray(numbers.astype(np.float16).view(np.uint16))


def _capture(captured: list[Captured], handle: miofind.Handle, problem: ProblemDescription, config: Config) -> None:
    captured.append(Captured(handle, problem, config))


def main() -> None:
    captured: list[Captured] = []
    with TemporaryDirectory() as folder, miofind.Handle("cuda", database=Path(folder, "finddb.db")) as handle:
        for problem in PROBLEMS:
            for config in Registry.default()["ConvCudnn"].configs(problem, handle.device):
                if sys.argv[1] == "thread":
                    thread = threading.Thread(target=_capture, args=(captured, handle, problem, config))
                    thread.start()
                    thread.join()
                else:
                    _capture(captured, handle, problem, config)
        if sys.argv[1] == "handle":
            handle.forget()
    del handle
    gc.collect()
    for number in range(32):  # what is loaded now may take the place of what was unloaded
        code = f'extern "C" __global__ void fill{number}(float* out) {{ out[threadIdx.x] = {number}; }}'
        cupy.RawModule(code=code).get_function(f"fill{number}")((1,), (32,), (cupy.zeros(32, cupy.float32),))
    wrong = [number for number, each in enumerate(captured) if not each.is_right()]
    if wrong or not captured:
        sys.exit(f"{wrong} of {len(captured)} replays are wrong")


if __name__ == "__main__":
    main()
