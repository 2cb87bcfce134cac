"""The rewriter: an annotated kernel and a scheme become the source of a fused kernel.

The user's statements are printed as they were written; what the scheme adds stands between them.
See docs/triton.md for a kernel before and after.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field

from syncopate_jax.errors import UnsupportedError
from syncopate_jax.kernel.annotated import (
    Annotated,
    Region,
    assigned,
    used,
)
from syncopate_jax.triton_source import added_names, pointers
from syncopate_jax.triton_source.phrases import Phrases
from syncopate_jax.triton_source.scheme import Read, Scheme
from syncopate_jax.triton_source.text import Text, fitted, indented, renamed

SUFFIX = "_fused"
VERSION = 4
"""Raised when the same kernel and scheme give another text than before."""


def rewrite(source: Annotated, scheme: Scheme) -> str:
    """The fused kernel, as the text of a module.

    Raises:
      UnsupportedError: the kernel's text does not show what the scheme needs, or it has a name that
        the rewritten kernel needs; names the line.
    """
    text = _Writer(source, scheme).module()
    try:
        ast.parse(text)
    except SyntaxError as error:
        line = (error.text or "").strip()
        raise UnsupportedError(
            f"{source.file}:{source.first_line}: kernel {source.name}: what is made of it does not "
            f"parse, {error.msg} at {line!r}; write that statement on lines of its own"
        ) from error
    return text


@dataclass
class _Writer:
    """Writes one kernel."""

    source: Annotated
    scheme: Scheme
    text: Text = field(init=False)
    say: Phrases = field(init=False)

    def __post_init__(self) -> None:
        self.text = Text.of(self.source.source)
        reached = list(self.source.calls.reached([self.source.function]))
        described = any(calls.is_descriptor_use(call) for calls, call in reached)
        stored = any(calls.is_descriptor_store(call) for calls, call in reached)
        self.say = Phrases(self.scheme, added_names.taken(self.source), described, stored)

    def _unsupported(self, node: ast.AST, text: str) -> UnsupportedError:
        line = node.lineno + self.source.first_line - 1  # type: ignore[attr-defined]
        return UnsupportedError(f"{self.source.file}:{line}: {text}")

    def _check_hoisted(self) -> None:
        """An address that is made before the tiles cannot follow where a tile's data is."""
        picked = [r.pointer for r in self.scheme.reads]
        picked += [self.scheme.write.pointer] if self.scheme.write else []
        uses = used(self.source.tile)
        for pointer in picked:
            names = pointers.addresses(self._before(), pointer, self.source.calls) - {pointer}
            for name in sorted(names & set(uses)):
                line = uses[name] + self.source.first_line - 1
                raise UnsupportedError(
                    f"{self.source.file}:{line}: {name} is made of {pointer} before the loop over "
                    f"tiles, but where a tile's data lies is known in the loop: make it there"
                )

    def module(self) -> str:
        """Header, constants and kernel."""
        self._check_hoisted()
        body = indented(self._body())
        head = self._header()
        added = self.say.added | {self.source.name + SUFFIX}
        if name := added_names.clash(self.source, self.scheme, added):
            raise self._unsupported(
                self.source.function,
                f"the name {name} is one that the rewritten kernel uses; rename it",
            )
        lines = [*self._signature(), *body]
        return "\n".join([*head, *(part for line in lines for part in fitted(line))]) + "\n"

    def _header(self) -> list[str]:
        source = self.source
        where = source.file.replace("\\", "/").rsplit("/", 1)[-1]
        lines = [
            f'"""Kernel {source.name} of {where}, fused: {self.scheme.title}.',
            "",
            f"Made by syncopate_jax (rewriter {VERSION}) by the kernel's directives; not to be "
            "edited.",
            '"""',
            "",
            "import triton",
            "import triton.language as tl",
            "",
            "from syncopate_jax.triton_source import device as sync",
            "",
        ]
        lines += [f"{n}: tl.constexpr = tl.constexpr({v!r})" for n, v in self.say.constants.items()]
        return [*lines, "", ""]

    def _signature(self) -> list[str]:
        source, given = self.source, {a.pointer for a in self.source.accesses}
        rest = [p for p in source.parameters if p not in given]
        lines = ["@triton.jit", f"def {source.name}{SUFFIX}("]
        lines += indented([f"{name}," for name in self.scheme.parameters])
        return [*lines, *indented([f"{name}: tl.constexpr," for name in rest]), "):"]

    # --- phases --------------------------------------------------------------------------------

    def _body(self) -> list[str]:
        source, scheme = self.source, self.scheme
        docstring = source.function.body[:1] if ast.get_docstring(source.function) else []
        lines = [*self.text.statements(docstring), *self._place()]
        if scheme.transfers:
            lines += self._communicate()
        lines += self.text.statements(self._before())
        lines += self._loop()
        lines += indented([*self._tile_start(), *self._tile_body(), *self._tile_end()])
        if source.loop is not None:
            after = source.function.body[source.function.body.index(source.loop) + 1 :]
            lines += self.text.statements(after)
        return lines

    def _before(self) -> Sequence[ast.stmt]:
        """The kernel's statements ahead of its tiles."""
        body = self.source.function.body
        first = 1 if ast.get_docstring(self.source.function) else 0
        if self.source.loop is not None:
            return body[first : body.index(self.source.loop)]
        return body[first : self.source.dispatch.start]

    def _place(self) -> list[str]:
        """Which rank and program this is, and the rank's own part of every array."""
        scheme = self.scheme
        programs = self.say.constant("PROGRAMS", scheme.programs)
        if not scheme.folded:
            return [self.say.new("program", "tl.program_id(0)"), self._own_counters()]
        lines = [
            self.say.new("rank", f"tl.program_id(0) // {programs}"),
            self.say.new("program", f"tl.program_id(0) % {programs}"),
            f"table_ptr += rank * {self.say.constant('TABLE', scheme.table)}",
            self._own_counters(),
        ]
        for array in scheme.arrays:
            if self.say.base(array) != array.name:
                lines.append(self.say.new(self.say.base(array), array.name))
            if array.size:
                size = self.say.constant(
                    f"{array.name.removesuffix('_ptr').upper()}_SIZE", array.size
                )
                lines.append(f"{array.name} += tl.cast(rank, tl.int64) * {size}")
        return lines

    def _own_counters(self) -> str:
        own = f" + rank * {self.say.slots}" if self.scheme.folded else ""
        return self.say.new("own_counters", f"counters_ptr{own}")

    def _communicate(self) -> list[str]:
        """What the first programs of a rank do instead of computing."""
        transfers = self.scheme.transfers
        assert transfers is not None
        count = self.say.constant("COMMUNICATING", transfers.programs)
        lines = ["# Programs that only communicate.", f"if program < {count}:"]
        inner = []
        channel, share, shares = "0", "program", count
        if transfers.channels > 1:
            ports = self.say.constant("CHANNELS", transfers.channels)
            inner += [
                self.say.new("channel", f"program % {ports}"),
                self.say.new("share", f"program // {ports}"),
                self.say.new("shares", f"({count} - channel + {ports} - 1) // {ports}"),
            ]
            channel, share, shares = "channel", "share", "shares"
        begins = self.say.constant("BEGINS", transfers.begins)
        first, last = (f"tl.load(table_ptr + {begins} + {channel}{x})" for x in ("", " + 1"))
        inner.append(self.say.each("transfer", f"range({first}, {last})"))
        inner += indented(self._operation(share, shares))
        return [*lines, *indented(inner)]

    def _operation(self, share: str, shares: str) -> list[str]:
        transfers = self.scheme.transfers
        assert transfers is not None
        lines = self.say.wait("OP_WAITS", transfers.waits, "transfer")
        kind = self.say.entry("OPS", transfers.ops, "transfer", 0)
        far = self.say.entry("OPS", transfers.ops, "transfer", 1)
        piece = self.say.constant("PIECE", transfers.piece)
        for number, move in enumerate(transfers.moves):
            ends = {"src": move.src, "dst": move.dst}
            ends["src" if move.pull else "dst"] = self.say.far(
                move.src if move.pull else move.dst, far
            )
            starts = [self.say.entry("OPS", transfers.ops, "transfer", c) for c in (2, 3)]
            copy = [
                self.say.new("src_ptr", f"{ends['src']} + {starts[0]}"),
                self.say.new("dst_ptr", f"{ends['dst']} + {starts[1]}"),
            ]
            for b in move.blocks:
                given = f"src_ptr + {b.src_at}, dst_ptr + {b.dst_at}, {share}, {shares}"
                sizes = f"{b.src_pitch}, {b.dst_pitch}, {b.width}, {b.rows}, {piece}"
                copy.append(f"sync.copy({given}, {sizes})")
            if len(transfers.moves) > 1:
                copy = [f"if {kind} == {number}:", *indented(copy)]
            lines += copy
        return [*lines, *self.say.signal("OP_SIGNALS", transfers.signals, "transfer")]

    def _loop(self) -> list[str]:
        """The header of the loop over this program's tiles."""
        loop, first, say = self.source.loop, "program", self.say
        lines = []
        if self.scheme.transfers:
            count = say.constant("COMMUNICATING", self.scheme.transfers.programs)
            start = f"tl.where(program < {count}, {say.tiles}, program - {count})"
            lines, first = [say.new("first_position", start)], "first_position"
        bounds = f"{first}, {say.tiles}, {say.workers}"
        if loop is None:
            return [*lines, say.each("position", f"range({bounds})")]
        call = loop.iter
        assert isinstance(call, ast.Call)
        # Warps that only load would not wait: the wait is the computing ones'. A flat loop waits
        # for the next tile before it stores this one, which is safe only where nobody waits for a
        # tile; and Triton pipelines it only where there is no other loop in it.
        left_out = {"warp_specialize", *(("flatten",) if self._tile_loops else ())}
        kept = [k for k in call.keywords if k.arg not in left_out]
        extra = "".join(f", {ast.unparse(keyword)}" for keyword in kept)
        return [*lines, say.each("position", f"{ast.unparse(call.func)}({bounds}{extra})")]

    @property
    def _tile_loops(self) -> bool:
        """Whether a tile gains a loop: over runs, partial results, places or signals."""
        scheme = self.scheme
        several = scheme.write is not None and not scheme.write.single
        return bool(scheme.runs or scheme.addends or scheme.signals or several)

    # --- a tile --------------------------------------------------------------------------------

    def _tile_start(self) -> list[str]:
        """Its index along each axis, where its operands are, and its waits."""
        lines = []
        for number, (_, variable) in enumerate(self.source.variables):
            lines.append(
                f"{variable} = {self.say.entry('ORDER', self.scheme.order, 'position', number)}"
            )
        for read in self.scheme.reads:
            if not read.by_run:
                lines += self._find(read, "position")
        lines += self.say.wait("WAITS", self.scheme.waits, "position")
        for name in self._reset():
            lines.append(self.say.new(f"{name}_here", name))
        return [*lines, *self._ahead()]

    def _ahead(self) -> list[str]:
        """What the table says of the next tile is brought close while this one is computed."""
        scheme, say = self.scheme, self.say
        rows = [("ORDER", scheme.order)] if any(scheme.order.multiples) else []
        rows += [(say.read(r), r.where) for r in scheme.reads if not r.by_run]
        lists = {"WAITS": scheme.waits, "EPILOGUE_WAITS": scheme.epilogue_waits}
        lists |= {"STORES": scheme.write.where if scheme.write else None}
        lists |= {"SIGNALS": scheme.signals}
        found = [say.row(name, where, "following") for name, where in rows]
        found += [say.list_at(n, x, "following") for n, x in lists.items() if x is not None]
        if not found:
            return []
        after = f"tl.minimum(position + {say.workers}, {say.tiles} - 1)"
        return [
            say.new("following", after),
            *(f"sync.ahead(table_ptr + {at})" for at in found),
        ]

    def _reset(self) -> list[str]:
        """Names that a tile changes and expects as they were before the first tile."""
        if self.source.loop is not None:
            return []
        before = assigned(self._before()) | set(self.source.parameters)
        picked = {read.pointer for read in self.scheme.reads if not read.by_run}
        return sorted((assigned(self.source.tile) & before) - picked - self._mapped)

    @property
    def _mapped(self) -> set[str]:
        return {variable for _, variable in self.source.variables}

    def _names(self) -> dict[str, str]:
        """New names of what a tile calls by the kernel's."""
        names = {name: f"{name}_here" for name in self._reset()}
        return names | {r.pointer: f"{r.pointer}_here" for r in self.scheme.reads if not r.by_run}

    def _find(self, read: Read, row: str) -> list[str]:
        """Points ``<pointer>_here`` to where the operand's data is."""
        stem = read.pointer.removesuffix("_ptr")
        name = f"{read.pointer}_here"
        return self.say.place(name, stem, read.spots, self.say.read(read), read.where, row)

    def _tile_body(self) -> list[str]:
        source, names = self.source, self._names()
        tile, lines = list(source.tile), []
        region, epilogue = source.dispatch, source.epilogue
        start = region.start if source.loop is None else 0
        at = start
        while at < len(tile):
            if at == region.start:
                lines += self.text.statements(source.kept, names)
                at = region.stop
            elif epilogue is not None and at == epilogue.start:
                lines += self._epilogue(names)
                at = epilogue.stop
            elif self.scheme.runs and source.reduction and tile[at] is source.reduction.loop:
                lines += self._reduction(tile[start:at], names)
                at += 1
            else:
                stop = self._plain_until(at, tile)
                lines += self.text.statements(tile[at:stop], names)
                at = stop
        return lines

    def _plain_until(self, at: int, tile: list[ast.stmt]) -> int:
        marks = [self.source.dispatch.start, len(tile)]
        if self.source.epilogue is not None:
            marks.append(self.source.epilogue.start)
        if self.source.reduction is not None:
            marks.append(tile.index(self.source.reduction.loop))
            marks.append(tile.index(self.source.reduction.loop) + 1)
        return min(mark for mark in marks if mark > at)

    def _tile_end(self) -> list[str]:
        if self.scheme.signals and self.source.epilogue is None:
            raise self._unsupported(
                self.source.function,
                f"others wait for tiles of {self.source.name}, but no epilogue directive says "
                "where it stores them; put one around its stores (a kernel that stores a tile "
                "later than it computes it has none)",
            )
        return self.say.signal("SIGNALS", self.scheme.signals, "position")

    # --- the reduction loop --------------------------------------------------------------------

    def _reduction(self, before: Sequence[ast.stmt], names: dict[str, str]) -> list[str]:
        """The loop as a loop over runs of steps, each behind its waits."""
        runs, reduction = self.scheme.runs, self.source.reduction
        assert runs is not None and reduction is not None
        loop = reduction.loop
        before = [s for s in before if s not in self.source.dispatch.inside]
        inner = []
        count = self.say.constant("RUNS", runs.count)
        inner += self.say.wait("RUN_WAITS", runs.waits, f"position * {count} + run")
        first, last = (self.say.entry("RUN_BOUNDS", runs.bounds, "run", c) for c in (0, 1))
        inner += [self.say.new("run_first", first), self.say.new("run_last", last)]
        lines, moved = [], dict(names)
        shifts: dict[str, str] = {}
        for read in self.scheme.reads:
            if read.by_run:
                row = f"(position * {count} + run)" if read.by_tile else "run"
                inner += self._find(read, row)
                shifts |= self._shifts(read, before, moved)
        steps = {step.name: step.amount for step in pointers.advances(loop)}
        carried = pointers.carried(loop, before, self.source.parameters)
        for name in sorted(carried & steps.keys()):
            lines.append(self.say.new(f"{name}_start", names.get(name, name)))
            shift = f" + {shifts.pop(name)}" if name in shifts else ""
            amount = f"run_first * ({steps[name]})"
            inner.append(f"{names.get(name, name)} = {name}_start + {amount}{shift}")
        for name, shift in shifts.items():
            if name in carried:
                raise self._unsupported(
                    loop,
                    f"the loop changes the address {name} by other than a constant amount, and "
                    f"its data lies in several places; compute it from {reduction.variable}",
                )
            inner.append(self.say.new(f"{name}_here", f"{name} + {shift}"))
            moved[name] = f"{name}_here"
        header = self._run_header()
        body = indented(self.text.statements(loop.body, moved))
        inner += [header, *body]
        return [*lines, self.say.each("run", f"range({count})"), *indented(inner)]

    def _run_header(self) -> str:
        reduction = self.source.reduction
        assert reduction is not None and isinstance(reduction.loop.iter, ast.Call)
        call = reduction.loop.iter
        step, end = reduction.step, reduction.end
        bounds = f"run_first, tl.minimum(run_last, {end})"
        if step != "1":
            bounds = f"run_first * ({step}), tl.minimum(run_last * ({step}), {end}), {step}"
        extra = "".join(f", {ast.unparse(keyword)}" for keyword in call.keywords)
        static = self.source.calls.name(call) == "tl.static_range"
        name = "tl.range" if static else ast.unparse(call.func)
        return f"for {reduction.variable} in {name}({bounds}{extra}):"

    def _shifts(
        self, read: Read, before: Sequence[ast.stmt], moved: dict[str, str]
    ) -> dict[str, str]:
        """How far addresses that were computed before the loop must be moved, by name."""
        loop = self.source.reduction.loop if self.source.reduction else None
        assert loop is not None
        inside = used(loop.body)
        known = pointers.addresses(before, read.pointer, self.source.calls)
        own, here = read.pointer, f"{read.pointer}_here"
        if own in inside:
            moved[own] = here
        shift = f"sync.apart({here}, {own}, {own}.dtype.element_ty.primitive_bitwidth // 8)"
        return {name: shift for name in sorted(known - {own}) if name in inside}

    # --- the epilogue --------------------------------------------------------------------------

    def _epilogue(self, names: dict[str, str]) -> list[str]:
        """Partial results are added, then the tile is stored at every place it goes."""
        region, write = self.source.epilogue, self.scheme.write
        assert region is not None
        lines = self.say.wait("EPILOGUE_WAITS", self.scheme.epilogue_waits, "position")
        lines += self._addends(names)
        if write is None:
            return lines + self.text.statements(region.inside, names)
        here = f"{write.pointer}_here"
        # What the statements change is as it was for every place.
        changed = [] if write.single else sorted(self._carried_into(region))
        again = {name: f"{names.get(name, name)}_again" for name in changed}
        fresh = [self.say.new(again[name], names.get(name, name)) for name in changed]
        given = names | again | {write.pointer: here}
        body = [*fresh, *self.text.statements(region.inside, given)]
        starts, _ = self.say.lists("STORES", write.where)
        row = f"tl.load(table_ptr + {starts} + position)"
        if write.single:
            lines.append(self.say.new("place", row))
            return [*lines, *self._store_place(here, "place"), *body]
        last = f"tl.load(table_ptr + {starts} + position + 1)"
        inner = [*self._store_place(here, "place"), *body]
        return [*lines, self.say.each("place", f"range({row}, {last})"), *indented(inner)]

    def _carried_into(self, region: Region) -> set[str]:
        """Names that a region assigns and that the tile has assigned before it.

        Triton forgets what a loop alone has assigned when the loop ends.
        """
        is_loop = self.source.calls.is_loop
        lasting = [s for s in region.block[: region.start] if not is_loop(s)]
        before = assigned(lasting) | set(self.source.parameters)
        written = self.scheme.write.pointer if self.scheme.write else ""
        return (assigned(region.inside) & before) - {written}

    def _store_place(self, here: str, row: str) -> list[str]:
        write = self.scheme.write
        assert write is not None
        stem = write.pointer.removesuffix("_ptr")
        return self.say.place(here, stem, write.spots, "STORES_ROWS", write.where.rows, row)

    def _addends(self, names: dict[str, str]) -> list[str]:
        """The loop that adds partial results to the accumulator, with the store's own addresses."""
        addends, region = self.scheme.addends, self.source.epilogue
        if addends is None:
            return []
        assert region is not None
        written = addends.pointer
        known = pointers.addresses(region.inside, written, self.source.calls)
        stores = [
            node
            for statement in region.inside
            for node in ast.walk(statement)
            if isinstance(node, ast.Call)
            and self.source.calls.name(node) == "tl.store"
            and set(used([node.args[0]])) & known
        ]
        if len(stores) != 1:
            raise self._unsupported(
                region.inside[0],
                f"partial results are added where the epilogue stores {written} once, it stores "
                f"{len(stores)} times",
            )
        store = stores[0]
        masks = [k.value for k in store.keywords if k.arg == "mask"] + store.args[2:3]
        slice_ = pointers.needed_for([store.args[0], *masks], list(region.inside))
        there = names | {written: "addend_ptr"}
        where, mask = (
            [ast.unparse(renamed(node, there)) for node in nodes]
            for nodes in ([store.args[0]], masks)
        )
        given = f"{where[0]}, mask={mask[0]}, other=0.0" if mask else where[0]
        accumulator = names.get(self.source.accumulator, self.source.accumulator)
        starts, _ = self.say.lists("ADDENDS", addends.where)
        shift = self.say.entry("ADDENDS_ROWS", addends.where.rows, "addend", 0)
        bounds = (
            f"tl.load(table_ptr + {starts} + position), "
            f"tl.load(table_ptr + {starts} + position + 1)"
        )
        inner = [self.say.new("addend_ptr", f"{addends.array} + {shift}")]
        inner += self.text.statements([s for s in slice_ if store not in ast.walk(s)], there)
        inner.append(f"{accumulator} += tl.load({given}).to({accumulator}.dtype)")
        return [self.say.each("addend", f"range({bounds})"), *indented(inner)]
