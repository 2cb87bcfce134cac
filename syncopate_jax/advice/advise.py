"""Which tensor-parallel degree, and which plan a layer, the simulator predicts to be best."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from syncopate_jax.advice.layers import Layer
from syncopate_jax.errors import InputError, UnsupportedError
from syncopate_jax.ir.arguments import instance, integer, largest_divisor, one_of
from syncopate_jax.ir.plan import ITEM_SIZES, Plan, Tensor
from syncopate_jax.ir.topology import Topology
from syncopate_jax.ops.blocked import block
from syncopate_jax.ops.exchange_plan import split_axis
from syncopate_jax.ops.fused import prepare
from syncopate_jax.ops.prediction import GPU_TILE, predict
from syncopate_jax.ops.spec import Contraction
from syncopate_jax.options import Options
from syncopate_jax.passes.split_chunks import split_chunks
from syncopate_jax.registry import templates
from syncopate_jax.synthesis.network import make_network
from syncopate_jax.synthesis.nodes import Nodes, nodes_of
from syncopate_jax.synthesis.subset import subset
from syncopate_jax.synthesis.synthesize import synthesize

SYNTHESIS = "synthesis"
TEMPLATES = {
    "all_gather": ("all_gather_swizzle", "all_gather_ring"),
    "reduce_scatter": ("reduce_scatter_direct", "reduce_scatter_ring"),
}
# Where links within nodes are faster than between them, these are tried too.
HIERARCHICAL = {
    "all_gather": "hierarchical_all_gather",
    "reduce_scatter": "hierarchical_reduce_scatter",
}


@dataclass(frozen=True, slots=True)
class Choice:
    """The best way found for one layer at one degree.

    Attributes:
      plan: a template's name, ``synthesis``, or ``none`` for degree 1.
      split: pieces a shard.
      seconds: predicted, of the fused operator or, if that is faster, of communication and
        computation one after the other (``fused`` tells).
      compute, communication: seconds of each alone.
    """

    layer: str
    degree: int
    plan: str
    split: int
    seconds: float
    fused: bool
    compute: float
    communication: float


@dataclass(frozen=True, slots=True)
class Advice:
    """Predictions for all layers at all degrees, for groups of ``tokens`` tokens each.

    ``choices`` holds one entry a degree and layer, degrees ascending; ``refused`` says why other
    plans, or degrees that are left out, cannot be used; ``one_rank`` is the seconds that the
    topology's first rank would take for all layers by itself.
    """

    topology: str
    tokens: int
    choices: tuple[Choice, ...]
    refused: tuple[str, ...]
    one_rank: float

    @property
    def degrees(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(choice.degree for choice in self.choices))

    def at(self, degree: int) -> tuple[Choice, ...]:
        """The layers' choices at a degree."""
        return tuple(choice for choice in self.choices if choice.degree == degree)

    def seconds(self, degree: int) -> float:
        """Of all layers together."""
        return sum(choice.seconds for choice in self.at(degree))

    def efficiency(self, degree: int) -> float:
        """Share of the ranks' computing rate that is left: time on one rank over rank-seconds."""
        spent = degree * self.seconds(degree)
        return self.one_rank / spent if spent else 1.0

    @property
    def best(self) -> int:
        """The degree at which the layers take least time together."""
        return min(self.degrees, key=lambda degree: (self.seconds(degree), degree))


def advise(
    layers: Sequence[Layer],
    topology: Topology,
    *,
    tp_degrees: Sequence[int] | None = None,
    tokens: int = 8192,
    dtype: str = "bfloat16",
    splits: Sequence[int] = (1, 4),
    progress: Callable[[int, int], None] | None = None,
) -> Advice:
    """Predicts every layer at every degree with every plan, and keeps the best plans.

    A degree t uses the topology's first t ranks, which work on ``tokens`` tokens together; the
    rest of the ranks would hold other groups, which work on other tokens.

    Args:
      tp_degrees: if None, the powers of 2 that divide the number of ranks, ``tokens`` and every
        layer's cut; why others are left out is in ``refused``.
      tokens: of one group; must be a multiple of every degree.
      splits: pieces a shard that are tried.

    Raises:
      InputError: an argument is another kind of thing, a degree does not fit the ranks, the tokens
        or a layer, or at no degree every layer has a plan that can be used.
    """
    given: Any = layers
    if not isinstance(given, Sequence) or not all(isinstance(one, Layer) for one in given):
        raise InputError(
            f"advise: layers needs a sequence of Layer, found {layers!r}; "
            f"syncopate_jax.advice.layers.model_layers(name) gives those of a model"
        )
    instance("advise", "topology", topology, Topology)
    if not layers:
        raise InputError("advise: needs at least one layer")
    integer("advise", "tokens", tokens, 1)
    one_of("advise", "dtype", dtype, tuple(sorted(ITEM_SIZES)))
    degrees, refused = _degrees(layers, topology, tokens, tp_degrees)
    total, done = len(degrees) * len(layers), 0
    one_rank = sum(_alone(layer, topology, tokens) for layer in layers)
    choices: list[Choice] = []
    for degree in degrees:
        part = subset(topology, range(degree))
        best: list[Choice] = []
        for layer in layers:
            found, reasons = _choices(layer, part, tokens, dtype, splits)
            refused += [reason for reason in reasons if reason not in refused]
            done += 1
            if progress:
                progress(done, total)
            if not found:
                refused.append(f"degree {degree}: no plan serves layer {layer.name}")
                done += len(layers) - 1 - len(best)
                break
            best.append(min(found, key=lambda choice: choice.seconds))
        else:
            choices += best
    if not choices:
        listed = "\n".join(f"  {reason}" for reason in refused)
        raise InputError(f"advise: no degree can be used on topology {topology.name}:\n{listed}")
    return Advice(topology.name, tokens, tuple(choices), tuple(refused), one_rank)


def _degrees(
    layers: Sequence[Layer], topology: Topology, tokens: int, asked: Sequence[int] | None
) -> tuple[tuple[int, ...], list[str]]:
    """The degrees to try, and why others are not; raises where one that was asked for is not."""
    ranks = topology.num_ranks
    if asked is None:
        powers = [2**i for i in range(ranks.bit_length())]
        whys = {degree: _unfit(layers, tokens, degree) for degree in powers}
        for degree in powers:
            if ranks % degree:
                whys[degree] = f"topology {topology.name} has {ranks} ranks, not a multiple of it"
        left_out = [f"degree {degree}: {why}" for degree, why in whys.items() if why]
        return tuple(degree for degree in powers if not whys[degree]), left_out
    degrees = tuple(sorted({integer("advise", "tp degree", degree, 1) for degree in asked}))
    if not degrees:
        raise InputError("advise: tp_degrees is empty, needs at least one")
    for degree in degrees:
        if degree > ranks:
            raise InputError(
                f"advise: degree {degree} needs {degree} ranks, topology {topology.name} has "
                f"{ranks}"
            )
        if why := _unfit(layers, tokens, degree):
            whole = math.gcd(tokens, *(layer.cut for layer in layers))
            raise InputError(
                f"advise: {why}; pad it to a multiple of {degree}, or take a degree that divides "
                f"the tokens and what each layer shares, such as {largest_divisor(whole, degree)}"
            )
    return degrees, []


def _unfit(layers: Sequence[Layer], tokens: int, degree: int) -> str | None:
    """Why ``degree`` ranks cannot share the tokens and the layers."""
    if tokens % degree:
        return f"{tokens} tokens cannot be shared by degree {degree}"
    for layer in layers:
        if layer.cut % degree:
            return (
                f"layer {layer.name} shares {layer.cut} "
                f"{'columns' if layer.gathers else 'rows'}, not a multiple of degree {degree}"
            )
    return None


def _alone(layer: Layer, topology: Topology, tokens: int) -> float:
    """Seconds of a whole layer on the topology's first rank."""
    if topology.flops[0] == 0:
        raise InputError(f"advise: topology {topology.name} gives rank 0 no flops")
    return float(2 * tokens * layer.k * layer.n / topology.flops[0])


def _choices(
    layer: Layer, topology: Topology, tokens: int, dtype: str, splits: Sequence[int]
) -> tuple[list[Choice], list[str]]:
    """What serves a layer on all ranks of ``topology``, and why other plans do not."""
    ranks = topology.num_ranks
    if ranks == 1:
        seconds = _alone(layer, topology, tokens)
        return [Choice(layer.name, 1, "none", 1, seconds, True, seconds, 0.0)], []
    kind = "all_gather" if layer.gathers else "reduce_scatter"
    if layer.gathers:
        spec = Contraction("bmk", "kn", "bmn", kind, "lhs", gather="m")
        lhs, rhs = (1, tokens // ranks, layer.k), (layer.k, layer.n // ranks)
    else:
        spec = Contraction("bmk", "kn", "bmn", kind, "out", scatter="m")
        lhs, rhs = (1, tokens, layer.k // ranks), (layer.k // ranks, layer.n)
    nodes = _nodes(topology)
    names = [*TEMPLATES[kind], *([HIERARCHICAL[kind]] if nodes else []), SYNTHESIS]
    found: list[Choice] = []
    reasons: list[str] = []
    usual = functools.cache(lambda: _usual(spec, lhs, rhs, topology, dtype))
    synthesised = functools.cache(lambda: _synthesised(kind, topology, dtype, *usual()[:2]))
    for name in names:
        for split in splits:
            try:
                plan: str | Plan = name
                if name == SYNTHESIS:
                    plan = split_chunks(synthesised(), split, usual()[2])
                elif nodes and name == HIERARCHICAL[kind]:
                    plan = _hierarchical(name, nodes, topology, dtype, split, *usual())
                one = predict(
                    spec, lhs, rhs, topology, Options(plan=plan, split=split), dtype=dtype
                )
            except (InputError, UnsupportedError) as error:
                why = str(error).removeprefix(f"simulate {name}: ")
                reasons.append(f"degree {ranks}, {name}: {why}")
                break
            fused = one.fused <= one.unfused
            seconds = one.fused if fused else one.unfused
            found.append(
                Choice(
                    layer.name, ranks, name, split, seconds, fused, one.compute, one.communication
                )
            )
    return found, reasons


def _nodes(topology: Topology) -> Nodes | None:
    try:
        return nodes_of(make_network("advise", topology, range(topology.num_ranks)))
    except InputError:
        return None  # ranks that nothing joins are no nodes; the plans tried say which they are


def _usual(
    spec: Contraction,
    lhs: tuple[int, ...],
    rhs: tuple[int, ...],
    topology: Topology,
    dtype: str,
) -> tuple[Tensor, int, int]:
    """What the operator exchanges, along which dimension, and which is cut into pieces."""
    given = block(spec, lhs, rhs, topology.num_ranks)
    layout, _, usual = prepare(spec.kind, given, dtype, dtype, Options(), largest=GPU_TILE)
    axis = layout.gather if spec.kind == "all_gather" else layout.scatter
    return usual.tensors[0], axis, split_axis(layout)


def _synthesised(kind: str, topology: Topology, dtype: str, tensor: Tensor, axis: int) -> Plan:
    """The plan made for the topology that does what the operator's usual one does."""
    return synthesize(
        kind,
        topology,
        tensor.shape,
        dimension=axis,
        dtype=dtype,
        chunks=1,
        tensor=tensor.name,
    )


def _hierarchical(
    name: str,
    nodes: Nodes,
    topology: Topology,
    dtype: str,
    split: int,
    tensor: Tensor,
    axis: int,
    cut: int,
) -> Plan:
    """The template over nodes that does what the operator's usual one does."""
    made: Plan = templates.get(name)(
        topology.num_ranks,
        tensor.shape,
        nodes=nodes.sizes,
        axis=axis,
        split=split,
        split_axis=cut,
        dtype=dtype,
        tensor=tensor.name,
        channel=nodes.inner,
        outer_channel=nodes.outer,
    )
    return made
