"""Mutants of a GPU: one kernel, mutants.cu, with one fault compiled in.

`MUTANTS` are wrong and `CONTROLS` right; `SOLVERS` has a solver of each, and `RIGHT` is the solver that is to answer in
their place.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from miofind.core.problem import DataType, Direction, ProblemDescription
from miofind.device.device import Device, Place
from miofind.solver.epilogue import epilogue_arguments, epilogue_defines
from miofind.solver.geometry import geometry, geometry_defines
from miofind.solver.steps import (
    Argument,
    Config,
    ConvSolution,
    KernelStep,
    Packing,
    Pointer,
    Region,
    Scalar,
    WorkspacePlan,
)
from mutants.base import Declared, Mutant, MutantSolver, conv

_SOURCE = "mutants.cu"
_THREADS = 256
_ONE_BLOCK = 1 << 14
_MOST_BLOCKS = 1 << 16
_HEAD_BYTES = 256

SINGLE = conv()
DATA = conv(direction="backward_data")
WEIGHTS = conv(direction="backward_weights")
HALF = conv(dtype="float16", layout="NHWC")
BRAIN = conv(dtype="bfloat16")
DOUBLE = conv(dtype="float64", direction="backward_data")
TF32 = conv(math="tf32")
LONG = ProblemDescription.convolution(x=(2, 128, 6, 6), w=(6, 128, 3, 3), dtype="float16", layout="NHWC")
LONG_SINGLE = ProblemDescription.convolution(x=(2, 128, 6, 6), w=(6, 128, 3, 3))
FUSED = conv(epilogue="scale.bias.channel_bias.residual.relu")
FUSED_HALF = conv(epilogue="float32.scale.bias.channel_bias.silu.residual", dtype="float16", layout="NHWC")
BIAS = conv(epilogue="bias.relu", dtype="bfloat16", layout="NHWC")
# So short that a sample is a long row of runs, each on tensors of its own.
TINY = ProblemDescription.convolution(x=(1, 2, 5, 5), w=(2, 2, 1, 1))
# So many elements that few are likely to be among listed ones.
MANY_IMAGES = ProblemDescription.convolution(x=(64, 8, 192, 192), w=(8, 8, 1, 1), dtype="float16")
MANY_FILTERS = ProblemDescription.convolution(
    x=(48, 96, 14, 14), w=(96, 96, 3, 3), padding=1, direction="backward_weights"
)
# Too many products for the whole output to be compared: listed elements stand for it.
LARGE = ProblemDescription.convolution(x=(64, 512, 32, 32), w=(512, 512, 1, 1), dtype="float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """How a mutant's kernel is built and launched, besides its name.

    Attributes:
        branch: of mutants.cu; the mutant's name if left out.
        options: of NVRTC.
        packs: the solver offers a packing.
        copies_late: weights go through the workspace by a step that lets the next one in too early.
    """

    branch: str = ""
    options: tuple[str, ...] = ()
    packs: bool = False
    copies_late: bool = False


@dataclass(frozen=True, slots=True)
class _Entry:
    mutant: Mutant
    kernel: Kernel


class CudaMutantSolver(MutantSolver):
    """Launches mutants.cu with one fault compiled in."""

    place = Place.CUDA
    sources = (_SOURCE,)
    source_package = "mutants"

    def __init__(self, entry: _Entry) -> None:
        super().__init__(entry.mutant)
        self._kernel = entry.kernel

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        steps = (self._main(problem, packed=False),)
        if self._kernel.copies_late:
            copy = self._step(problem, "copy_late", (Pointer(buffer="w"), Pointer(buffer="scratch"), _weights(problem)))
            steps = (copy, *steps)
        return self._solution(*steps)

    def packing(self, problem: ProblemDescription, device: Device, config: Config) -> Packing | None:
        if not self._kernel.packs:
            return None
        pack = self._step(problem, "pack", (Pointer(buffer="w"), Pointer(buffer="y"), _weights(problem)))
        return Packing(
            pack=ConvSolution(steps=(pack,)),
            run=self._solution(self._main(problem, packed=True)),
            bytes=_HEAD_BYTES + problem.w.bytes,
        )

    def kernels(self, device: Device) -> tuple[KernelStep, ...]:
        """All that it launches, those of its packing included."""
        problem = self.mutant.problem
        config = self.default_configs(problem, device)[0]
        kernels = self.solution(problem, device, config).kernels
        packing = self.packing(problem, device, config)
        return kernels if packing is None else (*kernels, *packing.pack.kernels, *packing.run.kernels)

    def _solution(self, *steps: KernelStep) -> ConvSolution:
        declared = self.mutant.declared
        size = declared.workspace_bytes
        return ConvSolution(
            steps=steps,
            workspace=WorkspacePlan((Region(name="scratch", bytes=size),) if size else ()),
            deterministic=declared.deterministic,
        )

    def _main(self, problem: ProblemDescription, *, packed: bool) -> KernelStep:
        has_scratch = bool(self.mutant.declared.workspace_bytes)
        args = (
            *(Pointer(buffer=name) for name in (*problem.direction.inputs, problem.direction.output)),
            Pointer(buffer="scratch") if has_scratch else Scalar(ctype="int64", value=0),
            geometry(problem),
            *epilogue_arguments(problem),
        )
        return self._step(problem, "mutant", args, packed=packed)

    def _step(
        self, problem: ProblemDescription, entry: str, args: tuple[Argument, ...], *, packed: bool = False
    ) -> KernelStep:
        size = problem.output.size
        blocks = 1 if size < _ONE_BLOCK or entry != "mutant" else min(-(-size // _THREADS), _MOST_BLOCKS)
        is_double = DataType.FLOAT64 in {problem.x.dtype, problem.w.dtype, problem.y.dtype}
        return KernelStep(
            source=_SOURCE,
            entry=entry,
            package=self.source_package,
            grid=(blocks, 1, 1),
            block=(_THREADS, 1, 1),
            defines=(
                ("T_X", problem.x.dtype.value),
                ("T_W", problem.w.dtype.value),
                ("T_Y", problem.y.dtype.value),
                ("T_SUM", "float64" if is_double else "float32"),
                *geometry_defines(problem),
                ("DIRECTION", list(Direction).index(problem.direction)),
                ("PACKED", int(packed)),
                ("MUTANT", self._kernel.branch or self.mutant.name),
                *epilogue_defines(problem),
            ),
            options=self._kernel.options,
            args=args,
            pdl=self._kernel.copies_late and entry == "mutant",
        )


def _weights(problem: ProblemDescription) -> Scalar:
    return Scalar(ctype="int64", value=problem.w.size)


@dataclass(slots=True)
class _Registry:
    entries: dict[str, _Entry] = field(default_factory=dict)

    def add(
        self, name: str, fault: str, problem: ProblemDescription, kernel: Kernel = Kernel(), **declared: Any
    ) -> None:
        """Register one."""
        assert name not in self.entries, name
        made = Mutant(name=name, fault=fault, problem=problem, declared=Declared(**declared))
        self.entries[name] = _Entry(made, kernel)


_mutants, _controls = _Registry(), _Registry()
_add = _mutants.add

# Some elements are wrong.
_add("dropped_tap", "The last tap of the filter is not summed.", SINGLE)
_add("dropped_last_filter", "The last filter of a group is not summed into dx.", DATA)
_add("dropped_last_channel", "The last channel of a group is not summed.", HALF)
_add("dropped_last_image", "The last image is not summed into dw.", WEIGHTS)
_add("dropped_tap_at_one_element", "One product is missing from one element.", SINGLE)
_add("wrong_middle_image", "One image in the middle of the batch is wrong.", LARGE)
_add("wrong_middle_output_channel", "One output channel in the middle is wrong.", LARGE)
_add("wrong_tile", "A tile of 16 by 16 pixels is wrong in one channel of one image.", MANY_IMAGES)
_add("wrong_row_of_an_image", "One row in the middle of one image is wrong.", MANY_IMAGES)
_add("swapped_images", "Two neighbouring images come out in each other's place.", MANY_IMAGES)
_add("wrong_middle_filter", "The gradient of one filter in the middle is wrong.", MANY_FILTERS)
_add("wrong_middle_channel", "The gradient of one channel in the middle is wrong.", MANY_FILTERS)
_add("wrong_middle_row", "One row in the middle of every image is wrong.", SINGLE)
_add("wrong_after_split", "The first element after the first block's is wrong.", DATA)
_add("wrong_last_element", "The very last element is wrong.", SINGLE)
_add("unwritten_element", "One element keeps what was there.", DATA)
_add("unwritten_between_strides", "Elements of dx that no output reads are left unwritten, not zero.", DATA)
_add("wrong_for_even_filters", "Output channels of even number take the next one's filter.", SINGLE)
_add("padding_of_ones", "Padding is counted as ones.", SINGLE)
_add("padding_of_edges", "Padding repeats the edge.", WEIGHTS)
_add("shifted_by_a_pixel", "The stride's phase is off by one pixel.", WEIGHTS)
_add("flipped_filter", "The filter is turned around.", DATA)
_add("transposed_filter", "Rows and columns of the filter are exchanged.", SINGLE)
_add("dilation_ignored", "The taps of a dilated filter are read as neighbours.", SINGLE)
_add("groups_exchanged", "Each group reads the other's channels.", BRAIN)

# Memory is read that nobody wrote, or written that belongs to others.
_add("adds_to_output", "The result is added to what the output held.", SINGLE)
_add("adds_to_numbers_in_output", "The result is added to what the output held, where that was a number.", DATA)
_add("keeps_numbers_in_output", "An element that holds a number already is taken as done.", WEIGHTS)
_add("knows_the_poison", "It is right only where the output's bytes are all 0xFF before.", HALF)
_add("reads_before_x", "A number in front of x is taken for its padding.", SINGLE)
_add("reads_after_w", "A number behind w is taken for one more weight.", SINGLE)
_add("writes_after_output", "One byte behind the output is overwritten.", SINGLE)
_add("writes_before_output", "One byte in front of the output is overwritten.", WEIGHTS)
_add("writes_into_an_input", "One weight is overwritten.", DATA)
_add("writes_after_workspace", "It uses more workspace than it asks for.", SINGLE, workspace_bytes=1024)
_add("expects_a_clear_workspace", "Sums are added to a workspace that nobody cleared.", DATA, workspace_bytes=1024)
_add(
    "adds_to_numbers_in_workspace",
    "A counter in the workspace is expected to be zero wherever it is no NaN.",
    WEIGHTS,
    workspace_bytes=1024,
)
_add(
    "keeps_weights_in_workspace",
    "Transformed weights in the workspace are taken from the run before, where there was one.",
    SINGLE,
    workspace_bytes=8 << 10,
)
_add("needs_alignment_of_16", "Vectors of 16 bytes are read from x, whatever its address.", SINGLE)
_add("needs_alignment_of_256_in_output", "Copies want an output at a multiple of 256 bytes.", HALF)
_add("wrong_when_well_aligned", "The fast path for addresses that are multiples of 64 leaves a tap out.", SINGLE)
_add(
    "begins_too_early",
    "A step does not wait for the one before, though it says so.",
    SINGLE,
    Kernel(copies_late=True),
    workspace_bytes=8 << 10,
)
_add("needs_equal_alignment", "Input and output must lie equally far from a multiple of 64 bytes.", SINGLE)
_add(
    "needs_alignment_of_512_in_workspace",
    "The workspace must begin at a multiple of 512 bytes.",
    DATA,
    workspace_bytes=1024,
)

# Right at first and wrong later, or other bits each time.
_add("wrong_from_second_run", "The second run and all later ones are wrong.", SINGLE)
_add(
    "inexact_and_wrong_from_second_run",
    "The second run and all later ones are wrong, of an algorithm that need not be exact.",
    DATA,
    Kernel(branch="wrong_from_second_run"),
    exact=False,
)
_add("wrong_from_third_run", "The third run and all later ones are wrong.", WEIGHTS)
_add("wrong_from_fifth_run", "The fifth run and all later ones are wrong, when the race has begun.", HALF)
_add("wrong_from_tenth_run", "The tenth run and all later ones are wrong.", SINGLE)
_add("nan_from_tenth_run", "The tenth run and all later ones leave a NaN.", DATA)
_add("wrong_from_fiftieth_run", "The fiftieth run and all later ones are wrong.", TINY)
_add("writes_nothing_from_tenth_run", "From the tenth run on nothing is written.", SINGLE)
_add("wrong_every_second_run", "Every second run is wrong once the race has begun.", TINY)
_add("wrong_every_seventh_run", "Every seventh run is wrong.", TINY)
_add("slow_and_wrong_from_fourth_run", "Left behind in the race, and wrong from the fourth run on.", SINGLE)
_add(
    "cut_off_and_wrong_from_third_run",
    "Cut off after its first timed run, and wrong from the third run on.",
    DATA,
    estimate_ms=3.0,
)
_add("overwrites_input_later", "An input is overwritten from the sixth run on.", DATA)
_add("writes_after_output_later", "Bytes behind the output are overwritten from the sixth run on.", SINGLE)
_add(
    "writes_after_workspace_later",
    "Bytes behind the workspace are overwritten from the sixth run on.",
    SINGLE,
    workspace_bytes=256,
)
_add("replays_first_output", "The first output is kept and given for all inputs.", SINGLE)
_add(
    "inexact_and_replays_first_output",
    "The first output is kept and given for all inputs, of an algorithm that need not be exact.",
    DATA,
    Kernel(branch="replays_first_output"),
    exact=False,
)
_add("replays_output_by_address", "An output is kept by the address of its input.", WEIGHTS)
_add(
    "inexact_and_keeps_weights",
    "The first weights are kept, of an algorithm that need not be exact.",
    SINGLE,
    Kernel(branch="keeps_weights"),
    exact=False,
)
_add("keeps_weights_by_address", "Transformed weights are kept by their address.", SINGLE)
_add(
    "keeps_weights_of_gradients_by_address",
    "Transformed weights are kept by their address, where no infinity among weights gives it away.",
    DATA,
    Kernel(branch="keeps_weights_by_address"),
    spreads_nonfinite=True,
)
_add(
    "inexact_and_keeps_weights_by_address",
    "Transformed weights are kept by their address, of an algorithm that need not be exact.",
    DATA,
    Kernel(branch="keeps_weights_by_address"),
    exact=False,
)
_add("keeps_images_by_address", "A copy of x is kept by its address.", HALF)
_add("keeps_output_by_weights", "An output is kept by what the weights hold, whatever x holds.", SINGLE)
_add("keeps_output_by_images", "An output is kept by what x holds, whatever the weights hold.", SINGLE)
_add(
    "inexact_and_keeps_output_by_gradients",
    "An output is kept by what dy holds, whatever x holds, of an algorithm that need not be exact.",
    WEIGHTS,
    Kernel(branch="keeps_output_by_images"),
    exact=False,
)
_add("shares_memory_between_runs", "Sums lie in memory that two runs at the same time share.", DATA)
_add("other_last_bits_each_run", "The last bits are others each time; said to be deterministic.", SINGLE)
_add(
    "inexact_and_other_last_bits",
    "The last bits are others each time, of an algorithm that need not be exact.",
    DATA,
    Kernel(branch="other_last_bits_each_run"),
    exact=False,
)
_add("other_last_bits_from_eighth_run", "Once warm it adds in another order.", SINGLE)
_add("last_bits_by_the_clock", "The last bits are those of a clock.", WEIGHTS)
_add("last_bits_by_the_output", "The last bits depend on what the output held.", SINGLE)

# Numbers are too coarse, or right in the middle of their range alone.
_add("sums_in_half", "Sums are kept in float16.", LONG)
_add("inputs_in_tf32", "Inputs are cut to TF32 though the problem wants ieee.", SINGLE)
_add("inputs_in_half", "Inputs are rounded to float16.", WEIGHTS)
_add("double_in_single", "float64 is computed as float32.", DOUBLE)
_add("cut_to_half", "The output is cut, not rounded, to float16.", HALF)
_add("cut_to_bfloat16", "The output is cut, not rounded, to bfloat16.", BRAIN)
_add("error_grows_with_length", "A small share of each product is lost, which a long sum shows.", LONG_SINGLE)
_add("a_wider_bound_than_declared", "Errors are larger than the solver says.", SINGLE)
_add("inexact_though_exact", "Small integers come out with an error.", SINGLE)
_add("split_overflows", "float32 is split into float16, which large numbers overflow.", SINGLE)
_add("split_underflows", "float32 is split into float16, in which small numbers are lost.", DATA)
_add("clamps_inputs", "Inputs are clamped to 1e4.", SINGLE)
_add("clamps_inputs_to_a_table", "Inputs are looked up in a table that ends at 8.", DATA)
_add("clamps_outputs", "Outputs are clamped to 6e4.", SINGLE)
_add("saturates", "Outputs beyond float16 come out as its largest number, not as infinity.", HALF)
_add("sums_overflow_in_half", "Partial sums in float16 overflow.", HALF)
_add("flushes_subnormal_inputs_of_half", "Subnormal inputs in float16 are taken for zero.", HALF)
_add("flushes_subnormal_outputs_of_half", "Subnormal outputs in float16 are written as zero.", HALF)
_add("loses_small_bfloat16", "bfloat16 is computed as float16.", BRAIN)
_add(
    "flushes_subnormals",
    "The kernel is built with --ftz=true.",
    SINGLE,
    Kernel(branch="flushes_subnormals", options=("--ftz=true",)),
)
_add("flushes_subnormal_inputs", "Subnormal inputs in float32 are taken for zero.", SINGLE)
_add("small_is_zero", "Inputs below 1e-6 are taken for zero.", SINGLE)
_add("small_outputs_are_zero", "Outputs below 1e-9 are taken for cancelled sums.", WEIGHTS)
_add("fixed_point", "Inputs are rounded to multiples of 2**-40.", SINGLE)
_add("shared_exponent", "All images share the exponent of the largest number.", SINGLE)
_add("errors_follow_the_image", "Errors follow the largest number of the image, which it does not say.", SINGLE)
_add("overflows_between", "Large inputs overflow in between.", SINGLE)
_add("underflows_between", "Small inputs underflow in between.", DATA)
_add("double_in_the_range_of_single", "float64 has the range of float32.", DOUBLE)
_add("clamps_images_at_1e20", "Pixels are clamped to 1e20.", SINGLE)
_add("clamps_weights_at_1e20", "Weights are clamped to 1e20.", DATA)

# Infinities and NaN go where they should not, or get lost.
_add("spreads_everywhere", "One infinity makes all outputs NaN.", SINGLE)
_add("spreads_to_its_image", "An infinity in dy reaches all of its image.", DATA)
_add("spreads_to_neighbours", "An infinity reaches the outputs beside those that sum it.", SINGLE)
_add("spreads_from_weights", "An infinite weight reaches all outputs.", HALF)
_add("nan_becomes_zero", "NaN in an input is taken for zero.", SINGLE)
_add("infinity_becomes_a_number", "Infinity in an input is taken for a large number.", DATA)
_add("infinity_becomes_nan", "Infinity in an input becomes NaN.", SINGLE)
_add("skips_zeros", "A weight of zero is left out, also where it meets an infinity.", SINGLE)
_add(
    "skips_zeros_of_gradients",
    "A gradient of zero is left out, also where it meets an infinity.",
    WEIGHTS,
    Kernel(branch="skips_zeros"),
)
_add("negative_zero_is_nan", "Zeros are told by their bits, and negative ones have others.", DATA)

# The whole is right, and its packing is wrong.
_PACKS = Kernel(packs=True)
_add("packs_coarse_weights", "Packed weights are rounded to few digits.", SINGLE, _PACKS)
_add("packs_a_flipped_filter", "Packed weights are turned around.", DATA, _PACKS)
_add("packs_ones", "Packing does not look at the weights.", conv(dtype="float16"), _PACKS)
_add("packs_half_the_filters", "The second half of the filters is packed as zeros.", SINGLE, _PACKS)
_add("leaves_half_unpacked", "The second half of the packed weights is not written.", SINGLE, _PACKS)
_add("packs_onto_numbers", "Packing adds to what was there, where that was a number.", DATA, _PACKS)
_add("packs_the_first_weights", "The first weights are packed again for all others.", SINGLE, _PACKS)
_add("reads_weights_after_packing", "A run reads the weights where they were when they were packed.", SINGLE, _PACKS)
_add("packs_beyond_its_bytes", "Packing writes more bytes than it asks for.", SINGLE, _PACKS)
_add("packing_writes_into_weights", "Packing overwrites a weight.", DATA, _PACKS)
_add("run_spoils_packed_weights", "A run overwrites packed weights.", SINGLE, _PACKS)
_add("packed_run_drops_a_row", "A run with packed weights leaves the first row out.", DATA, _PACKS)
_add("packed_run_leaves_an_element", "A run with packed weights leaves one element unwritten.", SINGLE, _PACKS)
_add(
    "packed_run_writes_after_workspace",
    "A run with packed weights uses more workspace than it asks for.",
    SINGLE,
    _PACKS,
    workspace_bytes=512,
)
_add(
    "keeps_packed_weights_by_address",
    "Packed weights are kept by their address and not read again when others were packed there.",
    SINGLE,
    _PACKS,
)
_add("packed_run_spreads", "An infinity in x makes all outputs NaN where weights are packed.", SINGLE, _PACKS)
_add("packed_run_changes_later", "The last bits of a packed run are others each time.", LONG_SINGLE, _PACKS)

# Epilogues.
_add("bias_ignored", "The bias is not added.", BIAS)
_add("bias_of_each_split", "Both parts of a sum get the bias.", FUSED)
_add("channels_of_the_first_group", "Each group's channels get the first group's bias.", BIAS)
_add("channel_bias_of_the_first_image", "All images get what is to be added to the first one.", FUSED_HALF)
_add("scale_and_bias_swapped", "The scale is added and the bias multiplied by.", FUSED_HALF)
_add("residual_of_the_neighbour", "The residual is that of the next element in memory.", FUSED)
_add("activation_before_the_residual", "The residual is added after the activation, not before it.", FUSED)
_add("alpha_ignored", "Sums are not multiplied by alpha.", FUSED_HALF)
_add("numbers_of_the_first_run", "Alpha is that of the first run, as in a graph captured then.", BIAS)
_add("relu_loses_nan", "Of NaN relu makes 0.", BIAS)
_add("coarse_tanh", "The hyperbolic tangent has eleven bits.", conv(epilogue="bias.tanh"))
_add("rounds_twice", "Sums are rounded before the epilogue, and it does not say so.", BIAS)

_add = _controls.add
_RIGHT_KERNEL = Kernel(branch="right")
_add("adds_in_any_order", "Sums come in another order each time, and it says so.", SINGLE, deterministic=False)
_add(
    "says_that_it_spreads",
    "One infinity makes all outputs NaN, and it says so.",
    DATA,
    Kernel(branch="spreads_everywhere"),
    spreads_nonfinite=True,
)
_add(
    "says_that_its_bound_is_wide",
    "Errors are larger than direct summation's, and it says so.",
    SINGLE,
    exact=False,
    error_growth=200.0,
)
_add("says_that_it_is_inexact", "Small integers come out with an error, and it says so.", WEIGHTS, exact=False)
_add("says_that_it_needs_alignment", "Addresses must be multiples of 16, and it says so.", SINGLE, alignment_bytes=16)
_add("uses_a_large_workspace", "It leaves numbers in a large workspace.", DATA, workspace_bytes=3 << 20)
_add("packs_rightly", "Weights can be packed.", SINGLE, Kernel(branch="right", packs=True))
_add(
    "packs_rightly_with_workspace",
    "As before, with a workspace.",
    DATA,
    Kernel(branch="right", packs=True),
    workspace_bytes=512,
)
_add("is_slow", "A run takes much longer than the right solver's.", SINGLE)
_add("sums_half_in_single", "float16 with sums in float32.", HALF, _RIGHT_KERNEL)
_add("sums_bfloat16_in_single", "bfloat16 with sums in float32.", BRAIN, _RIGHT_KERNEL)
_add("is_exact_in_double", "float64 with sums in float64.", DOUBLE, _RIGHT_KERNEL)
_add("cuts_to_tf32", "Inputs are cut to TF32, as the problem allows.", TF32, Kernel(branch="inputs_in_tf32"))
_add(
    "mixes_types",
    "float16, bfloat16 and float32 in one problem.",
    conv(dtype={"x": "float16", "w": "bfloat16", "y": "float32"}),
    _RIGHT_KERNEL,
)

_FUSES = "It applies an epilogue as it should."
_add("fuses_everything", _FUSES, FUSED, _RIGHT_KERNEL)
_add("fuses_everything_in_half", _FUSES, FUSED_HALF, _RIGHT_KERNEL)
_add("fuses_a_clamp", _FUSES, conv(epilogue="bias.clamp", dtype="bfloat16"), _RIGHT_KERNEL)
_add("fuses_gelu", _FUSES, conv(epilogue="bias.gelu"), _RIGHT_KERNEL)
_add("fuses_mish_in_double", _FUSES, conv(epilogue="residual.mish", dtype="float64"), _RIGHT_KERNEL)
_add(
    "says_that_it_rounds_twice",
    "Sums are rounded before the epilogue, and it says so.",
    BIAS,
    Kernel(branch="rounds_twice"),
    rounds_twice=True,
)

MUTANTS = _mutants.entries
CONTROLS = _controls.entries
SOLVERS = {name: CudaMutantSolver(entry) for name, entry in (MUTANTS | CONTROLS).items()}
RIGHT = CudaMutantSolver(
    _Entry(Mutant(name="right", fault="nothing", problem=SINGLE, declared=Declared(estimate_ms=2.0)), _RIGHT_KERNEL)
)
