"""Reading the text form of a plan, whose grammar is in ``text.py``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import NoReturn

from syncopate_jax.errors import FormatError, InputError
from syncopate_jax.ir import comm
from syncopate_jax.ir.arguments import MAX_EXTENT
from syncopate_jax.ir.build import build_plan
from syncopate_jax.ir.chunk import Box, Chunk
from syncopate_jax.ir.comm import P2P, Collective, ComputeDep, Dependency, OpDep, Operation
from syncopate_jax.ir.plan import MAX_NDIM, MAX_PLAN_RANKS, Goal, Plan, Region, Tensor

_TOKEN = re.compile(r'\s*(#.*|"(?:[^"\\]|\\.)*"|compute\([^()]*\)|\S+)')
_NUMBER = re.compile(r"\d{1,10}", re.ASCII)
_RANK = re.compile(r"r(\d{1,10})", re.ASCII)
_PLACE = re.compile(r"r(\d{1,10})\.(\d{1,10})", re.ASCII)
_LIST = re.compile(r"\[(?:\d{1,10}(?:,\d{1,10})*)?\]", re.ASCII)
_CHUNK = re.compile(r"([^\s\[]+)\[((?:\d{1,10}:\d{1,10}(?:,\d{1,10}:\d{1,10})*)?)\]", re.ASCII)
_COMPUTE = re.compile(r"compute\(r(\d{1,10}) ([^()]*)\)")


class Parser:
    """One pass over the lines of a plan's text."""

    def __init__(self, text: str):
        self.lines = text.split("\n")
        self.number = 0
        self.tokens: list[str] = []
        self.comment = ""  # what follows #: of an operation its origin
        self.tensors: dict[str, Tensor] = {}
        self.chunks: dict[str, Chunk] = {}  # a plan names each of its chunks many times
        self.initial: list[Region] = []
        self.goals: list[Goal] = []
        self.channels: list[str] = []
        self.groups: list[tuple[int, ...]] = []
        self.origins: list[str] = []
        self.ops: list[list[Operation]] = []
        self.name = ""
        self.dims: int | None = None

    def parse(self) -> Plan:
        """The plan; raises FormatError."""
        handlers: dict[str, Callable[[], None]] = {
            "tensor": self._tensor,
            "initial": self._initial,
            "goal": self._goal,
            "channel": lambda: self._name(self.channels, "channel"),
            "origin": lambda: self._name(self.origins, "origin"),
            "group": self._group,
        }
        for number, line in enumerate(self.lines, 1):
            self.number = number
            self._split(line)
            if not self.tokens:
                continue
            try:
                head = self.tokens.pop(0)
                if not self.ops:
                    self._head(head)
                elif head in handlers:
                    handlers[head]()
                else:
                    self._operation(head)
                if self.tokens:
                    self._fail(f"{self.tokens[0]!r}", "the end of the line")
            except InputError as error:
                raise FormatError(f"line {self.number}: {error}") from error
        if not self.ops:
            self._fail("no plan", "a line 'plan NAME ranks N'")
        return self._build()

    def _build(self) -> Plan:
        try:
            return build_plan(
                self.name,
                len(self.ops),
                tuple(self.tensors.values()),
                self.initial,
                self.goals,
                self.ops,
                ndim=self.dims,
                channels=self.channels,
                groups=self.groups,
                origins=self.origins,
            )
        except InputError as error:
            raise FormatError(f"plan text: {error}") from error

    def _split(self, line: str) -> None:
        self.tokens, self.comment = [], ""
        for match in _TOKEN.finditer(line):
            token = match[1]
            if token.startswith("#"):
                self.comment = token[1:].strip()
                return
            self.tokens.append(token)

    def _origin(self) -> str:
        return self._string(self.comment) if self.comment.startswith('"') else self.comment

    # Lines

    def _head(self, head: str) -> None:
        if head != "plan":
            self._fail(repr(head), "the plan's line 'plan NAME ranks N' first")
        self.name = self._word("the plan's name")
        self._expect("ranks")
        ranks = self._integer("a number of ranks")
        if not 1 <= ranks <= MAX_PLAN_RANKS:
            self._fail(f"{ranks} ranks", f"1 to {MAX_PLAN_RANKS}")
        if self._next_is("dims"):
            self.dims = self._integer("a number of dimensions")
            if self.dims > MAX_NDIM:
                self._fail(f"{self.dims} dims", f"at most {MAX_NDIM}")
        self.ops = [[] for _ in range(ranks)]

    def _tensor(self) -> None:
        name = self._take("a tensor's name")
        shape = self._list("a shape such as [4,8]")
        dtype = self._take("a dtype")
        tensor = Tensor(name, shape, dtype, self._next_is("per_rank"))
        if name in self.tensors:
            self._fail(f"a second tensor {name!r}", "another name")
        self.tensors[name] = tensor

    def _initial(self) -> None:
        rank, chunk = self._rank(), self._chunk()
        self.initial.append(Region(rank, chunk.tensor, chunk.box, self._next_is("produced")))

    def _goal(self) -> None:
        rank, chunk = self._rank(), self._chunk()
        source = self._take("a tensor's name") if self._next_is("from") else ""
        at = self._list("an offset such as [4,0]") if self._next_is("at") else ()
        over = self._ranks() if self._next_is("over") else ()
        named = over and self.tokens and self.tokens[0] in comm.REDUCTIONS[1:]
        reduce = self.tokens.pop(0) if named else "sum"
        if source:
            self._known(source)
        if at and len(at) != chunk.box.ndim:
            self._fail(f"offset {list(at)}", f"{chunk.box.ndim} numbers, one for each dimension")
        self.goals.append(Goal(rank, chunk.tensor, chunk.box, source, at, over, reduce))

    def _name(self, table: list[str], kind: str) -> None:
        value = self._word(f"the {kind}'s text")
        if value in table:
            self._fail(f"a second {kind} {value!r}", f"each {kind} once")
        table.append(value)

    def _group(self) -> None:
        group = self._ranks()
        if group in self.groups:
            self._fail(f"a second group {group}", "each group once")
        self.groups.append(group)

    def _operation(self, place: str) -> None:
        match = _PLACE.fullmatch(place)
        if match is None:
            known = "tensor, initial, goal, channel, group, origin or an operation such as r0.1"
            self._fail(repr(place), known)
        rank, index = self._place(match)
        wanted = len(self.ops[self._in_plan(rank)])
        if index != wanted:
            self._fail(f"operation {place}", f"r{rank}.{wanted} next")
        kind = self._take("push, pull, copy, move or a collective")
        if kind in comm.COLLECTIVES:
            self.ops[rank].append(self._collective(rank, kind))
        elif kind in ("push", "pull", "copy", "move"):
            self.ops[rank].append(self._p2p(rank, kind))
        else:
            known = f"push, pull, copy, move, {', '.join(comm.COLLECTIVES)}"
            self._fail(repr(kind), f"one of {known}")

    def _p2p(self, rank: int, kind: str) -> P2P:
        src_rank = self._rank() if kind in ("pull", "move") else rank
        src = self._chunk()
        self._expect("->")
        dst_rank = self._rank() if kind in ("push", "move") else rank
        dst = self._chunk()
        reduce, deps, channel = self._tail()
        return P2P(rank, src_rank, dst_rank, src, dst, deps, reduce, channel, self._origin())

    def _collective(self, rank: int, kind: str) -> Collective:
        src = self._chunk()
        self._expect("->")
        dst = self._chunk()
        self._expect("over")
        ranks = self._ranks()
        split = self._integer("an axis") if self._next_is("split") else -1
        concat = self._integer("an axis") if self._next_is("concat") else -1
        reduce, deps, channel = self._tail()
        return Collective(
            rank, kind, src, dst, ranks, deps, reduce, channel, split, concat, self._origin()
        )

    def _tail(self) -> tuple[str, tuple[Dependency, ...], str]:
        reduce = "none"
        if self.tokens and self.tokens[0] in comm.REDUCTIONS:
            reduce = self.tokens.pop(0)
        deps: list[Dependency] = []
        if self._next_is("after"):
            while self.tokens and self.tokens[0] != "on":
                deps.append(self._dependency())
            if not deps:
                self._fail("nothing", "a dependency after 'after'")
        channel = comm.DEFAULT_CHANNEL
        if self._next_is("on"):
            channel = self._word("a channel")
        return reduce, tuple(deps), channel

    # Parts of a line

    def _dependency(self) -> Dependency:
        token = self.tokens.pop(0)
        match = _PLACE.fullmatch(token)
        if match is not None:
            return OpDep(*self._place(match))
        match = _COMPUTE.fullmatch(token)
        if match is None:
            self._fail(repr(token), "a dependency such as r0.1 or compute(r0 x[0:4])")
        return ComputeDep(self._small(match[1]), self._chunk_in(match[2]))

    def _chunk(self) -> Chunk:
        return self._chunk_in(self._take("a chunk such as x[0:4,0:8]"))

    def _chunk_in(self, text: str) -> Chunk:
        if text not in self.chunks:
            self.chunks[text] = self._new_chunk(text)
        return self.chunks[text]

    def _new_chunk(self, text: str) -> Chunk:
        match = _CHUNK.fullmatch(text)
        if match is None:
            self._fail(repr(text), "a chunk such as x[0:4,0:8]")
        tensor = self._known(match[1])
        pairs = [part.split(":") for part in match[2].split(",") if part]
        lo, hi = (tuple(self._small(pair[i]) for pair in pairs) for i in range(2))
        box = Box(lo, hi)
        if box.ndim != len(tensor.shape):
            self._fail(f"{text} with {box.ndim} dimensions", f"{len(tensor.shape)} as the tensor")
        return Chunk(tensor.name, box)

    def _known(self, name: str) -> Tensor:
        if name not in self.tensors:
            known = ", ".join(self.tensors) or "none yet"
            self._fail(f"tensor {name!r}", f"one of the tensors listed above: {known}")
        return self.tensors[name]

    def _rank(self) -> int:
        token = self._take("a rank such as r0")
        match = _RANK.fullmatch(token)
        if match is None:
            self._fail(repr(token), "a rank such as r0")
        return self._small(match[1])

    def _ranks(self) -> tuple[int, ...]:
        text = self._take("ranks such as 0:4,7")
        if text == "none":
            return ()
        ranks: list[int] = []
        for part in text.split(","):
            bounds = part.split(":")
            if len(bounds) > 2 or not all(_NUMBER.fullmatch(bound) for bound in bounds):
                self._fail(repr(text), "ranks such as 0:4,7")
            lo = self._small(bounds[0])
            hi = self._small(bounds[1]) if len(bounds) == 2 else lo + 1
            if hi <= lo or hi - lo + len(ranks) > MAX_PLAN_RANKS:
                self._fail(repr(text), f"rising ranges of at most {MAX_PLAN_RANKS} ranks")
            ranks += range(lo, hi)
        return tuple(ranks)

    def _list(self, what: str) -> tuple[int, ...]:
        token = self._take(what)
        if not _LIST.fullmatch(token):
            self._fail(repr(token), what)
        return tuple(self._small(part) for part in token[1:-1].split(",") if part)

    def _word(self, what: str) -> str:
        token = self._take(what)
        return self._string(token) if token.startswith('"') else token

    def _string(self, token: str) -> str:
        try:
            value = json.loads(token)
        except ValueError as error:
            self._fail(repr(token), f"a JSON string ({error})")
        if not isinstance(value, str):
            self._fail(repr(token), "a JSON string")
        return value

    def _integer(self, what: str) -> int:
        token = self._take(what)
        if not _NUMBER.fullmatch(token):
            self._fail(repr(token), what)
        return self._small(token)

    def _small(self, digits: str) -> int:
        value = int(digits)
        if value > MAX_EXTENT:
            self._fail(digits, f"a number of at most {MAX_EXTENT}")
        return value

    def _place(self, match: re.Match[str]) -> tuple[int, int]:
        return self._small(match[1]), self._small(match[2])

    def _in_plan(self, rank: int) -> int:
        if rank >= len(self.ops):
            self._fail(f"rank {rank}", f"a rank below {len(self.ops)}")
        return rank

    def _take(self, what: str) -> str:
        if not self.tokens:
            self._fail("the end of the line", what)
        return self.tokens.pop(0)

    def _expect(self, word: str) -> None:
        found = self._take(repr(word))
        if found != word:
            self._fail(repr(found), repr(word))

    def _next_is(self, word: str) -> bool:
        if self.tokens and self.tokens[0] == word:
            self.tokens.pop(0)
            return True
        return False

    def _fail(self, found: str, needed: str) -> NoReturn:
        raise FormatError(f"line {self.number}: found {found}, needs {needed}")
