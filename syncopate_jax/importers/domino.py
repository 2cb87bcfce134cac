"""Importer of Domino's schedules: a tensor-parallel layer sliced along batch and along weights.

Domino (DeepSpeed) is configured by Megatron's arguments and slices every layer's input along the
batch, the weight of its last product along columns, or both; the all-reduce of one slice runs
while the next is computed. The file is JSON: those arguments, as ``vars(args)`` has them, and the
slicing (``docs/importers.md`` has the schema).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from syncopate_jax.errors import FormatError, InputError
from syncopate_jax.importers.json_fields import Field, read_json
from syncopate_jax.importers.program import ImportedCollective, ImportedProgram, Reader
from syncopate_jax.importers.replica_groups import MAX_PROGRAM_RANKS
from syncopate_jax.importers.resharding import Move
from syncopate_jax.importers.shardings import Derived
from syncopate_jax.registry import importers

NEEDED = (
    "num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size",
    "tensor_model_parallel_size",
)  # fmt: skip
AXIS = "tp"
ROWS, COLUMNS = 1, 2  # dimensions of [sequence, batch, hidden] that slicing cuts


def import_domino(text: str) -> ImportedProgram:
    """The all-reduces of one layer, forward and backward, each cut into its slices.

    Arrays are [sequence, batch, hidden], as in Domino. Forward, the results of the attention's and
    of the feed-forward's last product are sliced along the batch (``inputs`` parts) and along the
    columns (``weights`` parts); backward, the gradients of their inputs along the batch. All
    layers are the same; their number is a note.

    Raises:
      FormatError: a field is missing or malformed, or sizes do not divide; it names the field.
    """
    fields = read_json("domino", text).fields(("name", "args", "slicing"))
    layer = _Layer.of(fields["args"], fields["slicing"])
    return ImportedProgram(
        name=fields["name"].text(),
        source="domino",
        num_ranks=layer.ranks,
        collectives=tuple(
            layer.collective(part, direction)
            for direction in ("forward", "backward")
            for part in ("attention", "mlp")
        ),
        notes=tuple(_notes(fields["args"].members())),
    )


importers.register("domino")(Reader(import_domino, "a Domino layer: Megatron arguments, slicing"))


@dataclass(frozen=True, slots=True)
class _Layer:
    """Sizes of one layer, in elements, and its slices."""

    path: str
    ranks: int
    sequence: int
    batch: int
    hidden: int
    inner: Mapping[tuple[str, str], int]
    inputs: int
    weights: int
    dtype: str
    layers: int

    @classmethod
    def of(cls, args: Field, slicing: Field) -> _Layer:
        found = args.members()
        for key in NEEDED:
            if key not in found:
                raise FormatError(f"{args.path}: has no {key!r}; needs {', '.join(NEEDED)}")
        sizes = {key: found[key].integer(1) for key in NEEDED}
        ranks, hidden = sizes["tensor_model_parallel_size"], sizes["hidden_size"]
        if ranks > MAX_PROGRAM_RANKS:
            found["tensor_model_parallel_size"].fail(f"at most {MAX_PROGRAM_RANKS} ranks")
        inner = found.get("ffn_hidden_size")
        inner_size = 4 * hidden if inner is None or inner.value is None else inner.integer(1)
        for key, size in (
            ("hidden_size", hidden),
            ("num_attention_heads", sizes["num_attention_heads"]),
            ("ffn_hidden_size", inner_size),
        ):
            if size % ranks:
                raise FormatError(f"{args.path}.{key}: {size} is not divided by {ranks} ranks")
        if hidden % sizes["num_attention_heads"]:
            found["num_attention_heads"].fail(f"a divisor of hidden_size {hidden}")
        gated = any(key in found and found[key].flag() for key in ("swiglu", "gated_linear_unit"))
        cut = slicing.fields(("inputs", "weights"))
        return cls(
            path=args.path,
            ranks=ranks,
            sequence=sizes["seq_length"],
            batch=sizes["micro_batch_size"],
            hidden=hidden,
            inner={
                ("attention", "forward"): hidden // ranks,
                ("mlp", "forward"): inner_size // ranks,
                ("attention", "backward"): 3 * hidden // ranks,
                ("mlp", "backward"): (2 if gated else 1) * inner_size // ranks,
            },
            inputs=cut["inputs"].integer(1, sizes["micro_batch_size"]),
            weights=cut["weights"].integer(1, hidden),
            dtype=_dtype(found),
            layers=sizes["num_layers"],
        )

    def collective(self, part: str, direction: str) -> ImportedCollective:
        """The all-reduce after one product: [s,b,k] times [k,h], the contracted k cut."""
        shape = (self.sequence, self.batch, self.hidden)
        weights = self.weights if direction == "forward" else 1
        move = Move("out", "all_reduce", (AXIS,), shape=shape)
        pair = Derived("sbk", "kh", "sbh", ((AXIS, self.ranks),), (), (move,), move, ((AXIS, "k"),))
        cuts = ((ROWS, self.inputs), (COLUMNS, weights))
        try:
            return ImportedCollective(
                name=f"{part}.{direction}",
                kind="all_reduce",
                num_ranks=self.ranks,
                groups=(tuple(range(self.ranks)),),
                shape=shape,
                dtype=self.dtype,
                reduce="sum",
                cuts=tuple((axis, parts) for axis, parts in cuts if parts > 1),
                produced=True,
                pair=pair,
                notes=(
                    ("contracted", str(self.inner[part, direction])),
                    ("slices", str(self.inputs * weights)),
                    ("layers", str(self.layers)),
                ),
            )
        except InputError as error:
            raise FormatError(f"{self.path}: {error}") from error


def _dtype(found: Mapping[str, Field]) -> str:
    flags = {
        dtype: key in found and found[key].flag()
        for key, dtype in (("fp16", "float16"), ("bf16", "bfloat16"))
    }
    chosen = [dtype for dtype, on in flags.items() if on]
    if len(chosen) > 1:
        found["bf16"].fail("false where fp16 is true")
    return chosen[0] if chosen else "float32"


def _notes(found: Mapping[str, Field]) -> list[tuple[str, str]]:
    """Arguments that no plan depends on."""
    return [(key, str(item.value)[:80]) for key, item in found.items() if key not in NEEDED]
