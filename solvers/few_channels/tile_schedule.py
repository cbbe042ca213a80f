"""Which thread blocks compute which tiles of outputs: of forward and backward weights of few channels.

Pure arithmetic on shapes.
"""

from __future__ import annotations

from dataclasses import dataclass

from miofind.core.problem import ProblemDescription
from miofind.solver.columns import larger, smaller
from miofind.solver.structs import Struct
from miofind.solvers.common.correlation import ceil_div
from miofind.solvers.common.divisor import divide_by
from miofind.solvers.few_channels.shapes import outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class TileSchedule:
    """Tiles of all images are dealt to thread blocks by turns, for each block of filters on its own.

    Attributes:
        filter_tiles: blocks of filters.
        image_tiles, row_tiles: tiles of an image, and of a row of tiles.
        tiles: of all images.
        step: thread blocks that share the tiles of a block of filters.
    """

    filter_tiles: int
    image_tiles: int
    row_tiles: int
    tiles: int
    step: int

    @staticmethod
    def of(
        problem: ProblemDescription, tile_k: int, image: tuple[int, int], slots: int, least: int = 1
    ) -> TileSchedule:
        """That of tiles of `tile_k` filters, for `slots` thread blocks at a time.

        Args:
            image: rows and columns of tiles of an image.
            least: tiles of a thread block at least, if there are as many.
        """
        filter_tiles, image_tiles = ceil_div(problem.k, tile_k), image[0] * image[1]
        tiles = problem.n * image_tiles
        return TileSchedule(
            filter_tiles=filter_tiles,
            image_tiles=image_tiles,
            row_tiles=image[1],
            tiles=tiles,
            step=smaller(ceil_div(tiles, least), larger(1, slots // filter_tiles)),
        )

    @property
    def blocks(self) -> int:
        """Of the grid."""
        return self.filter_tiles * self.step

    def fields(self, problem: ProblemDescription) -> dict[str, int | Struct]:
        """Those of few_channels/shapes.py that kernels over outputs take."""
        return {
            **outputs(problem),
            "tiles": self.tiles,
            "tile_step": self.step,
            "filter_tiles": divide_by(self.filter_tiles),
            "image_tiles": divide_by(self.image_tiles),
            "row_tiles": divide_by(self.row_tiles),
        }
