"""A block of kernels_src/implicit_gemm/wgmma_ping_pong.cu as its mbarriers see it, in any order that they allow.

Warps that multiply, load or copy are generators that give what they wait for; so are copies and products under way.
Whoever meets in a stage or a place what is not his own item's, or overwrites what is still needed, fails.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

CONSUMERS, WARPS = 2, 4

Waiting = Iterator[Callable[[], bool]]
"""Someone who goes on once what he gave holds."""


def at_any_time() -> bool:
    return True


@dataclass
class Mbarrier:
    """Its phases end when all have arrived and all copies that they announced have come."""

    arrivals: int
    phase: int = 0
    arrived: int = 0
    copies: int = 0

    def arrive(self, copies: int = 0) -> None:
        assert self.arrived < self.arrivals, "more arrivals than a phase has"
        self.arrived += 1
        self.copies += copies
        self._end_phase()

    def copied(self) -> None:
        self.copies -= 1
        self._end_phase()

    def _end_phase(self) -> None:
        if self.arrived == self.arrivals and self.copies == 0:
            self.phase, self.arrived = self.phase + 1, 0

    def past(self, parity: int) -> Callable[[], bool]:
        """Whether the phase before is of that parity, be it the one that was meant or not."""
        return lambda: (self.phase - 1 - parity) % 2 == 0


@dataclass
class Operand:
    """Pixels or filters of a stage: of which item and k-tile, None while they are loaded; how many warps need them."""

    of: tuple[int, int] | None = None
    needed: int = 0


@dataclass
class Place:
    """Of results: whose, the copies that have to come before, and the warps that have staged theirs."""

    item: int | None = None
    copies: int = 0
    staged: set[int] = field(default_factory=set)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of a block: its tiles and their k-tiles, and what the kernel is compiled for.

    Attributes:
        k_tiles: of each of its items; some of strided backward data have none.
        writing: warps of a consumer that stage results.
        loads: copies that come to a place before results are staged.
    """

    k_tiles: Sequence[int]
    stages: int
    rows: int
    places: int
    keeps_filters: bool
    writing: int
    loads: int

    @property
    def items(self) -> int:
        return len(self.k_tiles)

    @property
    def under_way(self) -> int:
        """Groups of products that are under way while the next one is begun."""
        return 2 if self.rows == 1 else 1


class Block:
    """One block; who may go on does so in an order that random numbers choose."""

    def __init__(self, sizes: Sizes, generator: random.Random) -> None:
        self.sizes, self.generator = sizes, generator
        stages, kept = range(sizes.stages), range(sizes.k_tiles[0] if sizes.keeps_filters else 0)
        assert not sizes.keeps_filters or len(set(sizes.k_tiles)) == 1
        self.order = [(item, k_tile) for item, count in enumerate(sizes.k_tiles) for k_tile in range(count)]
        self.first = [0, *itertools.accumulate(sizes.k_tiles)]
        self.full = [Mbarrier(1 if kept else 2) for _ in stages]
        self.empty = [Mbarrier(WARPS) for _ in stages]
        self.filters_full = [Mbarrier(1) for _ in kept]
        self.turns, self.ready, self.staged = (
            [Mbarrier(arrivals) for _ in range(CONSUMERS)] for arrivals in (WARPS, 1, sizes.writing)
        )
        self.pixels, self.filters = [Operand() for _ in stages], [Operand() for _ in kept or stages]
        self.places = [Place() for _ in range(sizes.places)]
        self.stored: list[int] = []
        self.left: list[tuple[Waiting, Callable[[], bool], bool]] = []

    def run(self) -> None:
        """All to their ends. Some are slow: they seldom go on where another can."""
        warps = itertools.product(range(CONSUMERS), range(WARPS))
        everyone = [self._load_pixels(), self._load_filters(), self._copy_results()]
        for each in (*everyone, *itertools.starmap(self._consume, warps)):
            self._go_on(each, is_slow=self.generator.random() < 0.3)
        while self.left:
            self.generator.shuffle(self.left)
            if self.generator.random() < 0.9:
                self.left.sort(key=lambda each: each[2])
            place = next((place for place, (_, holds, _) in enumerate(self.left) if holds()), None)
            assert place is not None, "deadlock"
            waiting, _, is_slow = self.left.pop(place)
            self._go_on(waiting, is_slow=is_slow)
        assert self.stored == list(range(self.sizes.items))

    def _go_on(self, waiting: Waiting, *, is_slow: bool) -> None:
        following = next(waiting, None)
        if following is not None:
            self.left.append((waiting, following, is_slow))

    def _begin(self, waiting: Waiting) -> None:
        self._go_on(waiting, is_slow=self.generator.random() < 0.3)

    def _load_pixels(self) -> Waiting:
        for number, of in enumerate(self.order):
            stage, rounds = number % self.sizes.stages, number // self.sizes.stages
            yield self.empty[stage].past(rounds + 1)
            self._load(self.pixels[stage], of, self.full[stage])

    def _load_filters(self) -> Waiting:
        if self.sizes.keeps_filters:
            for k_tile, (filters, full) in enumerate(zip(self.filters, self.filters_full, strict=True)):
                self._load(filters, (0, k_tile), full)
            return
        for number, of in enumerate(self.order):
            stage, rounds = number % self.sizes.stages, number // self.sizes.stages
            yield self.empty[stage].past(rounds + 1)
            self._load(self.filters[stage], of, self.full[stage])

    def _load(self, operand: Operand, of: tuple[int, int], full: Mbarrier) -> None:
        assert operand.needed == 0, "a stage is overwritten before it was multiplied"
        operand.of, operand.needed = None, WARPS
        full.arrive(copies=1)
        self._begin(self._come(operand, of, full))

    def _come(self, operand: Operand, of: tuple[int, int], full: Mbarrier) -> Waiting:
        yield at_any_time
        operand.of = of
        full.copied()

    def first_parity(self, consumer: int) -> int:
        """Of a consumer's turns."""
        return int(consumer == 0)

    def released(self, number: int) -> int:
        """The k-tile that has been multiplied when that one has been begun."""
        return number - self.sizes.under_way

    def _consume(self, consumer: int, warp: int) -> Waiting:
        sizes = self.sizes
        products: deque[tuple[int, int]] = deque()
        for turn, item in enumerate(range(consumer, sizes.items, CONSUMERS)):
            yield self.turns[consumer].past(turn + self.first_parity(consumer))
            for k_tile in range(sizes.k_tiles[item]):
                number = self.first[item] + k_tile
                yield self.full[number % sizes.stages].past(number // sizes.stages)
                if sizes.keeps_filters:
                    yield self.filters_full[k_tile].past(0)
                products.append((item, k_tile))
                self._begin(self._multiply(products, item, k_tile))
                yield self._at_most(products, sizes.under_way)
                if k_tile >= sizes.under_way:
                    self.empty[self.released(number) % sizes.stages].arrive()
            self.turns[1 - consumer].arrive()
            yield self._at_most(products, 0)
            for last in range(min(sizes.under_way, sizes.k_tiles[item]), 0, -1):
                self.empty[(self.first[item + 1] - last) % sizes.stages].arrive()
            if warp < sizes.writing:
                yield from self._write(consumer, warp, turn, item)

    def _at_most(self, products: deque[tuple[int, int]], count: int) -> Callable[[], bool]:
        return lambda: len(products) <= count

    def _multiply(self, products: deque[tuple[int, int]], item: int, k_tile: int) -> Waiting:
        """A warp's products of a k-tile; they are made in order."""
        yield lambda: products[0] == (item, k_tile)
        stage = (self.first[item] + k_tile) % self.sizes.stages
        pixels, filters = self.pixels[stage], self.filters[k_tile if self.sizes.keeps_filters else stage]
        expected = [(item, k_tile), (0 if self.sizes.keeps_filters else item, k_tile)]
        assert [pixels.of, filters.of] == expected, "a stage is multiplied that is not there"
        yield at_any_time
        assert [pixels.of, filters.of] == expected, "a stage is overwritten while it is multiplied"
        pixels.needed -= 1
        filters.needed -= 1
        products.popleft()

    def place_of(self, item: int) -> Place:
        """Where a consumer stages results."""
        return self.places[item % self.sizes.places]

    def _write(self, consumer: int, warp: int, turn: int, item: int) -> Waiting:
        yield self.ready[consumer].past(turn)
        place = self.place_of(item)
        assert (place.item, place.copies) == (item, 0), "a place is written that is not ready"
        yield at_any_time
        assert (place.item, place.copies) == (item, 0), "a place is overwritten while it is written"
        place.staged.add(warp)
        self.staged[consumer].arrive()

    def following(self, item: int) -> int:
        """The item that a place is made ready for after that one's results have left."""
        return item + self.sizes.places

    def _copy_results(self) -> Waiting:
        for item in range(self.sizes.places):
            self._make_ready(item)
        for item in range(self.sizes.items):
            yield self.staged[item % CONSUMERS].past(item // CONSUMERS)
            self._begin(self._store(item))
            yield self._is_stored(item)
            self._make_ready(self.following(item))

    def _is_stored(self, item: int) -> Callable[[], bool]:
        return lambda: item in self.stored[-1:]

    def _store(self, item: int) -> Waiting:
        place = self.places[item % self.sizes.places]
        everyone = set(range(self.sizes.writing))
        assert (place.item, place.staged) == (item, everyone), "results are stored that are not staged"
        yield at_any_time
        assert (place.item, place.staged) == (item, everyone), "a place is overwritten before it was copied"
        place.item, place.staged = None, set()
        self.stored.append(item)

    def _make_ready(self, item: int) -> None:
        if item >= self.sizes.items:
            return
        place, ready = self.places[item % self.sizes.places], self.ready[item % CONSUMERS]
        assert place.item is None, "a place is overwritten before it was copied"
        place.item, place.copies = item, self.sizes.loads
        ready.arrive(copies=self.sizes.loads)
        for _ in range(self.sizes.loads):
            self._begin(self._read(place, ready))

    def _read(self, place: Place, ready: Mbarrier) -> Waiting:
        yield at_any_time
        place.copies -= 1
        ready.copied()
