"""Thread blocks of kernels_src/fft/tiles.cu and fft/lines.cu: the lengths they transform, and how many at once."""

from __future__ import annotations

from dataclasses import dataclass

from miofind.device.device import Device
from miofind.solvers.common.correlation import ceil_div, round_up

TILES_SOURCE = "fft/tiles.cu"
LINES_SOURCE = "fft/lines.cu"

# Lengths that a thread of fft/tiles.cu holds in registers: columns, and rows of half as many complex numbers.
_HEIGHTS = (1, 8, 10, 12, 14, 16, 18, 20, 21, 24, 27, 28, 30, 32, 35, 36, 40, 42, 45, 48, 54, 56, 60, 64)
_WIDTHS = (8, 12, 16, 20, 24, 28, 32, 36, 40, 48, 56, 60, 64, 72, 80, 96, 112, 128)
OWN_LINES = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)  # of fft/lines.cu
_LINE_OF_PLANE = 512  # numbers of a line for each plane that a block has
_LEAST_PLANES = 4
_THREADS = 256
_MOST_THREADS = 512
_COMPLEX_BYTES = 8
# Issued for a point, counted in the machine code of long lines: by the pass between memory and registers, by each
# other pass, and by what tells two real numbers apart that are one complex number.
_EDGE_INSTRUCTIONS, _PASS_INSTRUCTIONS, _SPLIT_INSTRUCTIONS = 40, 23, 48
_LANES, _SCHEDULERS = 32, 4
_ISSUED_SHARE = 0.74  # of the time of a scheduler, that it issues in on an H200
_WANTED_THREADS = 1024  # of a multiprocessor; with half of them it is taken to issue a third less
# Bytes of transforms of planes that a multiprocessor computes a cycle, were it only columns, or only rows that are not
# left out: tiles of 64 x 64 with 11 to 64 of them on an H200.
_COLUMNS_BYTES, _ROWS_BYTES = 10.5, 6.0


def own_height(size: int) -> int:
    """The least length of columns from `size` on that fft/tiles.cu transforms; 0 where there is none."""
    return next((length for length in _HEIGHTS if length >= size), 0)


def own_width(size: int) -> int:
    """The least length of rows from `size` on that fft/tiles.cu transforms; 0 where there is none."""
    return next((length for length in _WIDTHS if length >= size), 0)


def own_line(size: int) -> int:
    """The least length of a single row from `size` on that either of them transforms; 0 where there is none."""
    return own_width(size) or next((length for length in OWN_LINES if length >= size), 0)


def passes_of(points: int) -> int:
    """Passes of radix 8 or 16 over lines (kernels_src/fft/passes.cuh)."""
    return ceil_div(points.bit_length() - 1, 4)


def line_ms(points: int, edge: int, passes: int, device: Device) -> float:
    """Milliseconds of so many points, by `edge` instructions and so many passes, were all threads there."""
    instructions = points * (edge + _PASS_INSTRUCTIONS * passes) / _LANES
    return 1e3 * instructions / (_SCHEDULERS * _ISSUED_SHARE * device.sm_count * device.clock_hz)


def waiting(device: Device, threads: int, shared_bytes: int) -> float:
    """How many times longer than that blocks take, of which too few share a multiprocessor."""
    resident = min(_WANTED_THREADS, max(1, device.shared_bytes // (shared_bytes + 1024)) * threads)
    return 0.5 + 0.5 * _WANTED_THREADS / resident


@dataclass(frozen=True, slots=True)
class OwnBlock:
    """One shape of thread block.

    Attributes:
        lengths: of a transform.
        planes: of fft/tiles.cu; lines of fft/lines.cu have 512 numbers for each, and there is one at least.
    """

    lengths: tuple[int, int]
    planes: int

    @property
    def has_lines(self) -> bool:
        """Whether fft/lines.cu transforms: one row that no thread's registers hold."""
        return self.lengths[1] > _WIDTHS[-1]

    @property
    def source(self) -> str:
        """The kernels' file."""
        return LINES_SOURCE if self.has_lines else TILES_SOURCE

    def entry(self, *, inverse: bool) -> str:
        """The name of the kernel that transforms elements, or back."""
        return f"fft_{'lines' if self.has_lines else 'tiles'}_{'backward' if inverse else 'forward'}"

    @property
    def count(self) -> int:
        """Transforms of a block."""
        return max(1, self.planes * _LINE_OF_PLANE // self.lengths[1]) if self.has_lines else self.planes

    @property
    def threads(self) -> int:
        """Of a block: one for each column, or some in turn; one for each butterfly of sixteen complex numbers."""
        width = self.lengths[1]
        if self.has_lines:
            return min(_MOST_THREADS, self.count * width // 32)
        columns = self.planes * (width // 2 + 1)
        return round_up(ceil_div(columns, ceil_div(columns, _THREADS)), 32)

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The kernels' compile-time parameters, but for the tensor's."""
        height, width = self.lengths
        if self.has_lines:
            return (("LENGTH", width), ("LINES", self.count), ("THREADS", self.threads))
        return (("LENGTH_H", height), ("LENGTH_W", width), ("PLANES", self.planes), ("THREADS", self.threads))

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: numbers, and the gaps that keep neighbours in different banks."""
        height, width = self.lengths
        if self.has_lines:
            return _COMPLEX_BYTES * self.count * (width // 2 + width // 32 + 2)
        return _COMPLEX_BYTES * self.planes * ((height * (width // 2 + 1) + 13) // 16 * 16 + 2)

    def estimate_ms(self, device: Device, planes: int, rows: int) -> float:
        """Time of so many planes' transforms, of which so many rows are elements."""
        height, width = self.lengths
        if self.has_lines:
            points = width // 2
            edge = _EDGE_INSTRUCTIONS + _SPLIT_INSTRUCTIONS
            one = line_ms(planes * points, edge, passes_of(points) - 1, device)
            return one * waiting(device, self.threads, self.shared_bytes)
        moved = _COMPLEX_BYTES * planes * height * (width // 2 + 1) / (device.sm_count * device.clock_hz)
        return 1e3 * moved * (1 / _COLUMNS_BYTES + rows / height / _ROWS_BYTES)

    @property
    def repeats_fewer_planes(self) -> bool:
        """Whether it has the one line that a block of fewer planes has, too."""
        return self.has_lines and self.planes * _LINE_OF_PLANE <= self.lengths[1] and self.planes > _LEAST_PLANES
