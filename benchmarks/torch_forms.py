"""A network of PyTorch in the forms that a user may run it in, with PyTorch's kernels and with miofind's.

The forms are timed in turn, forwards and backwards, so that clocks and temperatures meet all of them alike. Results
are held to float32's, gradients layer by layer: a form may be off by no more than twice as much as PyTorch's eager one,
and a little, and by less than results are that are zero, halved, doubled or of the other sign. What that does not tell
is a wrong gradient of a bias that is small beside its layer's, and a sign where PyTorch's own gradients are noise.
"""

from __future__ import annotations

import contextlib
import copy
import math
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import script
import torch
from torch import nn
from torch.fx.experimental.optimization import fuse as folded
from turns import Turns

import miofind
import miofind.torch

ROUNDS = 6
BLOCK_S = 0.04
"""How long a form is timed at a stretch."""

WARM_UP_CALLS = 3
_REFERENCE = "torch eager"
"""The form whose error all others' are measured by, its own later ones, too."""

_LONGEST_NAME = 160
"""Of a kernel, whose templates may take pages."""
SLACK = {"inference": 2e-3, "training": 2e-2}
"""What a relative error, by the Euclidean norm, may be beside twice that of PyTorch's eager form."""

LARGEST_ERROR = 0.45
"""No relative error may be larger: half of a right result is off by 0.5, none at all or twice as much by 1."""

NORM_BAND = 1.5
"""By what factor norms may differ from those of PyTorch's eager form, where that has a larger error itself."""

LEAST_SHARE = 0.5
"""Of its layer's gradient: what the error of a smaller one, as a bias has before a batch norm, is relative to."""

CALM_SHIFT = 2.0
"""What is added behind batch norms in training, in deviations of what they give.

Without it roundings decide which half of the elements a ReLU lets through, and the gradients of deep networks are
noise: of ResNet-50, of 16 images of 64 pixels on a CPU, the outputs of the last block were off by 0.62 under autocast
and the gradients of most layers by 1.3, with it by 0.04 and 0.15; of RepLKNet-31B they were off by 1.0, with it 0.27.
"""

Scope = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One way of running a network.

    Attributes:
        name: "eager", "graph", "fused graph" ...
        is_ours: whether miofind runs its convolutions.
        run: one forward pass, or one training step.
        scope: what is in force meanwhile.
        shows: has what a run made lie where a check looks for it.
    """

    name: str
    is_ours: bool
    run: Callable[[], Any]
    scope: Scope = contextlib.nullcontext
    shows: Callable[[], None] = lambda: None

    @property
    def key(self) -> str:
        """What names its time."""
        return self._key_of(self.name)

    @property
    def graph_name(self) -> str:
        """The name of the same as the replay of a CUDA graph."""
        return self.name.replace("eager", "graph") if "eager" in self.name else f"{self.name} graph"

    @property
    def graph_key(self) -> str:
        """What names the time of that."""
        return self._key_of(self.graph_name)

    def _key_of(self, name: str) -> str:
        return f"{'miofind' if self.is_ours else 'torch'} {name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """With what a network is run.

    Attributes:
        kind: "inference" in float16, or "training": a step under autocast to bfloat16.
        channels_last: the memory order of weights and inputs.
        device: "cuda", or "cpu" in float32 for trials.
        handle: of miofind, whose FindDB answers.
        forms: of "eager", "graph" and "compile", those that are timed.
        is_tuned: whether what the FindDB does not answer is measured before.
        kernels: of each form, but for replays of graphs, how many are told that take most of a GPU's time.
        turns: the processes that share the GPU.
    """

    kind: str
    channels_last: bool
    device: str
    handle: miofind.Handle
    forms: Sequence[str]
    is_tuned: bool = False
    kernels: int = 0
    turns: Turns = field(default_factory=Turns)

    @property
    def dtype(self) -> Any:
        """Of weights and inputs in inference."""
        return torch.float16 if self.device == "cuda" else torch.float32

    def placed(self, value: Any) -> Any:
        """A module or a tensor on the device, in the memory order."""
        if not self.channels_last:
            return value.to(self.device)
        if isinstance(value, torch.Tensor):
            order = {4: torch.channels_last, 5: torch.channels_last_3d}.get(value.dim(), torch.contiguous_format)
            return value.to(self.device, memory_format=order)
        for parameter in value.parameters():
            parameter.data = self.placed(parameter.data)
        return value.to(self.device)

    def ours(self) -> AbstractContextManager[Any]:
        """miofind in force; what is not known by now is PyTorch's."""
        return miofind.torch.use("fallback", background=False, handle=self.handle, devices=self.device)

    def compiled_ours(self) -> AbstractContextManager[Any]:
        """The same for torch.compile: of a network that is tuned what graphs lack is measured as they are compiled."""
        on_miss = "find" if self.is_tuned else "fallback"
        return miofind.torch.use(on_miss, background=False, handle=self.handle, devices=self.device)

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def empty_cache(self) -> None:
        """Wait for the device, and leave memory that nothing uses to other processes."""
        self.synchronize()
        if self.device == "cuda":
            torch.cuda.empty_cache()


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What was found of one network.

    Attributes:
        ms: of each form.
        errors: of each form against float32, relative by the Euclidean norm, of all results together.
        layer_errors: the largest of a layer.
        untold: layers of which PyTorch's eager form is off by more than LARGEST_ERROR, so that signs are not told.
        seconds: what preparations took.
        calls, own_calls: convolutions of miofind's eager form, and those of them that miofind ran.
        failures: forms that failed, or were wrong, and why.
        kernels: of each form the names, launches and milliseconds of those that take most of a call, in order.
    """

    ms: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    layer_errors: dict[str, float] = field(default_factory=dict)
    untold: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    calls: int = 0
    own_calls: int = 0
    failures: dict[str, str] = field(default_factory=dict)
    kernels: dict[str, list[tuple[str, float, float]]] = field(default_factory=dict)


def timed_network(build: Callable[[], nn.Module], shape: Sequence[int], setting: Setting) -> Iterator[Outcome]:
    """The outcome of one network, as far as it is known, again after each step of the work.

    Args:
        shape: of the input, with the batch.
    """
    torch.manual_seed(0)
    outcome = Outcome()
    model, x = setting.placed(without_chance(build())), setting.placed(torch.randn(*shape))
    prepare = _inference if setting.kind == "inference" else _training
    forms, check = prepare(model, x, setting, outcome)
    setting.empty_cache()
    yield outcome
    ready = []
    with _cudnn_benchmark(False):  # compilers run, whatever else the GPU does; what is measured comes when it is alone
        for form in forms:
            with _noted(outcome, form.key, "first call"), form.scope():
                form.run()
                setting.empty_cache()
                ready.append(form)
            yield outcome
    with _cudnn_benchmark(True), setting.turns.alone():
        yield from _timed(ready, check, setting)


def _timed(ready: Sequence[Form], check: _Check, setting: Setting) -> Iterator[Outcome]:
    """The outcome with the times of forms that have run once, and of themselves in CUDA graphs."""
    outcome, pool = check.outcome, _graph_pool(setting)
    forms: list[Form] = []
    for form in ready:
        with _noted(outcome, form.key, "next calls"):
            _warm_up(form, check, setting)
            if "eager" in setting.forms or not form.name.endswith("eager"):
                forms.append(form)
        if "graph" in setting.forms and setting.device == "cuda" and form.key not in outcome.failures:
            with _noted(outcome, form.graph_key, "next calls"):
                graphed = _in_a_graph(form, pool, check.parameters)
                check.of(graphed)
                forms.append(graphed)
        yield outcome
    samples: dict[str, list[float]] = {form.key: [] for form in forms}
    for number in range(ROUNDS):
        for form in forms if number % 2 == 0 else forms[::-1]:
            samples[form.key].append(_block_ms(form, setting))
    for form in forms:  # what is right at once may go wrong where calls follow each other closely
        with _noted(outcome, form.key, "last call"), form.scope():
            form.run()
            check.of(form)
    times = {key: round(statistics.median(found), 4) for key, found in samples.items()}
    outcome.ms = {key: ms for key, ms in times.items() if key not in outcome.failures}
    yield outcome
    if setting.kernels and setting.device == "cuda":
        for form in (form for form in forms if "graph" not in form.name and form.key in outcome.ms):
            outcome.kernels[form.key] = _kernels(form, setting)
            yield outcome


def without_chance(model: nn.Module) -> nn.Module:
    """A network whose dropouts keep everything: compiled code would draw other numbers than eager kernels."""
    for module in model.modules():
        if type(module).__name__ in ("Dropout", "StochasticDepth"):
            module.p = 0.0  # type: ignore[assignment]
    return model


def _block_ms(form: Form, setting: Setting) -> float:
    """Milliseconds of a call, over as many as fill a stretch."""
    with form.scope():
        form.run()
        setting.synchronize()
        began = time.perf_counter()
        form.run()
        setting.synchronize()
        calls = max(1, round(BLOCK_S / (time.perf_counter() - began)))
        began = time.perf_counter()
        for _ in range(calls):
            form.run()
        setting.synchronize()
        return 1e3 * (time.perf_counter() - began) / calls


def _kernels(form: Form, setting: Setting) -> list[tuple[str, float, float]]:
    """The kernels of a call that take most of the GPU's time, over some calls."""
    with form.scope():
        for _ in range(WARM_UP_CALLS):
            form.run()
        setting.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(WARM_UP_CALLS):
                form.run()
            setting.synchronize()
    found = [(each.self_device_time_total, each) for each in profile.key_averages() if each.self_device_time_total]
    found.sort(key=lambda item: -item[0])
    return [
        (each.key[:_LONGEST_NAME], round(each.count / WARM_UP_CALLS, 2), round(us / 1e3 / WARM_UP_CALLS, 4))
        for us, each in found[: setting.kernels]
    ]


def _inference(model: nn.Module, x: Any, setting: Setting, outcome: Outcome) -> tuple[list[Form], _Check]:
    """The forms of a forward pass, and what checks them."""
    _calibrate(model, x)
    with torch.inference_mode():
        wanted = {"result": model(x)}
    x, model = x.to(setting.dtype), model.to(setting.dtype)
    flat = _or_same(folded, model)
    fused = miofind.torch.fuse(model)
    if setting.is_tuned:
        _tune((model, fused), x, setting, outcome)

    def forward(network: Any) -> Callable[[], Any]:
        return torch.inference_mode()(lambda: network(x))

    forms = [Form(name="eager", is_ours=False, run=forward(model))]
    forms += [Form(name="folded eager", is_ours=False, run=forward(flat))]
    forms += [
        Form(name=name, is_ours=True, run=forward(each), scope=setting.ours)
        for name, each in (("eager", model), ("fused eager", fused))
    ]
    if "compile" in setting.forms:
        ready = torch.compile(flat), torch.compile(fused, options=miofind.torch.inductor_options())
        forms += [Form(name="compile", is_ours=False, run=forward(ready[0]))]
        forms += [Form(name="compile", is_ours=True, run=forward(ready[1]), scope=setting.compiled_ours)]
    return forms, _Check(wanted, SLACK[setting.kind], outcome, lambda y: {"result": y})


def _training(model: nn.Module, x: Any, setting: Setting, outcome: Outcome) -> tuple[list[Form], _Check]:
    """The forms of a training step, and what checks its gradients."""
    _calm(model.train())
    torch.manual_seed(1)
    _loss(model, x, None).backward()
    wanted = _gradients(model)
    model.zero_grad(set_to_none=True)
    if setting.is_tuned:
        _tune((model,), x, setting, outcome, training=True, amp=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)  # so that all forms' gradients agree

    def step(network: Any) -> Callable[[], Any]:
        def run() -> None:
            optimizer.zero_grad(set_to_none=True)
            _loss(network, x, torch.bfloat16).backward()
            optimizer.step()

        return run

    forms = [Form(name="eager", is_ours=False, run=step(model))]
    forms += [Form(name="eager", is_ours=True, run=step(model), scope=setting.ours)]
    if "compile" in setting.forms:
        ready = torch.compile(model), torch.compile(model, options=miofind.torch.inductor_options())
        forms += [Form(name="compile", is_ours=False, run=step(ready[0]))]
        forms += [Form(name="compile", is_ours=True, run=step(ready[1]), scope=setting.compiled_ours)]

    parameters = [*model.parameters()]
    return forms, _Check(wanted, SLACK[setting.kind], outcome, lambda _: _gradients(model), parameters)


def _tune(
    models: Sequence[nn.Module], x: Any, setting: Setting, outcome: Outcome, *, training: bool = False, amp: Any = None
) -> None:
    """Tune networks, alone on the GPU once what the likeliest candidates run is compiled."""
    with _stated(outcome, "compile"), tempfile.TemporaryDirectory() as folder:
        for number, model in enumerate(models if setting.device == "cuda" else ()):
            suite = Path(folder) / f"{number}.csv"
            miofind.torch.problems(model, x, training=training, amp=amp).save(suite)
            ended = script.compile_likely(suite)
            if ended.returncode:  # kernels that fail to compile are left out of the tuning
                print(f"{shlex.join(ended.args)} ended with {ended.returncode}", file=sys.stderr)
    with setting.turns.alone(), _stated(outcome, "tune"):
        for model in models:
            miofind.torch.tune(model, x, training=training, amp=amp, handle=setting.handle, on_event=lambda event: None)


def _warm_up(form: Form, check: _Check, setting: Setting) -> None:
    """Check a form, and run it until libraries have measured what they measure."""
    with form.scope() as override:
        check.of(form)
        for _ in range(WARM_UP_CALLS):
            form.run()
        setting.synchronize()
        if form.key == "miofind eager":
            report = override.report()
            check.outcome.calls, check.outcome.own_calls = report.calls, report.own_calls


@contextlib.contextmanager
def _cudnn_benchmark(is_on: bool) -> Iterator[None]:
    """Have PyTorch measure cuDNN's algorithms, all of them, or not."""
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.benchmark_limit
    cudnn.benchmark, cudnn.benchmark_limit = is_on, 0
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.benchmark_limit = before


@contextlib.contextmanager
def _noted(outcome: Outcome, key: str, what: str) -> Iterator[None]:
    """Note how long the calls of the form of that key take, or why they fail."""
    try:
        with _stated(outcome, f"{what} of {key}"):
            yield
    except Exception as error:
        outcome.failures[key] = f"{type(error).__name__}: {error}"[:400]


def _graph_pool(setting: Setting) -> Any:
    """Memory that graphs share: one is replayed at a time, and what it wrote is read before the next."""
    return torch.cuda.graph_pool_handle() if setting.device == "cuda" else None


def _in_a_graph(form: Form, pool: Any, parameters: Sequence[Any]) -> Form:
    """A form as the replay of a CUDA graph of it, whose gradients are those of parameters when it is checked."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with form.scope():
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_CALLS):
                form.run()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph, pool=pool):
            y = form.run()

    gradients = [each.grad for each in parameters]

    def replay() -> Any:
        graph.replay()
        return y

    def show_gradients() -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient

    return Form(name=form.graph_name, is_ours=form.is_ours, run=replay, shows=show_gradients)


class _Check:
    """Holds results to float32's, each by itself.

    Args:
        wanted: float32's results by name.
        slack: what a relative error may be beside twice that of PyTorch's eager form.
        result: what is checked, by name, once a form's call gave its argument.
        parameters: whose gradients are checked.
    """

    def __init__(
        self,
        wanted: Mapping[str, Any],
        slack: float,
        outcome: Outcome,
        result: Callable[[Any], Mapping[str, Any]],
        parameters: Sequence[Any] = (),
    ) -> None:
        self.outcome, self.parameters = outcome, parameters
        self._wanted, self._slack, self._result = wanted, slack, result
        self._scales = _scales(_norms(wanted))
        self._total = math.hypot(*_norms(wanted).values())
        self._own_errors: dict[str, float] = {}
        self._own_norms: dict[str, float] = {}

    def of(self, form: Form) -> None:
        """Run a form once, and note its error.

        Raises:
            AssertionError: it is too large, of one of the results.
        """
        torch.manual_seed(1)
        made = form.run()
        form.shows()
        results = self._result(made)
        if missing := [name for name in self._wanted if name not in results]:
            raise AssertionError(f"no {missing[0]}")
        differences = _norms({name: results[name].double() - wanted for name, wanted in self._wanted.items()})
        norms = _norms({name: results[name] for name in self._wanted})
        if not all(map(math.isfinite, differences.values())):
            raise AssertionError("not finite")
        errors = {name: difference / self._scales[name] for name, difference in differences.items()}
        self._note(form, math.hypot(*differences.values()) / self._total, max(errors.values()))
        if form.key == _REFERENCE and not self._own_errors:
            self._own_errors, self._own_norms = errors, norms
            self.outcome.untold = [name for name, error in errors.items() if error > LARGEST_ERROR]
        for name, error in errors.items():
            self._hold(name, error, norms[name])

    def _note(self, form: Form, error: float, layer_error: float) -> None:
        """Keep the largest errors of a form."""
        for kept, found in ((self.outcome.errors, error), (self.outcome.layer_errors, layer_error)):
            kept[form.key] = max(found, kept.get(form.key, found))

    def _hold(self, name: str, error: float, norm: float) -> None:
        """Raise AssertionError where the error of a result is too large."""
        allowed = 2 * self._own_errors.get(name, 0.0) + self._slack
        if name not in self.outcome.untold:
            allowed = min(allowed, LARGEST_ERROR)
        elif not (own := self._own_norms[name]) / NORM_BAND < norm < own * NORM_BAND:
            raise AssertionError(f"{name}: norm {norm:.2g}, PyTorch's {own:.2g}")
        if error > allowed:
            raise AssertionError(f"{name}: relative error {error:.2g}, allowed {allowed:.2g}")


def _norms(tensors: Mapping[str, Any]) -> dict[str, float]:
    """The Euclidean norms of tensors, which are waited for once."""
    norms = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensors.values()]
    return dict(zip(tensors, torch.stack(norms).tolist(), strict=True))


def _scales(norms: Mapping[str, float]) -> dict[str, float]:
    """What the errors of parameters' gradients are relative to: their norms, or a share of their layer's; never 0."""
    layers: dict[str, float] = {}
    for name, norm in norms.items():
        layer = name.rpartition(".")[0]
        layers[layer] = math.hypot(layers.get(layer, 0.0), norm)
    shares = {name: LEAST_SHARE * layers[name.rpartition(".")[0]] for name in norms}
    return {name: max(norm, shares[name], sys.float_info.min) for name, norm in norms.items()}


def _calm(model: nn.Module) -> None:
    """Have batch norms of random weights give what most activations let through, so that gradients can be told."""
    for norm in model.modules():
        if isinstance(norm, nn.modules.batchnorm._BatchNorm) and norm.affine:
            norm.bias.data = CALM_SHIFT * norm.weight.detach().abs()


def _calibrate(model: nn.Module, x: Any) -> None:
    """Have batch norms know the statistics of random weights, so that deep activations stay within float16.

    One image has no variance where it is pooled to one pixel, so it is joined by another.
    """
    norms = [each for each in model.modules() if isinstance(each, nn.modules.batchnorm._BatchNorm)]
    model.eval()
    for norm in norms:
        norm.momentum = None
        norm.reset_running_stats()
        norm.train()
    with torch.no_grad():
        model(x if len(x) > 1 else torch.cat([x, torch.randn_like(x)]))
    model.eval()


def _or_same(change: Callable[[Any], Any], model: nn.Module) -> Any:
    """A network changed, or itself where torch.fx cannot trace it."""
    try:
        return change(copy.deepcopy(model))
    except Exception:
        return model


def _loss(network: Any, x: Any, amp: Any) -> Any:
    """Of a forward pass, under autocast to `amp`, by a fixed seed of its dropouts."""
    with torch.autocast(x.device.type, amp or torch.bfloat16, enabled=amp is not None):
        y = network(x)
    return y.float().square().mean()


def _gradients(model: nn.Module) -> dict[str, Any]:
    """The gradients of the parameters, by name."""
    return {name: each.grad.detach() for name, each in model.named_parameters() if each.grad is not None}


@contextlib.contextmanager
def _stated(outcome: Outcome, what: str) -> Iterator[Any]:
    """Note how long a block takes."""
    began = time.perf_counter()
    yield None
    outcome.seconds[what] = round(time.perf_counter() - began, 2)
