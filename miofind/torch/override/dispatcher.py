"""Kernels of miofind at PyTorch's dispatcher: `aten::convolution` and `aten::convolution_backward`.

PyTorch's own kernels stay behind them and run whatever miofind does not. Everything above the dispatcher's backend keys
stays PyTorch's: autograd and its double backward, autocast, torch.func, torch.compile.

Source: pytorch, torch/_native/registry.py, which overrides operators in the same way.
"""

from __future__ import annotations

import collections
import inspect
import itertools
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, ParamSpec

import torch

from miofind.device.device import INSTALL_CUDA, has_cupy, has_driver
from miofind.errors import InvalidOptionError, MissingLibraryError, brief, with_known_keywords
from miofind.process.forks import ForkedLock
from miofind.runtime.handle import Handle
from miofind.torch import direct
from miofind.torch.direct import DirectPath
from miofind.torch.override import formats
from miofind.torch.override.counts import CallReport
from miofind.torch.override.environment import VARIABLE, Way, way
from miofind.torch.override.flags import state
from miofind.torch.override.launches import Arguments
from miofind.torch.override.plans import Plan, Planner, note_capture
from miofind.torch.override.settings import DEFAULT_WORKSPACE_LIMIT_BYTES, MissPolicy, Settings
from miofind.torch.override.untraced import untraced

P = ParamSpec("P")

logger = logging.getLogger(__name__)

MAX_PLANS = 4096
"""Plans of one operator that an override keeps; the oldest go first."""

_KEYS = {"cuda": "CUDA", "cpu": "CPU"}
_FORWARD, _BACKWARD = "aten::convolution", "aten::convolution_backward"


_registered: collections.deque[Any] = collections.deque(maxlen=MAX_PLANS)
"""The last kernels that were registered: PyTorch frees one that is not any more, though a thread may be about to run
it, waiting for Python."""

_generations = itertools.count(1)


class Override:
    """What `enable` began: miofind's kernels with one choice of settings.

    Attributes:
        settings: what was asked for.
        devices: kinds of PyTorch's devices whose kernels were replaced.
        stays: whether no `enable` and no `disable` of a program's code changes anything about it.
        generation: a number that no other override has or had; another one once it decides anew.
    """

    def __init__(self, settings: Settings, devices: tuple[str, ...], *, stays: bool = False) -> None:
        self.settings = settings
        self.devices = devices
        self.stays = stays
        self.generation = next(_generations)
        self._planner = Planner(settings)
        self._lock = ForkedLock()
        self._forward: dict[Any, Plan] = {}
        self._backward: dict[Any, Plan] = {}
        self._past: collections.deque[Plan] = collections.deque(maxlen=MAX_PLANS)

    @property
    def is_enabled(self) -> bool:
        """Whether calls on one of its devices come to it."""
        return any(_routers[device].current is self for device in self.devices)

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans made so far, of forward calls first, those last that later calls are not answered by.

        These ran while kernels were compiled or CUDA graphs captured.
        """
        with self._lock:
            return (*self._forward.values(), *self._backward.values(), *self._past)

    def disable(self) -> None:
        """Give the calls back to the override that was enabled before, else to PyTorch; nothing where that was done."""
        _switch_off(self)

    def report(self) -> CallReport:
        """What ran PyTorch's convolutions so far, and why; a call counts once for each result that was asked for.

        Without fused modules and graphs, whose calls `miofind.torch.report()` has, too.
        """
        return CallReport.of(self.plans, self.devices)

    def forget_plans(self) -> None:
        """Decide anew for all calls to come, since FindDBs may have more answers now; a recording goes on."""
        if self.settings.on_miss is MissPolicy.RECORD:  # which asks no FindDB, and is to keep what it noted
            return
        with self._lock:
            self.generation = next(_generations)
            self._forward.clear()
            self._backward.clear()
            self._past.clear()
        direct.forget()

    def planned_forward(self, key: Any, arguments: Arguments, switches: tuple[Any, ...]) -> Plan:
        """The plan of a call of `aten::convolution` that there was none for."""
        return self._kept(self._forward, key, self._planner.planned(arguments, ("y",), switches))

    def planned_backward(self, key: Any, arguments: Arguments, mask: Any, switches: tuple[Any, ...]) -> Plan:
        """The plan of a call of `aten::convolution_backward` that there was none for."""
        wanted = [name for name, is_wanted in zip(("dx", "dw", "db"), mask, strict=True) if is_wanted]
        return self._kept(self._backward, key, self._planner.planned(arguments, wanted, switches))

    def _kept(self, plans: dict[Any, Plan], key: Any, plan: Plan) -> Plan:
        """The plan of a key: the first where two threads made one. One that is for this call alone may count, too."""
        if not plan.is_kept:
            if plan.is_of_capture:
                with self._lock:
                    self._past.append(plan)
            return plan
        with self._lock:
            while len(plans) >= MAX_PLANS:
                plans.pop(next(iter(plans)))
            kept = plans.setdefault(key, plan)
        if kept is plan:
            for pending in plan.pending:
                pending.when_done(lambda: self._replace(plans, key, plan))
        return kept

    def _replace(self, plans: dict[Any, Plan], key: Any, plan: Plan) -> None:
        """Decide anew for calls of a key, whose kernels are there by now."""
        with self._lock:
            if plans.get(key) is plan:
                self._past.append(plans.pop(key))

    def __enter__(self) -> Override:
        return self

    def __exit__(self, *exception: object) -> None:
        self.disable()


class _Router:
    """The kernels at one key of the dispatcher.

    Attributes:
        current: the override that takes the calls; None while PyTorch's kernels are the only ones.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.current: Override | None = None
        self._libraries: list[Any] = []
        self._direct: DirectPath | None = None

    def use(self, override: Override | None) -> None:
        """Send calls to an override, or have PyTorch's kernels be the only ones."""
        self.current = override
        direct.forget()
        if override is None:
            if self._direct is not None:
                self._direct.disable(_KEYS[self.device])
                self._direct = None
            while self._libraries:
                self._libraries.pop()._destroy()
        elif not self._libraries:
            self._register()

    def offer(self, plan: Plan) -> None:
        """Have later calls like the one that this thread is in do without Python, where they can."""
        path = self._direct
        if path is not None and plan.generation != path.generation:
            plan.offer(path)

    def _register(self) -> None:
        key, path = _KEYS[self.device], direct.direct_path()
        kernels = {_FORWARD: self._forward_kernel(key), _BACKWARD: self._backward_kernel(key)}
        namespace = "aten" if path is None else direct.NAMESPACE
        try:
            for name, kernel in kernels.items():
                library = torch.library.Library(namespace, "IMPL")
                self._libraries.append(library)
                own = name.removeprefix("aten::")
                _implement(library, own, kernel, key)
                _registered.append(torch.library.get_kernel(f"{namespace}::{own}", key))
            if path is not None:
                self._direct = path
                path.enable(key)
        except BaseException:
            self.use(None)
            raise

    def _forward_kernel(self, key: str) -> Any:
        native, is_tracing = _native_forward(key), torch._C._is_tracing  # by TorchScript, which tells no sizes
        router = self

        def convolution(
            keyset: Any,
            x: Any,
            w: Any,
            bias: Any,
            stride: Any,
            padding: Any,
            dilation: Any,
            transposed: Any,
            output_padding: Any,
            groups: Any,
        ) -> Any:
            override = router.current
            if override is None or is_tracing():
                return native(keyset, x, w, bias, stride, padding, dilation, transposed, output_padding, groups)
            switches = state()
            key = (
                x.shape,
                x.stride(),
                w.shape,
                w.stride(),
                x.dtype,
                w.dtype,
                x.get_device(),
                w.get_device(),
                bias if bias is None else (bias.shape, bias.dtype, bias.get_device()),
                *stride,
                None,  # each may have one number for all dimensions
                *padding,
                None,
                *dilation,
                None,
                transposed,
                *output_padding,
                groups,
                switches,
            )
            plan = override._forward.get(key)
            if plan is None:
                geometry = (stride, padding, dilation, transposed, output_padding, groups)
                plan = override.planned_forward(key, Arguments(x, w, None, bias, geometry), switches)
            elif plan.generation is not None:
                router.offer(plan)
            plan.python_calls += 1
            if plan.pending:
                note_capture(x.device)
            launch = plan.launch
            if launch is not None:
                if plan.adds_bias:
                    y = plan.run("y", launch, x, w, bias)
                    if y is not None:
                        return y
                elif (y := plan.run("y", launch, x, w)) is not None:
                    return y if bias is None else y.add_(bias.view(plan.bias_shape))
            return native(keyset, x, w, bias, stride, padding, dilation, transposed, output_padding, groups)

        return convolution

    def _backward_kernel(self, key: str) -> Any:
        native, is_tracing = torch.library.get_kernel(_BACKWARD, key).call_boxed, torch._C._is_tracing
        router = self

        def convolution_backward(
            keyset: Any,
            grad: Any,
            x: Any,
            w: Any,
            bias_sizes: Any,
            stride: Any,
            padding: Any,
            dilation: Any,
            transposed: Any,
            output_padding: Any,
            groups: Any,
            mask: Any,
        ) -> Any:
            geometry = (stride, padding, dilation, transposed, output_padding, groups)
            override = router.current
            if override is None or is_tracing():
                return native(keyset, grad, x, w, bias_sizes, *geometry, mask)
            switches = state()
            key = (
                grad.shape,
                grad.stride(),
                x.shape,
                x.stride(),
                w.shape,
                w.stride(),
                grad.dtype,
                x.dtype,
                w.dtype,
                grad.get_device(),
                x.get_device(),
                w.get_device(),
                *stride,
                None,  # each may have one number for all dimensions
                *padding,
                None,
                *dilation,
                None,
                transposed,
                *output_padding,
                groups,
                *mask,
                switches,
            )
            plan = override._backward.get(key)
            if plan is None:
                plan = override.planned_backward(key, Arguments(x, w, grad, bias_sizes, geometry), mask, switches)
            elif plan.generation is not None:
                router.offer(plan)
            plan.python_calls += 1
            wants_dx, wants_dw, wants_db = mask
            dx = dw = db = None
            ours_dx, ours_dw = plan.launch_dx, plan.launch_dw
            if ours_dx is not None or ours_dw is not None:
                dense = grad if plan.grad_layout is None else formats.dense(grad, plan.grad_layout)
                if ours_dx is not None:
                    dx = plan.run("dx", ours_dx, dense, w)
                if ours_dw is not None:
                    dw = plan.run("dw", ours_dw, x, dense)
                    if dw is not None and plan.gives_bias_gradient:
                        dw, db = dw
            if plan.pending:
                note_capture(x.device)
            wants_dx, wants_dw = wants_dx and dx is None, wants_dw and dw is None
            if wants_dx or wants_dw:
                rest = native(keyset, grad, x, w, bias_sizes, *geometry, [wants_dx, wants_dw, wants_db and db is None])
                firsts = zip((dx, dw, db), rest, strict=True)
                return tuple(other if own is None else own for own, other in firsts)
            if wants_db and db is None:
                db = grad.sum(plan.bias_dimensions)
            return dx, dw, db

        return convolution_backward


_routers = {device: _Router(device) for device in _KEYS}
_enabled: list[Override] = []
_switching = ForkedLock()


def _implement(library: Any, name: str, kernel: Any, key: str) -> None:
    """Register a kernel, and let PyTorch not warn that it stands before another, which stays in use."""
    keywords = {"with_keyset": True}
    if "allow_override" in inspect.signature(library.impl).parameters:
        keywords["allow_override"] = True
    with warnings.catch_warnings():
        for said in ("Warning only once for all operators", "Overriding a previously registered kernel"):
            warnings.filterwarnings("ignore", message=rf"\s*{said}", category=UserWarning)
        library.impl(name, untraced(kernel), key, **keywords)


def _native_forward(key: str) -> Any:
    """The kernel of `aten::convolution` that runs without ours.

    It is PyTorch's composite one unless somebody registered another: then what that does is called by name, since
    PyTorch parses its arguments in half the time that a boxed call takes.
    Source: pytorch, aten/src/ATen/native/Convolution.cpp, convolution.
    """
    boxed = torch.library.get_kernel(_FORWARD, key).call_boxed
    call = getattr(torch, "_convolution", None)
    if call is None or torch._C._dispatch_has_kernel_for_dispatch_key(_FORWARD, key):
        return boxed

    def native(keyset: Any, *arguments: Any) -> Any:
        precision, deterministic_algorithms, deterministic, enabled, benchmark, _ = state()
        is_deterministic = deterministic or deterministic_algorithms
        return call(*arguments, benchmark, is_deterministic, enabled, precision == "tf32")

    return native


def _switch_on(override: Override) -> None:
    with _switching:
        _enabled.append(override)
        try:
            for device in override.devices:
                _routers[device].use(override)
        except BaseException:
            _switch_off(override)
            raise


def _switch_off(override: Override) -> None:
    with _switching:
        if override in _enabled:
            _enabled.remove(override)
        for device, router in _routers.items():
            if router.current is override:
                before = [other for other in _enabled if device in other.devices]
                router.use(before[-1] if before else None)


@with_known_keywords
def enable(
    on_miss: MissPolicy | str = MissPolicy.AUTO,
    *,
    min_gain: float = 1.0,
    workspace_limit_bytes: int | None = DEFAULT_WORKSPACE_LIMIT_BYTES,
    only: Iterable[str] = (),
    exclude: Iterable[str] = (),
    dtypes: Iterable[Any] | None = None,
    directions: Iterable[str] | None = None,
    time_budget_s: float | None = None,
    background: bool = True,
    handle: Handle | None = None,
    devices: Iterable[str] = ("cuda",),
) -> Override:
    """Have miofind run PyTorch's convolutions, forward and backward, in this process from now on.

    Models, their state and their graphs stay as they are. What miofind has no faster answer to, PyTorch's own kernels
    run. Each call counts on top of earlier ones: `disable` of what it returns goes back to those.

    Args:
        on_miss: what becomes of a convolution that no FindDB has an answer to. In all PyTorch's kernel runs it and the
            problem is noted, unless: "auto" measures it first where `torch.backends.cudnn.benchmark` is True, "find"
            always, "estimate" runs what estimates say is fastest, "error" raises NoSolutionError. "record" notes all
            problems and runs none. "fallback" measures nothing.
        min_gain: miofind runs what is at least that many times as fast as PyTorch where `tune` timed both, in this
            process or in one that had its FindDB, else as cuDNN was where a FindDB has both.
        workspace_limit_bytes: largest workspace of a convolution, of PyTorch's memory for as long as it runs; None for
            no limit.
        only, exclude: solver ids, algorithms or libraries, as in `FindOptions`.
        dtypes: element types of convolutions that miofind runs, such as torch.float16 or "half"; all if left out.
        directions: "forward", "backward_data" and "backward_weights": what miofind computes; all if left out.
        time_budget_s: seconds of measuring for a problem, as in `FindOptions`.
        background: kernels that are not compiled yet are compiled by processes of their own, and PyTorch's run
            meanwhile, of depthwise convolutions one for all shapes; see `wait_until_compiled`. With False, and wherever
            PyTorch is to be deterministic, a call waits for them.
        handle: a device and its FindDB; each GPU's default one if left out.
        devices: kinds of PyTorch's devices: "cuda", and "cpu", whose solvers are for tests.

    Returns:
        A handle with `disable()` and `report()`, and a context manager that disables.

    MIOFIND_TORCH in the environment goes before what a program asks for: with `0` nothing is replaced. With `tune`
    misses are measured whatever `on_miss` says but "record"; all else stays as asked for. With `record` nothing is
    replaced while `python -m miofind.torch` records the program.

    Raises:
        MissingLibraryError: PyTorch is older than 2.9.
        InvalidOptionError, UnknownSolverError: the message names the argument, or MIOFIND_TORCH, and the value.
    """
    settings = Settings(
        on_miss=on_miss,  # type: ignore[arg-type]
        min_gain=min_gain,
        workspace_limit_bytes=workspace_limit_bytes,
        only=only,  # type: ignore[arg-type]
        exclude=exclude,  # type: ignore[arg-type]
        dtypes=dtypes,  # type: ignore[arg-type]
        directions=directions,  # type: ignore[arg-type]
        time_budget_s=time_budget_s,
        background=background,
        handle=handle,
    )
    _require_release()
    wanted = way()
    if wanted is Way.TUNE and settings.on_miss is not MissPolicy.RECORD:  # who records wants no more than that
        settings = replace(settings, on_miss=MissPolicy.FIND)
    override = Override(settings, _checked_devices(devices))
    if _is_left_off(wanted):
        return override
    if "cuda" in override.devices and torch.backends.cuda.is_built() and has_driver() and not has_cupy():
        logger.warning("CuPy is not installed, so PyTorch's own kernels run on GPUs: %s", INSTALL_CUDA)
    _switch_on(override)
    logger.info("miofind runs PyTorch's convolutions on %s", " and ".join(override.devices))
    return override


def disable() -> None:
    """Have PyTorch run all convolutions itself again, whoever enabled miofind; a recording of the program goes on."""
    with _switching:
        for override in reversed(_enabled.copy()):
            if not override.stays:
                _switch_off(override)


def record_program() -> Override:
    """Note all problems on all devices from now on, whatever the program's code enables and disables.

    Raises:
        MissingLibraryError: PyTorch is older than 2.9.
    """
    _require_release()
    override = Override(Settings(on_miss=MissPolicy.RECORD), tuple(_KEYS), stays=True)
    _switch_on(override)
    return override


def _is_left_off(wanted: Way) -> bool:
    """Whether `enable` replaces nothing by what the environment asks for; it is said, and so is that nobody records."""
    is_recorded = any(override.stays for override in enabled())
    if wanted is Way.OFF or (wanted is Way.RECORD and is_recorded):
        told = "is set: miofind.torch.enable() leaves PyTorch's convolutions as they are"
        logger.warning("%s=%s %s", VARIABLE, wanted, told)
        return True
    if wanted is Way.RECORD:
        told = "is set, and nothing records this process: run it by `python -m miofind.torch SCRIPT`"
        logger.warning("%s=%s %s", VARIABLE, wanted, told)
    return False


def _scoped(begin: Callable[P, Override]) -> Callable[P, AbstractContextManager[Override]]:
    """The same for a with block, with the same keywords for type checkers."""

    @contextmanager
    def use(*arguments: P.args, **keywords: P.kwargs) -> Iterator[Override]:
        """`enable` for a with block; it counts for all threads of the process meanwhile."""
        with begin(*arguments, **keywords) as override:
            yield override

    return use


use = _scoped(enable)


def enabled() -> tuple[Override, ...]:
    """What is enabled now, a device's newest last."""
    with _switching:
        return tuple(_enabled)


@contextmanager
def native_kernels() -> Iterator[None]:
    """PyTorch's own kernels for a with block, in all threads; nothing may be enabled or disabled meanwhile."""
    with _switching:
        current = {device: router.current for device, router in _routers.items()}
        for router in _routers.values():
            router.current = None
        direct.forget()
        try:
            yield
        finally:
            for device, override in current.items():
                _routers[device].current = override
            direct.forget()


def forget_plans() -> None:
    """Decide anew for all calls to come, whatever is enabled, since FindDBs may have more answers now."""
    with _switching:
        for override in _enabled:
            override.forget_plans()


def current(device: str = "cuda") -> Override | None:
    """The override that takes the calls on a kind of device; None where PyTorch's kernels are the only ones."""
    return _routers[device].current


def _checked_devices(devices: Iterable[str]) -> tuple[str, ...]:
    given = tuple(devices) if isinstance(devices, Iterable) and not isinstance(devices, str) else (devices,)
    if not given or not set(given) <= _KEYS.keys():
        raise InvalidOptionError(f"devices={brief(devices)} must be some of {', '.join(_KEYS)}")
    return given


def _require_release() -> None:
    """Do nothing where PyTorch's kernels can be replaced and still be called.

    Raises:
        MissingLibraryError: PyTorch is too old.
    """
    if hasattr(torch.library, "get_kernel") and hasattr(torch._C, "_get_fp32_precision_getter"):
        return
    raise MissingLibraryError(
        f"miofind.torch needs PyTorch 2.9 or newer, and {torch.__version__} is installed: pip install 'torch>=2.9'"
    )
