"""The graph of a network for inference, by torch.fx; nothing where the graph would compute something else.

torch.fx runs a network's code with stand-ins for tensors. What code does beside computing with them is in no graph, and
neither is what it would have done had an answer been another. Such code cannot be traced.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
import operator
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch import fx
from torch.fx.proxy import TraceError

from miofind.process.forks import ForkedLock
from miofind.torch.fused.bytecode import raised_at
from miofind.torch.fused.checks import Check, check_of, must_be, must_have
from miofind.torch.fused.extremes import extremes_are_steps
from miofind.torch.fused.graph_steps import (
    ACTIVATION_CALLS,
    CONVOLUTIONS,
    GIVES_TUPLE,
    has_hooks,
    is_convolution,
    keeps_channels,
)
from miofind.torch.fused.kinds import Kind, kind_of, needs_tensor
from miofind.torch.fused.module import FusedConvolution
from miofind.torch.fused.refusals import Refusal, noted_refusals
from miofind.torch.fused.sizes import NUMBERS, STEPS
from miofind.torch.fused.stand_ins import Attribute, NoArguments, NoNames, StandIn
from miofind.torch.fused.watch import Surroundings, modes, questions_refused, watched
from miofind.torch.fused.writes import is_told_by_name, name_of

_ASKING = ("torch.fx.proxy", extremes_are_steps.__module__)
"""Python modules whose frames are passed over to find the code that asks."""
_PLAIN = (
    list,
    tuple,
    dict,
    torch.Size,
    fx.immutable_collections.immutable_list,
    fx.immutable_collections.immutable_dict,
)
_one_at_a_time = ForkedLock()
"""What is patched while code is traced is so in all threads."""
_MOST_CHECKS = 64  # each takes two more runs of what is before it


class DependsOnNone(Exception):
    """A module's graph is another one where an argument, or what is in one, is None."""


class Undecided(TraceError):
    """A module's code asks once more whether what it computes holds than there are answers."""

    def __init__(self, asker: FrameType) -> None:
        super().__init__(f"{asker.f_code.co_qualname} decides by what it computes, in line {asker.f_lineno}")


def traced(module: Any, *, is_whole: bool = True) -> fx.Graph:
    """The graph of a module, in which submodules that cannot be traced are single operations.

    An argument in it stands for a tensor, or for a dictionary or an object of tensors. Where code asks whether one `is
    None`, the graph would only be right for calls that give it, or only for those that do not.

    Further arguments that code hands on (`self.predict(x, *args, **kwargs)`) are none in the graph, which takes none
    then.

    Args:
        is_whole: whether it is the network itself: the code of what holds a part of one may give it further arguments.

    Raises:
        Exception: whatever the module's own code raises when it is given no tensors.
    """
    try:
        return _traced(module, takes_more=True)
    except TraceError:
        code = inspect.unwrap(type(module).forward).__code__
        has_more = code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
        names_its_input = code.co_argcount + code.co_kwonlyargcount > 1  # else it is among the further arguments
        if not (is_whole and has_more and names_its_input):
            raise
        with contextlib.suppress(Exception):  # of which the first tells more
            return _traced(module, takes_more=False)
        raise


def _traced(module: Any, *, takes_more: bool) -> fx.Graph:
    tracer = _traced_around(module, set(), takes_more=takes_more)
    for name in tracer.given:
        if _depends_on_none(module, tracer, name):
            raise DependsOnNone(f"its code asks whether {name} is None")
    return tracer.graph


def _traced_around(module: Any, opaque: set[Any], *, takes_more: bool) -> Tracer:
    """The tracer of a module's graph; the submodules that cannot be traced are added to `opaque`."""
    while True:
        tracer = Tracer(opaque, takes_more=takes_more)
        try:
            return _traced_with_checks(module, tracer)
        except Exception:
            if tracer.failed is None or tracer.failed in opaque:
                raise
            opaque.add(tracer.failed)


def _traced_with_checks(module: Any, tracer: Tracer) -> Tracer:
    """The tracer of a module's graph, in which the questions of its code are checks.

    Args:
        tracer: without checks; `failed` is set where the module cannot be traced.

    Raises:
        Exception: as by `Tracer.run`.
    """
    checks: list[Check] = []
    while True:
        trial = tracer.with_checks(checks)
        try:
            trial.run(module)
        except Exception as error:
            tracer.failed = trial.failed
            is_asked = isinstance(error, Undecided) and len(checks) < _MOST_CHECKS
            check = _check_behind(module, tracer, checks) if is_asked else None
            if check is None:
                raise
            checks.append(check)
        else:
            return trial


def _check_behind(module: Any, tracer: Tracer, checks: Sequence[Check]) -> Check | None:
    """The check that a module's code makes behind those known; None where it goes on with either answer."""
    for answer in (False, True):
        trial = tracer.with_checks((*checks, Check(answer, "", "")))
        try:
            trial.run(module)
        except Exception as error:
            check = check_of(error, trial.asker, trial.place, answer, trial.texts)
            if check is not None:
                return check
        finally:
            trial.forget(module)
    return None


def _depends_on_none(module: Any, tracer: Tracer, name: str) -> bool:
    """Whether the graph is another one where what has a name is None.

    The constants that torch.fx has set meanwhile are taken off the module: it would number others further.
    """
    without = Tracer(tracer.opaque, absent=name, takes_more=tracer.takes_more)
    constants = {each: vars(module).pop(each) for each in tracer.constants}
    try:
        without = _traced_with_checks(module, without)
    except TraceError:
        return True
    except Exception as error:  # it cannot do without, or torch.fx cannot trace what it does then
        return _is_raised_by_fx(error)
    finally:
        others = {each: vars(module).pop(each) for each in without.constants}
        vars(module).update(constants)
    return tracer.steps(name) != without.steps(name) or not all(
        _is_same(constant, others[each]) for each, constant in constants.items()
    )


def _is_raised_by_fx(error: Exception) -> bool:
    at = raised_at(error)
    return at is not None and at.tb_frame.f_globals.get("__name__", "").startswith("torch.fx.")


def _is_same(a: Any, b: Any) -> bool:
    """Whether two constants of graphs are the same; nothing is known of what is on no device."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return type(a) is type(b)
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return bool(a.is_meta or torch.equal(a, b))


class _Unheeded(BaseException):
    """A module's code goes on asking where it was refused, it may be for ever: it catches exceptions."""


class Tracer(fx.Tracer):
    """Takes modules with hooks for single operations: inlined they would lose them.

    Args:
        opaque: further modules that are single operations, since they cannot be traced.
        absent: the name of an argument, or of what code reads of one, that is None.
        checks: what the questions of the code are, in order, whether what it computes holds.
        takes_more: whether a step stands for further arguments, where the code takes any; else there are none.

    Attributes:
        failed: the innermost submodule whose code raised; None where that was the network's own.
        asked: how many questions the code has asked.
        asker: the code that asked last.
        place: of that question, in its instructions.
        given: names of arguments, and of what code reads of arguments that are no tensors.
        kinds: what the steps give.
        texts: what the code of a module made of stand-ins, whose names are in place of what they stand for.
        counted: the steps whose number of parts is checked.
        constants: the attributes of the network that torch.fx has set.
    """

    proxy_buffer_attributes = True
    """Buffers are read in each call, as parameters: they may be loaded, moved and written to."""

    def __init__(
        self,
        opaque: Collection[Any] = (),
        absent: str = "",
        checks: Sequence[Check] = (),
        *,
        takes_more: bool = True,
    ) -> None:
        super().__init__()  # a GraphModule that is unpickled makes one without arguments
        self.opaque, self.absent, self.checks, self.takes_more = opaque, absent, checks, takes_more
        self.failed: Any = None
        self.asked = 0
        self.asker: FrameType | None = None
        self.place = 0
        self.given: dict[str, None] = {}
        self.kinds: dict[fx.Node, Kind] = {}
        self.texts: set[str] = set()
        self.counted = set[fx.Node]()
        self.constants: list[str] = []
        self._modes = modes()
        self._surroundings: Surroundings | None = None
        self._names: dict[int, tuple[str, Any]] = {}
        self._refusals: list[TraceError] = []
        self._of_code = contextlib.ExitStack()
        self._thread = threading.get_ident()

    def run(self, root: Any) -> None:
        """Trace a network's code, whose graph is `graph` then, and leave no trace of that where it fails.

        Raises:
            TraceError: its code does what a graph does not tell.
        """
        self._surroundings = Surroundings(root)
        held = itertools.chain(root.named_buffers(), root.named_parameters())
        self._names = {id(tensor): (name, tensor) for name, tensor in held}
        before, in_training = set(vars(root)), {module for module in root.modules() if module.training}
        try:
            watching = watched(self._surroundings.memory)
            with _one_at_a_time, noted_refusals() as self._refusals, watching, extremes_are_steps(), self._heeded():
                with self._of_code:
                    self._trace(root)
                self._check(root)
        except Exception:
            for name in vars(root).keys() - before:
                del vars(root)[name]
            raise
        finally:
            self._surroundings.put_back()
            for module in root.modules():
                module.training = module in in_training
        self.constants = [name for name in vars(root) if name not in before]

    def _trace(self, root: Any) -> None:
        try:
            self.trace(root)
        except IndexError as error:  # PyTorch 2.9 asks for the text of any RuntimeError, which may have none
            raised = error.__context__
            if isinstance(raised, RuntimeError) and not raised.args:
                raise raised from None
            raise

    @contextlib.contextmanager
    def _heeded(self) -> Iterator[None]:
        """Refuse what code does that goes on where it is not answered."""
        try:
            yield
        except _Unheeded as error:
            assert self.asker is not None
            raise Undecided(self.asker) from error
        if self.asker is not None and self.asked > len(self.checks):
            raise Undecided(self.asker)

    def with_checks(self, checks: Sequence[Check]) -> Tracer:
        """One like it, with other checks."""
        return Tracer(self.opaque, self.absent, checks, takes_more=self.takes_more)

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        """What the network's code is given, whose questions are refused from now on."""
        function, arguments = super().create_args_for_root(root_fn, is_module, concrete_args)
        for place, each in enumerate(arguments):
            name = each.node.target if type(each) is StandIn else ""
            if name.startswith("*") and not self.takes_more:
                self.graph.erase_node(each.node)
                arguments[place] = NoNames() if name.startswith("**") else NoArguments()
        if self._surroundings is not None:  # else other tools trace a fused graph
            self._of_code.enter_context(questions_refused())
        return function, arguments

    def create_arg(self, a: Any) -> Any:
        """What a step is given: NumPy's float64 as the float that it is, since code that names NumPy does not run.

        Stand-ins and tuples, of which most are, are taken as torch.fx takes them after a dozen questions.

        Raises:
            TraceError: it is a list, tuple or dictionary with more to it, which torch.fx makes a plain one of.
        """
        kind = type(a)
        if issubclass(kind, StandIn):
            return a.node
        if kind is tuple:
            return tuple([self.create_arg(each) for each in a])
        if kind is OrderedDict:
            return self.create_proxy("call_function", OrderedDict, ([*a.items()],), {}).node
        is_more = issubclass(kind, (list, tuple, dict)) and kind not in _PLAIN and not hasattr(kind, "_fields")
        if is_more:
            raise Refusal(f"its code makes a {kind.__name__}, which is more than its contents")
        return float(a) if issubclass(kind, float) else super().create_arg(a)

    def forget(self, root: Any) -> None:
        """Take off a network what tracing it has set there."""
        for name in self.constants:
            del vars(root)[name]
        self.asker = None  # which refers to the network

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Whether what code computes holds, as the check needs that it makes there.

        Raises:
            TraceError: it is none that is known.
        """
        asker = sys._getframe(1)
        while asker.f_back is not None and asker.f_globals.get("__name__") in _ASKING:
            asker = asker.f_back
        self.asked, self.asker, self.place = self.asked + 1, asker, asker.f_lasti
        if self.asked > len(self.checks) + 1:
            raise _Unheeded
        if self.asked > len(self.checks):
            raise Undecided(asker)
        check = self.checks[self.asked - 1]
        self.create_proxy("call_function", must_be, (obj, check.answer, check.kind, check.message), {})
        return check.answer

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        """What a step gives, one after another.

        Raises:
            TraceError: nobody knows how many there are.
        """
        count = self.number_of_parts(obj)
        if count is None:
            raise Refusal("its code takes one after another of something of which nobody knows how many there are")
        return iter([obj[place] for place in range(count)])

    def number_of_parts(self, obj: fx.Proxy) -> int | None:
        """Into how many parts a step cuts a tensor, which the graph checks; None where that is not told."""
        count = self._parts_told(obj.node)
        if count is not None and obj.node not in self.counted:
            self.counted.add(obj.node)
            self.create_proxy("call_function", must_have, (obj, count), {})
        return count

    def _parts_told(self, node: fx.Node) -> int | None:
        if node.op not in ("call_function", "call_method") or not is_told_by_name(node):
            return None
        name, asked = name_of(node), node.args[1] if len(node.args) > 1 else None
        if name == "chunk":
            count = node.kwargs.get("chunks", asked)
            return self._chunks(node, count) if type(count) is int else None
        sizes = node.kwargs.get("split_size_or_sections", node.kwargs.get("split_size", asked))
        return len(sizes) if name in ("split", "split_with_sizes") and isinstance(sizes, (list, tuple)) else None

    def _chunks(self, node: fx.Node, count: int) -> int:
        """How many parts PyTorch cuts into, all equal but the last: fewer than asked for, where that is known."""
        dim = node.kwargs.get("dim", node.args[2] if len(node.args) > 2 else 0)
        channels = self._channels(node.args[0] if node.args else None) if dim == 1 and count else None
        return count if not channels else math.ceil(channels / math.ceil(channels / count))

    def _channels(self, made: Any) -> int | None:
        """How many channels a step gives, if a convolution and what keeps their number made it; None otherwise."""
        while isinstance(made, fx.Node):
            module = self.root.get_submodule(str(made.target)) if made.op == "call_module" else None
            if isinstance(module, CONVOLUTIONS):
                return int(module.out_channels)
            keeps = keeps_channels(module) if module is not None else made.target in ACTIVATION_CALLS
            made = made.args[0] if keeps and made.args else None
        return None

    def steps(self, absent: str) -> list[str]:
        """What the graph computes where what has a name is None, as texts."""
        numbers: dict[fx.Node, str] = {}
        texts = []
        for node in self.graph.nodes:
            if _name_of(node) != absent:
                numbers[node] = f"%{len(numbers)}"
                texts.append(f"{node.op} {node.target} {fx.map_arg((node.args, node.kwargs), numbers.get)}")
        return texts

    def create_node(self, kind: str, target: Any, args: Any, kwargs: Any, *more: Any, **named: Any) -> fx.Node:
        """A step; none where code has changed a mode for it, which a graph does not tell."""
        if modes() != self._modes:
            raise Refusal("its code changes autocast or the recording of gradients, or has a backward of its own")
        if target is torch._assert:
            told = [str(each) for each in (*args[1:], *kwargs.values())]
            self.texts = {text for text in self.texts if not any(text in each for each in told)}
        if kind == "call_function" and self._are_numbers(args):
            target = STEPS.get(target, target)
        node = super().create_node(kind, target, args, kwargs, *more, **named)
        made = self.kinds[node] = kind_of(node, self.kinds, self.root)
        node.meta[GIVES_TUPLE] = made is not None and issubclass(made, tuple)
        name = _name_of(node)
        if name and not name.startswith("*"):
            self.given[name] = None
        return node

    def _are_numbers(self, args: Any) -> bool:
        return all((self.kinds.get(each) if isinstance(each, fx.Node) else type(each)) in NUMBERS for each in args)

    def proxy(self, node: fx.Node) -> Any:
        """What stands for the result of a step."""
        return None if self.absent and _name_of(node) == self.absent else StandIn(node, self)

    def attribute(self, owner: StandIn, name: str) -> Any:
        """What stands for an attribute that not every tensor has."""
        if owner.is_given:
            full = f"{owner.node.target}.{name}"
            self.given[full] = None
            if full == self.absent:
                return None
        return Attribute(owner, name)

    def is_leaf_module(self, m: Any, module_qualified_name: str) -> bool:
        is_single = isinstance(m, FusedConvolution) or is_convolution(m) or has_hooks(m) or m in self.opaque
        return is_single or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: Any, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if threading.get_ident() != self._thread:  # torch.fx takes the calls of all threads for those of the network
            return forward(*args, **kwargs)
        if args and args[0] is None and needs_tensor(m):
            raise TypeError(f"a {type(m).__name__} is given None")
        self._check_modes(m)

        def checked(*arguments: Any, **named: Any) -> Any:
            callers, self.texts = self.texts, set()
            made = forward(*arguments, **named)
            self._check(m)
            self.texts = callers
            return made

        try:
            return super().call_module(m, checked, args, kwargs)
        except (Exception, _Unheeded):
            is_part = any(each is m for each in self.root.modules())  # else code made it just now, and will make others
            self.failed = m if self.failed is None and is_part else self.failed
            raise

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """What code gets of a module, which is itself in other threads.

        As torch.fx does (`_module_getattr` of torch/fx/_symbolic_trace.py), but for parameters and buffers that the
        network had before, by an index in place of a search among all of them.
        """
        if threading.get_ident() != self._thread or not isinstance(attr_val, torch.Tensor):
            return attr_val
        name, _ = self._names.get(id(attr_val), ("", None))
        if not name:
            return super().getattr(attr, attr_val, parameter_proxy_cache)
        if name not in parameter_proxy_cache:
            parameter_proxy_cache[name] = self.create_proxy("get_attr", name, (), {})
        return parameter_proxy_cache[name]

    def _check_modes(self, module: Any) -> None:
        """Refuse code that has put a module of the network, or one in it, into training mode."""
        is_training = module.training or (module._modules and any(each.training for each in module.modules()))
        if is_training and any(each is module for each in self.root.modules()):  # others are made in that mode
            raise Refusal("its code puts a module into training mode")

    def _check(self, module: Any) -> None:
        """Refuse what the code of a module, which has run, did beside computing."""
        if self._refusals:
            raise self._refusals[0]
        self._check_modes(module)
        if self._surroundings is not None:
            changed = self._surroundings.changed(module, self._is_memory)
            if changed:
                raise Refusal(f"its code {changed}")
        if self.texts:
            raise Refusal("its code makes a text of what it computes")

    def _is_memory(self, key: Any, value: Any) -> bool:
        """Whether code keeps what it makes of parameters alone, by a text such as that of a device.

        The graph makes it in each call, of the parameters as they are then.
        """
        if key not in self.texts or not isinstance(value, StandIn) or not self._is_of_parameters(value.node):
            return False
        self.texts.remove(key)
        return True

    def _is_of_parameters(self, node: fx.Node) -> bool:
        seen, pending = set[fx.Node](), [node]
        while pending:
            each = pending.pop()
            if each.op == "placeholder":
                return False
            pending += [given for given in each.all_input_nodes if given not in seen]
            seen.add(each)
        return True


def _name_of(node: fx.Node) -> str:
    """The name of an argument, or of an item or attribute of one that is no tensor's; "" for other steps."""
    if node.op == "placeholder":
        return str(node.target)
    owner = node.args[0] if node.target in (operator.getitem, getattr) else None
    if not isinstance(owner, fx.Node) or owner.op not in ("placeholder", "get_attr"):
        return ""
    name = node.args[1]
    if node.target is getattr:
        return "" if hasattr(torch.Tensor, str(name)) else f"{owner.target}.{name}"
    is_of_arguments = isinstance(name, str) or str(owner.target).startswith("*")
    return f"{str(owner.target).lstrip('*')}[{name!r}]" if is_of_arguments else ""
