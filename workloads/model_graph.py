"""From a torch module to the units that a sub-model may leave out of it (`core/model/units.py`).

torch.fx traces the module, and every value of the graph is followed: which of its axes holds the units of
which layer, and which weights they meet. Whatever is not understood keeps its units whole, which is always
right. Whole stay, besides: the model's input and output, the stem (a first convolution) and every width at
which tensors are added or joined. Where values of one width are multiplied (a gate and what it lets
through, a scale of channels) the units of both are one choice.
"""

from __future__ import annotations

import copy
import operator
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import torch
from torch import fx, nn

from anabranch.core.errors import AppError
from anabranch.core.model.units import UnitGroup
from anabranch.workloads.fixed_sizes import SIZES, counted
from anabranch.workloads.fx_trace import ROOT, trace
from anabranch.workloads.unit_functions import FUNCTIONS, RULES
from anabranch.workloads.unit_layers import LAYERS, Rule
from anabranch.workloads.unit_values import Slot, TracedCall, Value, Variable, WholeWidth, lock, values_in


def find_units(module: nn.Module) -> tuple[UnitGroup, ...]:
    """The groups of units of a module in training, in the order of its graph; it stays as it is.

    Empty where every layer must stay whole. Raises `AppError`, naming the place, when torch.fx cannot
    trace the module, for instance because it branches on values, and whenever there is a doubt.
    """
    return units_and_widths(module)[0]


def units_and_widths(module: nn.Module) -> tuple[tuple[UnitGroup, ...], tuple[WholeWidth, ...]]:
    """As `find_units`, and the widths of which no unit may be left out, in the order of the graph."""
    traced = copied(module).train()  # tracing runs `forward`, which may change buffers
    graph = trace(traced)
    walk = _Walk(traced, graph)
    walk.run()
    walk.keep_whole(counted(module, graph, walk.groups()))
    return walk.groups(), walk.whole_widths()


def copied(module: nn.Module) -> nn.Module:
    """A copy. Raises `AppError` where it would not be what the module is.

    Weights that are computed anew at each call cannot be copied; tensors that share memory without being one
    tensor would go different ways.
    """
    for path, part in module.named_modules():
        named = path or type(part).__name__
        for hook in part._forward_pre_hooks.values():
            if type(hook).__module__.startswith("torch.nn.utils"):
                raise AppError(
                    f"module {named!r} has weights that {type(hook).__name__} computes anew at each call: "
                    "torch.nn.utils.parametrizations has norms that can be copied"
                )
    if shared := _overlapping(module):
        raise AppError(
            f"tensors {shared[0]!r} and {shared[1]!r} share memory without being one tensor: "
            "tie them by giving both names to one Parameter"
        )
    try:
        return copy.deepcopy(module)
    except Exception as error:
        raise AppError(f"the model cannot be copied: {type(error).__name__}: {error}") from error


def _overlapping(module: nn.Module) -> tuple[str, str] | None:
    """The names of two tensors, not the same object, of which one's memory reaches into the other's."""
    spans: dict[int, tuple[int, int, str]] = {}
    for path, part in module.named_modules():
        for name, tensor in (*part._parameters.items(), *part._buffers.items(), *vars(part).items()):
            if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided and tensor.numel():
                steps = zip(tensor.stride(), tensor.shape, strict=True)
                last = sum(stride * (size - 1) for stride, size in steps)
                begin = tensor.data_ptr()
                end = begin + (last + 1) * tensor.element_size()
                spans.setdefault(id(tensor), (begin, end, f"{path}.{name}" if path else name))
    ordered = sorted(spans.values())
    for (_, end, name), (begin, _, other) in pairwise(ordered):
        if begin < end:
            return name, other
    return None


class _Walk:
    """Follows the values through the graph of a module."""

    def __init__(self, module: nn.Module, graph: fx.Graph) -> None:
        self._module, self._graph = module, graph
        self._values: dict[fx.Node, Any] = {}
        self._variables: list[Variable] = []
        self._whole = _tied(module)
        self._uses = Counter(node.target for node in graph.nodes if node.op == "call_module")
        self._state = module.state_dict()
        self._own: dict[str, Value] = {}
        self._because: dict[Variable, str] = {}

    def run(self) -> None:
        """Visits every node."""
        for node in self._graph.nodes:
            unused = not node.users and node.target is operator.getitem
            if not unused:
                self._values[node] = self._visit(node)
                self._explain(self._what(node))
        self._lock_shared()
        self._explain("its weights are used elsewhere too")

    def keep_whole(self, groups: Iterable[UnitGroup]) -> None:
        """These groups of units are not to be cut, for their number is in the model's code."""
        names = {group.name for group in groups}
        _lock_all(v for v in self._roots() if v.name in names)
        self._explain(SIZES)

    def _explain(self, because: str) -> None:
        """What has just been locked was locked by this."""
        for variable in self._roots():
            if variable.locked:
                self._because.setdefault(variable, because)

    def _path(self, node: fx.Node) -> str:
        """Of the module that is called, in the model; it may be the model itself."""
        target = str(node.target)
        return "" if target == ROOT and not hasattr(self._module, ROOT) else target

    def _what(self, node: fx.Node) -> str:
        if node.op == "output":
            return "the model's output"
        if node.op == "call_module":
            path = self._path(node)
            return f"{type(self._module.get_submodule(path)).__name__} {path}".rstrip()
        return str(
            node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "a function")
        )

    def whole_widths(self) -> tuple[WholeWidth, ...]:
        """Of the layers, not of tensors that none owns."""
        whole = (v for v in self._roots() if v.locked and not v.bare)
        return tuple(WholeWidth(v.name, v.size, self._because[v]) for v in whole)

    def groups(self) -> tuple[UnitGroup, ...]:
        """What is left to cut."""
        return tuple(group for v in self._roots() if (group := v.group()) is not None)

    def _roots(self) -> list[Variable]:
        return [v for v in self._variables if v.into is None]

    def _start(self, name: str, size: int) -> Variable:
        self._variables.append(Variable(name, size, place=len(self._variables)))
        return self._variables[-1]

    def _visit(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            return Value(raw=True, batched=True)
        if node.op == "get_attr":
            return self._tensor(str(node.target))
        args = fx.node.map_arg(node.args, self._value)
        kwargs = fx.node.map_arg(node.kwargs, self._value)
        if node.op == "output":
            return lock(args)
        rule, module, path = self._rule(node)
        made = len(self._variables)
        try:
            found = rule(TracedCall(module, path, args, kwargs, self._start)) if rule else None
        except (TypeError, ValueError, IndexError, AttributeError):
            found = None  # arguments of an unusual form
        if found is None:
            for variable in self._variables[made:]:
                variable.locked = True
            return self._not_understood((args, kwargs), raw=module is None)
        return found

    def _tensor(self, name: str) -> Value:
        """A tensor that no layer of torch owns: it may be cut where its axes meet a layer's units alone."""
        tensor = self._state.get(name)
        if tensor is None or not tensor.is_floating_point():
            self._whole.add(name)
            return Value()
        if name not in self._own:
            slots = {}
            for axis, length in enumerate(tensor.shape):
                if length > 1:
                    variable = self._start(name, length)
                    variable.bare = True
                    variable.add(name, axis)
                    slots[axis - tensor.dim()] = Slot(variable)
            self._own[name] = Value(slots, tensor.dim(), bare=True)
        return self._own[name]

    def _value(self, node: fx.Node) -> Any:
        return self._values[node]

    def _not_understood(self, inputs: Any, raw: bool) -> Value:
        for part in inputs:
            for item in part.values() if isinstance(part, dict) else part:
                lock(item)
        found = list(values_in(inputs))
        return Value(raw=raw and bool(found) and all(value.raw for value in found))

    def _rule(self, node: fx.Node) -> tuple[Rule | None, nn.Module | None, str]:
        if node.op == "call_function":
            return FUNCTIONS.get(node.target), None, ""  # type: ignore[arg-type]
        if node.op == "call_method":
            return RULES.get(str(node.target)), None, ""
        path = self._path(node)
        module = self._module.get_submodule(path)
        plain = not any(True for _ in module.parameters())
        rule = LAYERS.get(type(module)) if plain or self._uses[node.target] == 1 else None
        return (None if _has_hooks(module) else rule), module, path

    def _lock_shared(self) -> None:
        """Tensors that are used by other ways too, or are one tensor under two names, stay whole."""
        owners: defaultdict[tuple[str, int], list[Variable]] = defaultdict(list)
        for variable in self._roots():
            for at in variable.members:
                owners[at].append(variable)
        for (tensor, _), found in owners.items():
            if tensor in self._whole or len(found) > 1:
                _lock_all(found)


def _lock_all(variables: Iterable[Variable]) -> None:
    for variable in variables:
        variable.locked = True


def _tied(module: nn.Module) -> set[str]:
    """Names of the tensors that have another name too."""
    names: defaultdict[int, list[str]] = defaultdict(list)
    for name, tensor in (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ):
        names[id(tensor)].append(name)
    return {name for found in names.values() if len(found) > 1 for name in found}


def _has_hooks(module: nn.Module) -> bool:
    """Whether something else happens at a call, or the weights are computed anew for it."""
    computed = any(torch.nn.utils.parametrize.is_parametrized(m) for m in module.modules())
    return computed or bool(module._forward_hooks or module._forward_pre_hooks)
