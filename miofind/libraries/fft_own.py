"""Thread blocks of kernels_src/fft_tiles.cu and fft_lines.cu: the lengths they transform, and how many at once."""

from __future__ import annotations

from dataclasses import dataclass

from miofind.tiling.correlation import ceil_div, round_up

TILES_SOURCE = "fft_tiles.cu"
LINES_SOURCE = "fft_lines.cu"

# Lengths that a thread of fft_tiles.cu holds in registers: columns, and rows of half as many complex numbers.
_HEIGHTS = (1, 8, 10, 12, 14, 16, 18, 20, 21, 24, 27, 28, 30, 32, 35, 36, 40, 42, 45, 48, 54, 56, 60, 64)
_WIDTHS = (8, 12, 16, 20, 24, 28, 32, 36, 40, 48, 56, 60, 64, 72, 80, 96, 112, 128)
OWN_LINES = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)  # of fft_lines.cu
_LINE_OF_PLANE = 512  # numbers of a line for each plane that a block has
_LEAST_PLANES = 4
_THREADS = 256
_MOST_THREADS = 512
_COMPLEX_BYTES = 8


def own_height(size: int) -> int:
    """The least length of columns from `size` on that fft_tiles.cu transforms; 0 where there is none."""
    return next((length for length in _HEIGHTS if length >= size), 0)


def own_width(size: int) -> int:
    """The least length of rows from `size` on that fft_tiles.cu transforms; 0 where there is none."""
    return next((length for length in _WIDTHS if length >= size), 0)


def own_line(size: int) -> int:
    """The least length of a single row from `size` on that either of them transforms; 0 where there is none."""
    return own_width(size) or next((length for length in OWN_LINES if length >= size), 0)


@dataclass(frozen=True, slots=True)
class OwnBlock:
    """One shape of thread block.

    Attributes:
        lengths: of a transform.
        planes: of fft_tiles.cu; lines of fft_lines.cu have 512 numbers for each, and there is one at least.
    """

    lengths: tuple[int, int]
    planes: int

    @property
    def has_lines(self) -> bool:
        """Whether fft_lines.cu transforms: one row that no thread's registers hold."""
        return self.lengths[1] > _WIDTHS[-1]

    @property
    def source(self) -> str:
        """The kernels' file; their names begin with its stem."""
        return LINES_SOURCE if self.has_lines else TILES_SOURCE

    @property
    def count(self) -> int:
        """Transforms of a block."""
        return max(1, self.planes * _LINE_OF_PLANE // self.lengths[1]) if self.has_lines else self.planes

    @property
    def threads(self) -> int:
        """Of a block: one for each column, or some in turn; one for each butterfly of eight complex numbers."""
        width = self.lengths[1]
        if self.has_lines:
            return min(_MOST_THREADS, self.count * width // 16)
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

    @property
    def repeats_fewer_planes(self) -> bool:
        """Whether it has the one line that a block of fewer planes has, too."""
        return self.has_lines and self.planes * _LINE_OF_PLANE < self.lengths[1] and self.planes > _LEAST_PLANES
