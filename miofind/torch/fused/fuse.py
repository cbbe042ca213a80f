"""`fuse`: a network for inference whose convolutions compute what follows them.

torch.fx writes the network's graph down; chains of convolution, batch norm, activation and addition become
`FusedConvolution` modules. Whatever is not known exactly stays as it is.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any

import torch
from torch import fx, nn
from torch.fx.proxy import TraceError

from miofind.arrays.batch_norm import fold_batch_norm
from miofind.errors import InvalidOptionError, MiofindError, brief
from miofind.process.garbage import with_rare_garbage_collection, without_what_is_loaded
from miofind.torch.fused.compiled import is_compiled, is_exported, path_without
from miofind.torch.fused.computed_weights import Constants, call_as_modules, calls_convolution, free_name
from miofind.torch.fused.constants import keep_constants
from miofind.torch.fused.generated import look_up_holders_once
from miofind.torch.fused.graph_steps import ADDITIONS, AFFINE, CONVOLUTIONS, Steps, has_hooks, is_convolution, is_rank
from miofind.torch.fused.module import FusedConvolution
from miofind.torch.fused.nonlinearity import Nonlinearity
from miofind.torch.fused.reading import Reading, only_called
from miofind.torch.fused.references import References
from miofind.torch.fused.tracing import DependsOnNone, traced
from miofind.torch.fused.window import Window
from miofind.torch.fused.writes import storage_of

_MAKES_PARAMETERS = (
    "torch.nn.utils.parametrize.remove_parametrizations, remove_weight_norm, remove_spectral_norm or prune.remove"
)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """One convolution of a fused network.

    Attributes:
        name: of the convolution in the network that was given.
        parts: what it computes now, in order, such as ("convolution", "batch_norm", "residual", "relu").
    """

    name: str
    parts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FusionReport:
    """What `fuse` did to a network; its text is a line for each of these.

    Attributes:
        fused: the convolutions that became `FusedConvolution`, in the order they run.
        kept: by name, convolutions that stayed, and why.
        untraced: by name of a submodule ("" for the network itself), why torch.fx could not trace it; its own
            submodules were fused one by one.
    """

    fused: tuple[FusedLayer, ...]
    kept: Mapping[str, str]
    untraced: Mapping[str, str]

    def __str__(self) -> str:
        lines = [f"{layer.name}: {' + '.join(layer.parts)}" for layer in self.fused]
        lines += [f"{name}: kept, {reason}" for name, reason in self.kept.items()]
        lines += [f"{name or 'the network'}: not traced, {reason}" for name, reason in self.untraced.items()]
        return "\n".join(lines)


def fuse(model: Any) -> Any:
    """A copy of a network for inference with its convolutions fused, and what was done in its `fusion_report`.

    Batch norms are folded into weights and bias in float64, then rounded to the weights' dtype, and so are numbers that
    the result is multiplied by or that are added, the same of all channels or one of each, as of frozen batch norms and
    scaled branches. Convolution, bias, activation and the addition of a tensor of the same shape, before or after the
    activation, become one `FusedConvolution`, where nothing else uses what is between them. Activations are those of
    `miofind.Activation`, as modules, functions and methods, in place or not; dropouts and identities between them are
    nothing in inference.

    The network given stays as it is. The copy is a torch.fx.GraphModule where torch.fx can trace the network and the
    graph tells all that its code does, else one of its class with its submodules fused one by one, which keep their
    classes and attributes, too. It runs eagerly, under autocast, torch.compile and in CUDA graphs; it can be pickled,
    copied and moved to a device, dtype or memory format. Its gradients with respect to its input are right; its weights
    and other tensors are constants, and so is what its code computes of these alone for a convolution by a function, as
    weight standardization does. Convolutions with hooks, parametrizations or padding other than zeros stay. What the
    network's code checks of its input (`if size % 4: raise ...`) the copy checks, too. Of code that hands on whatever
    further arguments it is given (`*args`) the graph takes none. Of what torch.compile gave the network in it is fused,
    and compiled as it was.

    Args:
        model: a torch.nn.Module in eval mode.

    Raises:
        InvalidOptionError: no module, one in training mode, of TorchScript or of torch.export, or one that cannot be
            copied.
    """
    if not isinstance(model, nn.Module):
        raise InvalidOptionError(f"model={brief(model)} must be a torch.nn.Module")
    if isinstance(model, torch.jit.ScriptModule):
        raise InvalidOptionError("the model is TorchScript, which has no code to read: fuse it before it is scripted")
    if is_exported(model):
        raise InvalidOptionError("the model is a module of torch.export: fuse the network before it is exported")
    training = next((name for name, module in model.named_modules() if module.training), None)
    if training is not None:
        raise InvalidOptionError(f"{training or 'the model'} is in training mode: pass model.eval()")
    if is_compiled(model):
        return model.dynamo_ctx(fuse(model._orig_mod))
    # Weights of inference mode would have no gradients. That these are on shows where code switches them off.
    with (
        without_what_is_loaded(),
        with_rare_garbage_collection(),
        _no_autocast(),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        copied = _copied(model)
        work = _Work(copied, References(copied))
        made = _fused(copied, "", work)
    transposed = (name for name, module in made.named_modules() if isinstance(module, _TRANSPOSED))
    work.kept.update(dict.fromkeys(transposed, "it is transposed"))
    made.fusion_report = work.report()
    return made


@contextlib.contextmanager
def _no_autocast() -> Iterator[None]:
    """Compute weights in their own dtype, though `fuse` is called in a block of autocast."""
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


def _copied(model: Any) -> Any:
    try:
        return copy.deepcopy(model)
    except (RuntimeError, TypeError, ValueError) as error:
        # A tensor that was computed, as pruning leaves it; what a lazy module has before its first call; a lock.
        way = f"; of weights that are computed make parameters: {_MAKES_PARAMETERS}" if _computes_weights(model) else ""
        raise InvalidOptionError(f"the model cannot be copied: {error}{way}") from error


def _computes_weights(model: Any) -> bool:
    """Whether a module has a tensor as an attribute that has gradients of others: it is computed before each call."""
    values = (value for module in model.modules() for value in vars(module).values())
    return any(isinstance(value, torch.Tensor) and not value.is_leaf for value in values)


@dataclass(slots=True)
class _Work:
    """What a report is made of, and what code that stays reads of the modules below it."""

    network: Any
    references: References
    fused: list[FusedLayer] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)
    untraced: dict[str, str] = field(default_factory=dict)
    readings: list[Reading] = field(default_factory=list)
    of_all: list[Reading] = field(default_factory=list)

    def report(self) -> FusionReport:
        """What was done, by the names of the network that torch.compile may have been given."""
        fused = tuple(replace(layer, name=path_without(layer.name)) for layer in self.fused)
        kept, untraced = (
            {path_without(path): reason for path, reason in each.items()} for each in (self.kept, self.untraced)
        )
        return FusionReport(fused, kept, untraced)

    def reading(self, module: Any, path: str) -> Reading:
        """What the code of a module asks for."""
        return Reading.of(module, path, self.references.methods.get(id(module), ()))

    def is_whole(self, path: str, module: Any) -> bool:
        """Whether all code that has a module calls it as a whole."""
        return id(module) not in self.references.shared and only_called(path, self.readings)

    def has_parts(self, path: str, module: Any) -> bool:
        """Whether code that stays asks for parts of a module."""
        is_shared = id(module) in self.references.shared
        if is_shared and not self.of_all:
            self.of_all += [self.reading(each, name) for name, each in self.network.named_modules()]
            self.of_all += map(Reading.of_class, self.references.classes)
        others = self.of_all if is_shared else ()
        return any(each.of_part(path, module) for each in self.readings) or any(
            each.of_others_part(module) for each in others
        )


def _has_convolution(module: Any) -> bool:
    return any(isinstance(each, CONVOLUTIONS) or calls_convolution(each) for each in module.modules())


def _fused(module: Any, path: str, work: _Work) -> Any:
    """A module with what is in it fused: its graph where it can be traced, else itself with its submodules' graphs."""
    if isinstance(module, CONVOLUTIONS):
        work.kept[path] = (
            "what follows it is not known, since what holds it was not traced: make both a module with a forward"
        )
        return module
    if not _has_convolution(module):
        return module
    if has_hooks(module):
        reason = "it has hooks"
    elif is_compiled(module):
        reason = "it was compiled before: give torch.compile what is fused"
    elif "forward" in vars(module):
        reason = "its forward was replaced"  # as accelerate does; torch.fx would read its class's
    elif not isinstance(inspect.getattr_static(module, "forward"), FunctionType):
        reason = "its forward is no function, and may be another one in another call"
    elif not path and _has_own_call(module):
        reason = "its class has a __call__ of its own"
    elif path and isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)) and not work.is_whole(path, module):
        reason = ""  # what holds it was not traced, and may take it apart or look at what is between its modules
    elif path and work.has_parts(path, module):
        reason = "code of what holds it has parts of it"
    elif name := _name_of_graphs(module, path):
        reason = f"it has {name!r}, a name of what torch.fx has itself"
    else:
        try:
            with _memory_kept(module):
                graph = traced(module, is_whole=not path)
        except DependsOnNone as error:
            reason = str(error)
        except Exception as error:  # whatever a network's own code raises when it is given no tensors
            reason = f"{type(error).__name__}: {brief(str(error).strip().partition(chr(10))[0])}"
        else:
            return _rewritten(module, graph, path, work)
    if reason:
        work.untraced[path] = reason
        reading = work.reading(module, path)
        reading.hides |= has_hooks(module)  # which are given the module
        work.readings.append(reading)
        if reading.sets_modes:
            below = (name for name, each in module.named_modules(prefix=path) if isinstance(each, CONVOLUTIONS))
            work.kept.update(dict.fromkeys(below, "code of what holds it puts modules into training mode"))
            return module
    for name, child in module.named_children():
        module._modules[name] = _fused(child, f"{path}.{name}".removeprefix("."), work)
    return module


def _has_own_call(module: Any) -> bool:
    """Whether calls of a module run code of its class around its forward; torch.fx's modules have a `__call__`, too."""
    return not isinstance(module, fx.GraphModule) and type(module).__call__ is not nn.Module.__call__


@functools.cache
def _names_of_graphs() -> frozenset[str]:
    graph = fx.GraphModule(nn.Module(), fx.Graph())
    return frozenset({*dir(graph)} - {*dir(nn.Module())})


def _name_of_graphs(module: Any, path: str) -> str:
    """A name by which a module and each of torch.fx's have something; "" for none."""
    names = {*module._modules, *module._parameters, *module._buffers}
    if not path and not isinstance(module, fx.GraphModule):
        names |= vars(module).keys() - {"meta"}
    return min(names & _names_of_graphs(), default="")


@contextlib.contextmanager
def _memory_kept(module: Any) -> Iterator[None]:
    """Refuse code that gives the network's tensors other memory (`.data = ...`), and give them theirs back.

    Raises:
        TraceError: it did.
    """
    held = [(each, each.data) for each in (*module.parameters(), *module.buffers())]
    try:
        yield
    finally:
        moved = [(each, before) for each, before in held if each.data_ptr() != before.data_ptr()]
        for each, before in moved:
            each.data = before
    if moved:
        raise TraceError("its code gives a tensor that it has other memory")


def _rewritten(module: Any, graph: fx.Graph, path: str, work: _Work) -> Any:
    """The graph of a module with its chains fused, as a module with what the module has beside submodules."""
    for node in graph.nodes:
        node.type = None  # annotations, which are texts with `from __future__ import annotations`, break its pickles
    made = fx.GraphModule(module, graph, type(module).__name__)
    unused = {
        part: {name: vars(module)[part][name] for name in vars(module)[part].keys() - vars(made)[part]}
        for part in _PARTS
    }
    _Rewriting(made, module, path, work).run()
    keep_constants(made, module)
    look_up_holders_once(made)  # the code of all that was rewritten
    _drop_unread(made, has_own=not path)
    for each in made.modules():
        each.training = False  # torch.fx makes modules of its own, in place of lists of modules
    if path:
        for part, held in unused.items():
            vars(made)[part].update(held)
        return _disguised(module, made)
    for name, value in vars(module).items():
        if name not in vars(made) or name == "meta":
            setattr(made, name, value)
    return made


def _drop_unread(made: fx.GraphModule, *, has_own: bool) -> None:
    """Drop tensors that no step reads, of which weights were computed, from what torch.fx made to hold tensors.

    Args:
        has_own: whether the graph's own tensors are nobody else's.
    """
    read = {str(node.target) for node in made.graph.find_nodes(op="get_attr")}
    called = tuple(f"{node.target}." for node in made.graph.find_nodes(op="call_module"))
    for path, holder in made.named_modules():
        is_made = (has_own and holder is made) or (type(holder) is nn.Module and not f"{path}.".startswith(called))
        for tensors in (holder._parameters, holder._buffers) if is_made else ():
            for name in [each for each in tensors if f"{path}.{each}".removeprefix(".") not in read]:
                del tensors[name]


def _disguised(module: Any, graph: fx.GraphModule) -> Any:
    """A submodule that runs a graph, of a class of its own below its class, with its attributes.

    What holds it was not traced: its code may ask for the submodule's class, or read what it has.
    """
    cls: Any = type(module).__base__ if "_graph_run" in vars(module) else type(module)
    own: dict[str, Any] = {"forward": type(graph).forward, "__reduce__": _reduced, "__module__": cls.__module__}
    parts = {name: vars(graph)[name] for name in _PARTS}  # the same dictionaries: what moves one moves both
    vars(module).update(parts, _graph_run=graph)
    module.__class__ = type(cls.__name__, (cls,), own)
    return module


_PARTS = ("_modules", "_parameters", "_buffers")


def _reduced(module: Any) -> tuple[Any, ...]:
    """How a submodule is pickled and copied: by its first class, its graph and its state."""
    state = module.__getstate__()  # its class may leave out what cannot be pickled, PyTorch's what it compiled
    if isinstance(state, dict):
        state = {name: value for name, value in state.items() if name != "_graph_run"}
    return _restored, (type(module).__base__, vars(module)["_graph_run"], state)


def _restored(cls: Any, graph: fx.GraphModule, state: Any) -> Any:
    module = cls.__new__(cls)
    module.__setstate__(state)
    vars(module).pop("_graph_run", None)
    for part in _PARTS:  # those that no step reads
        for name, value in vars(module).get(part, {}).items():  # which pickles of other releases lack
            vars(graph)[part].setdefault(name, value)
    return _disguised(module, graph)


@dataclass(slots=True)
class _Chain:
    """A convolution and what follows it.

    Attributes:
        nodes: in order, the convolution first.
        parts: their names.
        norms: what is folded into the weights, each by the names of `fold_batch_norm`.
        key: tells chains from others that fold something else.
        is_batched: whether what is folded gives another shape without a batch dimension, or refuses that.
        widens: whether it gives the weights' dtype though autocast has the convolution compute in another.
        folded: weight and bias with it, None without.
        numbers: the activation, and what is done with the residual.
        residual: what is added, or None.
        adds_in_place: whether it is written into the convolution's result.
        residual_first: whether it is the sum's first summand.
    """

    nodes: list[fx.Node]
    parts: list[str] = field(default_factory=lambda: ["convolution"])
    norms: list[dict[str, Any]] = field(default_factory=list)
    key: list[Any] = field(default_factory=list)
    is_batched: bool = False
    widens: bool = False
    folded: tuple[Any, Any] | None = None
    numbers: Nonlinearity = field(default_factory=Nonlinearity)
    residual: fx.Node | None = None
    adds_in_place: bool = False
    residual_first: bool = False


class _Rewriting:
    """Fuses the chains of one graph, that of a module."""

    def __init__(self, made: fx.GraphModule, module: Any, path: str, work: _Work) -> None:
        self.made = made
        self.module = module
        self.path = path
        self.work = work
        self.steps = Steps(made)
        self.written = self._written()
        self.constants = Constants(made, module, self.steps, self.written)
        self.names: dict[tuple[Any, ...], str] = {}

    def run(self) -> None:
        """Rewrite the graph."""
        call_as_modules(self.made, self.module, self.steps, self.constants)
        self._drop_assertions()
        targets = (node.target for node in self.made.graph.nodes if node.op in ("call_module", "get_attr"))
        self.work.readings.append(Reading(self.path, {tuple(str(target).split(".")) for target in targets}))
        for node in list(self.made.graph.nodes):
            module = self.steps.module(node)
            name = f"{self.path}.{node.target}".removeprefix(".")
            if isinstance(module, CONVOLUTIONS):
                self._fuse(node, module, name)
            elif module is not None and _has_convolution(module):  # it has hooks, or cannot be traced
                self.made.add_submodule(str(node.target), _fused(module, name, self.work))
        self.constants.drop_unread()
        self.made.graph.lint()
        self.made.delete_all_unused_submodules()

    def _written(self) -> set[Any]:
        """Names of the memory that the graph's steps may write to."""
        written = (each for node in self.made.graph.nodes for each in self.steps.written(node))
        return set[Any]().union(*map(self.steps.places, written))

    def _drop_assertions(self) -> None:
        """Drop what asserts the dimensions of convolutions' results, which would be read by more than what follows."""
        graph = self.made.graph
        for node in list(graph.nodes):
            if self.steps.asserts_rank(node):
                condition = node.args[0]
                graph.erase_node(node)
                if not condition.users:
                    graph.erase_node(condition)
        for node in list(graph.nodes):
            if is_rank(node) and not node.users:
                graph.erase_node(node)

    def _fuse(self, node: fx.Node, module: Any, name: str) -> None:
        """Replace a convolution and what follows it, or note why it stays."""
        reason = _why_kept(module, node)
        if not reason and self._writes_to(_weights(module)):
            reason = "the network's code writes to its weights"
        chain = _Chain([node]) if reason else self._chain(node, with_residual=True)
        if chain.residual is not None and self._is_written(chain):
            chain = self._chain(node, with_residual=False)
        if not reason and len(chain.parts) == 1 and module.bias is None:
            reason = "nothing follows it that it could compute"
        if reason:
            self.work.kept[name] = reason
            return
        last = chain.nodes[-1]
        with self.made.graph.inserting_after(node if chain.residual is None else last):
            read = node.args if chain.residual is None else (*node.args, chain.residual)
            fused = self.made.graph.call_module(self._name(node, module, chain), read)
        last.replace_all_uses_with(fused)
        for each in reversed(chain.nodes):
            self.made.graph.erase_node(each)
        bias = ["bias"] if module.bias is not None and not chain.norms else []
        self.work.fused.append(FusedLayer(name, (chain.parts[0], *bias, *chain.parts[1:])))

    def _name(self, node: fx.Node, module: Any, chain: _Chain) -> str:
        """The name of the chain's module: the convolution's own, unless others run that convolution differently."""
        kind = (chain.numbers, chain.residual is not None, chain.adds_in_place, chain.residual_first)
        key = (node.target, *kind, *chain.key)
        if key not in self.names:
            called = [str(each.target) for each in self.made.graph.nodes if each.op == "call_module"]
            is_others = any(str(node.target).startswith(f"{name}.") for name in called)  # part of a single operation
            is_read = bool(chain.norms) and self._reads_parts(node.target)  # as they are without the norm
            is_called_once = called.count(str(node.target)) == 1 and node.target not in self.names.values()
            is_own = is_called_once and not is_others and not is_read
            place = str(node.target).replace(".", "_") if is_others else node.target  # that may run all it has
            new = f"{place}_fused"
            self.names[key] = str(node.target) if is_own else free_name(new, len(self.names), self.made, self.module)
            fused = _module(module, chain)
            self.made.add_submodule(self.names[key], fused)
            self.steps.add(self.names[key], fused)
        return self.names[key]

    def _reads_parts(self, target: Any) -> bool:
        """Whether steps read parameters or buffers of a module."""
        targets = (str(node.target) for node in self.made.graph.nodes if node.op == "get_attr")
        return any(each.startswith(f"{target}.") for each in targets)

    def _chain(self, node: fx.Node, *, with_residual: bool) -> _Chain:
        """What follows a convolution and can be computed with it: steps each of which alone reads the one before."""
        chain = _Chain([node])
        while len(chain.nodes[-1].users) == 1:
            last = chain.nodes[-1]
            (user,) = last.users
            if _times_read(user, last) != 1 or not (
                self.steps.is_nothing(user)
                or self._takes_norm(chain, user)
                or self._takes_affine(chain, user)
                or self._takes_activation(chain, user)
                or (with_residual and self._takes_residual(chain, user))
            ):
                break
            chain.nodes.append(user)
        return chain

    def _takes_norm(self, chain: _Chain, user: fx.Node) -> bool:
        module = self.steps.module(chain.nodes[0])
        norm = self.steps.batch_norm(user, chain.nodes[-1], module.weight.dim()) if _is_linear(chain) else None
        if norm is None or self._writes_to(norm.values()):
            return False
        is_taken = _folds(chain, module, norm, "batch_norm", [id(each) for each in norm.values()])
        chain.is_batched |= is_taken
        return is_taken

    def _takes_affine(self, chain: _Chain, user: fx.Node) -> bool:
        """Whether a step multiplies by a number or adds one, the same of all channels or one of each.

        So do frozen batch norms, that are no modules of PyTorch's, and networks that scale their branches.
        """
        name = AFFINE.get(user.target) if user.op in ("call_function", "call_method") else None
        if name is None or len(user.args) != 2 or user.kwargs or not _is_linear(chain):
            return False
        first, second = user.args
        is_first = first is chain.nodes[-1]
        if not is_first and (name not in ("mul", "add") or self.steps.writes(user)):
            return False
        other = second if is_first else first
        is_step = isinstance(other, fx.Node)
        value = self.constants.tensor(other) if is_step else other
        module = self.steps.module(chain.nodes[0])
        of_channels = _of_channels(value, module.weight)
        key = [name, is_step, id(value) if is_step else value]
        if of_channels is None or not _folds(chain, module, _affine(name, of_channels), name, key):
            return False
        chain.is_batched |= is_step and value.dim() == module.weight.dim()
        chain.widens |= is_step and value.dim() > 0 and not self.steps.writes(user)
        return True

    def _takes_activation(self, chain: _Chain, user: fx.Node) -> bool:
        found = self.steps.activation(user, chain.nodes[-1]) if chain.numbers.activation == "none" else None
        if found is not None:
            chain.numbers = replace(found, beta=chain.numbers.beta)
            chain.parts.append(found.activation)
        return found is not None

    def _takes_residual(self, chain: _Chain, user: fx.Node) -> bool:
        is_addition = user.op in ("call_function", "call_method") and user.target in ADDITIONS
        if chain.residual is not None or not is_addition or len(user.args) != 2 or user.kwargs.keys() - {"alpha"}:
            return False
        first, second = user.args
        is_first = first is chain.nodes[-1]
        other, alpha = second if is_first else first, user.kwargs.get("alpha", 1)
        if not isinstance(other, fx.Node) or type(alpha) not in (int, float) or not math.isfinite(alpha):
            return False
        is_in_place = self.steps.writes(user)
        if not is_first and (alpha != 1 or is_in_place):
            return False  # a factor of the convolution, or written into what others may read
        position = "before" if chain.numbers.activation == "none" else "after"
        chain.residual, chain.adds_in_place, chain.residual_first = other, is_in_place, not is_first
        chain.numbers = replace(chain.numbers, residual_position=position, beta=float(alpha))
        chain.parts.append("residual")
        return True

    def _writes_to(self, tensors: Iterable[Any]) -> bool:
        """Whether steps may write to one of the network's tensors."""
        return any(isinstance(each, torch.Tensor) and storage_of(each) in self.written for each in tensors)

    def _is_written(self, chain: _Chain) -> bool:
        """Whether a chain's inputs may be written to between its convolution and its end, where it is computed."""
        nodes = list(self.made.graph.nodes)
        between = nodes[nodes.index(chain.nodes[0]) : nodes.index(chain.nodes[-1])]
        written = [each for node in between if node not in chain.nodes for each in self.steps.written(node)]
        inputs = [chain.residual, *chain.nodes[0].all_input_nodes]
        read = set[Any]().union(*(self.steps.places(node) for node in inputs if node is not None))
        return any(not read.isdisjoint(self.steps.places(each)) for each in written)


def _times_read(user: fx.Node, node: fx.Node) -> int:
    """How often a step reads another."""
    count = 0

    def see(each: fx.Node) -> fx.Node:
        nonlocal count
        count += each is node
        return each

    fx.map_arg((user.args, user.kwargs), see)
    return count


def _why_kept(module: Any, node: fx.Node) -> str:
    """Why a convolution stays as it is; "" where it may be fused."""
    for name in ("weight", "bias"):
        if name not in module._parameters:
            return f"its {name} is no parameter: make it one ({_MAKES_PARAMETERS})"
    if not is_convolution(module):
        return f"its class is {type(module).__name__}"
    if module.weight.is_complex():
        return "its weights are complex"
    if has_hooks(module):
        return "it has hooks"
    if module.padding_mode != "zeros":
        return f"its padding is {module.padding_mode}"
    if len(node.args) != 1 or node.kwargs:
        return "it is called with keywords"
    try:
        _window(module)
    except InvalidOptionError as error:
        return str(error)
    return ""


def _window(module: Any) -> Window:
    return Window.of(
        module.weight.shape[2:],
        stride=module.stride,
        padding=module.padding,
        dilation=module.dilation,
        groups=module.groups,
    )


def _weights(module: Any) -> tuple[Any, Any]:
    return module.weight.detach(), None if module.bias is None else module.bias.detach()


def _is_linear(chain: _Chain) -> bool:
    """Whether all that a chain does can be folded into the convolution's weights."""
    return chain.residual is None and chain.numbers.activation == "none"


def _folds(chain: _Chain, module: Any, norm: dict[str, Any], part: str, key: list[Any]) -> bool:
    """Fold a batch norm, or what is like one, into a chain's weights, if that can be."""
    folded = _folded(module, [*chain.norms, norm])
    if folded is None:
        return False
    chain.norms.append(norm)
    chain.key += key
    chain.folded = folded
    chain.parts.append(part)
    return True


def _of_channels(value: Any, weight: Any) -> Any:
    """A number or a constant tensor as one number for each channel, (k,); None where it is something else."""
    count, rank = weight.shape[0], weight.dim()
    if type(value) in (int, float):
        wide = torch.float64 if weight.dtype == torch.float64 else torch.float32  # in which PyTorch takes numbers
        most = torch.finfo(wide).max
        is_taken = value == 0 or (1 / most <= abs(value) <= most and (type(value) is float or abs(value) < 2**63))
        return torch.full((count,), value, dtype=torch.float64, device=weight.device) if is_taken else None
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.device != weight.device:
        return None
    shape = (*(1,) * (rank - value.dim()), *value.shape)
    is_alike = value.dtype == weight.dtype or value.dim() == 0
    if not is_alike or len(shape) != rank or shape not in ((1,) * rank, (1, count, *(1,) * (rank - 2))):
        return None
    return value.detach().flatten().expand(count)


def _affine(name: str, value: Any) -> dict[str, Any]:
    """What a step does with a number of each channel, as a batch norm by the names of `fold_batch_norm`."""
    zero, one = torch.zeros_like(value, dtype=torch.float64), torch.ones_like(value, dtype=torch.float64)
    value = value.to(torch.float64)
    gamma = {"mul": value, "div": 1 / value}.get(name, one)
    beta = {"add": value, "sub": -value}.get(name, zero)
    return {"mean": zero, "variance": one, "gamma": gamma, "beta": beta, "epsilon": 0.0}


def _folded(module: Any, norms: list[dict[str, Any]]) -> tuple[Any, Any] | None:
    """Weight and bias with batch norms, rounded once; None where it cannot be, or where they would lose too much.

    They overflow, or numbers that are no batch norm's make a channel's weights too small for their dtype.
    """
    before = _weights(module)
    weight: Any = before[0].double()
    bias: Any = None if before[1] is None else before[1].double()
    try:
        for norm in norms:
            given = {name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in norm.items()}
            weight, bias = fold_batch_norm(weight, bias, **given)
    except MiofindError:  # PyTorch, which the norm is left to, takes it or says why not
        return None
    rounded = weight.to(module.weight.dtype), bias.to((module.weight if module.bias is None else module.bias).dtype)
    if module.weight.is_meta:
        return rounded
    if not _are_finite(rounded):
        return None if _are_finite(before) else rounded  # what is not finite stays so, whatever is folded into it
    is_small = any(norm["epsilon"] == 0 for norm in norms) and _is_rounded_away(weight, rounded[0])
    return None if is_small else rounded


def _is_rounded_away(exact: Any, rounded: Any) -> bool:
    """Whether a channel's weights have lost more than their dtype's precision, as those below its least number."""
    lost = (rounded.double() - exact).flatten(1).norm(dim=1)
    return bool((lost > torch.finfo(rounded.dtype).eps * exact.flatten(1).norm(dim=1)).any())


def _are_finite(tensors: tuple[Any, ...]) -> bool:
    return all(each is None or _is_finite(each) for each in tensors)


def _is_finite(tensor: Any) -> bool:
    """Whether all numbers are finite: they are where their sum is, which takes one pass where `isfinite` takes five."""
    if tensor.is_floating_point() and math.isfinite(tensor.sum(dtype=torch.float32)):
        return True
    return bool(tensor.isfinite().all())


def _module(module: Any, chain: _Chain) -> Any:
    """What computes a chain."""
    weight, bias = chain.folded or _weights(module)
    return FusedConvolution(
        weight,
        bias,
        _window(module),
        chain.numbers,
        adds_in_place=chain.adds_in_place,
        has_norm=chain.is_batched,
        widens=chain.widens,
        has_residual=chain.residual is not None,
        residual_first=chain.residual_first,
        is_folded=chain.folded is not None,
    ).eval()
